"""Judges a compute call: the oracle in float64, replicates where the profile rounds inside, then the statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

import torch

from day0check.compare.claims import as_claimed
from day0check.compare.directions import STEP, Parameter, Unclaimed
from day0check.compare.equal_rows import rows_as_one
from day0check.compare.equal_weights import largest_alike
from day0check.compare.judgement import Judgement, merge
from day0check.compare.metrics import judge_result
from day0check.compare.one_rounding import Expected
from day0check.compare.replay import Replay
from day0check.compare.rounding import BLOCK_FORMATS, WEIGHTS, Mode, Rounder, random_variance, round_blocks, ulp
from day0check.compare.scale_blocks import told_by_block
from day0check.compare.sums import float32_floor, simple_floor
from day0check.contracts.contract import Contract
from day0check.contracts.profiles import Profile

BLOCK_ELEMENTS = 2**22  # float64 elements of arguments and results that one block of rows may hold
# Operators whose only inner point is followed by one matrix, whose square therefore carries the variance of the point:
# (point, matrix, arguments that carry none of it).
BEFORE_A_MATRIX = {
    "mla.attention": ("p", "values", ()),
    "mla.partial": ("p", "values", ()),
    "gqa.attention": ("p", "values", ()),
    "vision.attention": ("p", "v", ()),
    "dsa.attention": ("p", "keys", ()),
    "mlp.dense": ("h", "down", ()),
    "moe.shared": ("h", "down", ()),
    "moe.experts": ("h", "w2", ("w2_scale", "b2")),
    "vision.mlp": ("h", "fc1", ("bias1",)),
    "vision.gated_mlp": ("h", "down", ("down_bias",)),
    "vision.project_plain": ("h", "w1", ("bias1",)),
    "mla.output": ("gated", "weight", ()),
    "kda.output": ("gated", "weight", ()),
}
LOGARITHMS = ("mla.partial",)  # operators whose last result is a logarithm of a sum that no inner point reaches
PAYLOADS = ("w1", "w3", "w2")
FEEDS_BACK = {"operands", "state"}  # points whose rounding a later row of the same request meets again
SQUARED_ELEMENTS = 2**26  # of the matrix that `inner_variance` squares in float64
LEAST_SAMPLES, MOST_REPLICATES = 32, 8  # rows times replicates behind a column of the noise map


def judge_compute(
    replay: Replay,
    results: tuple[torch.Tensor, ...],
    profile: Profile,
    *,
    seed: int,
    keep: torch.Tensor | None = None,
    thorough: bool = True,
) -> list[Judgement]:
    """One judgement per floating-point result of a call (or of joined calls), with `axis` and `row` set.

    `keep` bool [rows]: rows of the first argument that count. `thorough`: the contract's parameters are estimated even
    where nothing is conspicuous (one evaluation each). Large calls are judged in blocks of rows where rows do
    not depend on each other. Raises whatever the reference raises on the candidate's arguments.
    """
    count = len(next(iter(results))) if results and results[0].dim() else 0
    judged: list[Judgement | None] = [None] * len(results)
    for start, end in _blocks(replay, results, count):
        whole = (start, end) == (0, count)
        part = replay if whole else _rows_of(replay, start, end)
        own = results if whole else tuple(r[start:end] for r in results)
        kept = keep if keep is None or whole else keep[start:end]
        for i, judgement in enumerate(_judge_block(part, own, profile, seed + start, kept, thorough)):
            judgement = _shifted(judgement, start)
            judged[i] = judgement if judged[i] is None else merge(judged[i], judgement)
    return [j for j in judged if j is not None]


def _blocks(replay: Replay, results: tuple[torch.Tensor, ...], count: int) -> list[tuple[int, int]]:
    independent = all(a.role in ("rows", "owner", "batch", "shared", "static") for a in replay.contract.args)
    by_row = all(r.rows == "rows" for r in replay.contract.results) and all(len(r) == count for r in results if r.dim())
    names = replay.row_names()
    aligned = all(len(replay.arguments[n]) == count for n in names) and replay.contract.args[0].role == "rows"
    if not (independent and by_row and aligned and count) or "grids" in replay.arguments:
        return [(0, count)]
    elements = sum(replay.arguments[n].numel() for n in names) + sum(r.numel() for r in results)
    size = max(1, min(count, BLOCK_ELEMENTS * count // max(1, elements)))
    return [(start, min(count, start + size)) for start in range(0, count, size)]


def _rows_of(replay: Replay, start: int, end: int) -> Replay:
    return replay.changed(**{name: replay.arguments[name][start:end] for name in replay.row_names()})


def _shifted(judgement: Judgement, start: int) -> Judgement:
    if judgement.row is None or start == 0:
        return judgement
    bad = tuple(row + start for row in judgement.bad)
    return Judgement(**{**judgement.__dict__, "row": judgement.row + start, "bad": bad})


def _judge_block(
    replay: Replay,
    results: tuple[torch.Tensor, ...],
    profile: Profile,
    seed: int,
    keep: torch.Tensor | None,
    thorough: bool,
) -> list[Judgement]:
    contract = replay.contract
    block = profile.inputs.get(contract.name) if replay.arguments.get("x_scale") is None else None
    replay = _with_plain_weights(_with_plain_rows(replay.wide(torch.float64)))
    oracle = tuple(r.to(torch.float64) if r.is_floating_point() else r for r in replay.run())
    if len(oracle) != len(results):
        return [_miscounted(len(results), len(oracle))]
    inner, points = profile.inner_points(contract.name), profile.points_of(contract.name)
    generator = torch.Generator(device=results[0].device).manual_seed(seed)
    replicates: list[tuple[torch.Tensor, ...]] = []
    internal = least = None
    in_blocks = block is not None or any(points[p] in BLOCK_FORMATS for p in inner)
    function = as_claimed(contract.function(), profile, contract.name)
    if inner or block is not None:
        rows = len(results[0]) if results[0].dim() else 1
        for _ in range(_replicates(("x", *inner) if in_blocks else inner, rows)):
            used = replay if block is None else _quantised(replay, block, "random", generator)
            replicates.append(used.run(Rounder(points, "random", generator, leave=contract.result_points()), function))
        least = None if in_blocks else inner_variance(replay, points)
        internal = least if len(inner) == 1 else None
        # a strongly decayed row is so small that float32 sums of the others show in it; far out in a sequence an angle
        # is as exact as float32 makes it
        if {*FEEDS_BACK, "table"} & set(inner):
            floors = float32_floor(replay, oracle, generator)
        else:
            floors = [simple_floor(o) for o in oracle if o.is_floating_point()]
        if contract.name in LOGARITHMS:
            floors = [*floors[:-1], float32_floor(replay, oracle, generator)[-1]]
    else:
        floors = float32_floor(replay, oracle, generator)
    judged, floor_at, groups = [], iter(floors), _groups(replay)
    plain = replay if block is None else _quantised(replay, block, "nearest", None)
    rounded = cache(lambda: plain.run(Rounder(points, "nearest", leave=contract.result_points()), function))
    changes = {d.argument: cache(partial(_change, replay, oracle, d.argument)) for d in contract.directions}
    exact = cache(lambda: oracle if block is None else plain.run(Rounder({}, "nearest"), function))
    further = {
        p: cache(lambda p=p: plain.run(Rounder({p: profile.act_dtype}, "nearest"), function))
        for p in unclaimed_points(contract, profile)
    }
    for i, (result, spec) in enumerate(zip(results, contract.results, strict=True)):
        if not oracle[i].is_floating_point():
            judged.append(_equal(result, oracle[i], spec.rows))
            continue
        mask = keep if spec.rows == "rows" and keep is not None and len(keep) == len(result) else None
        own = tuple(r[i] for r in replicates if not torch.equal(r[i], oracle[i]))
        expected = Expected(
            oracle[i],
            next(floor_at),
            profile.rounding_of(contract.name, spec),
            tuple(r[i] for r in replicates) if own else (),  # a result that no inner point reaches has one rounding
            internal if i == 0 else None,
            least if i == 0 else None,
            nearest=lambda i=i: rounded()[i],
            parameters=tuple(
                Parameter(d.argument, d.words, d.per_head, partial(_of_result, changes[d.argument], i))
                for d in contract.directions
            ),
            unclaimed=tuple(Unclaimed(p, lambda p=p, i=i: further[p]()[i] - exact()[i]) for p in further),
            groups=groups,
            coupled=bool(FEEDS_BACK & set(inner)),
            alike=_rows_as_one(replay, mask) if "p" in inner else 1.0,
        )
        judgement = judge_result(result, expected, keep=mask, thorough=thorough)
        if contract.reference.startswith("reference.linear:linear"):
            judgement = told_by_block(judgement, replay, result, oracle[i])
        judged.append(Judgement(**{**judgement.__dict__, "axis": spec.rows}))
    return judged


def unclaimed_points(contract: Contract, profile: Profile) -> tuple[str, ...]:
    """The inner points of a contract that the profile does not round, but another form of it does; not those whose
    rounding later rows meet again. Rounding there may make less error than what is claimed, and still it is another
    precision than the one that was claimed."""
    if profile.act_dtype == "float32":
        return ()
    left_out = (*profile.points_of(contract.name), *contract.result_points(), *FEEDS_BACK)
    return tuple(p for p in contract.points if p not in left_out)


def _rows_as_one(replay: Replay, keep: torch.Tensor | None) -> float:
    queries = replay.arguments[replay.contract.args[0].name]
    return rows_as_one(queries if keep is None or len(keep) != len(queries) else queries[keep])


def _groups(replay: Replay) -> tuple[tuple[str, torch.Tensor], ...]:
    """The expert of each pair, where the operator has experts."""
    if replay.contract.name != "moe.experts":
        return ()
    x, offsets = replay.arguments["x"], replay.arguments["offsets"]
    pairs = torch.arange(x.shape[0], device=x.device)
    return (("expert", (torch.searchsorted(offsets, pairs, right=True) - 1).clamp(0, max(0, len(offsets) - 2))),)


def _change(replay: Replay, oracle: tuple[torch.Tensor, ...], argument: str) -> tuple[torch.Tensor, ...] | None:
    """The change of every result with the logarithm of an argument, by a finite difference; None where the argument
    is absent or nothing that can be a little larger."""
    name = f"{argument}_scale" if replay.arguments.get(f"{argument}_scale") is not None else argument
    value = replay.arguments.get(name)
    if not (isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point())):
        return None
    changed = replay.changed(**{name: value * (1 + STEP)}).run()
    return tuple((c - o) / STEP for c, o in zip(changed, oracle, strict=True))


def _of_result(changes: Callable[[], tuple[torch.Tensor, ...] | None], result: int) -> torch.Tensor | None:
    found = changes()
    return None if found is None else found[result]


def _replicates(inner: tuple[str, ...], rows: int) -> int:
    """How many replicates: two where a formula knows the variance, four for several inner points, more where one
    rounding moves a whole row, and more for few rows, to fill the noise map."""
    least = 16 if {*FEEDS_BACK, "s", "x"} & set(inner) else 2 if len(inner) == 1 else 4
    return max(least, min(MOST_REPLICATES, -(-LEAST_SAMPLES // max(1, rows))))


def inner_variance(replay: Replay, points: Mapping[str, str]) -> torch.Tensor | None:
    """Variance that the last inner rounding gives each element of the result, sum_n ulp(h_n)^2/6 w_n^2; None where it
    is not followed by a single matrix. Earlier roundings add to it.

    It is the reference itself on the squared matrix, with the rounded values replaced by the variance of their
    rounding: where one rounding moves a whole row, two replicates cannot measure it. Weights of a row that are equal
    (of equal keys) round alike: of the largest such group the errors add up, (sum_n ulp(h_n) w_n)^2/6.
    """
    name, arguments = replay.contract.name, replay.arguments
    inner = [p for p in points if p != "out"]
    if name not in BEFORE_A_MATRIX or BEFORE_A_MATRIX[name][0] not in inner:
        return None
    at, matrix, dropped = BEFORE_A_MATRIX[name]
    if arguments[matrix].numel() > SQUARED_ELEMENTS and matrix in PAYLOADS:
        return None  # experts of a full-size layer: the fit to the replicates has to do
    dtype = points[at]

    together: list[bool] = []

    def spread(value: torch.Tensor) -> torch.Tensor:
        return torch.where(random_variance(value, dtype) > 0, ulp(value.contiguous(), dtype).square() / 6, 0.0)

    def variance(point: str, value: torch.Tensor) -> torch.Tensor:
        if point != at:
            return value
        if at in WEIGHTS:
            together.append(bool(largest_alike(value, spread(value), dtype).any()))
        return spread(value)

    def deviation(point: str, value: torch.Tensor) -> torch.Tensor:
        return largest_alike(value, spread(value), dtype) if point == at else value

    if name == "dsa.attention":
        independent = _weighted(variance, **arguments, of=torch.square)
        return independent + _weighted(deviation, **arguments).square() if any(together) else independent
    plain = _decoded(replay, matrix)
    independent = replay.changed(**{matrix: plain.square()}, **dict.fromkeys(dropped)).run(variance)[0]
    return independent + replay.run(deviation)[0].square() if any(together) else independent


def _quantised(replay: Replay, block: str, mode: Mode, generator: torch.Generator | None) -> Replay:
    """The call of an operator that quantises its rows itself, where nobody sees its codes."""
    return replay.changed(x=round_blocks(replay.arguments["x"], block, mode, generator))


def _with_plain_rows(replay: Replay) -> Replay:
    """The candidate's own codes of its activations as the values that they mean."""
    if replay.arguments.get("x_scale") is None:
        return replay
    return replay.changed(x=_decoded(replay, "x"), x_scale=None)


