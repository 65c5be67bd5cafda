"""Number formats, exact for every code (model.md 3): E2M1, E8M0, E4M3, MXFP4 (OCP MX v1.0), DeepSeek block FP8, INT4 in
groups (compressed-tensors).

K is the contraction (input) axis, always last. Decoding returns exactly the coded value in the dtype asked for, or
raises; encoding rounds to nearest, ties to even, and saturates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E8M0_NAN = 255
E8M0_BIAS = 127
MX_GROUP = 32
FP8_BLOCK = 128
INT4_GROUP = 32
INT4_CODES = 8  # in a word of 32 bits
_INT4_ZERO = 8  # the code of 0


def e2m1_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of 4-bit codes (uint8, 0..15; bit 3 is the sign, and code 8 is -0.0), any shape."""
    values = [s * m for s in (1.0, -1.0) for m in E2M1_MAGNITUDES]
    return torch.tensor(values, dtype=dtype, device=codes.device)[codes.long()]


def e2m1_encode(values: Tensor) -> Tensor:
    """Codes (uint8) of the nearest E2M1 values, ties to the even code, beyond 6 saturated. Raises on NaN."""
    if bool(torch.isnan(values).any()):
        raise ValueError("e2m1_encode: NaN has no E2M1 code")
    v = values.to(torch.float64)
    levels = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64, device=v.device)
    middles = (levels[1:] + levels[:-1]) / 2
    lower = torch.searchsorted(middles, v.abs())  # a middle itself stays with the code below it
    upper = torch.searchsorted(middles, v.abs(), right=True)  # ... or goes with the code above it
    code = torch.where(lower % 2 == 0, lower, upper)
    return (code + 8 * torch.signbit(v)).to(torch.uint8)


def e8m0_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(code - 127) of uint8 codes; code 0 is 2^-127, a float32 subnormal. Raises ValueError on 255 (NaN)."""
    if dtype == torch.float16:
        raise ValueError("e8m0_decode: float16 cannot hold powers from 2^-127 to 2^127; use float32 or float64")
    bad = codes == E8M0_NAN
    if bool(bad.any()):
        where = tuple(torch.nonzero(bad)[0].tolist())
        raise ValueError(f"e8m0_decode: scale code 255 (NaN) at {where}; the checkpoint is damaged")
    table = torch.tensor([2.0 ** (e - E8M0_BIAS) for e in range(E8M0_NAN)], dtype=torch.float64, device=codes.device)
    return table.to(dtype)[codes.long()]


def e8m0_encode(scales: Tensor) -> Tensor:
    """uint8 codes of powers of two from 2^-127 to 2^127. Raises ValueError on anything else."""
    mantissa, exponent = torch.frexp(scales.to(torch.float64))
    code = exponent.long() - 1 + E8M0_BIAS
    if not bool(((mantissa == 0.5) & (code >= 0) & (code < E8M0_NAN)).all()):
        raise ValueError("e8m0_encode: every scale must be a power of two from 2^-127 to 2^127")
    return code.to(torch.uint8)


def e4m3_encode(values: Tensor) -> Tensor:
    """Nearest float8_e4m3fn values, beyond +-448 saturated, NaN kept.

    The clamp comes first because builds of torch differ in what the bare cast does beyond 448.
    """
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e4m3_decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of float8_e4m3fn codes (or of their uint8 bytes); bytes 0x7f and 0xff are NaN."""
    return (codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes).to(dtype)


