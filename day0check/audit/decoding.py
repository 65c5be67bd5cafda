"""A second decoder of stored codes, beside the reference's: from the bytes of the files and the tables of the formats.

E2M1 with an E8M0 scale for 32 columns (OCP Microscaling Formats v1.0), E4M3 (OCP 8-bit Floating Point v1.0) with a
float32 scale for 128 x 128 (DeepSeek-V3), INT4 with a scale for 32 columns (compressed-tensors, "pack-quantized"). It
shares no code with `reference/formats.py` nor with the reader of safetensors. Rows of tensors of each form are decoded
by both; one that comes out otherwise means that one of the two is wrong, and then no comparison of weights says
anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
from safetensors import safe_open

from day0check.audit.fault import Fault
from reference.formats import block_fp8_decode, int4_decode, mxfp4_decode
from reference.inventory import Inventory

SAMPLED = 64  # tensors of each form, spread over all of them: it is the decoder that is asked here, not the data
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
GROUP, BLOCK = 32, 128
_READ_AS = {"U8": "<u1", "F8_E4M3": "<u1", "I32": "<u4", "F32": "<f4", "BF16": "<u2", "F16": "<f2"}


@dataclass(frozen=True)
class Form:
    """A form of coded weights: the end of the names of codes and of scales, and the dtypes of the codes.

    `own`: a row of codes and the row of scales that belongs to it, as the file has them -> values [K]; `rows_a_scale`:
    rows that share one row of scales; `theirs`: the reference's decoding of those rows.
    """

    name: str
    codes: str
    scales: str
    dtype: str
    rows_a_scale: int
    own: Callable[[np.ndarray, np.ndarray], np.ndarray]
    theirs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def audit_decoding(inventory: Inventory) -> Iterator[Fault]:
    """A fault for every sampled tensor of which a row is decoded otherwise by the reference. Tensors whose scales are
    missing or of another shape are told elsewhere and left out here; values are compared as bits of the dtype that the
    reference gives them, NaN with NaN."""
    for form in FORMS:
        for stored, scales in _sampled(_coded(inventory, form)):
            file, _, shape = inventory.sound[stored]
            leading = shape[:-1]
            row = crc32(stored.encode()) % int(np.prod(leading))
            theirs = _of_reference(inventory, form, (stored, scales), row)
            if theirs is None:
                continue
            own = form.own(
                _raw_row(inventory.directory, file, stored, row),
                _raw_row(inventory.directory, inventory.sound[scales][0], scales, row // form.rows_a_scale),
            )
            if np.array_equal(_rounded(own, theirs.dtype), theirs.float().numpy(), equal_nan=True):
                continue
            at = int(np.flatnonzero(_rounded(own, theirs.dtype) != theirs.float().numpy())[0])
            what = (
                f"row {row} of {stored} in {file} comes out otherwise by two decoders of {form.name}: column {at} is "
                f"{float(theirs[at])} by the reference and {float(own[at])} by the bytes of the file"
            )
            yield Fault("decoders disagree", stored, what, (file,))


def _coded(inventory: Inventory, form: Form) -> list[tuple[str, str]]:
    """(stored name of codes, that of their scales) of the form's tensors that have scales of the shape due."""
    found = []
    for stored, (_, dtype, shape) in sorted(inventory.sound.items()):
        scales = stored.removesuffix(form.codes) + form.scales
        codes = stored.endswith(form.codes) and dtype == form.dtype and len(shape) > 1 and 0 not in shape
        if codes and scales in inventory.sound and (len(shape) == 2 or form.rows_a_scale == 1):
            _, scale_dtype, held = inventory.sound[scales]
            rows = -(-shape[0] // form.rows_a_scale)
            if (
                scale_dtype in _READ_AS
                and held[:-1] == (rows, *shape[1:-1])
                and held[-1] == _scales_of(form, shape[-1])
            ):
                found.append((stored, scales))
    return found


def _scales_of(form: Form, width: int) -> int:
    """Scales in a row of so many stored elements: each has 32 columns, of which a byte holds 2 and a word 8, or 128."""
    return -(-width // {"U8": GROUP // 2, "I32": GROUP // 8, "F8_E4M3": BLOCK}[form.dtype])


def _sampled(coded: list[tuple[str, str]]) -> list[tuple[str, str]]:
    count = min(SAMPLED, len(coded))
    return [coded[len(coded) * i // count] for i in range(count)]


# ------------------------------------------------------------------------------------------------- bytes of a file


@lru_cache(maxsize=8)
def _header(file: Path, stamp: tuple[int, int]) -> tuple[dict[str, dict], int]:
    """The header of a safetensors file and where its data begin: eight bytes of length, then JSON."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return json.loads(opened.read(length)), 8 + length


def _raw_row(directory: Path, name: str, stored: str, row: int) -> np.ndarray:
    """One row [K] of a tensor whose leading axes are taken for one, as the file holds it."""
    file = directory / name
    state = file.stat()
    header, begin = _header(file, (state.st_mtime_ns, state.st_size))
    entry = header[stored]
    dtype, width = np.dtype(_READ_AS[entry["dtype"]]), entry["shape"][-1]
    with file.open("rb") as opened:
        opened.seek(begin + entry["data_offsets"][0] + row * width * dtype.itemsize)
        found = np.frombuffer(opened.read(width * dtype.itemsize), dtype=dtype)
    return (found.astype(np.uint32) << 16).view(np.float32) if entry["dtype"] == "BF16" else found


def _of_reference(inventory: Inventory, form: Form, names: tuple[str, str], row: int) -> torch.Tensor | None:
    """The same row by the reference; None where it refuses the scales, which is told elsewhere."""
    first = row // form.rows_a_scale
    parts = []
    for stored, begin, rows in zip(names, (first * form.rows_a_scale, first), (form.rows_a_scale, 1), strict=True):
        with safe_open(str(inventory.directory / inventory.sound[stored][0]), framework="pt") as opened:
            leading = inventory.sound[stored][2][:-1]
            *outer, first_row = (int(i) for i in np.unravel_index(begin, leading))  # of more axes a row at a time
            place = (*(slice(i, i + 1) for i in outer), slice(first_row, first_row + rows))
            parts.append(opened.get_slice(stored)[place].flatten(0, -2))
    try:
        return form.theirs(*parts)[row - first * form.rows_a_scale]
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------------------- formats


def mxfp4_row(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Bytes [K/2], of each the low four bits first, and exponents [K/32] -> float32 [K]."""
    values = E2M1[np.stack([codes & 15, codes >> 4], axis=1).reshape(-1)]
    return np.ldexp(values, np.repeat(scales.astype(np.int32) - 127, GROUP))


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    """float32 of bytes: sign, four bits of exponent with bias 7, three of mantissa; all seven set is NaN."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    normal = np.ldexp(8 + mantissa, exponent - 10)
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), normal).astype(np.float32)
    values = np.where(codes & 0x7F == 0x7F, np.float32(np.nan), values)
    return np.where(codes & 0x80, -values, values)


def block_fp8_row(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Bytes [K] and factors [ceil(K/128)] -> float32 [K]."""
    return e4m3_values(codes) * np.repeat(scales.astype(np.float32), BLOCK)[: len(codes)]


def int4_row(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Words of 32 bits [K/8] of eight codes from the low bits up, 8 for zero, and factors [K/32] -> float32 [K]."""
    fours = codes[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)
    return (fours.reshape(-1).astype(np.float32) - 8) * np.repeat(scales.astype(np.float32), GROUP)


def _rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float32 values as the dtype of the reference holds them: bfloat16 to the nearest, ties to the even one."""
    if dtype != torch.bfloat16:
        return values
    bits = values.view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return np.where(np.isnan(values), values, bits.astype(np.uint32).view(np.float32))


def _as_weights(decode: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Those that a checkpoint turns into weights when it reads them."""
    return lambda codes, scales: decode(codes, scales).to(torch.bfloat16)


FORMS = (
    Form("MXFP4", ".weight_packed", ".weight_scale", "U8", 1, mxfp4_row, mxfp4_decode),
    Form("block FP8", ".weight", ".weight_scale_inv", "F8_E4M3", BLOCK, block_fp8_row, _as_weights(block_fp8_decode)),
    Form("INT4", ".weight_packed", ".weight_scale", "I32", 1, int4_row, _as_weights(int4_decode)),
)