def _with_plain_weights(replay: Replay) -> Replay:
    """Small FP8 payloads decoded once for all evaluations; large ones are left to the reference, expert by expert."""
    weights = [n for n in PAYLOADS if replay.arguments.get(f"{n}_scale") is not None]
    if not weights or sum(replay.arguments[n].numel() for n in weights) > BLOCK_ELEMENTS:
        return replay
    plain = {n: _decoded(replay, n) for n in weights}
    return replay.changed(**plain, **{f"{n}_scale": None for n in weights})


def _decoded(replay: Replay, matrix: str) -> torch.Tensor:
    """A weight in float64, its FP8 payload multiplied by its scale."""
    weight, scale = replay.arguments[matrix], replay.arguments.get(f"{matrix}_scale")
    if scale is None:
        return weight
    from reference.formats import fp8_columns_decode

    return fp8_columns_decode(weight, scale, dtype=torch.float64)


def _weighted(weights, q, *, keys, valid, value_width: int, scale: float, of=torch.clone) -> torch.Tensor:
    """Sums of gathered values, or of their squares, under other weights: the values are part of the keys, so a
    further channel takes the place of `valid`."""
    from reference.attention import attention

    keys = keys.masked_fill(~valid[..., None], 0)
    closed = torch.where(valid, 0.0, -1e30 / max(scale, 1e-30)).to(keys.dtype)[..., None]
    n, rows = keys.shape[1], torch.arange(q.shape[0], device=q.device)
    return attention(
        torch.cat([q, torch.ones_like(q[..., :1])], -1),
        keys=torch.cat([keys, closed], -1).unsqueeze(2),
        values=of(keys[..., :value_width]).unsqueeze(2),
        owner=rows,
        visible=torch.where(valid.any(-1), n, 0),
        scale=scale,
        round=weights,
    )


def _miscounted(found: int, due: int) -> Judgement:
    return Judgement(
        0,
        0,
        {"results": float(found)},
        {"results": float(due)},
        "results",
        pattern="wrong number of results",
        message=f"{found} results where the contract has {due}",
    )


def _equal(found: torch.Tensor, expected: torch.Tensor, axis: str) -> Judgement:
    """An integer result of a compute operator (an image's grid) has one right value."""
    same = found.shape == expected.shape and bool((found.to(expected.dtype) == expected).all())
    return Judgement(
        len(expected),
        expected.numel(),
        {"wrong_integers": 0.0 if same else 1.0},
        {"wrong_integers": 0.0},
        "" if same else "wrong_integers",
        axis=axis,
        pattern="" if same else "wrong integers",
        message="" if same else f"{found.flatten().tolist()[:8]} where {expected.flatten().tolist()[:8]} is due",
    )
