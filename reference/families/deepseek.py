"""DeepSeek-V3, V3.2 and GLM-5: latent attention, plain residual, grouped routing (model.md 1.2, 2.3, 2.4, 4)."""

from __future__ import annotations

from typing import Any

from reference.config import Index, Mla, ModelConfig, Moe
from reference.families.keys import Keys
from reference.families.parts import (
    SPARSE,
    check_quantisation,
    draft_layer,
    indexer_types,
    leading_dense,
    must_be,
    rope,
    tokens,
)

LATENT_EPS = 1e-6  # of the latent norms; every upstream class leaves rms_norm_eps out of them (model.md 2.1)


def deepseek_v3(keys: Keys, preprocessor: dict[str, Any], tokenizer: dict[str, Any]) -> ModelConfig:
    """DeepSeek-V3 and Kimi K2: every layer attends to all visible keys."""
    return text_model(keys, outer=keys, tokenizer=tokenizer)


def deepseek_v32(keys: Keys, preprocessor: dict[str, Any], tokenizer: dict[str, Any]) -> ModelConfig:
    """DeepSeek-V3.2: an indexer in every layer, its rotary embedding half-split where that of attention is interleaved
    (model.md 6.1)."""
    return text_model(keys, outer=keys, tokenizer=tokenizer, index_layout="half")


def glm_moe_dsa(keys: Keys, preprocessor: dict[str, Any], tokenizer: dict[str, Any]) -> ModelConfig:
    """GLM-5: as V3.2 without YaRN, the indexer rotated in interleaved pairs; layers may share a selection."""
    return text_model(keys, outer=keys, tokenizer=tokenizer, index_layout="interleaved")


def text_model(
    text: Keys, *, outer: Keys, tokenizer: dict[str, Any], index_layout: str | None = None, **more: Any
) -> ModelConfig:
    """The ModelConfig of a DeepSeek-V3 text configuration; `index_layout` None: no indexer. `more` fields are set."""
    count = text.integer("num_hidden_layers")
    for key, allowed in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        must_be(text, key, allowed)
    check_quantisation(text, outer)
    _structural(text)
    rotary = rope(text)
    index = None
    layers = ("mla",) * count
    if index_layout is not None:
        index = _index(text, index_layout)
        layers = tuple(SPARSE[kind] for kind in indexer_types(text, layers=count))
    return ModelConfig(
        **{
            "name": outer.text("name", text.text("model_type")),
            "hidden": text.integer("hidden_size"),
            "layers": layers,
            "vocab": text.integer("vocab_size"),
            "max_positions": text.integer("max_position_embeddings"),
            "mlp_width": text.integer("intermediate_size"),
            "mla": latent_attention(text, latent_eps=LATENT_EPS),
            "index": index,
            "moe": mixture(text, layers=count, groups=(1, 1) if index_layout == "interleaved" else (8, 4)),
            "draft": draft_layer(text, kind="mla" if index is None else "dsa"),
            "rope": rotary,
            "eps": text.number("rms_norm_eps"),
            "tied_head": outer.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False)),
            "tokens": tokens(outer, text, tokenizer=tokenizer),
            **more,
        }
    )


def _structural(text: Keys) -> None:
    """Marks keys as read that say again what other keys say, or that only training reads."""
    for key in ("qk_head_dim", "output_router_logits", "pretraining_tp", "ep_size", "router_aux_loss_coef"):
        text.used.add(key)
    must_be(text, "topk_method", "noaux_tc")
    kinds = text.value("layer_types", list, [])
    if set(kinds) <= {"indexed_attention", "full_attention"}:
        return
    text.used.discard("layer_types")


def latent_attention(text: Keys, *, latent_eps: float) -> Mla:
    return Mla(
        heads=text.integer("num_attention_heads"),
        q_lora=text.integer("q_lora_rank", None),
        kv_lora=text.integer("kv_lora_rank"),
        nope=text.integer("qk_nope_head_dim"),
        rope=text.integer("qk_rope_head_dim"),
        v=text.integer("v_head_dim"),
        latent_eps=latent_eps,
    )


def _index(text: Keys, layout: str) -> Index:
    stated = text.flag("indexer_rope_interleave", None)
    if stated is not None:
        layout = "interleaved" if stated else "half"
    return Index(
        heads=text.integer("index_n_heads"),
        dim=text.integer("index_head_dim"),
        topk=text.integer("index_topk"),
        rope=text.integer("qk_rope_head_dim"),
        rope_layout=layout,
    )


def mixture(text: Keys, *, layers: int, groups: tuple[int, int] = (1, 1)) -> Moe:
    """Routed experts under DeepSeek's names. `moe_layer_freq` other than 1 thins them out. What a configuration leaves
    out has the default of upstream's classes, which differ in `groups` alone."""
    must_be(text, "scoring_func", "sigmoid")
    width = text.integer("moe_intermediate_size")
    return Moe(
        experts=text.integer("n_routed_experts"),
        topk=text.integer("num_experts_per_tok"),
        width=width,
        shared_width=width * text.integer("n_shared_experts", 1),
        groups=text.integer("n_group", groups[0]),
        kept_groups=text.integer("topk_group", groups[1]),
        renormalise=text.flag("norm_topk_prob", True),
        scale=text.number("routed_scaling_factor", 2.5),
        first_dense=leading_dense(text, layers=layers, default=3),
        frequency=text.integer("moe_layer_freq", 1),
    )
