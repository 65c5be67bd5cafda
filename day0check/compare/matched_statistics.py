"""How much of a candidate's error is one change or another: amplitudes, spreads, and which changes can be told apart.

Legend: P prompts, N values of one prompt, G guesses, K replicates. Everything in units of each value's noise. A value
counts as at most `clip` noises, since a choice that falls otherwise (an expert, a key) makes few large errors. Prompts
are independent of each other, values of one are not. Source: method notes, section 5.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from scipy.special import stdtrit

from day0check.compare.slopes import beyond_nearest

SPREADS = 6.0
TAIL = 1e-6  # per guess: a thousand of them raise an alarm in one of a thousand runs
APART = 4.0  # spreads of what one guess leaves unexplained, beyond which it is ruled out in favour of another
ROUNDS, SETTLED = 30, 1e-4  # of the amplitude's fit: at most so many, until it moves by no more of itself
OWN, NEAREST, REPLICATES = 0, 1, slice(2, None)


@dataclass(frozen=True)
class Projections:
    """`errors` [2 + K, N] of each prompt: the candidate's, those of rounding to nearest, the replicates'; `changes`
    [G, N] of each prompt: what each guess changes."""

    errors: tuple[torch.Tensor, ...]
    changes: tuple[torch.Tensor, ...] = ()
    clip: float = math.inf

    @classmethod
    def of(cls, errors: Sequence[torch.Tensor], variance: Sequence[torch.Tensor], *, clip: float) -> Projections:
        """From errors [2 + K, n, d] and their noise [n, d]."""
        scaled = tuple((e / v.sqrt()).flatten(1) for e, v in zip(errors, variance, strict=True))
        return cls(scaled, clip=clip)

    def with_changes(self, changes: Sequence[torch.Tensor], variance: Sequence[torch.Tensor]) -> Projections:
        """Further guesses [G, n, d] of each prompt behind those there are."""
        new = [(c / v.sqrt()).flatten(1) for c, v in zip(changes, variance, strict=True)]
        if self.changes:
            new = [torch.cat(pair) for pair in zip(self.changes, new, strict=True)]
        return Projections(self.errors, tuple(new), self.clip)

    @property
    def prompts(self) -> int:
        return len(self.errors)

    @property
    def limit(self) -> float:
        """Spreads that chance explains, of a spread estimated from so many prompts and replicates."""
        return max(SPREADS, float(-stdtrit(self.prompts * (self.errors[0].shape[0] - 2), TAIL / 2)))

    @functools.cached_property
    def gram(self) -> torch.Tensor:
        """[G, G]: products of the changes."""
        return torch.stack([c @ c.T for c in self.changes]).sum(0)

    def told(self, direction: Sequence[torch.Tensor]) -> Told | None:
        """What the error says of a direction [N] of each prompt; None where it changes nothing."""
        square = sum(float(d.square().sum()) for d in direction)
        if not square > 0:
            return None
        scores = torch.stack([self._clipped(e) @ d for e, d in zip(self.errors, direction, strict=True)])  # [P, 2 + K]
        spread = float(scores[:, REPLICATES].square().mean(1).sum().sqrt())
        beyond = float(beyond_nearest(scores[:, OWN].sum(), scores[:, NEAREST].sum()))
        spread = max(spread, 1e-300)
        amplitude = self._fitted(direction)
        unexplained = self._unexplained(direction, amplitude)
        inflated = spread * max(1.0, unexplained)
        return Told(amplitude, inflated / square, beyond / inflated, unexplained)

    def _unexplained(self, direction: Sequence[torch.Tensor], amplitude: float) -> float:
        """What is left of the error over a replicate's: an error that is something else altogether lies along every
        direction by chance, and further than noise does."""
        left = [self._clipped(e[OWN] - amplitude * d) for e, d in zip(self.errors, direction, strict=True)]
        noise = [self._clipped(e[REPLICATES]) for e in self.errors]
        own, known = (sum(float(x.square().mean(-1).mean()) for x in lists) for lists in (left, noise))
        return (own / max(known, 1e-300)) ** 0.5

    def _clipped(self, errors: torch.Tensor) -> torch.Tensor:
        return errors.clamp(-self.clip, self.clip)

    def _fitted(self, direction: Sequence[torch.Tensor]) -> float:
        """The amplitude with the least sum of clipped errors left (Huber's estimate, by reweighting): a few values far
        off do not decide."""
        errors, change = torch.cat([e[OWN] for e in self.errors]), torch.cat(list(direction))
        amplitude, weighted = math.inf, change
        for _ in range(ROUNDS):
            before, amplitude = amplitude, float(weighted @ errors / (weighted @ change).clamp(min=1e-300))
            if abs(amplitude - before) <= SETTLED * abs(amplitude):
                break
            left = torch.sub(errors, change, alpha=amplitude).abs_().clamp_(min=self.clip)
            weighted = change * (self.clip / left)
        return amplitude

    def direction(self, guess: int, *, without: int | None = None) -> list[torch.Tensor]:
        """The change of a guess, or the part of it that another guess cannot make."""
        if without is None:
            return [c[guess] for c in self.changes]
        gram = self.gram
        share = float(gram[guess, without] / gram[without, without].clamp(min=1e-300))
        return [c[guess] - share * c[without] for c in self.changes]

    def apart(self, guess: int, other: int, amplitude: float) -> tuple[bool, int | None]:
        """Whether `other` alone does not explain what `guess` explains, and how many prompts would show it were the
        guess true with this amplitude (None: no number would, both change the same)."""
        left = self.direction(guess, without=other)
        whole = sum(float(d.square().sum()) for d in self.direction(guess))
        rest = sum(float(d.square().sum()) for d in left)
        told = self.told(left)
        if told is None or rest < 1e-4 * whole:
            return False, None
        expected = abs(amplitude) / told.spread
        return told.significance > APART, max(
            self.prompts + 1, math.ceil(self.prompts * (APART / max(expected, 1e-12)) ** 2)
        )


@dataclass(frozen=True)
class Told:
    """`amplitude` ± `spread` of a guess, in units of it, how many spreads the error lies beyond rounding to nearest
    along it, and how much larger than a replicate's error is what the guess leaves `unexplained`."""

    amplitude: float
    spread: float
    significance: float
    unexplained: float = 1.0


@dataclass(frozen=True)
class Ranked:
    """A guess by its number, what was told of it, and the correlation of its change with the first one's."""

    guess: int
    told: Told
    shared: float = field(default=1.0)


def ranked(found: Projections) -> list[Ranked]:
    """All guesses that change something, the most significant first."""
    count = found.changes[0].shape[0] if found.changes else 0
    told = [(i, found.told(found.direction(i))) for i in range(count)]
    known = sorted(((i, t) for i, t in told if t is not None), key=lambda p: -p[1].significance)
    if not known:
        return []
    gram, first = found.gram, known[0][0]
    norms = gram.diagonal().clamp(min=1e-300).sqrt()
    return [Ranked(i, t, float(gram[i, first] / (norms[i] * norms[first]))) for i, t in known]
