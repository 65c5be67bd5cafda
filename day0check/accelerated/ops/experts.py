"""Mixture of experts of the fast path: router, dispatch, MXFP4 to FP8 conversion and grouped experts."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from day0check.accelerated.ops.arithmetic import dequantised, product, wide
from day0check.accelerated.ops.index import ordered
from day0check.accelerated.ops.spine import gated

SCALE_COLUMNS = 128  # columns of one weight row that share an FP8 scale
GROUP = 32  # columns of one weight row that share an E8M0 exponent
LARGEST_SHIFT, SMALLEST_SHIFT = 12, -18  # a code shifted below that is zero in E4M3 whatever it was
HIGHEST_REFERENCE = 248  # 2^(248 - 127 + 6) is the largest power of two of float32


def scores(x: Tensor, *, weight: Tensor, scoring: str) -> Tensor:
    """Router scores of `x` [rows, D] against `weight` [E, D], float32; `scoring` sigmoid or softmax."""
    logits = product(x, weight)
    return torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, -1)


def route(
    scores: Tensor,
    *,
    bias: Tensor | None = None,
    k: int,
    groups: int,
    kept_groups: int,
    renormalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The `k` experts of each row of `scores` [rows, E] by biased score, lower id first among equal ones, and the
    weights of the unbiased scores. Returns ids int64 and weights float32, both [rows, k]."""
    rows, experts = scores.shape
    biased = scores if bias is None else scores + bias
    if kept_groups < groups:
        grouped = biased.view(rows, groups, -1)
        strength = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        kept = _best(strength, kept_groups)
        allowed = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, kept, True)
        biased = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).view(rows, experts)
    ids = _best(biased, k)
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale


def _best(values: Tensor, k: int) -> Tensor:
    """Columns of the k largest of each row, the lower column first among equal ones."""
    return ordered(values, torch.arange(values.shape[1], device=values.device)).topk(k, -1).indices


