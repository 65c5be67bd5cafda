"""The reference beside transformers' own classes: tiny random models that upstream saves and we read, and the reverse.

`reference_errors()` measures every family in every mode and gives the rows of the table in the README.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from upstream_configs import FAMILIES, upstream_model

from reference.generate import generate
from reference.layers import just_call
from reference.model import Model
from reference.weights import Checkpoint

UPSTREAM_VERSION = "5.24.0"
ROWS, PREFILL, NEW = 40, 24, 6
SMALLEST_MARGIN = 1e-4  # a closer selection may fall either way in float32
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}


class Widened(TorchFunctionMode):
    """Turns every float32 that upstream's code asks for into float64: its fixed float32 norms, softmaxes, routers and
    states then show their formula and not their precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return func(*(_widened(value) for value in args), **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def precision(dtype: torch.dtype) -> contextlib.AbstractContextManager:
    return Widened() if dtype == torch.float64 else contextlib.nullcontext()


# --------------------------------------------------------------------------------------------------- random weights


def randomise(model: Any, seed: int) -> None:
    """Seeded weights with every part awake: norms around one, biases, decays from weak to strong, spread scores."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: torch.Size, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    tensors = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
            if "inv_freq" in name or not tensor.dtype.is_floating_point:
                continue
            tensor.copy_(_values(name, tensor.shape, normal))


def _values(name: str, shape: torch.Size, normal: Callable[[torch.Size, float], torch.Tensor]) -> torch.Tensor:
    if name.endswith("A_log"):
        return normal(shape, 0.4)
    if name.endswith("dt_bias"):
        return normal(shape, 1.0) - 2
    if name.endswith("correction_bias"):
        return normal(shape, 0.1)
    if name.endswith("compress_ape"):
        return normal(shape, 0.7)
    if "conv1d" in name:
        return normal(shape, 0.6)
    if name.endswith((".scale", "hc_scale")) or ("norm" in name and name.endswith("weight")):
        return 1 + normal(shape, 0.2)
    if len(shape) == 1:
        return normal(shape, 0.3)
    fan_in = math.prod(shape[1:]) if len(shape) > 3 else shape[-1]
    return normal(shape, 1.0 if "embed_tokens" in name or "pos_emb" in name else 1.2 / math.sqrt(fan_in))


# ------------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Pair:
    """The same weights on both sides."""

    upstream: Any
    ours: Model
    checkpoint: Checkpoint
    dtype: torch.dtype


@dataclass(frozen=True)
class Outcome:
    """Largest relative error over rows; `margin` of the closest selection; `same_tokens` None where none are made."""

    error: float
    margin: float
    same_tokens: bool | None = None

    @property
    def decided(self) -> bool:
        return self.margin >= SMALLEST_MARGIN


def saved_by_upstream(family: str, directory: Path, *, seed: int, dtype: torch.dtype) -> Pair:
    """A random upstream model, saved by transformers and read here."""
    model = upstream_model(family)
    randomise(model, seed)
    model.save_pretrained(directory)
    return _pair(model, directory, dtype)


def written_here(family: str, directory: Path, *, dtype: torch.dtype) -> Pair:
    """A directory of ours, loaded by transformers. Raises AssertionError when names are left over on either side."""
    _, model_class = FAMILIES[family]
    model, info = model_class().from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[what], (what, info[what])
    return _pair(model, directory, dtype)


def _pair(model: Any, directory: Path, dtype: torch.dtype) -> Pair:
    model.set_experts_implementation("eager")
    model = model.to(dtype).eval()
    checkpoint = Checkpoint(directory)
    return Pair(model, Model(checkpoint, dtype=torch.float64), checkpoint, dtype)


def token_ids(seed: int, *, high: int = 120, rows: int = ROWS) -> torch.Tensor:
    return torch.randint(3, high, (rows,), generator=torch.Generator().manual_seed(1000 + seed))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest ||found - expected|| / ||expected|| of a row."""
    difference = (found.double() - expected.double()).norm(dim=-1)
    return float((difference / expected.double().norm(dim=-1)).max())


class Margins:
    """A `call` of the reference that remembers how closely any selection was decided."""

    def __init__(self) -> None:
        self.smallest = math.inf

    def __call__(self, place: str, operator: str, function: Any, *args: Any, site: str = "", **kwargs: Any) -> Any:
        if operator == "dsa.select":
            column = torch.arange(args[0].shape[1])
            self._gap(args[0].masked_fill(column >= kwargs["visible"][:, None], -math.inf), kwargs["k"])
        if operator == "moe.route":
            self._route(args[0] if kwargs["bias"] is None else args[0] + kwargs["bias"], **kwargs)
        return just_call(place, operator, function, *args, site=site, **kwargs)

    def _route(self, biased: torch.Tensor, *, k: int, groups: int, kept_groups: int, **_: Any) -> None:
        if groups > 1:
            members = biased.unflatten(1, (groups, -1))
            worth = members.topk(2, dim=-1).values.sum(-1)
            self._gap(worth, kept_groups)
            cut = worth.topk(kept_groups, dim=-1).values[:, -1:]
            biased = members.masked_fill((worth < cut)[..., None], -math.inf).flatten(1)
        self._gap(biased, k)

    def _gap(self, scores: torch.Tensor, k: int) -> None:
        if scores.shape[1] <= k:
            return
        best = scores.topk(k + 1, dim=-1).values
        gap = (best[:, k - 1] - best[:, k])[torch.isfinite(best[:, k])]
        self.smallest = min([self.smallest, *gap.tolist()])


@torch.no_grad()
def prefill(pair: Pair, ids: torch.Tensor, **media: Any) -> Outcome:
    """All logits of one causal pass."""
    margins = Margins()
    with precision(pair.dtype):
        expected = pair.upstream(ids[None], **media.get("upstream", {})).logits[0]
    found = pair.ours.forward(ids, images=media.get("images", ()), call=margins)
    return Outcome(relative_error(found, expected), margins.smallest)


@torch.no_grad()
def decode(pair: Pair, ids: torch.Tensor, **media: Any) -> Outcome:
    """Cached logits: a prefill, then every further token by itself, on both sides."""
    margins, state = Margins(), pair.ours.start()
    found = [pair.ours.extend(state, ids[:PREFILL], images=media.get("images", ()), call=margins)]
    found += [pair.ours.extend(state, ids[n : n + 1], call=margins) for n in range(PREFILL, len(ids))]
    with precision(pair.dtype):
        out = pair.upstream(ids[None, :PREFILL], use_cache=True, **media.get("upstream", {}))
        expected = [out.logits[0]]
        for n in range(PREFILL, len(ids)):
            out = pair.upstream(ids[None, n : n + 1], use_cache=True, **{CACHE: cache_of(out)})
            expected.append(out.logits[0])
    return Outcome(relative_error(torch.cat(found), torch.cat(expected)), margins.smallest)


CACHE = "cache"


def cache_of(out: Any) -> Any:
    return out.cache


@torch.no_grad()
def generation(pair: Pair, ids: torch.Tensor, **media: Any) -> Outcome:
    """Greedy answers of both sides, and the error of our logits beside upstream's scores."""
    margins = Margins()
    with precision(pair.dtype):
        answer = pair.upstream.generate(
            ids[None],
            attention_mask=torch.ones_like(ids)[None],
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            **media.get("upstream", {}),
        )
    turn = SimpleNamespace(tokens=ids.tolist(), images=media.get("images", ()))
    request = SimpleNamespace(turns=[turn], max_new_tokens=NEW, stop_tokens=(), temperature=0.0, seed=0, forced=())
    own = generate(pair.ours, request, call=margins)
    best = own.logits.topk(2, dim=-1).values
    margin = min(margins.smallest, float((best[:, 0] - best[:, 1]).min()))
    error = relative_error(own.logits, torch.cat(list(answer.logits)))
    return Outcome(error, margin, list(own.tokens) == answer.sequences[0].tolist())


MODES: dict[str, Callable[..., Outcome]] = {"prefill": prefill, "decode": decode, "generate": generation}


# ------------------------------------------------------------------------------------------------------------ table


@dataclass(frozen=True)
class Row:
    """One line of the table: the largest error over the seeds that were decided, and how many were not."""

    family: str
    mode: str
    dtype: str
    error: float
    bound: float
    seeds: int
    skipped: int


def reference_errors(families: tuple[str, ...] = (), seeds: tuple[int, ...] = (0, 1, 2)) -> Iterator[Row]:
    """Every family (or those named) x mode x precision, measured now."""
    for family in families or tuple(FAMILIES):
        for dtype, bound in BOUNDS.items():
            outcomes: dict[str, list[Outcome]] = {mode: [] for mode in MODES}
            for seed in seeds:
                with tempfile.TemporaryDirectory() as directory:
                    pair = saved_by_upstream(family, Path(directory), seed=seed, dtype=dtype)
                    for mode, run in MODES.items():
                        outcomes[mode].append(run(pair, token_ids(seed)))
            for mode, own in outcomes.items():
                kept = [o for o in own if o.decided or dtype == torch.float64]
                worst = max((o.error for o in kept), default=math.nan)
                name = str(dtype).removeprefix("torch.")
                yield Row(family, mode, name, worst, bound, len(kept), len(own) - len(kept))


# -------------------------------------------------------------------------------------- what the tests of a family ask


def assert_reads_what_upstream_saved(family: str, directory: Path, *, dtype: torch.dtype) -> None:
    """Every mode on directories that transformers saved, two seeds; no key and no tensor is left over."""
    decided = 0
    for seed in (0, 1):
        pair = saved_by_upstream(family, directory / str(seed), seed=seed, dtype=dtype)
        assert (pair.checkpoint.unknown_keys, pair.checkpoint.unexpected) == ((), ())
        for mode, run in MODES.items():
            outcome = run(pair, token_ids(seed))
            if dtype == torch.float32 and not outcome.decided:
                continue
            decided += 1
            assert outcome.error <= BOUNDS[dtype], (mode, seed, outcome)
            assert outcome.same_tokens in (None, True), (mode, seed)
    assert decided >= 3, "too few seeds were decided by a clear margin: choose others"


def assert_upstream_reads_what_we_write(family: str, directory: Path) -> None:
    """Every mode on a directory of ours that transformers loads: in float64 where nothing is rotated, else in float32,
    since upstream's frequencies are float32 powers and need not be the nearest ones."""
    dtype = torch.float64 if Checkpoint(directory).config.rope.layout == "none" else torch.float32
    pair = written_here(family, directory, dtype=dtype)
    outcomes = [run(pair, token_ids(seed)) for seed in (0, 1, 2) for run in MODES.values()]
    decided = [outcome for outcome in outcomes if outcome.decided or dtype == torch.float64]
    assert decided, "no sequence was decided by a clear margin: choose others"
    assert max(outcome.error for outcome in decided) <= BOUNDS[dtype]
    assert all(outcome.same_tokens in (None, True) for outcome in decided)


def error_of_other_reading(pair: Pair, change: Callable[[Any], Any], *, seed: int = 0) -> float:
    """The error of a prefill when our configuration is read differently: `change` takes and gives a ModelConfig."""
    other = Model(pair.checkpoint, dtype=torch.float64)
    other.config = change(other.config)
    return prefill(Pair(pair.upstream, other, pair.checkpoint, pair.dtype), token_ids(seed)).error
