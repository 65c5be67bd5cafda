"""The reference as a candidate, in its plain form: every operator is the contract's own function, rounded where the
profile rounds. It shows that the harness is green for the truth, and runs operators files against it.

One request at a time, in one piece: what a scheduler does is not in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from day0check.compare.rounding import Rounder
from day0check.contracts import CONTRACTS
from day0check.contracts.contract import Contract
from day0check.contracts.profiles import PROFILES
from day0check.errors import UsageError
from day0check.probe.recorder import Recorder
from day0check.probe.registry import Operators
from day0check.probe.rows import RowMap
from day0check.types import Outputs, Request, Schedule
from reference.image_grid import image_grid
from reference.model import Model, State
from reference.weights import Checkpoint

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FORM_OF_CACHES = ("kv.quantise", "kv.dequantise")  # codes that a cache may keep; rows are kept as they are here
_PROFILE_OF = {dtype: name for name, dtype in DTYPES.items()}


def rounded(contract: Contract, *args: Any, **kwargs: Any) -> Any:
    """The reference function of a contract as an operator of the precision that its arguments have.

    Low-precision arguments are computed with in float32 (float32 sums are what a profile claims) and rounded to nearest
    at the points of the profile; "act" results come back in the dtype of the arguments. Moves, writes and arguments of
    float32 go to the function as they are.
    """
    function = contract.function()
    if not contract.points:
        return function(*args, **kwargs)
    low = _low_dtype((*args, *kwargs.values()))
    if low is not None:
        points = PROFILES[_PROFILE_OF[low]].points_of(contract.name)
        kwargs = {"round": Rounder(points), **{name: _wide(value) for name, value in kwargs.items()}}
    result = function(*map(_wide, args), **kwargs)
    several = isinstance(result, tuple)
    narrow = tuple(
        _as_promised(value, spec.dtype, low)
        for spec, value in zip(contract.results, result if several else (result,), strict=True)
    )
    return narrow if several else narrow[0]


def _low_dtype(values: tuple[Any, ...]) -> torch.dtype | None:
    found = (v.dtype for v in values if isinstance(v, torch.Tensor))
    return next((dtype for dtype in found if dtype == torch.bfloat16), None)


def _as_promised(value: torch.Tensor, dtype: str, low: torch.dtype | None) -> torch.Tensor:
    """A result in the dtype of its contract; "act" is `low`, or the dtype that it has."""
    if dtype in ("float32", "bfloat16"):
        return value.to(getattr(torch, dtype))  # preprocessing works in float64
    return value.to(low) if dtype == "act" and low is not None and value.is_floating_point() else value


def _wide(value: Any) -> Any:
    low = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.float() if low else value


class Reference:
    """The backend `reference`: `reference.model.Model` behind the five methods of a backend."""

    def __init__(self) -> None:
        self._operators = Operators({name: functools.partial(rounded, c) for name, c in CONTRACTS.items()})
        self._model: Model | None = None

    def capabilities(self) -> set[str]:
        return {"taps", "operators", "images", "forced_tokens"}

    def operators(self) -> Operators:
        return self._operators

    def load(self, model_dir: str, profile: str, device: str, layout: dict[str, Any]) -> None:
        """Opens the checkpoint; weights are read when they are needed.

        Raises UsageError for a profile or device that it does not have, CheckpointError for what it cannot read.
        """
        if profile not in DTYPES:
            todo = f"use {', '.join(DTYPES)}"
            raise UsageError(f"the reference backend has no profile {profile!r}", where="--profile", todo=todo)
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            todo = "use cpu, or a device that this torch was built for"
            reason = str(error).split("\n", 1)[0]
            raise UsageError(f"device {device!r} cannot be used: {reason}", where="--device", todo=todo) from error
        self._model = Model(Checkpoint(model_dir), dtype=DTYPES[profile], device=device)

    def run(self, requests: tuple[Request, ...], schedule: Schedule, recorder: Recorder) -> Outputs:
        """Answers the requests one after another. Raises UsageError before `load`."""
        if self._model is None:
            raise UsageError("no model is loaded", where="reference backend", todo="call load first")
        sequences, generated, finish, step = {}, {}, {}, 0
        for request in requests:
            conversation = _Conversation(self._model, self._operators, recorder, request, step)
            conversation.run()
            step = conversation.step
            sequences[request.id] = tuple(conversation.tokens)
            generated[request.id] = tuple(conversation.spans)
            finish[request.id] = conversation.finish
        return Outputs(sequences, generated, finish)

    def pools(self) -> None:
        return None

    def close(self) -> None:
        self._model = None


class _Conversation:
    """One request from its first token to its last."""

    def __init__(
        self, model: Model, operators: Operators, recorder: Recorder, request: Request, first_step: int
    ) -> None:
        self.model, self.operators, self.recorder, self.request = model, operators, recorder, request
        self.step = first_step
        self.tokens: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self.finish = "length"
        self._state: State = model.start()

    def run(self) -> None:
        pending: list[int] = []
        for number, turn in enumerate(self.request.turns):
            self.tokens += turn.tokens
            token = self._extend("prefill", [*pending, *turn.tokens], turn.images)
            begin, pending, self.finish = len(self.tokens), [], "length"
            forced = self.request.forced[number] if self.request.forced else None
            for index in range(len(forced) if forced is not None else self.request.max_new_tokens):
                if index:
                    token = self._extend("decode", self.tokens[-1:], ())
                self.tokens.append(token if forced is None else forced[index])
                pending = self.tokens[-1:]
                if pending[0] in self.request.stop_tokens:
                    self.finish = "stop"
                    break
            self.spans.append((begin, len(self.tokens)))

    def _extend(self, phase: str, tokens: list[int], images: tuple[str, ...]) -> int:
        """Feeds tokens and gives the next one, all through the recorder, as one step."""
        begin = self._state.length
        rows = RowMap((self.request.id,), (0,) * len(tokens), tuple(range(begin, begin + len(tokens))))
        with self.recorder.step(phase, rows, self.step):
            caller = _Caller(self.operators, self.recorder, self.model.config, rows, tokens)
            logits = self.model.extend(self._state, tokens, images=images, call=caller, form="plain")
            last = rows.take([len(tokens) - 1])
            like = {"device": logits.device}
            token = self.recorder.call(
                "",
                "sample.token",
                self.operators.get("sample.token", phase),
                (logits[-1:],),
                {
                    "temperature": torch.tensor([self.request.temperature], dtype=torch.float32, **like),
                    "seed": torch.tensor([self.request.seed], dtype=torch.int64, **like),
                    "positions": torch.tensor([last.position[0]], dtype=torch.int64, **like),
                },
                row_map=last,
            )
        self.step += 1
        return int(token)


class _Caller:
    """The `call` of the reference's assembly: looks the operator up, and says which rows it is about."""

    def __init__(self, operators: Operators, recorder: Recorder, config: Any, rows: RowMap, tokens: list[int]) -> None:
        self.operators, self.recorder, self.config, self.rows = operators, recorder, config, rows
        pads = [p for p, t in zip(rows.position, tokens, strict=True) if t == config.tokens.media_pad]
        self._pads = RowMap(rows.requests, (0,) * len(pads), tuple(pads))
        self._patches: list[RowMap] = []
        self._spliced = 0
        self._pairs: RowMap | None = None

    def __call__(
        self, place: str, operator: str, function: Callable[..., Any], *args: Any, site: str = "", **kwargs: Any
    ) -> Any:
        if operator in FORM_OF_CACHES:
            return function(*args, **kwargs)
        target = self.operators.get(operator, self.recorder.phase)
        row_map = self._row_map(place, operator, args[0])
        result = self.recorder.call(place, operator, target, args, kwargs, site, row_map)
        if operator == "moe.dispatch":
            choices = kwargs["ids"].shape[1]
            self._pairs = self.rows.take([pair // choices for pair in result[1].tolist()])
        return result

    def _row_map(self, place: str, operator: str, first: torch.Tensor) -> RowMap | None:
        if operator == "image.preprocess":
            self._patches.append(self._patch_rows(height=first.shape[0], width=first.shape[1]))
            return self._patches[-1]
        if operator == "vision.project":
            return self._pads.take(range(self._spliced))
        if place.startswith("vision"):
            return RowMap.concatenate(self._patches)
        if operator == "moe.experts":
            return self._pairs
        if operator in ("mla.expand", "rope.positions"):  # their rows are all rows of the request so far
            keys = first.shape[0]
            return RowMap(self.rows.requests, (0,) * keys, tuple(range(keys)))
        return None

    def _patch_rows(self, *, height: int, width: int) -> RowMap:
        """Each patch of an image is about the position of the token that its merge group becomes."""
        merge, grid = self.config.vision.merge, image_grid(width, height, self.config.vision)
        columns = grid.columns // merge
        groups = [(r // merge) * columns + c // merge for r in range(grid.rows) for c in range(grid.columns)]
        rows = self._pads.take([self._spliced + g for g in groups])
        self._spliced += grid.tokens
        return rows
