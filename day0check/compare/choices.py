"""Judges operators that choose, on the scores that the candidate itself produced: legality, multiset, tie rule."""

from __future__ import annotations

import torch

from day0check.compare.judgement import MOST_BAD, Judgement
from day0check.compare.replay import Replay
from reference.moe import weights_of

UNIT = 2.0**-24
SUMS = 8  # float32 roundings allowed on a weight beyond one for each expert, in units
CUMULATIVE_NOISE = 2.0**-18  # of a running sum of probabilities in float32


def judge_choice(
    replay: Replay, results: tuple[torch.Tensor, ...], *, claims_tie_rule: bool, keep: torch.Tensor | None = None
) -> list[Judgement]:
    """Judges dsa.select, moe.route or sample.token. `keep` bool [rows]: rows that count."""
    judges = {"dsa.select": _selection, "moe.route": _routing, "sample.token": _sampling}
    if replay.contract.name not in judges:
        raise ValueError(f"no rule says how {replay.contract.name} may choose")
    due = len(replay.contract.results)
    rows = replay.arguments[replay.contract.args[0].name].shape[0]
    if len(results) != due or any(r.shape[:1] != (rows,) for r in results):
        shapes = [list(r.shape) for r in results]
        return [_fault(rows, "shape", torch.ones(1, dtype=torch.bool), "wrong shape", f"results of shape {shapes}")]
    if keep is None:
        keep = torch.ones(rows, dtype=torch.bool, device=results[0].device)
    return judges[replay.contract.name](replay, results, claims_tie_rule, keep)


def _fault(rows: int, name: str, bad: torch.Tensor, pattern: str, message: str, **more: float) -> Judgement:
    count = int(bad.sum())
    return Judgement(
        rows,
        rows,
        {**more, name: float(count)},
        {name: 0.0},
        name,
        int(bad.nonzero()[0]),
        "rows",
        pattern,
        f"{pattern} in {count} of {rows} rows{': ' + message if message else ''}",
        bad=tuple(bad.nonzero().flatten()[:MOST_BAD].tolist()),
    )


def _good(rows: int, limits: tuple[str, ...], **statistics: float) -> Judgement:
    return Judgement(rows, rows, {**statistics, **dict.fromkeys(limits, 0.0)}, dict.fromkeys(limits, 0.0))


# ---------------------------------------------------------------------------------------------------- key selection


