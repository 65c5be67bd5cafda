"""Judges what has one right answer: exact operators, moves, writes, and the decoding of MXFP4 by value."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from typing import Any

import torch

from day0check.compare.judgement import MOST_BAD, Judgement
from day0check.compare.replay import Replay
from day0check.compare.rounding import Rounder, dtype_name
from day0check.compare.scale_blocks import PATTERN as SCALE_BLOCK
from day0check.compare.scale_blocks import off_by_blocks

CACHE_BYTES = 256 * 2**20
FP8_COLUMNS, MXFP4_BLOCK = 128, 32
AVERAGES = ("vision.merge",)  # moves that average frames: the mean is computed wide and rounded once


def judge_exact(replay: Replay, results: tuple[torch.Tensor, ...]) -> list[Judgement]:
    """Bytes of every result against the reference on the candidate's own arguments, in their own dtypes.

    An operator with the point "out" (one correctly rounded operation) is computed in float64 and rounded to nearest in
    the result's dtype. An argument that a fused kernel left in float32 may be met in float32: that sum, rounded, is
    legal too.
    """
    contract = replay.contract
    if contract.points or contract.name in AVERAGES:
        dtype = next((dtype_name(r.dtype) for r in results if r.is_floating_point()), "float32")
        expected = replay.wide(torch.float64).run(Rounder({"out": dtype}))
        expected = tuple(e.to(r.dtype) for e, r in zip(expected, results, strict=False))
    else:
        expected = replay.run()
    if len(expected) != len(results):
        return [_wrong_count(len(results), len(expected))]
    if contract.points:
        expected = _or_in_float32(replay, results, expected)
    axes = [r.rows for r in contract.results]
    return [compare_bytes(r, e, axis=a) for r, e, a in zip(results, expected, axes, strict=True)]


def _or_in_float32(
    replay: Replay, results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """`expected`, with the elements of narrower results that the same operation gives in float32."""
    due = [
        r.shape == e.shape and r.element_size() < 4 and r.is_floating_point()
        for r, e in zip(results, expected, strict=False)
    ]
    if not any(due) or all(value.dtype != torch.float32 for value in replay.floats().values()):
        return expected
    also = replay.wide(torch.float32).run(Rounder({"out": "float32"}))
    return tuple(
        torch.where(r == a.to(r.dtype), a.to(r.dtype), e) if mine else e
        for mine, r, a, e in zip(due, results, also, expected, strict=True)
    )


def judge_write(replay: Replay) -> list[Judgement]:
    """Reads back, through the contract's `after` function, what a writing operator must have left in its pool."""
    module, name = replay.contract.after.split(":")
    after = getattr(importlib.import_module(module), name)
    found, expected = replay.run(function=after)
    judgement = compare_bytes(found, expected)
    if judgement.passed:
        return [judgement]
    written = _written_rows(replay)
    row = judgement.row if written is None or judgement.row is None else int(written[judgement.row])
    axis = "batch" if replay.contract.args[1].role == "batch" else "rows"
    bad = judgement.bad if written is None else tuple(written[list(judgement.bad)].tolist())
    return [Judgement(**{**judgement.__dict__, "row": row, "axis": axis, "pattern": "not written", "bad": bad})]


def _written_rows(replay: Replay) -> torch.Tensor | None:
    slots = replay.arguments.get("slots")
    return None if slots is None else torch.nonzero(slots >= 0).flatten()


def compare_bytes(found: torch.Tensor, expected: torch.Tensor, *, axis: str = "rows") -> Judgement:
    """Byte by byte, shape and dtype included; NaN equals the same NaN, -0.0 differs from 0.0."""
    rows, elements = (int(found.shape[0]) if found.dim() else 1), int(found.numel())
    if found.shape != expected.shape or found.dtype != expected.dtype:
        kind = "shape" if found.shape != expected.shape else "dtype"
        return Judgement(
            rows,
            elements,
            {kind: 1.0},
            {kind: 0.0},
            kind,
            axis=axis,
            pattern=f"wrong {kind}",
            message=f"{dtype_name(found.dtype)} {list(found.shape)} where "
            f"{dtype_name(expected.dtype)} {list(expected.shape)} is due",
        )
    statistics, limits = {"mismatched_bytes": 0.0}, {"mismatched_bytes": 0.0}
    if elements == 0:
        return Judgement(rows, elements, statistics, limits, axis=axis)
    wrong = as_bytes(found) != as_bytes(expected)
    count = int(wrong.sum())
    if count == 0:
        return Judgement(rows, elements, statistics, limits, axis=axis)
    statistics["mismatched_bytes"] = float(count)
    bad = wrong.any(1).nonzero().flatten()
    pattern = "one row" if len(bad) == 1 and rows > 1 else "some rows" if 2 * len(bad) <= rows else "most rows"
    return Judgement(
        rows,
        elements,
        statistics,
        limits,
        "mismatched_bytes",
        int(bad[0]),
        axis,
        pattern,
        f"{count} bytes in {len(bad)} of {rows} rows differ; the first in row {int(bad[0])}, "
        f"byte {int(wrong[bad[0]].nonzero()[0])}",
        bad=tuple(bad[:MOST_BAD].tolist()),
    )


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """[rows, bytes] of a tensor; a scalar is one row."""
    x = x.detach().contiguous()
    return x.reshape(x.shape[0] if x.dim() else 1, -1).view(torch.uint8)


