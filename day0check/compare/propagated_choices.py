"""Choices in the net: is the candidate's choice one that noise can explain? Then it is replayed into every pass.

m rows, n keys or E experts, k chosen. Scores are the oracle's own, computed with every earlier choice replayed; their
noise is what the replicates' scores show. A choice is legal when it has the right form and gives up at most `LIMIT`
score noises against the best one (method.md, 3).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

LIMIT = 8.0
FLOOR = 4 * 2.0**-24
ROUNDS = 4
_OPTIONS = 64  # sets of unused groups that are tried for one row
_NEG = -torch.inf


@dataclass(frozen=True)
class Judged:
    """One line a row.

    `form`: 0 = right, else index + 1 into FORMS; `regret`: in score noises; `flips`: chosen ones that the oracle would
    not choose; `noise_flips`: the same of the replicates, on the average.
    """

    form: torch.Tensor
    regret: torch.Tensor
    flips: torch.Tensor
    noise_flips: torch.Tensor

    @property
    def legal(self) -> torch.Tensor:
        return (self.form == 0) & (self.regret <= LIMIT)


FORMS = ("out of range", "selects the future", "duplicate", "wrong count", "too many groups")


def judge_selection(
    scores: torch.Tensor,
    replicates: Sequence[torch.Tensor],
    chosen: torch.Tensor,
    visible: torch.Tensor,
    *,
    k: int,
    threshold: float | None = None,
) -> Judged:
    """Selections `chosen` [m, any width], -1 = none, of the first `visible` [m] of `scores` [m, n]."""
    n = scores.shape[-1]
    seen = torch.arange(n, device=scores.device) < visible.unsqueeze(-1)
    mask = _mask(chosen, n)
    form = _form_of(chosen, n)
    future = ((chosen >= visible.unsqueeze(-1)) & (chosen < n)).any(-1)
    count = (chosen >= 0).sum(-1)
    most = visible.clamp(max=k)
    wrong = (count > most) if threshold is not None else (count != most)
    form = torch.where((form == 0) & future, 2, form)
    form = torch.where((form == 0) & wrong, 4, form)
    own = scores.masked_fill(~seen, _NEG)
    others = [r.masked_fill(~seen, _NEG) for r in replicates]
    unit = _unit(own, others, 2 * k)
    best = _best(own, most, k)
    if threshold is None:
        regret = _regret(own, mask & seen, best, unit)
    else:
        best &= own >= threshold
        regret = _threshold_regret(own, mask & seen, best, unit, threshold, most)
    noise = [(_best(r, most, k) & ~best).sum(-1) for r in others]
    return Judged(
        form,
        regret,
        (mask & ~best).sum(-1),
        torch.stack(noise).double().mean(0) if noise else torch.zeros(len(scores), dtype=torch.float64),
    )


def judge_route(
    scores: torch.Tensor,
    replicates: Sequence[torch.Tensor],
    chosen: torch.Tensor,
    *,
    k: int,
    groups: int = 1,
    kept_groups: int = 1,
) -> Judged:
    """Routes `chosen` [m, k'] by biased `scores` [m, E]; with groups, experts of at most `kept_groups` groups."""
    experts = scores.shape[-1]
    mask = _mask(chosen, experts)
    form = _form_of(chosen, experts)
    form = torch.where((form == 0) & ((chosen >= 0).sum(-1) != k), 4, form)
    unit = _unit(scores, replicates, 2 * k)
    allowed = torch.ones_like(mask)
    count = torch.full((len(scores),), k, device=scores.device)
    group_regret = torch.zeros(len(scores), dtype=scores.dtype, device=scores.device)
    if groups > 1:
        used = mask.view(len(mask), groups, -1).any(-1)
        form = torch.where((form == 0) & (used.sum(-1) > kept_groups), 5, form)
        sums = group_scores(scores, groups)
        group_unit = _unit(sums, [group_scores(r, groups) for r in replicates], groups)
        allowed, group_regret = _kept(scores, sums, mask, used, kept_groups, unit, group_unit)
    regret = torch.maximum(_regret_within(scores, allowed, mask, unit, count), group_regret)
    best = _routed(scores, k, groups, kept_groups)
    noise = [(_routed(r, k, groups, kept_groups) & ~best).sum(-1) for r in replicates]
    return Judged(
        form,
        regret,
        (mask & ~best).sum(-1),
        torch.stack(noise).double().mean(0) if noise else torch.zeros(len(scores), dtype=torch.float64),
    )


def group_scores(scores: torch.Tensor, groups: int) -> torch.Tensor:
    """[m, groups]: sum of the two best biased scores of each group."""
    grouped = scores.view(len(scores), groups, -1)
    return grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)


