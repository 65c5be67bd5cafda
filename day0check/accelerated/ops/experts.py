"""Mixture of experts of the fast path: router, dispatch, MXFP4 to FP8 conversion and grouped experts."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from day0check.accelerated.ops.arithmetic import dequantised, product, wide
from day0check.accelerated.ops.index import ordered
from day0check.accelerated.ops.spine import gated

SCALE_COLUMNS = 128  # columns of one weight row that share an FP8 scale
GROUP = 32  # columns of one weight row that share an E8M0 exponent
LARGEST_SHIFT, SMALLEST_SHIFT = 12, -18  # a code shifted below that is zero in E4M3 whatever it was
SMALLEST_EXACT = -2  # of the shifts at which every code keeps its value
MAGNITUDES = 0x7777777777777777  # of sixteen codes, without their signs
FEW_PAIRS = 64  # of a row and an expert, that a CPU sorts sooner without tensors
FEW_EXPERTS = 128  # among which it chooses for one row sooner without tensors
GROUP_ELEMENTS = 1 << 20  # of the decoded weights of experts that are computed in one product
TILE_BYTES, DEVICE_TILE_BYTES = 1 << 17, 1 << 23  # packed bytes converted at a time
HIGHEST_REFERENCE = 248  # 2^(248 - 127 + 6) is the largest power of two of float32


def scores(x: Tensor, *, weight: Tensor, scoring: str, router_bias: Tensor | None = None) -> Tensor:
    """Router scores of `x` [rows, D] against `weight` [E, D], float32; `scoring` sigmoid, softmax, or logit: x W^T + b
    itself. Raises ValueError for another."""
    logits = product(x, weight)
    if router_bias is not None:
        logits = logits + router_bias.to(logits.dtype)
    if scoring == "logit":
        return logits
    if scoring not in ("sigmoid", "softmax"):
        raise ValueError(f"scoring {scoring!r} is none of sigmoid, softmax, logit")
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
    weighting: str = "score",
) -> tuple[Tensor, Tensor]:
    """The `k` experts of each row of `scores` [rows, E] by biased score, lower id first among equal ones, and the
    weights of the unbiased scores, or with `weighting` softmax their softmax among the chosen. Returns ids int64 and
    weights float32, both [rows, k]."""
    rows, experts = scores.shape
    biased = scores if bias is None else scores + bias
    chosen = None
    if rows == 1 and experts <= FEW_EXPERTS and scores.device.type == "cpu":
        chosen = _chosen_of_one(biased[0], k, groups, kept_groups)
    if kept_groups < groups and chosen is None:
        grouped = biased.view(rows, groups, -1)
        strength = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        kept = _best(strength, kept_groups)
        allowed = torch.zeros_like(strength, dtype=torch.bool).scatter_(1, kept, True)
        biased = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).view(rows, experts)
    ids = _best(biased, k) if chosen is None else torch.tensor([chosen])
    weights = scores.gather(1, ids)
    if weighting == "softmax":
        weights = torch.softmax(weights, -1)
    elif renormalise:
        weights = weights / weights.sum(-1, keepdim=True).add_(1e-20)
    return ids, weights * scale


def _chosen_of_one(biased: Tensor, k: int, groups: int, kept_groups: int) -> list[int] | None:
    """The `k` experts of one row by `biased` [E], as `route` chooses them; None where a score is NaN or infinite, or
    the groups kept have fewer than k."""
    values = biased.tolist()
    if not all(map(math.isfinite, values)):
        return None
    allowed: list[int] | range = range(len(values))
    if kept_groups < groups:
        grouped = biased.view(groups, -1)
        strength = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1).tolist()
        kept = set(sorted(range(groups), key=strength.__getitem__, reverse=True)[:kept_groups])
        allowed = [e for e in allowed if e // grouped.shape[-1] in kept]
    # a sort keeps the order of equals, backwards as well: the lower number first
    return sorted(allowed, key=values.__getitem__, reverse=True)[:k] if len(allowed) >= k else None


def _best(values: Tensor, k: int) -> Tensor:
    """Columns of the k largest of each row, the lower column first among equal ones.

    A CPU sees whether plain top-k gives the same: where neither ties nor NaN decide, that is.
    """
    if values.device.type == "cpu" and k < values.shape[1]:
        found = values.topk(k + 1, -1)
        if bool((found.values[:, :-1] > found.values[:, 1:]).all()):
            return found.indices[:, :k]
    return ordered(values, torch.arange(values.shape[1], device=values.device)).topk(k, -1).indices


def dispatch(x: Tensor, *, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of `x` [rows, L] repeated for each choice in `ids` [rows, k] and sorted by expert; id -1 goes nowhere.

    Returns y [pairs, L], the pair number row * k + choice of each, the active experts, and their offsets into y.
    """
    if x.device.type == "cpu" and ids.numel() <= FEW_PAIRS:
        order, active, offsets = (torch.tensor(n, dtype=torch.int64) for n in _sorted_pairs(ids.flatten().tolist()))
        if x.shape[0] == 1:
            return x.repeat(order.numel(), 1), order, active, offsets
        return x.index_select(0, order.div(ids.shape[1], rounding_mode="floor")), order, active, offsets
    flat = ids.flatten()
    count = torch.bincount(flat + 1, minlength=experts + 1)[1:]
    order = torch.argsort(flat, stable=True)[flat.numel() - int(count.sum()) :]
    active = count.nonzero().squeeze(1)
    offsets = torch.zeros(active.numel() + 1, dtype=torch.int64, device=x.device)
    torch.cumsum(count[active], 0, out=offsets[1:])
    return x.index_select(0, order.div(ids.shape[1], rounding_mode="floor")), order, active, offsets