def dispatch(x: Tensor, *, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of `x` [rows, L] repeated for each choice in `ids` [rows, k] and sorted by expert; id -1 goes nowhere.

    Returns y [pairs, L], the pair number row * k + choice of each, the active experts, and their offsets into y.
    """
    flat = ids.flatten()
    count = torch.bincount(flat + 1, minlength=experts + 1)[1:]
    order = torch.argsort(flat, stable=True)[flat.numel() - int(count.sum()) :]
    active = count.nonzero().squeeze(1)
    offsets = torch.zeros(active.numel() + 1, dtype=torch.int64, device=x.device)
    torch.cumsum(count[active], 0, out=offsets[1:])
    return x.index_select(0, order.div(ids.shape[1], rounding_mode="floor")), order, active, offsets


def combine(y: Tensor, *, order: Tensor, weights: Tensor) -> Tensor:
    """Sum over each row's experts of weight times output: `y` [pairs, L], `order` [pairs], `weights` [rows, k]."""
    rows, k = weights.shape
    back = wide(y).new_zeros(rows * k, y.shape[1]).index_copy_(0, order, wide(y))
    used = weights.flatten().new_zeros(rows * k).index_copy_(0, order, weights.flatten()[order])
    return torch.bmm(used.view(rows, 1, k).to(back.dtype), back.view(rows, k, -1)).squeeze(1).to(y.dtype)


def convert(
    packed: Tensor,
    *,
    scale: Tensor,
    experts: Tensor,
    payload_out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """MXFP4 of the `experts` [A] as E4M3 payload [A, N, K] and power-of-two float32 scales [A, N, ceil(K/128)].

    `packed` [E, N, K/2] uint8, low nibble = even column; `scale` [E, N, K/32] E8M0 bytes. Written into `payload_out`
    and `scale_out` when they are given. The third result counts elements that E4M3 cannot hold at their block's scale,
    which happens only when exponents in a block lie more than 14 apart.

    A code's three bits, moved up by two, are the E4M3 number 2^-6 times its value; adding s to the exponent field
    multiplies by 2^s. Hence the block scale 2^(e - 127 + 6) with e the lowest exponent of the block, or 12 below the
    highest when they lie further apart.
    """
    codes, exponents = packed.index_select(0, experts), scale.index_select(0, experts).to(torch.int16)
    count, rows, half = codes.shape
    blocks = -(-exponents.shape[2] // (SCALE_COLUMNS // GROUP))
    if payload_out is None:
        payload_out = torch.empty(count, rows, 2 * half, dtype=torch.float8_e4m3fn, device=packed.device)
    if scale_out is None:
        scale_out = torch.empty(count, rows, blocks, dtype=torch.float32, device=packed.device)
    grouped = codes.view(count, rows, -1, GROUP // 2)
    reference = _block_exponent(exponents, (grouped & 0x77).amax(-1) > 0, blocks)
    shift = exponents - reference.repeat_interleave(SCALE_COLUMNS // GROUP, 2)[..., : exponents.shape[2]]
    nibbles = torch.stack((grouped & 0xF, grouped >> 4), -1).flatten(-2)  # [A, N, K/32, 32]
    if int(shift.amin()) >= 0 and int(shift.amax()) <= LARGEST_SHIFT:
        lost = torch.zeros(1, dtype=torch.int64, device=packed.device)
        target = _shifted(nibbles, shift.to(torch.uint8).unsqueeze(-1))
    else:
        target, lost = _looked_up(nibbles, shift)
    payload_out.view(torch.uint8).copy_(target.view(count, rows, 2 * half))
    scale_out.copy_(torch.ldexp(torch.ones_like(scale_out), reference.to(torch.int32) - 121))
    return payload_out, scale_out, lost


def _block_exponent(exponents: Tensor, occupied: Tensor, blocks: int) -> Tensor:
    """The exponent of shift zero of each block of four groups; groups of zeros have no say. int16 [A, N, blocks]."""
    groups = SCALE_COLUMNS // GROUP
    missing = blocks * groups - exponents.shape[2]
    low = torch.nn.functional.pad(exponents.masked_fill(~occupied, 255), (0, missing), value=255)
    high = torch.nn.functional.pad(exponents.masked_fill(~occupied, 0), (0, missing), value=0)
    low, high = low.unflatten(2, (blocks, groups)).amin(-1), high.unflatten(2, (blocks, groups)).amax(-1)
    return torch.maximum(high - LARGEST_SHIFT, low.clamp(max=HIGHEST_REFERENCE))


def _shifted(nibbles: Tensor, shift: Tensor) -> Tensor:
    """E4M3 bytes of codes times 2^(shift - 6), 0 <= shift <= 12, by moving bits alone; both uint8."""
    magnitude = nibbles & 0x7
    raised = (magnitude << 2) + (shift << 3)
    half = torch.where(shift == 0, 4, shift << 3)  # 0.5 is subnormal only while it is unshifted
    moved = torch.where(magnitude > 1, raised, torch.where(magnitude == 1, half, 0))
    return moved.to(torch.uint8) | ((nibbles & 0x8) << 4)


def _looked_up(nibbles: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The general case through a table of every (shift, code): bytes, and how many of them are not exact."""
    table, exact = (t.to(nibbles.device) for t in _table())
    at = (shift.clamp(SMALLEST_SHIFT, LARGEST_SHIFT) - SMALLEST_SHIFT).to(torch.int64).unsqueeze(-1) * 16 + nibbles
    return table[at], (~exact[at]).sum().view(1)


@functools.lru_cache(maxsize=1)
def _table() -> tuple[Tensor, Tensor]:
    """E4M3 byte of every code at every shift, and whether it is exact; row = shift - SMALLEST_SHIFT."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.cat((magnitudes, -magnitudes))
    shifts = torch.arange(SMALLEST_SHIFT, LARGEST_SHIFT + 1)
    value = codes * torch.pow(2.0, (shifts - 6).float()).unsqueeze(1)
    rounded = value.to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8).flatten(), (rounded.float() == value).flatten()


def decode(payload: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """An expert's weight [N, K] in `dtype`: E4M3 payload times its scale per 128 columns, or a plain weight."""
    if scale is None:
        return payload.to(dtype)
    w = payload.to(dtype)
    blocks = w.shape[-1] // SCALE_COLUMNS
    if w.shape[-1] == blocks * SCALE_COLUMNS:
        return (w.unflatten(-1, (blocks, SCALE_COLUMNS)) * scale.to(dtype).unsqueeze(-1)).flatten(-2)
    return w * scale.to(dtype).repeat_interleave(SCALE_COLUMNS, -1)[..., : w.shape[-1]]


def experts(
    x: Tensor,
    *,
    offsets: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    w1_scale: Tensor | None = None,
    w3_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    activation: str,
    beta: float | None = None,
    linear_beta: float | None = None,
    limit: float | None = None,
    x_scale: Tensor | None = None,
) -> Tensor:
    """act(x w1^T, x w3^T) w2^T of each active expert on its own pairs; h and the result are rounded (form "fused").

    `x` [pairs, L], rows offsets[a]:offsets[a+1] belong to expert a; `w1`, `w3` [A, I, L], `w2` [A, L, I].
    With `x_scale`, `x` holds E4M3 codes with a scale per 128 columns, and h and the result are bfloat16.
    """
    out = x.dtype if x_scale is None else torch.bfloat16
    x = x if x_scale is None else dequantised(x, x_scale)
    y = torch.empty_like(x, dtype=out)
    dtype = wide(x).dtype
    bounds = offsets.tolist()
    for a, (start, stop) in enumerate(itertools.pairwise(bounds)):
        mine = x[start:stop].to(dtype)
        first, third, second = (
            decode(w[a], None if s is None else s[a], dtype)
            for w, s in ((w1, w1_scale), (w3, w3_scale), (w2, w2_scale))
        )
        h = gated(mine @ first.T, mine @ third.T, activation, beta, linear_beta, limit).to(out)
        y[start:stop] = (h.to(dtype) @ second.T).to(out)
    return y
