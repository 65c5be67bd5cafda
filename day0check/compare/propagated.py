"""The propagated net: every travelling tap of a candidate against the oracle through the whole run.

For each request one teacher-forced causal pass over the candidate's whole sequence: the oracle in float64 and beside
it replicates under random rounding at the profile's points. They meet at each tap of a contract with `net=True`: there
the candidate's rows are compared, and its legal choices are replayed into every pass (method.md, 3 and 5).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from day0check.compare import kept_states
from day0check.compare.claims import as_claimed
from day0check.compare.computations import Computation, computations
from day0check.compare.equal_rows import EqualRowsAlike, quantised_alike
from day0check.compare.free_choices import CHOOSING, REPLICATES, FreeLimits, shows_no_choice
from day0check.compare.locate import drafting_place
from day0check.compare.lockstep import run_together
from day0check.compare.net_measures import CaseTable
from day0check.compare.net_noise import add_float32_noise
from day0check.compare.noise_book import NoiseBook
from day0check.compare.propagated_choices import Judged, judge_route, judge_selection
from day0check.contracts import CONTRACTS
from day0check.contracts.profiles import Profile, profile_named
from day0check.errors import InputError
from day0check.snapshot import Snapshot
from day0check.types import Measure, Request, RunCase
from reference.moe import weights_of

Forward = Callable[[Sequence[int], Sequence[str], Callable[..., Any]], torch.Tensor]
REPLAYED = CHOOSING


def compare_case(
    model: Any,
    profile: Profile | str,
    case: RunCase,
    snapshot: Snapshot,
    *,
    device: str = "cpu",
    replicates: int = 2,
    seed: int = 0,
    book: NoiseBook | None = None,
) -> list[Measure]:
    """The measures of the net for one case, in order of execution, one per (tap, phase).

    `model`: a checkpoint directory, a `reference.weights.Checkpoint`, or a pair of functions
    (oracle in float64, expected) with the signature (tokens, images, call) -> logits [tokens, vocab].
    Random numbers depend on `seed`, request and replicate only. `book` takes the noise of every tap. Raises InputError
    when the candidate left no outputs.
    """
    profile = profile_named(profile) if isinstance(profile, str) else profile
    outputs = snapshot.outputs
    if outputs is None:
        raise InputError(
            "the candidate left no outputs to follow", where=str(snapshot.directory), todo="run the case to its end"
        )
    oracle, expected = model if isinstance(model, tuple) else forwards(model, profile, device, _drafted(snapshot))
    fed = snapshot.fed_lengths()
    table = CaseTable(snapshot, free=FreeLimits() if shows_no_choice(snapshot) else None)
    replicates = replicates if table.free is None else max(replicates, REPLICATES)
    for index, request in enumerate(case.requests):
        sequence = outputs.sequences.get(request.id)
        if not sequence:
            continue  # the check "candidate" accuses it
        length = fed.get(request.id, len(sequence) - 1)  # a token chosen last is never an input
        for computation in computations(snapshot, request.id):
            table.follow(request.id, computation)
            own_book = book if computation.last else None
            run = RequestRun(profile, request, sequence[: max(1, length)], computation, table, own_book)
            bodies = [run.body(oracle, None)]
            for replicate in range(replicates):
                bodies.append(run.body(expected, seeded((seed, index, replicate), device)))
            logits = run_together(bodies, run.at_meeting)
            table.add_tokens(request, outputs, logits[0], torch.stack([value.double() for value in logits[1:]]))
        table.add_missing(request.id, run.met)
    return table.measures()


def _drafted(snapshot: Snapshot) -> bool:
    """Whether the candidate ran a draft layer: only then do the passes run it, too."""
    return bool(drafting_place(snapshot.taps()))


def forwards(model: Any, profile: Profile, device: str, drafts: bool = False) -> tuple[Forward, Forward]:
    """(oracle in float64, expected in the precision that carries the roundings of the profile) of a checkpoint."""
    if isinstance(model, (str, Path)):
        stamps = tuple((file.name, file.stat().st_mtime_ns) for file in sorted(Path(model).glob("*")))
        return _read_forwards(str(model), stamps, profile.act_dtype, device, drafts)
    return _model_forwards(model, profile.act_dtype, device, drafts)


@functools.lru_cache(maxsize=1)
def _read_forwards(
    directory: str, stamps: tuple[tuple[str, int], ...], act_dtype: str, device: str, drafts: bool
) -> Any:
    """The forwards of a directory whose files have these `stamps`: a run's cases share one model and its weights."""
    from reference.weights import Checkpoint

    return _model_forwards(Checkpoint(directory), act_dtype, device, drafts)


