"""The matched filter: how much of a candidate's propagated error is one named parameter of one operator and layer.

For black boxes, of which few taps are seen. The oracle runs once more with the hypothesis (that parameter a little
larger); the candidate's error is projected on the change. Amplitude 0 = absent, 1 = exactly this, at this size; its
spread comes from the replicates, a whole prompt being one sample, since the errors of its rows depend on each other.
Source: method notes, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from scipy.special import stdtrit

from day0check.compare import kept_states
from day0check.compare.computations import Computation
from day0check.compare.lockstep import run_together
from day0check.compare.net_measures import CaseTable, layer_of
from day0check.compare.net_noise import noise_map
from day0check.compare.propagated import REPLAYED, Forward, RequestRun, forwards, seeded
from day0check.compare.rounding import Rounder, round_blocks
from day0check.compare.slopes import beyond_nearest
from day0check.contracts import CONTRACTS
from day0check.contracts.profiles import Profile, profile_named
from day0check.snapshot import Snapshot
from day0check.types import Measure, Request, RunCase

SIZE, HEAD_SIZE = 0.01, 0.02  # relative change of a parameter, and of that of one head
LARGEST = 0.5  # relative error of a parameter beyond which one step of it says nothing
REPLICATES = 8
MOST = 32  # hypotheses; beyond it those about single heads are left out
HOPELESS = ("eps",)  # a percent of it shows in no travelling tensor
FIRST_TOKENS = 24  # that show where a model calls what
SIDE_BY_SIDE = 6  # hypotheses that run beside the oracle at a time: each holds the activations of a pass
SPREADS = 6.0
TAIL = 1e-6  # per hypothesis: a thousand of them raise an alarm in one of a thousand runs
NEAREST = torch.Generator()  # stands for rounding to nearest in place of random rounding


@dataclass(frozen=True)
class Hypothesis:
    """`argument` of the operator at `tap` is `size` (relative) too large; of one head where `head` is given."""

    tap: str
    operator: str
    argument: str
    words: str
    size: float
    head: int | None = None

    def __str__(self) -> str:
        of = "" if self.head is None else f" of head {self.head}"
        return f"{self.words}{of} in {self.tap}"

    def applied(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with the hypothesis in them. A scale of scores of one head is one of its queries."""
        if self.head is None:
            return args, kwargs | {self.argument: kwargs[self.argument] * (1 + self.size)}
        queries = args[0].clone()
        queries[:, self.head] *= 1 + self.size
        return (queries, *args[1:]), kwargs


@dataclass(frozen=True)
class Match:
    """What the error at tap `seen_at` says of a hypothesis: `amplitude` ± `spread` in units of it, over `prompts`
    prompts, and what of it lies `beyond` rounding to nearest. `prompts_needed`: how many would tell amplitude 1 from
    none. `shared`: correlation of its change with that of the most significant hypothesis."""

    hypothesis: Hypothesis
    seen_at: str
    amplitude: float
    beyond: float
    spread: float
    limit: float
    prompts: int
    prompts_needed: int
    shared: float = 0.0

    @property
    def significance(self) -> float:
        return abs(self.beyond) / self.spread

    @property
    def found(self) -> bool:
        return self.significance > self.limit and abs(self.hypothesis.size * self.amplitude) <= LARGEST

    def text(self) -> str:
        size = 100 * self.hypothesis.size * self.amplitude
        return (
            f"{self.hypothesis} {abs(size):.3g}% too {'large' if size > 0 else 'small'} "
            f"(± {100 * self.hypothesis.size * self.spread:.1g}%, seen at {self.seen_at}, {self.prompts} prompts)"
        )


def hypotheses(forward: Forward, tokens: Sequence[int], images: Sequence[str] = ()) -> tuple[Hypothesis, ...]:
    """The parameters that the contracts name, at every place where a pass over `tokens` calls them, and the heads of
    those that have their own; in order of execution."""
    found: list[Hypothesis] = []

    def call(place: str, operator: str, function: Callable, *args: Any, site: str = "", **kwargs: Any) -> Any:
        tap = ".".join(part for part in (place, operator, site) if part)
        named = CONTRACTS[operator].directions if operator in CONTRACTS else ()
        for direction in (d for d in named if d.argument not in HOPELESS):
            value = kwargs.get(direction.argument)
            if not (isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point())):
                continue
            found.append(Hypothesis(tap, operator, direction.argument, direction.words, SIZE))
            if direction.per_head and args[0].shape[1] > 1:
                heads = range(args[0].shape[1])
                found.extend(
                    Hypothesis(tap, operator, direction.argument, direction.words, HEAD_SIZE, h) for h in heads
                )
        return function(*args, **kwargs)

    with torch.inference_mode():
        forward(tokens, images, call)
    return tuple(dict.fromkeys(found))


