"""How large a model is: parameters, bytes as stored, and what a request keeps. From its configuration alone.

Standard library only. Shapes: `reference.tensors`; caches: model.md 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from reference.config import ModelConfig
from reference.families.gpt_oss import GptOssSizes, gpt_oss_tensors
from reference.tensors import Stored, expected_tensors

BYTES = {"bfloat16": 2, "float32": 4, "uint8": 1}
_VISION = ("vision_tower.", "mm_projector.", "visual.")
_STATE_BYTES = 4  # of KDA: float32
# Bytes a value: codes of 4 bits with an E8M0 byte, or with a bfloat16 scale, for 32; codes of 8 bits with a float32
# scale for 128 of a row; plain.
EXPERT_FORMS = {"mxfp4": 0.5 + 1 / 32, "int4": 0.5 + 2 / 32, "fp8": 1 + 4 / 128, "bf16": 2.0}


@dataclass(frozen=True)
class Size:
    """`total` (without the draft layer), `draft` (of it), `routed` (of the model's routed experts), `vision`: counts of
    parameters, by the values that packed codes stand for; scales are none. `activated`: what one text token is
    multiplied with, the head included, the embedding, the tower and the draft layer not. `tensors` and `stored_bytes`:
    as the table lists them, the draft layer too, without the padding that a release may add; `expert_values` and
    `expert_bytes`: of them in matrices of routed experts."""

    tensors: int
    stored_bytes: int
    total: int
    draft: int
    routed: int
    vision: int
    activated: int
    expert_values: int
    expert_bytes: int

    def bytes_with_experts_in(self, form: str) -> int:
        """Bytes of all tensors with the matrices of routed experts in a form of `EXPERT_FORMS`, the rest as stored."""
        return self.stored_bytes - self.expert_bytes + round(self.expert_values * EXPERT_FORMS[form])


def size_of(config: ModelConfig) -> Size:
    """The size of a model."""
    moe = config.moe
    return _size(
        expected_tensors(config),
        draft=f"layers.{len(config.layers)}.",
        part=(0, 1) if moe is None else (moe.topk, moe.experts),
        embedding=0 if config.tied_head else config.vocab * config.hidden,
    )


def gpt_oss_size(sizes: GptOssSizes) -> Size:
    """As `size_of`, of a gpt-oss."""
    part = (sizes.topk, sizes.experts)
    return _size(gpt_oss_tensors(sizes), draft="no layer", part=part, embedding=sizes.vocab * sizes.hidden)


def _size(table: dict[str, Stored], *, draft: str, part: tuple[int, int], embedding: int) -> Size:
    """`draft`: how names of the draft layer begin; `part`: of how many experts how many work for a token."""
    total = drafting = routed = vision = size = values = bytes_ = 0
    for name, stored in table.items():
        elements = math.prod(stored.shape)
        size += elements * BYTES[stored.dtype]
        count = _values(name, elements)
        if ".experts." in name and not name.endswith("_bias"):
            values += count
            bytes_ += elements * BYTES[stored.dtype]
        if name.startswith(draft):
            drafting += count
            continue
        total += count
        routed += count if ".experts." in name else 0
        vision += count if name.startswith(_VISION) else 0
    used = routed * part[0] // part[1]
    activated = total - routed + used - vision - embedding
    return Size(len(table), size, total, drafting, routed, vision, activated, values, bytes_)


def _values(name: str, elements: int) -> int:
    if name.endswith((".weight_packed", "_blocks")):
        return 2 * elements
    return 0 if name.endswith((".weight_scale", "_scales")) else elements


def cache_bytes_per_token(config: ModelConfig, *, element_bytes: int = 2) -> int:
    """Bytes that one token adds to the caches of all layers: latents, and index keys (one per pool of tokens)."""
    return int(sum(_token_elements(config, layer) for layer in range(len(config.layers))) * element_bytes)


def _token_elements(config: ModelConfig, layer: int) -> float:
    kind = config.layers[layer]
    if kind == "kda":
        return 0
    return config.cache_width(layer) + (config.index.dim / config.index.pool if kind == "dsa" else 0)


def state_bytes_per_request(config: ModelConfig, *, element_bytes: int = 2) -> int:
    """Bytes that a request keeps whatever its length: KDA states in float32, convolution rows, an unfinished pool."""
    total = 0
    for kind in config.layers:
        if kind == "kda":
            k = config.kda
            total += k.heads * k.dim * k.dim * _STATE_BYTES + (k.conv - 1) * 3 * k.heads * k.dim * element_bytes
        if kind == "dsa" and config.index.pool > 1:
            total += 2 * config.index.waiting * config.index.lanes * config.index.dim * element_bytes
    return total


def workspaces(config: ModelConfig, *, rows: int, context: int, element_bytes: int = 2) -> dict[str, int]:
    """Bytes that a step of `rows` rows at a context of `context` tokens needs beside weights and caches, by what for.

    "residual bank" and "residual streams": what the residual of a layer reads. "index scores": float32, of all rows at
    once. "experts decoded": all of a layer as FP8 with scales, where they are packed. "logits": float32, of all rows.
    """
    found, residual, moe = {}, config.residual, config.moe
    if residual.kind == "attention":
        sources = math.ceil(len(config.layers) / residual.block) + 1
        found["residual bank"] = sources * config.hidden * rows * element_bytes
    if residual.kind == "mhc":
        found["residual streams"] = residual.streams * config.hidden * rows * element_bytes
    if config.index is not None:
        found["index scores"] = rows * math.ceil(context / config.index.pool) * 4
    if moe is not None and moe.packed != "none":
        values = 3 * moe.experts * moe.width * (moe.latent or config.hidden)
        found["experts decoded"] = round(values * EXPERT_FORMS["fp8"])
    found["logits"] = rows * config.vocab * 4
    return found