def _model_forwards(checkpoint: Any, act_dtype: str, device: str, drafts: bool) -> tuple[Forward, Forward]:
    from reference.model import Model

    # rounding points of bfloat16 lie far above the arithmetic of float32; those of float32 do not
    narrow = torch.float64 if act_dtype == "float32" else torch.float32
    wide = Model(checkpoint, dtype=torch.float64, device=device)
    expected = Model(checkpoint, dtype=narrow, device=device)
    drafts = drafts and checkpoint.config.draft is not None
    return (
        lambda tokens, images, call: wide.forward(list(tokens), images=images, call=call, drafts=drafts),
        lambda tokens, images, call: expected.forward(list(tokens), images=images, call=call, drafts=drafts),
    )


def seeded(key: tuple[int, ...], device: str) -> torch.Generator:
    digest = hashlib.sha256(repr(("net", *key)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))


def rounded(
    profile: Profile, operator: str, function: Callable, args: tuple, kwargs: dict, generator: torch.Generator | None
) -> Any:
    """The result of an operator of the reference, rounded at random where the profile rounds, or with the noise of the
    sums of float32 where that is claimed; as it is without a generator."""
    if generator is None:
        # rounded to whole levels, the bytes of one resampler would be one more legal candidate and no oracle
        return (as_claimed(function, profile, operator) if operator in profile.resample else function)(*args, **kwargs)
    points, block = profile.points_of(operator), profile.inputs.get(operator)
    function = as_claimed(function, profile, operator)
    if block is not None:
        args = (quantised_alike(args[0], block, generator), *args[1:])
    if points:
        kwargs = kwargs | {"round": EqualRowsAlike(points, "random", generator)}
    result = function(*args, **kwargs)
    if profile.act_dtype != "float32" or CONTRACTS[operator].kind != "compute":
        return result
    terms = max(args[0].shape[1:], default=1)
    noisy = tuple(
        add_float32_noise(value, terms, generator) for value in (result if isinstance(result, tuple) else (result,))
    )
    return noisy if isinstance(result, tuple) else noisy[0]