@dataclass
class _Sums:
    """Of one tap and H hypotheses, weighted by the noise, a list entry for each prompt: projections of the errors of
    the candidate [H], of rounding to nearest [H], of each replicate [K, H], and the changes' own products [H, H]."""

    own: list[torch.Tensor] = field(default_factory=list)
    nearest: list[torch.Tensor] = field(default_factory=list)
    replicates: list[torch.Tensor] = field(default_factory=list)
    gram: list[torch.Tensor] = field(default_factory=list)


def match(
    models: tuple[Forward, Forward],
    profile: Profile,
    case: RunCase,
    snapshot: Snapshot,
    asked: Sequence[Hypothesis],
    *,
    device: str = "cpu",
    replicates: int = REPLICATES,
    seed: int = 0,
) -> tuple[Match, ...]:
    """How much of each hypothesis is in the travelling tensors that the candidate left, the most significant first.

    `models`: (oracle in float64, expected), as in `compare_case`. Requests that left no outputs are skipped. Of the
    recorded taps behind a hypothesis the one counts at which the replicates say that it shows best. A hypothesis that
    changes no recorded tap is left out.
    """
    oracle, expected = models
    sums: list[dict[str, _Sums]] = []
    groups = [asked[i : i + SIDE_BY_SIDE] for i in range(0, len(asked), SIDE_BY_SIDE)]
    for group in groups:
        sums.append({})
        for index, request in enumerate(case.requests):
            tokens = _tokens(snapshot, request)
            if not tokens:
                continue
            run = _MatchedRun(
                profile, request, tokens, Computation(snapshot), CaseTable(snapshot), hypotheses=tuple(group)
            )
            run.sums = sums[-1]
            run.replicates = replicates
            bodies = [run.body(oracle, None)]
            bodies += [run.body(expected, seeded((seed, index, r), device)) for r in range(replicates)]
            bodies.append(run.body(expected, NEAREST))
            bodies += [run.body(run.with_hypothesis(oracle, h), None) for h in group]
            run_together(bodies, run.at_meeting)
    found = [m for group, taps in zip(groups, sums, strict=True) for m in _matches(group, taps)]
    return tuple(sorted(found, key=lambda m: -m.significance / m.limit))


def _tokens(snapshot: Snapshot, request: Request) -> tuple[int, ...]:
    outputs = snapshot.outputs
    sequence = outputs.sequences.get(request.id, ()) if outputs is not None else ()
    length = snapshot.fed_lengths().get(request.id, len(sequence) - 1)
    return tuple(sequence[: max(1, length)]) if sequence else ()


@dataclass
class _MatchedRun(RequestRun):
    """The passes of one request: oracle, replicates, rounding to nearest, then one for each hypothesis. The choices of
    all are those of the candidate where they are legal, else the oracle's."""

    hypotheses: tuple[Hypothesis, ...] = ()
    replicates: int = REPLICATES
    sums: dict[str, _Sums] = field(default_factory=dict)

    def with_hypothesis(self, forward: Forward, hypothesis: Hypothesis) -> Forward:
        def changed(tokens: Sequence[int], images: Sequence[str], call: Callable[..., Any]) -> torch.Tensor:
            def inner(place: str, operator: str, function: Callable, *args: Any, site: str = "", **kwargs: Any) -> Any:
                if ".".join(part for part in (place, operator, site) if part) == hypothesis.tap:
                    args, kwargs = hypothesis.applied(args, kwargs)
                return call(place, operator, function, *args, site=site, **kwargs)

            return forward(tokens, images, inner)

        return changed

    def _rounded(
        self, operator: str, function: Callable, args: tuple, kwargs: dict, generator: torch.Generator | None
    ) -> Any:
        if generator is not NEAREST:
            return super()._rounded(operator, function, args, kwargs, generator)
        if operator == kept_states.OPERATOR and kept_states.claimed(self.profile):
            function = kept_states.in_calls(function, self.kept_at)
        points, block = self.profile.points_of(operator), self.profile.inputs.get(operator)
        args = args if block is None else (round_blocks(args[0], block), *args[1:])
        return function(*args, **kwargs, **({"round": Rounder(points)} if points else {}))

    def at_meeting(self, tap: str, values: list[tuple[str, Callable | None, tuple, dict]]) -> Any:
        operator, function = values[0][:2]
        if operator in REPLAYED:
            expected = values[: 1 + self.replicates]
            return self.choose(tap, operator, function, [(args, kwargs) for _, _, args, kwargs in expected])
        if tap.startswith("vision."):
            return None
        recorded = self.computation.view.recorded(tap, self.request.id)
        results = [args[0][0] if isinstance(args[0], tuple) else args[0] for _, _, args, _ in values]
        inside = [i for i, position in enumerate(recorded.positions) if position < len(results[0])]
        if inside:
            at = torch.tensor([recorded.positions[i] for i in inside], device=results[0].device)
            seen = recorded.values[inside].to(at.device)
            self._project(tap, seen.flatten(1).double(), [r[at].flatten(1).double() for r in results])
        return None

    def _project(self, tap: str, candidate: torch.Tensor, passes: list[torch.Tensor]) -> None:
        oracle, rest = passes[0], torch.stack(passes[1:]) - passes[0]
        expected, nearest, changes = rest[: self.replicates], rest[self.replicates], rest[self.replicates + 1 :]
        if candidate.shape != oracle.shape or not bool(torch.isfinite(candidate).all()):
            return  # what is no number is found by the net itself
        weighted = changes / noise_map(expected.square(), oracle)
        sums = self.sums.setdefault(tap, _Sums())
        sums.own.append(torch.einsum("nd,hnd->h", candidate - oracle, weighted).cpu())
        sums.nearest.append(torch.einsum("nd,hnd->h", nearest, weighted).cpu())
        sums.replicates.append(torch.einsum("knd,hnd->kh", expected, weighted).cpu())
        sums.gram.append(torch.einsum("gnd,hnd->gh", changes, weighted).cpu())