def _wrong_count(found: int, due: int) -> Judgement:
    return Judgement(
        0,
        0,
        {"results": float(found)},
        {"results": float(due)},
        "results",
        pattern="wrong number of results",
        message=f"{found} results where the contract has {due}",
    )


class Decoded:
    """MXFP4 weights decoded once: [E, N, K] float64 by the identity of their packed bytes, up to CACHE_BYTES."""

    def __init__(self, capacity_bytes: int = CACHE_BYTES) -> None:
        self._capacity, self._bytes = capacity_bytes, 0
        self._kept: OrderedDict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = OrderedDict()

    def experts(self, packed: torch.Tensor, scale: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """float64 [A, N, K] of the given experts; the packed tensors are kept so that their address stays theirs."""
        from reference.formats import mxfp4_decode

        rows, columns = packed.shape[1], packed.shape[2] * 2
        if packed.shape[0] * rows * columns * 8 > self._capacity // 4:
            return mxfp4_decode(packed[experts], scale[experts], dtype=torch.float64)
        key = (packed.data_ptr(), packed._version, scale.data_ptr(), scale._version, tuple(packed.shape))
        if key not in self._kept:
            whole = mxfp4_decode(packed, scale, dtype=torch.float64)
            self._kept[key] = (whole, packed, scale)
            self._bytes += whole.numel() * 8
            while self._bytes > self._capacity:
                _, (oldest, *_) = self._kept.popitem(last=False)
                self._bytes -= oldest.numel() * 8
        self._kept.move_to_end(key)
        return self._kept[key][0][experts]


def judge_conversion(replay: Replay, results: tuple[torch.Tensor, ...], decoded: Decoded) -> list[Judgement]:
    """`moe.convert` by value: payload * scale is the MXFP4 value, save exactly the elements counted in `inexact`.

    Which scale is chosen is free, but not at the price of more inexact elements than the best scale leaves, and an
    inexact element is at most half a step of E4M3 away.
    """
    if len(results) != 3:
        return [_wrong_count(len(results), 3)]
    payload, block_scale, inexact = results
    packed, scale, experts = (replay.arguments[n] for n in ("packed", "scale", "experts"))
    shape = (len(experts), packed.shape[1], packed.shape[2] * 2)
    blocks = -(-shape[2] // FP8_COLUMNS)
    if tuple(payload.shape) != shape or tuple(block_scale.shape) != (*shape[:2], blocks):
        return [
            compare_bytes(payload, payload.new_empty(shape)),
            compare_bytes(block_scale, block_scale.new_empty(shape[0], shape[1], blocks)),
        ]
    expected = decoded.experts(packed, scale, experts)
    code = payload.to(torch.float64)
    step_scale = block_scale.to(torch.float64).repeat_interleave(FP8_COLUMNS, -1)[..., : shape[2]]
    wrong = ~(code * step_scale == expected)
    count, said = int(wrong.sum()), int(inexact)
    statistics, limits = {"inexact": float(said), "illegal": 0.0}, {"illegal": 0.0}
    if count == 0 and said == 0:
        return [Judgement(shape[0], expected.numel(), statistics, limits, axis="")]
    illegal, pattern, message = _illegal_conversion(replay, wrong, code, step_scale, expected, said)
    if not illegal:
        return [Judgement(shape[0], expected.numel(), statistics, limits, axis="")]
    statistics["illegal"] = float(illegal)
    row = int(wrong.flatten(1).any(1).nonzero()[0]) if count else None
    where = "" if row is None else f"; the first in expert {int(experts[row])}"
    return [Judgement(shape[0], expected.numel(), statistics, limits, "illegal", row, "", pattern, message + where)]


def _illegal_conversion(
    replay: Replay,
    wrong: torch.Tensor,
    code: torch.Tensor,
    step_scale: torch.Tensor,
    expected: torch.Tensor,
    said: int,
) -> tuple[int, str, str]:
    """(number of illegal elements, pattern, message); zero when the inexact ones are counted, few and near."""
    count = int(wrong.sum())
    half_step = torch.maximum(code.abs() * 2.0**-4, torch.tensor(2.0**-10, dtype=code.dtype, device=code.device))
    far = wrong & ~((code * step_scale - expected).abs() <= half_step * step_scale.abs())
    if bool(far.any()):
        pairs = expected.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        if bool((code * step_scale == pairs).all()):
            return int(far.sum()), "nibbles swapped", f"{count} values are those of the other nibble of their byte"
        if (blocks := off_by_blocks(code * step_scale, expected, MXFP4_BLOCK)) is not None:
            message = (
                f"{count} values are off by the scale of their block: {blocks[0]} of {expected.numel() // MXFP4_BLOCK} "
                f"scale blocks, by up to {blocks[1]:.4g}"
            )
            return int(far.sum()), SCALE_BLOCK, message
        return int(far.sum()), "wrong value", f"{count} values are not those of the MXFP4 codes"
    if count != said:
        return abs(count - said) or 1, "miscounted", f"{count} values are inexact where {said} are reported"
    least = int(replay.changed(payload_out=None, scale_out=None).run()[2])
    if count > least:
        return count - least, "needless loss", f"{count} values are inexact where the best scale leaves {least}"
    return 0, "", ""
