"""Kimi K2.5: the text model of DeepSeek-V3 and a MoonViT tower with biases and LayerNorms (model.md 2.9, 7)."""

from __future__ import annotations

from typing import Any

from reference.config import ModelConfig, Vision
from reference.families.deepseek import text_model
from reference.families.keys import Keys
from reference.families.parts import check_quantisation, must_be, tokens

LAYER_NORM_EPS = 1e-5  # of the tower; no configuration has a key for it


def kimi_k25(keys: Keys, preprocessor: dict[str, Any], tokenizer: dict[str, Any]) -> ModelConfig:
    """Kimi K2.5 under transformers' keys or under those of the first release (`vt_...`)."""
    text = keys.part("text_config")
    check_quantisation(keys, text)
    must_be(text, "model_type", "deepseek_v3", "kimi_k2")
    for key in ("video_token_id", "vision_start_token_id", "vision_end_token_id", "use_unified_vision_chunk"):
        keys.used.add(key)
    pad = "image_token_id" if "image_token_id" in keys.data else "media_placeholder_token_id"
    return text_model(
        text,
        outer=keys,
        tokenizer=tokenizer,
        name=keys.text("name", "kimi_k25"),
        vision=_vision(keys, keys.part("vision_config"), preprocessor),
        tokens=tokens(keys, text, tokenizer=tokenizer, media_pad=pad),
    )


def _vision(keys: Keys, vision: Keys, preprocessor: dict[str, Any]) -> Vision:
    def size(key: str, default: int | None = None) -> int:
        earlier = {"pos_emb_height": "init_pos_emb_height", "pos_emb_width": "init_pos_emb_width"}
        first = vision.integer(earlier.get(key, f"vt_{key}"), default)
        return vision.integer(key) if first is None else vision.integer(key, first)

    for key in (
        "mm_hidden_size",
        "text_hidden_size",
        "init_pos_emb_time",
        "pos_emb_time",
        "merge_type",
        "pos_emb_type",
    ):
        vision.used.add(key)
    must_be(vision, "video_attn_type", "spatial_temporal")
    must_be(vision, "hidden_act", "gelu_pytorch_tanh")
    must_be(vision, "projector_hidden_act", "gelu")
    must_be(vision, "mm_projector_type", "patchmerger")
    rotary = vision.part("rope_parameters", optional=True)
    if rotary is not None:
        must_be(rotary, "rope_type", "axial")
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    must_be(keys, "projection_hidden_size", hidden)
    media = preprocessor.get("media_proc_cfg", preprocessor)
    return Vision(
        hidden=hidden,
        layers=size("num_hidden_layers"),
        heads=heads,
        head_dim=hidden // heads,
        mlp=size("intermediate_size"),
        patch=vision.integer("patch_size", 14),
        merge=vision.integers("merge_kernel_size", [2, 2])[0],
        table=(size("pos_emb_height", 64), size("pos_emb_width", 64)),
        interpolation="bicubic",
        norm="layer",
        eps=LAYER_NORM_EPS,
        bias=True,
        projector_pre_norm=True,
        projector_eps=keys.number("projection_layer_norm_eps", vision.number("projector_ln_eps", 1e-5)),
        rope_theta=10000.0 if rotary is None else rotary.number("rope_theta", 10000.0),
        patch_limit=int(media.get("in_patch_limit", media.get("max_patches", 16384))),
        side_limit=int(media.get("patch_limit_on_one_side", 512)),
        image_mean=tuple(float(m) for m in media.get("image_mean", (0.5, 0.5, 0.5))),
        image_std=tuple(float(s) for s in media.get("image_std", (0.5, 0.5, 0.5))),
    )