def _sorted_pairs(ids: list[int]) -> tuple[list[int], list[int], list[int]]:
    """The numbers of the pairs that go somewhere by expert, the active experts, and where each one's pairs begin."""
    order = sorted((pair for pair, expert in enumerate(ids) if expert >= 0), key=ids.__getitem__)
    active, offsets = [], []
    for place, pair in enumerate(order):
        if not active or ids[pair] != active[-1]:
            active.append(ids[pair])
            offsets.append(place)
    return order, active, [*offsets, len(order)]


def combine(y: Tensor, *, order: Tensor, weights: Tensor) -> Tensor:
    """Sum over each row's experts of weight times output: `y` [pairs, L], `order` [pairs], `weights` [rows, k]."""
    rows, k = weights.shape
    if rows == 1 and order.numel() == k and y.device.type == "cpu":
        used = weights[0].index_select(0, order).to(wide(y).dtype)
        return torch.mv(wide(y).T, used).unsqueeze(0).to(y.dtype)
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

    Folding 2^s into a code is exact for -8 <= s <= 6 (E4M3's range holds all of E2M1 there). A block's scale is
    2^(e - 127 + 6) with e the lowest exponent of the block that has a code other than zero, or 12 below the highest
    when they lie further apart. Experts are worked on a few at a time, so that nothing beside the results grows with
    their number.
    """
    count, rows, half = experts.numel(), packed.shape[1], packed.shape[2]
    blocks = -(-scale.shape[2] // (SCALE_COLUMNS // GROUP))
    if payload_out is None:
        payload_out = torch.empty(count, rows, 2 * half, dtype=torch.float8_e4m3fn, device=packed.device)
    if scale_out is None:
        scale_out = torch.empty(count, rows, blocks, dtype=torch.float32, device=packed.device)
    lost = torch.zeros(1, dtype=torch.int64, device=packed.device)
    size = max(1, (TILE_BYTES if packed.device.type == "cpu" else DEVICE_TILE_BYTES) // max(1, rows * half))
    for start in range(0, count, size):
        some = slice(start, min(start + size, count))
        _convert_some(packed, scale, experts[some], payload_out[some], scale_out[some], lost)
    return payload_out, scale_out, lost


def _convert_some(
    packed: Tensor, scale: Tensor, experts: Tensor, payload: Tensor, block_scale: Tensor, lost: Tensor
) -> None:
    """Converts `experts` [A] into `payload` [A, N, K] and `block_scale` [A, N, blocks] and adds to `lost` [1]."""
    codes = packed.index_select(0, experts)
    exponents = scale.index_select(0, experts)
    if packed.device.type == "cpu" and lie_close(scale):
        return _convert_plainly(codes, exponents, payload, block_scale)
    exponents = exponents.to(torch.int32)
    groups = exponents.shape[2]
    occupied = (codes.view(torch.int64) & MAGNITUDES).view(*exponents.shape, -1).ne(0).any(-1)
    reference = _block_exponent(exponents, occupied, block_scale.shape[2])
    spread = reference.unsqueeze(-1).expand(*reference.shape, SCALE_COLUMNS // GROUP).flatten(2)[..., :groups]
    shift = (exponents - spread).masked_fill_(~occupied, 0)
    tables = _tables(packed.device)
    row = shift.clamp(min=SMALLEST_SHIFT).sub_(SMALLEST_SHIFT).mul_(256)
    entry = (codes.view(*exponents.shape, -1) + row.unsqueeze(-1)).flatten()  # int32: 256 bytes of two codes a shift
    payload.view(torch.uint8).view(torch.int16).copy_(tables[0].index_select(0, entry).view(codes.shape))
    block_scale.copy_(_power_of_two(reference - 121))
    if int(shift.amin()) < SMALLEST_EXACT:
        lost += tables[1].index_select(0, entry).sum()


_close: dict[int, tuple[weakref.ref[Tensor], int, bool]] = {}


def lie_close(scale: Tensor) -> bool:
    """Whether the exponents of every block of every expert lie so close together that nothing is lost, whatever the
    codes are, and blocks are whole. Found out once for each stack, which never changes."""
    known = _close.get(id(scale))
    if known is not None and known[0]() is scale and known[1] == scale._version:
        return known[2]
    groups = scale.shape[2]
    per_block = min(groups, SCALE_COLUMNS // GROUP)
    close = bool(groups) and groups % per_block == 0
    if close:
        low, high = torch.aminmax(scale.unflatten(2, (-1, per_block)), dim=-1)
        close = int((high - low).max()) <= LARGEST_SHIFT and int(low.max()) <= HIGHEST_REFERENCE
    key = id(scale)
    _close[key] = (weakref.ref(scale, lambda _: _close.pop(key, None)), scale._version, close)
    return close


def _convert_plainly(codes: Tensor, exponents: Tensor, payload: Tensor, block_scale: Tensor) -> None:
    """As `_convert_some`, for exponents uint8 [A, N, K/32] that lie close."""
    blocks = exponents.to(torch.int32).unflatten(2, (-1, min(exponents.shape[2], SCALE_COLUMNS // GROUP)))
    low = blocks.amin(-1, keepdim=True)
    table = (blocks - low).add_(-SMALLEST_SHIFT).mul_(256)
    entry = (codes.view(*blocks.shape, -1) + table.unsqueeze(-1)).flatten()
    _look_up(_tables(codes.device)[0], entry, payload.view(torch.int16))
    _look_up(_powers(codes.device), low.flatten(), block_scale)


def _look_up(table: Tensor, entry: Tensor, out: Tensor) -> None:
    """Writes the entries of `table` that `entry` names into `out`, straight where it lies in one piece."""
    if out.is_contiguous():
        torch.index_select(table, 0, entry, out=out.view(-1))
    else:
        out.copy_(table.index_select(0, entry).view(out.shape))


@functools.lru_cache(maxsize=4)
def _powers(device: torch.device) -> Tensor:
    """The scale of a block whose exponent of shift zero is each of 0 to HIGHEST_REFERENCE."""
    return _power_of_two(torch.arange(HIGHEST_REFERENCE + 1, dtype=torch.int32) - 121).to(device)


def _block_exponent(exponents: Tensor, occupied: Tensor, blocks: int) -> Tensor:
    """The exponent of shift zero of each block of four groups; groups of zeros have no say. int32 [A, N, blocks]."""
    groups = SCALE_COLUMNS // GROUP
    missing = blocks * groups - exponents.shape[2]
    low, high = exponents.masked_fill(~occupied, 255), exponents.masked_fill(~occupied, 0)
    if missing:
        low, high = torch.nn.functional.pad(low, (0, missing), value=255), torch.nn.functional.pad(high, (0, missing))
    low, high = low.unflatten(2, (blocks, groups)).amin(-1), high.unflatten(2, (blocks, groups)).amax(-1)
    return torch.maximum(high - LARGEST_SHIFT, low.clamp_(max=HIGHEST_REFERENCE))


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in float32 for int32 exponents -149 to 127, also below the smallest normal number."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


@functools.lru_cache(maxsize=4)
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """For every shift from SMALLEST_SHIFT to LARGEST_SHIFT and byte of two codes (entry 256 * shift + byte): the two
    E4M3 bytes, low nibble first, as an int16; and how many of the two are not exact, int64."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.cat((magnitudes, -magnitudes))
    shifts = torch.arange(SMALLEST_SHIFT, LARGEST_SHIFT + 1)
    value = codes * torch.pow(2.0, (shifts - 6).float()).unsqueeze(1)
    rounded = value.to(torch.float8_e4m3fn)
    byte = torch.arange(256)
    pair = torch.stack((byte & 0xF, byte >> 4), -1)  # [256, 2]
    payload = rounded.view(torch.uint8)[:, pair].contiguous().view(torch.int16).flatten()
    inexact = (rounded.float() != value)[:, pair].sum(-1).flatten()
    return payload.to(device), inexact.to(device)


@functools.lru_cache(maxsize=4)
def _e4m3_values(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The value of every E4M3 byte."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype).to(device)


def _from_e4m3(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """E4M3 codes in `dtype`, in memory of their own. A CPU looks them up, which is quicker than its conversion."""
    if payload.device.type != "cpu" or payload.dtype != torch.float8_e4m3fn:
        return payload.to(dtype, copy=True)
    entry = payload.view(torch.uint8).flatten().to(torch.int32)
    return _e4m3_values(payload.device, dtype).index_select(0, entry).view(payload.shape)


def decode(payload: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Weights [..., N, K] in `dtype`: E4M3 payload times its scale per 128 columns, or plain weights."""
    if scale is None:
        return payload.to(dtype)
    w = _from_e4m3(payload, dtype)
    blocks = w.shape[-1] // SCALE_COLUMNS
    if w.shape[-1] == blocks * SCALE_COLUMNS:
        return w.unflatten(-1, (blocks, SCALE_COLUMNS)).mul_(scale.to(dtype).unsqueeze(-1)).flatten(-2)
    if blocks == 0:
        return w.mul_(scale.to(dtype))
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
    b1: Tensor | None = None,
    b3: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str,
    beta: float | None = None,
    linear_beta: float | None = None,
    limit: float | None = None,
    alpha: float | None = None,
    x_scale: Tensor | None = None,
) -> Tensor:
    """act(x w1^T, x w3^T) w2^T of each active expert on its own pairs; h and the result are rounded (form "fused").

    `x` [pairs, L], rows offsets[a]:offsets[a+1] belong to expert a; `w1`, `w3` [A, I, L], `w2` [A, L, I], and where
    there are biases `b1`, `b3` [A, I], `b2` [A, L].
    With `x_scale`, `x` holds E4M3 codes with a scale per 128 columns, and h and the result are bfloat16.
    """
    out = x.dtype if x_scale is None else torch.bfloat16
    x = x if x_scale is None else dequantised(x, x_scale)
    act = functools.partial(gated, activation=activation, beta=beta, linear_beta=linear_beta, limit=limit, alpha=alpha)
    matrices = ((w1, w1_scale, b1), (w3, w3_scale, b3), (w2, w2_scale, b2))
    counts = [stop - start for start, stop in itertools.pairwise(offsets.tolist())]
    alike = bool(counts) and min(counts) == max(counts) > 0
    if alike and sum(w.numel() for w, *_ in matrices) <= GROUP_ELEMENTS:
        return _together(wide(x).unflatten(0, (len(counts), -1)), matrices, act, out).flatten(0, 1)
    y = torch.empty_like(x, dtype=out)
    start = 0
    for a, count in enumerate(counts):
        mine, one = wide(x[start : start + count]), slice(a, a + 1)
        matrices_of_it = tuple(tuple(None if t is None else t[one] for t in parts) for parts in matrices)
        y[start : start + count] = _together(mine.unsqueeze(0), matrices_of_it, act, out)[0] if count else mine
        start += count
    return y


def _together(
    x: Tensor,
    matrices: tuple[tuple[Tensor, Tensor | None, Tensor | None], ...],
    act: Callable[[Tensor, Tensor], Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """The MLPs of several experts with as many pairs each: `x` [A, m, L] wide, result [A, m, L] in `dtype`. Of each of
    the `matrices`: weights, scales and biases."""

    def product_with(a: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        w = decode(weight, scale, a.dtype).transpose(1, 2)
        return torch.bmm(a, w) if bias is None else torch.baddbmm(bias.to(a.dtype).unsqueeze(1), a, w)

    first, third, second = matrices
    h = act(product_with(x, *first), product_with(x, *third)).to(dtype)
    return product_with(h.to(x.dtype), *second).to(dtype)