def _kept(
    scores: torch.Tensor,
    sums: torch.Tensor,
    mask: torch.Tensor,
    used: torch.Tensor,
    kept: int,
    unit: torch.Tensor,
    group_unit: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts that were open to the candidate [m, E], regret of its groups in noises [m]).

    Groups that it kept but took no expert from are not known: the ones that accuse it least are taken.
    """
    groups, k = sums.shape[-1], int(mask.sum(-1).amax())
    width = scores.shape[-1] // groups
    fill = sums.masked_fill(used, torch.inf).topk(kept, dim=-1).indices
    open_groups = torch.zeros_like(used).scatter(1, fill, True) | used
    best_groups = _best(sums, torch.full((len(sums),), kept, device=sums.device), kept)
    for row in ((used.sum(-1) < kept) & (used.sum(-1) > 0)).nonzero().flatten().tolist():
        one, count = slice(row, row + 1), torch.tensor([k], device=sums.device)
        rest = sorted((g for g in range(groups) if not used[row, g]), key=lambda g: -float(sums[row, g]))
        least = torch.inf
        for extra in itertools.islice(itertools.combinations(rest, kept - int(used[row].sum())), _OPTIONS):
            trial = used[one].clone()
            trial[0, list(extra)] = True
            experts = trial.repeat_interleave(width, dim=-1)
            cost = max(
                float(_regret_within(scores[one], experts, mask[one], unit[one], count)),
                float(_regret(sums[one], trial, best_groups[one], group_unit[one])),
            )
            if cost < least:
                least, open_groups[row] = cost, trial[0]
    regret = _regret(sums, open_groups, best_groups, group_unit)
    return open_groups.repeat_interleave(width, dim=-1), regret


def _regret_within(
    scores: torch.Tensor, allowed: torch.Tensor, mask: torch.Tensor, unit: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    """Regret of `mask` among the `allowed` ones, of which `count` are to be taken."""
    scores = scores.masked_fill(~allowed, _NEG)
    return _regret(scores, mask & allowed, _best(scores, count, int(count.amax())), unit)


def _mask(chosen: torch.Tensor, n: int) -> torch.Tensor:
    inside = (chosen >= 0) & (chosen < n)
    mask = torch.zeros(len(chosen), n + 1, dtype=torch.bool, device=chosen.device)
    mask.scatter_(1, torch.where(inside, chosen, n).long(), True)
    return mask[:, :n]


def _form_of(chosen: torch.Tensor, n: int) -> torch.Tensor:
    """1 = out of range, 3 = duplicate, 0 = neither."""
    ordered = chosen.sort(-1).values
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1)
    outside = ((chosen >= n) | (chosen < -1)).any(-1)
    return torch.where(outside, 1, torch.where(twice, 3, 0))


def _regret(scores: torch.Tensor, mask: torch.Tensor, best: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """[m]: how far the worst misplaced one lies beyond the boundary of the `best`, in its own noise `unit` [m, n].

    A taken one that is not among the best lies below the worst of them; a left one of the best lies above the best of
    the others. `scores` are -inf where nothing may be taken.
    """
    lowest = scores.masked_fill(~best, torch.inf).amin(-1, keepdim=True)
    highest = scores.masked_fill(best, _NEG).amax(-1, keepdim=True)
    taken = ((lowest - scores) / unit).masked_fill(~mask | best, 0.0)
    left = ((scores - highest) / unit).masked_fill(mask | ~best, 0.0)
    return torch.maximum(taken, left).nan_to_num(nan=0.0, posinf=torch.inf).amax(-1).clamp(min=0)


def _threshold_regret(
    scores: torch.Tensor,
    mask: torch.Tensor,
    best: torch.Tensor,
    unit: torch.Tensor,
    threshold: float,
    most: torch.Tensor,
) -> torch.Tensor:
    """As `_regret` where every key that reaches `threshold` is wanted, up to the `most` [m] best: below that number the
    threshold itself is the boundary."""
    full = best.sum(-1, keepdim=True) >= most.unsqueeze(-1)
    lowest = scores.masked_fill(~best, torch.inf).amin(-1, keepdim=True)
    highest = scores.masked_fill(best, _NEG).amax(-1, keepdim=True).clamp(min=threshold)
    taken = ((torch.where(full, lowest, threshold) - scores) / unit).masked_fill(~mask | best, 0.0)
    left = ((scores - highest) / unit).masked_fill(mask | ~best, 0.0)
    return torch.maximum(taken, left).nan_to_num(nan=0.0, posinf=torch.inf).amax(-1).clamp(min=0)


def _best(scores: torch.Tensor, count: torch.Tensor, k: int) -> torch.Tensor:
    """Mask of the `count` best of each row (at most k), the lower index among equal ones."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    taken = torch.arange(order.shape[-1], device=scores.device) < count.unsqueeze(-1)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, taken)


