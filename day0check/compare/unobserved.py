"""An observed run beside an unobserved one of the same case: the same logits, to the bit?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from day0check.probe.final_logits import FinalLogits


def unobserved_figures(
    observed: FinalLogits,
    unobserved: FinalLogits,
    before: Mapping[str, Sequence[int]],
    after: Mapping[str, Sequence[int]],
) -> dict[str, float]:
    """What two runs' logits say where their tokens are still the same. `before` and `after`: the sequences of each.

    `rows` that both have, `different` ones in any byte, `non_finite` ones that are so in the unobserved run alone,
    `relative_l2` the size of the difference over that of the observed logits, over all rows. Empty without a row.
    """
    rows = different = non_finite = 0
    error = size = 0.0
    for (request, position), first in observed.rows.items():
        second = unobserved.rows.get((request, position))
        if second is None or position >= _same(before.get(request, ()), after.get(request, ())):
            continue
        rows += 1
        if first.shape != second.shape:
            different, error, size = different + 1, error + 1.0, size + 1.0
            continue
        wide, other = first.double(), second.double()
        different += not torch.equal(_bits(first), _bits(second))
        non_finite += bool(torch.isfinite(wide).all()) and not bool(torch.isfinite(other).all())
        usable = torch.isfinite(wide) & torch.isfinite(other)
        error += float((wide - other)[usable].square().sum())
        size += float(wide[usable].square().sum())
    if not rows:
        return {}
    figures = {"rows": rows, "different": different, "non_finite": non_finite}
    return {**{name: float(value) for name, value in figures.items()}, "relative_l2": (error / (size or 1.0)) ** 0.5}


def worst(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The figures of several ranks as one: the largest of each; empty where a rank has none."""
    if not figures or not all(figures):
        return {}
    return {name: max(own[name] for own in figures) for name in figures[0]}


def _same(before: Sequence[int], after: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the first on."""
    pairs = zip(before, after, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(before), len(after)))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
