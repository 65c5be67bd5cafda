"""What the matched filter says of a black box's answers in words and figures: the parameter, its size, its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from day0check.compare.matched_guesses import EPSILON, Guess
from day0check.compare.matched_statistics import APART, Projections, Ranked, ranked
from day0check.types import Measure

UNEXPLAINED = 2.5  # of a replicate's error: what may be left beside the parameter that is named
PARTLY = 1.5  # beyond it the sentence says that not all is explained
SURE = 0.975  # of the interval's upper end
LISTED = 4
MOST = 8  # guesses that are held against each other
ONE_PERCENT = 0.01
LOGITS = "head.logits"  # of what is said where no parameter is named


@dataclass(frozen=True)
class Rival:
    """Another guess that explains the error as well; `prompts` would tell it apart (None: no number would)."""

    guess: Guess
    prompts: int | None


@dataclass(frozen=True)
class Verdict:
    """`guess` is wrong by `size` (relative), between `low` and `high` at 95 %; `rivals` explain the error as well."""

    guess: Guess
    size: float
    low: float
    high: float
    ranked: Ranked
    rivals: tuple[Rival, ...]
    found: bool

    @property
    def layers(self) -> tuple[int, ...]:
        """Every layer that may have it."""
        own = self.guess.parameter
        guesses = [self.guess, *(r.guess for r in self.rivals if r.guess.parameter == own)]
        return own.layers() if any(g.layer is None for g in guesses) else tuple(sorted({g.layer for g in guesses}))

    @property
    def prompts_to_tell(self) -> int | None:
        """How many prompts would tell the layers apart: 0 where these do, None where no number would."""
        same = [r.prompts for r in self.rivals if r.guess.parameter == self.guess.parameter]
        return None if None in same else max(same, default=0)


def verdict(found: Projections, guesses: Sequence[Guess]) -> Verdict | None:
    """The guess that the error looks most like, and those that are as like it; None where none changes an answer."""
    order = ranked(found)
    if not order:
        return None
    telling = [r for r in order if _told(r, found, guesses)][:MOST]
    best = _that_explains_the_others(telling, found) if telling else order[0]
    guess, told = guesses[best.guess], best.told
    size = guess.parameter.size
    freedom = found.prompts * (found.errors[0].shape[0] - 2)
    wide = float(stdtrit(freedom, SURE)) * told.spread
    rivals = []
    for other in (r for r in telling if r is not best):
        apart, prompts = found.apart(best.guess, other.guess, told.amplitude)
        if not apart:
            rivals.append(Rival(guesses[other.guess], prompts))
    low, high = size * (told.amplitude - wide), size * (told.amplitude + wide)
    return Verdict(guess, size * told.amplitude, low, high, best, tuple(rivals), bool(telling))


def _that_explains_the_others(telling: Sequence[Ranked], found: Projections) -> Ranked:
    """The guess beside which none of the others is needed, or needed least; the most significant of equal ones. Noise
    differs along directions that are much alike, so significance alone may name the neighbour."""

    def needed(each: Ranked) -> float:
        beside = (found.told(found.direction(o.guess, without=each.guess)) for o in telling if o is not each)
        return max([APART, *(t.significance for t in beside if t is not None)])

    return min(telling, key=lambda each: (needed(each), -each.told.significance))


def _told(each: Ranked, found: Projections, guesses: Sequence[Guess]) -> bool:
    told = each.told
    possible = guesses[each.guess].possible(told.amplitude) and told.unexplained <= UNEXPLAINED
    return possible and told.significance > found.limit


def smallest_errors(found: Projections, guesses: Sequence[Guess]) -> dict[str, float]:
    """The smallest relative error of each parameter, wrong everywhere, that these prompts would have shown; an eps is
    9 where ten times as much shows."""
    seen = {}
    for i, guess in enumerate(guesses):
        told = found.told(found.direction(i)) if guess.layer is None else None
        if told is not None:
            name = f"{guess.parameter.operator}.{guess.parameter.argument}"
            seen[name] = guess.parameter.size * told.spread * found.limit
    return seen


def prompts_for(smallest: float, prompts: int, *, size: float = ONE_PERCENT) -> int:
    """How many prompts like these show an error of `size`, where `prompts` show `smallest`."""
    return max(1, math.ceil(prompts * (smallest / size) ** 2))


def in_words(said: Verdict, found: Projections) -> str:
    """One sentence: parameter, size, interval, where, what else it may be, and what more prompts would tell."""
    told = said.ranked.told
    size, way = f"{100 * abs(said.size):.3g}%", "large" if said.size > 0 else "small"
    ends = sorted((abs(said.low), abs(said.high)))
    text = (
        f"the error looks like {said.guess.parameter.words} of {said.guess.parameter.operator} {size} too {way} "
        f"(95% interval {100 * ends[0]:.3g}% to {100 * ends[1]:.3g}%) {where(said)}: {told.significance:.3g} spreads "
        f"over {found.prompts} prompts, limit {found.limit:.3g}"
    )
    others = list(dict.fromkeys(_other(r) for r in said.rivals if r.guess.parameter != said.guess.parameter))
    more = len(others) - LISTED
    listed = ", ".join(others[:LISTED]) + (f" and {more} more" if more > 0 else "")
    if told.unexplained > PARTLY:
        text += f"; what it leaves is {told.unexplained:.2g} times the noise, so more is wrong"
    return text + (f"; as like it: {listed}" if others else "")


def where(said: Verdict) -> str:
    """The layers, and how many prompts would tell them apart."""
    own = [r for r in said.rivals if r.guess.parameter == said.guess.parameter]
    every = said.guess.layer is None or any(r.guess.layer is None for r in own)
    if not own:
        return "in every layer that has it" if said.guess.layer is None else f"in layer {said.guess.layer}"
    alone = sorted({g.layer for g in (said.guess, *(r.guess for r in own)) if g.layer is not None})
    named = ", ".join(map(str, alone[:LISTED])) + (", …" if len(alone) > LISTED else "")
    text = f"in layer{'s'[: len(alone) > 1]} {named}"
    text = f"in every layer, or only {text}" if every else f"in one of {text.removeprefix('in ')}"
    prompts = said.prompts_to_tell
    return f"{text} ({'no number of' if prompts is None else f'about {prompts}'} prompts would tell)"


def _other(rival: Rival) -> str:
    tell = "no number of prompts tells" if rival.prompts is None else f"{rival.prompts} prompts would tell"
    place = "" if rival.guess.layer is None else f" in layer {rival.guess.layer}"
    return f"{rival.guess.parameter.words} of {rival.guess.parameter.operator}{place} ({tell})"


def nothing_told(found: Projections, seen: dict[str, float]) -> str:
    """What an unaccused black box may still hide."""
    sizes = {name: size for name, size in seen.items() if not name.endswith(".eps")}
    hidden = [name for name, size in seen.items() if name.endswith(".eps") and size > EPSILON]
    text = "no parameter explains the error"
    if sizes:
        best, worst = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        text += (
            f"; {found.prompts} prompts show {best} wrong by {100 * sizes[best]:.2g}% and {worst} by "
            f"{100 * sizes[worst]:.2g}%, one percent of it needs {prompts_for(sizes[worst], found.prompts)} prompts"
        )
    if hidden:
        text += f"; not even ten times the value shows of {', '.join(hidden)}"
    return text


def measure(found: Projections, guesses: Sequence[Guess], *, order: int) -> Measure | None:
    """The verdict as a measure of the operator that is named; None where no guess changes an answer."""
    said = verdict(found, guesses)
    if said is None:
        return None
    seen, told, parameter = smallest_errors(found, guesses), said.ranked.told, said.guess.parameter
    layer = said.layers[0] if said.found and len(said.layers) == 1 else None
    prompts = prompts_for(told.spread * found.limit, found.prompts, size=1.0)
    statistics = {
        "matched": told.significance if said.found else min(told.significance, found.limit),
        "amplitude": said.size,
        "amplitude_low": said.low,
        "amplitude_high": said.high,
        "unexplained": told.unexplained,
        "prompts": float(found.prompts),
        "prompts_needed": float(prompts),
        "prompts_to_tell_layers": math.inf if said.prompts_to_tell is None else float(said.prompts_to_tell),
    }
    place, operator = "" if layer is None else f"layers.{layer:02d}.", parameter.operator
    return Measure(
        tap=f"{place}{operator}" if said.found else f"{LOGITS}.matched",
        operator=operator if said.found else LOGITS,
        kind="compute",
        phase="prefill",
        layer=layer,
        order=order,
        rows=0,
        elements=sum(e.shape[1] for e in found.errors),
        passed=not said.found,
        statistics=statistics | {f"sees_{name}": value for name, value in seen.items()},
        limits={"matched": found.limit},
        failing="matched" if said.found else "",
        pattern=f"wrong {parameter.words}" if said.found else "",
        message=in_words(said, found) if said.found else nothing_told(found, seen),
        power=max((s for name, s in seen.items() if not name.endswith(".eps")), default=None) if said.found else None,
    )
