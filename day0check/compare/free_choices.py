"""Limits of the net for a candidate that shows results and none of its choices.

Nothing can be replayed then: an expert or a key that falls otherwise is an error of one row, far beyond the noise of
roundings. Replicates that make their own choices have such rows, too: each is held against the others, and the largest
of what they show, times a factor, is what a row may be off. Means over rows keep their limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from day0check.compare.locate import split_tap
from day0check.compare.net_noise import row_errors
from day0check.snapshot import Snapshot

CHOOSING = ("dsa.select", "moe.route")
REPLICATES = 8
FACTOR = 2.0  # between the furthest of all rows of all replicates and the limit, as for answers of an endpoint


def shows_no_choice(snapshot: Snapshot) -> bool:
    """Whether a candidate shows results, and no choice that a pass could follow. One whose calls were replayed shows
    every choice that its model makes."""
    operators = {split_tap(tap)[1] for tap in snapshot.taps()}
    return bool(operators) and not operators & set(CHOOSING) and not snapshot.measures


@dataclass
class FreeLimits:
    """The furthest that replicates strayed: `rows` by tap in noises of a row, `margin` in units of `given_up`."""

    rows: dict[str, float] = field(default_factory=dict)
    margin: float = 0.0

    def see_rows(self, tap: str, oracle: torch.Tensor, replicates: Sequence[torch.Tensor]) -> None:
        """`oracle` and each of `replicates` [n, d], all rows of a pass at a tap."""
        stack = torch.stack([r.double() for r in replicates])
        for own, others in _each_beside_the_others(stack):
            furthest = float(row_errors(oracle, own, others).z.sqrt().max())
            self.rows[tap] = max(self.rows.get(tap, 0.0), furthest)

    def see_logits(self, oracle: torch.Tensor, replicates: torch.Tensor) -> None:
        """`oracle` [n, vocab] and `replicates` [R, n, vocab]: what the best token of each gives up."""
        for own, others in _each_beside_the_others(replicates.double()):
            self.margin = max(
                self.margin, float(given_up(oracle, own.argmax(-1), error_of_a_difference(oracle, others)).max())
            )

    def row_limit(self, tap: str, least: float) -> float:
        return max(least, FACTOR * self.rows.get(tap, 0.0))

    def margin_limit(self, least: float) -> float:
        return max(least, FACTOR * self.margin)


def given_up(oracle: torch.Tensor, tokens: torch.Tensor, size: float) -> torch.Tensor:
    """[n]: the largest logit of `oracle` [n, vocab] minus that of `tokens` [n], in units of `size`; infinite for one
    outside the vocabulary."""
    wide, inside = oracle.double(), (tokens >= 0) & (tokens < oracle.shape[-1])
    lost = wide.amax(-1) - wide.gather(-1, torch.where(inside, tokens, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(inside, lost / max(size, torch.finfo(torch.float32).tiny), torch.inf)


def error_of_a_difference(oracle: torch.Tensor, replicates: torch.Tensor) -> float:
    """Of two logits of a replicate, over all rows of `oracle` [n, vocab] and `replicates` [R, n, vocab]: a row's own
    noise knows nothing of the choice that falls otherwise in it."""
    errors = (replicates.double() - oracle.double()).nan_to_num()
    return float((2 * errors.square().mean()).sqrt())


def _each_beside_the_others(stack: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    count = stack.shape[0]
    return [(stack[i], stack[[j for j in range(count) if j != i]]) for i in range(count)] if count > 1 else []