def _matches(group: Sequence[Hypothesis], taps: dict[str, _Sums]) -> list[Match]:
    best: list[Match | None] = [None] * len(group)
    grams: dict[str, torch.Tensor] = {}
    for tap, sums in taps.items():
        own, gram = torch.stack(sums.own).sum(0), torch.stack(sums.gram).sum(0)
        outside = beyond_nearest(own, torch.stack(sums.nearest).sum(0))
        prompts, count = len(sums.own), sums.replicates[0].shape[0]
        spread = torch.stack(sums.replicates).square().mean(1).sum(0).sqrt()  # prompts are independent of each other
        grams[tap] = gram
        limit = max(SPREADS, float(-stdtrit(prompts * count, TAIL / 2)))
        for i, hypothesis in enumerate(group):
            square = float(gram[i, i])
            if square <= 0:
                continue
            noise = float(spread[i]) / square
            if best[i] is not None and best[i].spread <= noise:
                continue
            alone = noise * prompts**0.5
            needed = max(1, math.ceil((limit * alone) ** 2))
            best[i] = Match(
                hypothesis, tap, float(own[i]) / square, float(outside[i]) / square, noise, limit, prompts, needed
            )
    return _with_shares([m for m in best if m is not None], group, grams)


def _with_shares(found: list[Match], group: Sequence[Hypothesis], grams: dict[str, torch.Tensor]) -> list[Match]:
    if not found:
        return found
    leader = max(found, key=lambda m: m.significance)
    lead, told = list(group).index(leader.hypothesis), []
    for m in found:
        gram, i = grams[leader.seen_at], list(group).index(m.hypothesis)
        both = float((gram[i, i] * gram[lead, lead]).clamp(min=1e-300).sqrt())
        told.append(replace(m, shared=float(gram[i, lead]) / both))
    return told


def compare_matched(
    model: Any, profile: Profile | str, case: RunCase, snapshot: Snapshot, *, device: str = "cpu", seed: int = 0
) -> list[Measure]:
    """The measure of the parameter that explains most of a black box's error, with its amplitude and its neighbours;
    none where the candidate left no travelling tensor. `model` as in `compare_case`."""
    profile = profile_named(profile) if isinstance(profile, str) else profile
    models = model if isinstance(model, tuple) else forwards(model, profile, device)
    tokens = next((t for t in (_tokens(snapshot, request) for request in case.requests) if t), ())
    if not tokens:
        return []
    asked = hypotheses(models[0], tokens[:FIRST_TOKENS])
    if len(asked) > MOST:
        asked = tuple(h for h in asked if h.head is None)
    matches = match(models, profile, case, snapshot, asked, device=device, seed=seed)
    return [_measure(matches, snapshot)] if matches else []


def _measure(matches: Sequence[Match], snapshot: Snapshot) -> Measure:
    best = next((m for m in matches if m.found), matches[0])
    like = [m for m in matches if m is not best and m.found][:3]
    message = ""
    if best.found:
        others = "".join(f"; as like it: {m.text()}, shares {abs(m.shared):.2f}" for m in like)
        message = f"the error looks like {best.text()}: {best.significance:.3g} spreads{others}"
    statistics = {"matched": best.significance if best.found else min(best.significance, best.limit)}
    statistics |= {
        "amplitude": best.amplitude,
        "prompts": float(best.prompts),
        "prompts_needed": float(best.prompts_needed),
    }
    return Measure(
        tap=best.hypothesis.tap,
        operator=best.hypothesis.operator,
        kind="compute",
        phase="prefill",
        layer=layer_of(best.hypothesis.tap),
        order=snapshot.first_order(best.seen_at),
        rows=0,
        elements=0,
        passed=not best.found,
        statistics=statistics,
        limits={"matched": best.limit},
        failing="matched" if best.found else "",
        pattern=f"wrong {best.hypothesis.words}" if best.found else "",
        message=message,
        power=max((m.hypothesis.size * m.spread * m.limit for m in matches if m.spread < 1), default=None),
    )
