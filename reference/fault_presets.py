"""Variants of the small presets in which faults show that no other preset can show: one switch changed in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reference.storage import Form

JsonFiles = dict[str, dict[str, Any]]
Change = Callable[[JsonFiles], None]  # changes the files in place


def _weights_not_renormalised(files: JsonFiles) -> None:
    files["config.json"]["text_config"]["moe_renormalize"] = False


ROW_BREAK = 270


def _images_in_rows(files: JsonFiles) -> None:
    """A position table read bicubically; rows of an image that end with a break; positions with three axes."""
    files["config.json"]["vision_config"]["pos_emb_interpolation_mode"] = "bicubic"
    files["config.json"]["day0check"] = {"mrope_section": [2, 3, 3], "image_break_token_id": ROW_BREAK}
    added = files["tokenizer_config.json"]["added_tokens_decoder"]
    added[str(ROW_BREAK)] = {"content": "<|row_break|>", "special": True}


def _magnitude_scaled(files: JsonFiles) -> None:
    """YaRN whose two magnitude scales differ, so that cos and sin have a factor of their own."""
    files["config.json"]["rope_scaling"] |= {"mscale": 1.0, "mscale_all_dim": 0.5}


def _overlapping_pools(files: JsonFiles) -> None:
    """Keys of pools that are made of the tokens of two pools."""
    files["config.json"]["day0check"] = {"index_kpool_overlap": True}


def _grouped_queries(files: JsonFiles) -> None:
    """Two layers whose four query heads share two key heads, with a norm of its own for each head."""
    grouped = {"layers": [1, 5], "heads": 4, "kv_heads": 2, "head_dim": 16}
    files["config.json"]["day0check"] = {"grouped_query": grouped}


def _one_decay_for_a_head(files: JsonFiles) -> None:
    """Decays projected from the hidden state, one for all channels of a head."""
    files["config.json"]["day0check"] = {"linear_decay": "per_head"}


def _uneven_over_ranks(files: JsonFiles) -> None:
    """Six heads, 18 experts of three scale blocks and 250 columns: nothing of it comes out even over four ranks."""
    text = files["config.json"]["text_config"]
    text |= {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 250, "moe_intermediate_size": 96}
    text |= {"num_experts": 18, "num_expert_group": 3, "topk_group": 2}
    text["linear_attn_config"] = text["linear_attn_config"] | {"num_heads": 6}


def _forty_layers(files: JsonFiles) -> None:
    """As deep as models are, and as narrow as this one is."""
    config = files["config.json"]
    config["indexer_types"] = [config["indexer_types"][n % 5] for n in range(40)]
    config["num_hidden_layers"] = 40


def _calibrated_cache(files: JsonFiles) -> None:
    """A scale in every layer for FP8 codes of what it caches."""
    files["config.json"]["day0check"] = {"calibrated_cache": True}


# name -> (the preset it is a variant of, what is changed)
FAULT_PRESETS: dict[str, tuple[str, Change]] = {
    "fault-moe": ("tiny", _weights_not_renormalised),
    "fault-vl": ("tiny", _images_in_rows),
    "fault-gqa": ("tiny", _grouped_queries),
    "fault-packed": ("tiny", _one_decay_for_a_head),
    "fault-interleaved": ("tiny", _one_decay_for_a_head),
    "fault-pools": ("tiny-glm-5.3", _overlapping_pools),
    "fault-ranks": ("tiny", _uneven_over_ranks),
    "fault-cache": ("tiny-deepseek-v3.2", _calibrated_cache),
    "fault-deep": ("tiny-glm-5", _forty_layers),
    "fault-dsa": ("tiny-deepseek-v3.2", _magnitude_scaled),
}
# name -> forms in which its files store what the table of tensors lists plainly
FAULT_FORMS: dict[str, tuple[Form, ...]] = {
    "fault-packed": ("packed-linear",),
    "fault-interleaved": ("interleaved-gates",),
}