@dataclass
class RequestRun:
    """The passes of one computation of a request: what each does at a call, and what happens where they meet."""

    profile: Profile
    request: Request
    tokens: Sequence[int]
    computation: Computation
    table: CaseTable
    book: NoiseBook | None = None
    met: list[str] = field(default_factory=list)

    def body(self, forward: Forward, generator: torch.Generator | None) -> Callable[..., torch.Tensor]:
        images = tuple(image for turn in self.request.turns for image in turn.images)

        def run(meet: Callable[[str, Any], Any]) -> torch.Tensor:
            def call(place: str, operator: str, function: Callable, *args: Any, site: str = "", **kwargs: Any) -> Any:
                tap = ".".join(part for part in (place, operator, site) if part)
                if operator in REPLAYED:
                    chosen = meet(tap, (operator, function, args, kwargs))
                    if chosen is None:
                        return function(*args, **kwargs)
                    return chosen if operator == "dsa.select" else routed(chosen, *args, **kwargs)
                result = self._rounded(operator, function, args, kwargs, generator)
                if operator in CONTRACTS and CONTRACTS[operator].net:
                    meet(tap, (operator, None, (result,), {}))
                return result

            return forward(self.tokens, images, call)

        return run

    def _rounded(
        self, operator: str, function: Callable, args: tuple, kwargs: dict, generator: torch.Generator | None
    ) -> Any:
        if generator is not None and operator == kept_states.OPERATOR and kept_states.claimed(self.profile):
            function = kept_states.in_calls(function, self.kept_at)
        return rounded(self.profile, operator, function, args, kwargs, generator)

    @functools.cached_property
    def kept_at(self) -> tuple[int, ...]:
        """Behind which rows the states of the request were kept. A noise book also serves runs of other schedules: its
        noise is that of the most that any does, a rounding behind every row."""
        return () if self.book is not None else kept_states.ends_of_calls(self.computation.view, self.request.id)

    # ---------------------------------------------------------------------------------------------- meetings

    def at_meeting(self, tap: str, values: list[tuple[str, Callable | None, tuple, dict]]) -> Any:
        self.met.append(tap)
        operator, function = values[0][:2]
        if operator in REPLAYED:
            return self.choose(tap, operator, function, [(args, kwargs) for _, _, args, kwargs in values])
        results = [args[0][0] if isinstance(args[0], tuple) else args[0] for _, _, args, _ in values]
        self.table.add_values(tap, operator, self.request.id, results[0], results[1:])
        if self.book is not None:
            self.book.add(self.request.id, tap, results[0], results[1:])
        return None

    def choose(
        self, tap: str, operator: str, function: Callable, calls: list[tuple[tuple, dict]]
    ) -> torch.Tensor | None:
        """What every pass takes; None where each takes its own, since the candidate shows none of its choices."""
        if self.table.free is not None:
            return None
        (args, kwargs), scores = calls[0], [_biased(*a, **k) for a, k in calls]
        own = function(*args, **kwargs)
        own = own if operator == "dsa.select" else own[0]
        recorded = self.computation.view.recorded(tap, self.request.id)
        inside = [i for i, p in enumerate(recorded.positions) if p < len(own)]
        if not inside:
            return own
        at = torch.tensor([recorded.positions[i] for i in inside], device=own.device)
        chosen = recorded.values[inside].to(own.device, torch.int64).flatten(1)
        oracle, others = scores[0][at], [s[at].double() for s in scores[1:]]
        if operator == "dsa.select":
            limits = {"k": kwargs["k"], "threshold": kwargs.get("threshold")}
            judged = judge_selection(oracle, others, chosen, kwargs["visible"][at], **limits)
        else:
            limits = {name: kwargs[name] for name in ("k", "groups", "kept_groups")}
            judged = judge_route(oracle, others, chosen, **limits)
        judged = replace(
            judged, regret=judged.regret / self.table.explained(self.request.id, len(own)).to(at.device)[at]
        )
        self.table.add_choices(tap, operator, self.request.id, recorded, inside, judged)
        return _replayed(own, at, chosen, judged)


def _replayed(own: torch.Tensor, at: torch.Tensor, chosen: torch.Tensor, judged: Judged) -> torch.Tensor:
    """The oracle's own choices with the legal rows of the candidate's put in their place."""
    width = own.shape[-1]
    legal = judged.legal
    # -1 may stand in any place: the chosen ones first, then cut or fill to the width of our own
    packed = chosen.gather(1, (chosen < 0).to(torch.int8).sort(dim=-1, stable=True).indices)[:, :width]
    packed = torch.nn.functional.pad(packed, (0, width - packed.shape[-1]), value=-1)
    replayed = own.clone()
    replayed[at[legal]] = packed[legal].to(own.dtype)
    return replayed


def _biased(scores: torch.Tensor, *, bias: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
    return scores if bias is None else scores + bias


def routed(
    ids: torch.Tensor, scores: torch.Tensor, *, renormalise: bool, scale: float, weighting: str = "score", **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, weights) of a route with given experts: from the unbiased scores of the chosen, times scale."""
    weights = weights_of(scores.gather(1, ids.long()), renormalise=renormalise, weighting=weighting)
    return ids, weights * scale