def mxfp4_pack(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte, the even element in the low nibble: uint8 [..., K] -> [..., K/2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def mxfp4_unpack(packed: Tensor) -> Tensor:
    """4-bit codes of packed bytes: uint8 [..., K/2] -> [..., K]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def mxfp4_decode(packed: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """E2M1 code times 2^(scale - 127) of its group of 32: packed uint8 [..., K/2], scale uint8 [..., K/32] -> [..., K].

    Raises ValueError on scale 255, on shapes that do not fit, and where a value exceeds the range of `dtype` (codes
    up to 6 x 2^127 exist; float64 holds them all).
    """
    if packed.shape[:-1] != scale.shape[:-1] or packed.shape[-1] * 2 != scale.shape[-1] * MX_GROUP:
        raise ValueError(
            f"mxfp4_decode: packed {tuple(packed.shape)} needs one scale per 16 bytes, not {tuple(scale.shape)}"
        )
    values = e2m1_decode(mxfp4_unpack(packed), dtype).unflatten(-1, (-1, MX_GROUP))
    y = (values * e8m0_decode(scale, dtype)[..., None]).flatten(-2)
    if scale.numel() and int(scale.max()) > 252 and not bool(torch.isfinite(y).all()):
        raise ValueError(f"mxfp4_decode: a weight exceeds the range of {dtype}; decode to float64")
    return y


def mxfp4_encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """(packed uint8 [..., K/2], scale uint8 [..., K/32]) of values [..., K]: group exponent floor(log2(amax)) - 2,
    elements rounded to nearest even and saturated (OCP MX v1.0, 6.3). Raises ValueError if K is no multiple of 32 or
    a value is not finite."""
    if values.shape[-1] % MX_GROUP:
        raise ValueError(f"mxfp4_encode: {values.shape[-1]} columns are no multiple of {MX_GROUP}")
    if not bool(torch.isfinite(values).all()):
        raise ValueError("mxfp4_encode: a value is not finite")
    groups = values.to(torch.float64).unflatten(-1, (-1, MX_GROUP))
    _, exponent = torch.frexp(groups.abs().amax(-1))
    code = (exponent.long() - 3 + E8M0_BIAS).clamp(0, E8M0_NAN - 1)  # frexp's mantissa is in [1/2, 1)
    codes = e2m1_encode(groups / torch.exp2((code - E8M0_BIAS).to(torch.float64))[..., None]).flatten(-2)
    return mxfp4_pack(codes), code.to(torch.uint8)


def fp8_columns_decode(payload: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """E4M3 payload [..., K] times its scale per 128 columns [..., ceil(K/128)], in `dtype`."""
    columns = torch.arange(payload.shape[-1], device=payload.device) // FP8_BLOCK
    return e4m3_decode(payload, dtype) * scale.to(dtype)[..., columns]


def block_fp8_encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(payload float8_e4m3fn [N, K], weight_scale_inv float32 [ceil(N/128), ceil(K/128)]) with scale amax/448 of each
    128 x 128 block, 1 for a block of zeros (DeepSeek-V3)."""
    rows, columns = (math.ceil(n / FP8_BLOCK) for n in weight.shape)
    padded = torch.zeros(rows * FP8_BLOCK, columns * FP8_BLOCK, dtype=torch.float32, device=weight.device)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.unflatten(1, (columns, FP8_BLOCK)).unflatten(0, (rows, FP8_BLOCK))
    amax = blocks.abs().amax((1, 3))
    scale = torch.where(amax > 0, amax / E4M3_MAX, 1.0)
    payload = e4m3_encode(blocks / scale[:, None, :, None]).view(torch.uint8).flatten(2).flatten(0, 1)
    return payload[: weight.shape[0], : weight.shape[1]].contiguous().view(torch.float8_e4m3fn), scale


def block_fp8_decode(payload: Tensor, weight_scale_inv: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """payload [N, K] *times* weight_scale_inv [ceil(N/128), ceil(K/128)] (the name misleads), in `dtype`.

    Raises ValueError when the scales do not cover the payload.
    """
    needed = tuple(math.ceil(n / FP8_BLOCK) for n in payload.shape)
    if tuple(weight_scale_inv.shape) != needed:
        raise ValueError(
            f"block_fp8_decode: payload {tuple(payload.shape)} needs scales {needed}, "
            f"not {tuple(weight_scale_inv.shape)}"
        )
    rows = torch.arange(payload.shape[0], device=payload.device) // FP8_BLOCK
    return fp8_columns_decode(payload, weight_scale_inv[rows], dtype=dtype)


def int4_encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(packed int32 [N, K/8], scale bfloat16 [N, K/32]) of weight [N, K]: codes -8 to 7 to the nearest, ties to even,
    with scale amax / 7.5 of each group of 32 columns, 1 for a group of zeros (compressed-tensors, symmetric).

    Raises ValueError if K is no multiple of 32.
    """
    if weight.shape[-1] % INT4_GROUP:
        raise ValueError(f"int4_encode: {weight.shape[-1]} columns are no multiple of {INT4_GROUP}")
    groups = weight.float().unflatten(-1, (-1, INT4_GROUP))
    amax = groups.abs().amax(-1)
    scale = torch.where(amax > 0, amax / 7.5, 1.0).to(torch.bfloat16)
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7) + _INT4_ZERO
    return mxfp4_pack(codes.to(torch.uint8).flatten(-2)).contiguous().view(torch.int32), scale


def int4_decode(packed: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """(code - 8) times the scale of its group of 32 columns, in `dtype`: packed int32 [N, K/8], eight codes a word from
    the low bits up, scale [N, K/32] -> [N, K]. Raises ValueError when the scales do not cover the codes."""
    needed = (packed.shape[0], packed.shape[1] * INT4_CODES // INT4_GROUP)
    if tuple(scale.shape) != needed or packed.shape[1] * INT4_CODES % INT4_GROUP:
        raise ValueError(f"int4_decode: words {tuple(packed.shape)} need scales {needed}, not {tuple(scale.shape)}")
    values = mxfp4_unpack(packed.contiguous().view(torch.uint8)).to(dtype) - _INT4_ZERO
    return (values.unflatten(-1, (-1, INT4_GROUP)) * scale.to(dtype)[..., None]).flatten(-2)


def e4m3_rows_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes float8_e4m3fn [rows, K], scale float32 [rows, ceil(K/128)]) of rows [rows, K], each block of 128 columns
    scaled by amax / 448, by 1 where it is all zero (DeepSeek-V3, activations)."""
    blocks = math.ceil(x.shape[1] / FP8_BLOCK)
    padded = torch.zeros(x.shape[0], blocks * FP8_BLOCK, dtype=torch.float32, device=x.device)
    padded[:, : x.shape[1]] = x
    padded = padded.unflatten(1, (blocks, FP8_BLOCK))
    amax = padded.abs().amax(-1)
    scale = torch.where(amax > 0, amax / E4M3_MAX, 1.0)
    codes = e4m3_encode(padded / scale[..., None]).view(torch.uint8).flatten(1)[:, : x.shape[1]]
    return codes.contiguous().view(torch.float8_e4m3fn), scale


def rows_decode(x: Tensor, x_scale: Tensor | None) -> tuple[Tensor, torch.dtype]:
    """(values of rows that may be E4M3 codes with a scale per 128 columns, the dtype that a result made of them has:
    that of plain rows, bfloat16 for codes)."""
    if x_scale is None:
        return x, x.dtype
    return fp8_columns_decode(x, x_scale, dtype=torch.float32), torch.bfloat16