def _selection(
    replay: Replay, results: tuple[torch.Tensor, ...], claims_tie_rule: bool, keep: torch.Tensor
) -> list[Judgement]:
    """dsa.select: -1 in any place, no key twice, none unseen, min(k, eligible) of them, the best ones."""
    arguments = replay.arguments
    scores, visible, k = arguments["scores"], arguments["visible"], arguments["k"]
    found, rows, n = results[0].long(), scores.shape[0], scores.shape[1]
    if found.shape[1] != k:
        return [_fault(rows, "shape", keep, "wrong shape", f"{found.shape[1]} places for k = {k}")]
    due = replay.run()[0].long()
    chosen = found >= 0
    inside = chosen & (found < n)
    ordered = found.sort(-1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    faults = (
        ("out of range", ((found < -1) | (found >= n)).any(-1)),
        ("selects the future", (inside & (found >= visible[:, None])).any(-1)),
        ("selects a key twice", repeated.any(-1)),
        ("wrong count", chosen.sum(-1) != (due >= 0).sum(-1)),
    )
    for pattern, bad in faults:
        bad = bad & keep
        if bool(bad.any()):
            return [_fault(rows, "illegal", bad, pattern, _first_selection(bad, found, visible))]
    seen = torch.arange(n, device=scores.device) < visible[:, None]
    judged = keep & ~(torch.isnan(scores) & seen).any(-1)  # what is best among NaN is no question
    different = (ordered != due.sort(-1).values).any(-1) & judged
    if not bool(different.any()):
        return [_good(rows, ("illegal", "skipped", "ties") if claims_tie_rule else ("illegal", "skipped"), regret=0.0)]
    regret = _regret(scores, found, due)
    skips = different & (regret > 0)
    if bool(skips.any()):
        worst = float(regret[skips].max())
        return [_fault(rows, "skipped", skips, "skips better keys", f"by up to {worst:.3g} in score", regret=worst)]
    if claims_tie_rule:
        return [_fault(rows, "ties", different, "another tie rule", "equal scores, the lower index is to win")]
    return [_good(rows, ("illegal", "skipped"), regret=0.0, ties=float(different.sum()))]


def _first_selection(bad: torch.Tensor, found: torch.Tensor, visible: torch.Tensor) -> str:
    row = int(bad.nonzero()[0])
    return (
        f"row {row} sees {int(visible[row])} keys and has {int((found[row] >= 0).sum())}, up to {int(found[row].max())}"
    )


def _regret(scores: torch.Tensor, found: torch.Tensor, due: torch.Tensor) -> torch.Tensor:
    """[rows]: largest score lost when both selections are laid side by side from the best down; a NaN is worst."""
    own, best = (_sorted_scores(scores, i) for i in (found, due))
    lost = torch.where(own == best, torch.zeros_like(own), best - own)  # inf - inf
    return torch.nan_to_num(lost, nan=float("inf")).amax(-1) if lost.shape[-1] else lost.new_zeros(len(lost))


def _sorted_scores(scores: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    picked = scores.to(torch.float64).gather(1, indices.clamp(min=0))
    lowest = torch.finfo(torch.float64).min
    picked = torch.nan_to_num(picked, nan=lowest, posinf=float("inf"), neginf=lowest / 2)
    return picked.masked_fill(indices < 0, lowest).sort(-1, descending=True).values


# ----------------------------------------------------------------------------------------------------------- router


def _routing(
    replay: Replay, results: tuple[torch.Tensor, ...], claims_tie_rule: bool, keep: torch.Tensor
) -> list[Judgement]:
    """moe.route: experts by biased score, weights from the unbiased scores of the candidate's own experts."""
    arguments = replay.arguments
    ids, weights = results[0].long(), results[1]
    scores, k = arguments["scores"], arguments["k"]
    rows, experts = scores.shape
    if tuple(ids.shape) != (rows, k) or tuple(weights.shape) != (rows, k):
        return [_fault(rows, "shape", keep, "wrong shape", f"{list(ids.shape)} experts for k = {k}")]
    ordered = ids.sort(-1).values
    faults = (
        ("out of range", ((ids < 0) | (ids >= experts)).any(-1)),
        ("chooses an expert twice", (ordered[:, 1:] == ordered[:, :-1]).any(-1)),
    )
    for pattern, bad in faults:
        if bool((bad & keep).any()):
            return [_fault(rows, "illegal", bad & keep, pattern, "")]
    keep = keep & ~torch.isnan(scores).any(-1)  # which experts are best among NaN is no question
    return [_experts(replay, ordered, claims_tie_rule, keep), _weights(arguments, ids, weights, keep)]


def _experts(replay: Replay, ordered: torch.Tensor, claims_tie_rule: bool, keep: torch.Tensor) -> Judgement:
    """Equal to the selection on biased scores added exactly or in float32; else the loss against float32's rounding."""
    rows = ordered.shape[0]
    limits = ("illegal", "skipped", "ties") if claims_tie_rule else ("illegal", "skipped")
    different = keep.clone()
    for dtype in (torch.float64, torch.float32):
        due = replay.wide(dtype).run()[0].sort(-1).values
        different &= (ordered != due).any(-1)
    if not bool(different.any()):
        return _good(rows, limits, regret=0.0)
    biased, surely, maybe, margin = _biased(replay)
    mask = torch.zeros_like(maybe).scatter_(1, ordered, True)
    groups, most = replay.arguments["groups"], replay.arguments["kept_groups"]
    used = mask.unflatten(1, (groups, -1)).any(-1)
    outside = different & ((mask & ~maybe).any(-1) | (used.sum(-1) > most))
    if bool(outside.any()):
        return _fault(rows, "skipped", outside, "expert outside the kept groups", "")
    open_to_it = surely | used.repeat_interleave(mask.shape[1] // groups, 1)
    lowest = biased.masked_fill(~mask, float("inf")).amin(-1)
    loss = biased.masked_fill(mask | ~open_to_it, -float("inf")).amax(-1) - lowest
    skips = different & (loss > margin)
    if bool(skips.any()):
        worst = float(loss[skips].max())
        return _fault(
            rows, "skipped", skips, "skips better experts", f"by up to {worst:.3g} in biased score", regret=worst
        )
    tied = different & (loss <= 0)
    if claims_tie_rule and bool(tied.any()):
        return _fault(rows, "ties", tied, "another tie rule", "equal biased scores, the lower expert is to win")
    return _good(rows, limits, regret=max(0.0, float(loss[different].max())))


def _biased(replay: Replay) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(biased scores [rows, E] float64, experts of groups that must and that may be kept, float32's margin [rows])."""
    arguments = replay.wide(torch.float64).arguments
    scores, bias, groups = arguments["scores"], arguments.get("bias"), arguments["groups"]
    biased = scores if bias is None else scores + bias
    margin = 4 * UNIT * biased.abs().amax(-1)
    if groups <= 1:
        everything = torch.ones_like(biased, dtype=torch.bool)
        return biased, everything, everything, margin
    members = biased.unflatten(1, (groups, -1))
    size = members.shape[-1]
    worth = members.topk(min(2, size), -1).values.sum(-1)
    cut = worth.topk(arguments["kept_groups"], -1).values[:, -1:]
    surely, maybe = worth > cut + margin[:, None], worth >= cut - margin[:, None]
    return biased, surely.repeat_interleave(size, 1), maybe.repeat_interleave(size, 1), margin


def _weights(arguments, ids: torch.Tensor, weights: torch.Tensor, keep: torch.Tensor) -> Judgement:
    """Weights within float32's rounding of the unbiased scores of the chosen; known mistakes are called by name."""
    rows = ids.shape[0]
    scores, found = arguments["scores"].to(torch.float64), weights.to(torch.float64)
    bias = arguments.get("bias")

    weighting = arguments.get("weighting") or "score"

    def expected(from_scores: torch.Tensor, renormalise: bool, scale: float) -> torch.Tensor:
        w = from_scores.gather(1, ids)
        return scale * weights_of(w, renormalise=renormalise, weighting=weighting)

    def near(due: torch.Tensor) -> torch.Tensor:
        units = ids.shape[1] + SUMS
        if weighting == "softmax":  # a logit's rounding is an error of its exponential, as large as the logit
            units = units + scores.gather(1, ids).abs().amax(-1, keepdim=True)
        room = units * UNIT * due.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
        return ((found - due).abs() <= room).all(-1)

    renormalise, scale = arguments["renormalise"], arguments["scale"]
    due = expected(scores, renormalise, scale)
    bad = ~near(due) & keep
    if not bool(bad.any()):
        return _good(rows, ("wrong_weights",))
    mistakes = [("not renormalised", scores, False, scale), ("scale left out", scores, renormalise, 1.0)]
    if weighting == "softmax":
        mistakes = [("scale left out", scores, renormalise, 1.0)]
        everywhere = scale * torch.softmax(scores, -1).gather(1, ids)
        if bool(near(everywhere)[bad].all()):
            return _fault(rows, "wrong_weights", bad, "softmax over all experts", "of the chosen ones alone is due")
    if bias is not None:
        mistakes.insert(0, ("bias in the weights", scores + bias.to(torch.float64), renormalise, scale))
    pattern = "wrong weights"
    for name, from_scores, normed, factor in mistakes:
        if bool(near(expected(from_scores, normed, factor))[bad].all()):
            pattern = name
            break
    worst = float(torch.nan_to_num((found - due).abs(), nan=float("inf"))[bad].max())
    return _fault(rows, "wrong_weights", bad, pattern, f"off by up to {worst:.3g}")


# --------------------------------------------------------------------------------------------------------- sampling


def _sampling(
    replay: Replay, results: tuple[torch.Tensor, ...], claims_tie_rule: bool, keep: torch.Tensor
) -> list[Judgement]:
    """sample.token: the largest logit at temperature 0, else a draw whose only freedom is float32's running sum."""
    arguments = replay.arguments
    logits, temperature = arguments["logits"].to(torch.float64), arguments["temperature"]
    ids, rows = results[0].long(), logits.shape[0]
    outside = ((ids < 0) | (ids >= logits.shape[1])) & keep
    if bool(outside.any()):
        return [_fault(rows, "illegal", outside, "out of range", "")]
    different = (ids != replay.run()[0]) & keep & ~torch.isnan(logits).any(-1)
    greedy = temperature <= 0
    limits = ("illegal", "skipped", "ties") if claims_tie_rule else ("illegal", "skipped")
    own, best = logits.gather(1, ids[:, None])[:, 0], logits.nan_to_num(nan=-float("inf")).amax(-1)
    lesser = different & greedy & ~(own == best)
    if bool(lesser.any()):
        return [_fault(rows, "skipped", lesser, "not the largest logit", "")]
    if claims_tie_rule and bool((different & greedy).any()):
        return [_fault(rows, "ties", different & greedy, "another tie rule", "equal logits, the lowest id is to win")]
    drawn = different & ~greedy
    if bool(drawn.any()):
        far = drawn & ~_on_the_edge(arguments, ids)
        if bool(far.any()):
            return [_fault(rows, "skipped", far, "not the draw of its seed and position", "")]
    return [_good(rows, limits)]


def _on_the_edge(arguments, ids: torch.Tensor) -> torch.Tensor:
    """bool [rows]: the uniform number lies within float32's noise of the chosen token's part of the running sum."""
    from reference.sampling import uniform

    temperature = arguments["temperature"].to(torch.float64).clamp(min=1e-30)[:, None]
    p = torch.softmax(arguments["logits"].to(torch.float64) / temperature, -1)
    total = p.cumsum(-1)
    end = total.gather(1, ids[:, None])[:, 0]
    begin = end - p.gather(1, ids[:, None])[:, 0]
    u = uniform(arguments["seed"], positions=arguments["positions"])
    return (u >= begin - CUMULATIVE_NOISE) & (u <= end + CUMULATIVE_NOISE)