def _routed(scores: torch.Tensor, k: int, groups: int, kept_groups: int) -> torch.Tensor:
    if groups > 1:
        count = torch.full((len(scores),), kept_groups, device=scores.device)
        kept = _best(group_scores(scores, groups), count, kept_groups)
        scores = scores.masked_fill(~kept.repeat_interleave(scores.shape[-1] // groups, dim=-1), _NEG)
    return _best(scores, torch.full((len(scores),), k, device=scores.device), k)


def _unit(scores: torch.Tensor, replicates: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Noise [m, n] of each score: row factor times column factor of the replicates' errors, but at least the row's.

    The row's is measured on the `width` best, the ones that compete (larger scores are noisier), and drawn half towards
    the common value of the rows, since few scores stand behind one row's figure. `scores` are -inf where not allowed.
    """
    width = min(width, scores.shape[-1])
    values, at = scores.topk(width, dim=-1)
    size = values.masked_fill(~torch.isfinite(values), 0.0).abs().amax(-1, keepdim=True)
    floor = (FLOOR * size).square().clamp(min=torch.finfo(torch.float32).tiny)
    if not replicates:
        return floor.sqrt().expand_as(scores)
    real = torch.isfinite(scores)
    square = sum((r - scores).masked_fill(~real, 0.0).square() for r in replicates) / len(replicates)
    competing = real.gather(1, at)
    rows = square.gather(1, at).sum(-1, keepdim=True) / competing.sum(-1, keepdim=True).clamp(min=1)
    return (torch.maximum((rows + rows.mean()) / 2, _fit(square, real)) + floor).sqrt()


def _fit(square: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """`square` [m, n] as row factor times column factor, fitted where `real` by alternating means."""
    columns = torch.ones_like(square[:1])
    in_row, in_column = real.sum(-1, keepdim=True).clamp(min=1), real.sum(0, keepdim=True).clamp(min=1)
    tiny = torch.finfo(square.dtype).tiny
    for _ in range(ROUNDS):
        rows = (square / columns.clamp(min=tiny)).sum(-1, keepdim=True) / in_row
        columns = (square / rows.clamp(min=tiny)).sum(0, keepdim=True) / in_column
    return rows * columns
