"""Forms in which releases store what the table lists plainly: block FP8 linears, INT4 experts, a padded A_log.

A preset says which of them its files have; reading them back is `reference.weights`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from reference.coded import GROUP_SCALES, PACKED, SHAPE
from reference.formats import block_fp8_encode, int4_encode

Form = Literal["block-fp8", "int4-experts", "padded-a-log", "packed-linear", "interleaved-gates"]

# What DeepSeek-V3.2 and GLM-5 keep in high precision although it is a matrix (model.md 4).
_HIGH_PRECISION = ("embed_tokens.weight", "lm_head.weight", ".gate.weight", "weights_proj.weight")
_PADDING = 9.0  # far from every trained value, so that padding read as a head shows


def stored_as(
    name: str, tensor: torch.Tensor, *, forms: tuple[Form, ...], head_width: int | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """What a release with these `forms` stores for the tensor of canonical `name`: (canonical name, tensor) pairs.

    "block-fp8": every linear becomes E4M3 with a float32 `_scale_inv` per 128 x 128 block. "int4-experts": those of
    routed experts become words of eight codes, with a scale for 32 and their shape. "padded-a-log": A_log is filled up
    to `head_width` values, as Kimi K3 stores 128 of which 96 count (model.md 6.7). Forms that join several tensors:
    `reference.packing`.
    """
    if "padded-a-log" in forms and name.endswith(".A_log"):
        padding = torch.full((max(0, head_width - tensor.numel()),), _PADDING, dtype=tensor.dtype)
        yield name, torch.cat((tensor, padding))
    elif "int4-experts" in forms and ".experts." in name:
        packed, scales = int4_encode(tensor)
        yield f"{name}{PACKED}", packed
        yield f"{name}{GROUP_SCALES}", scales
        yield f"{name}{SHAPE}", torch.tensor(tensor.shape, dtype=torch.int32)
    elif "block-fp8" in forms and _is_coded(name, tensor):
        payload, scales = block_fp8_encode(tensor.float())
        yield name, payload
        yield f"{name}_scale_inv", scales
    else:
        yield name, tensor


def _is_coded(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith(".weight") and tensor.dim() == 2 and not name.endswith(_HIGH_PRECISION)
