"""GLM-5.3 (`glm5_next`): KDA and k-pool sparse attention without rotation, mHC streams, clamped SwiGLU (model.md 1.2).

transformers names layers by `layer_types`; released configurations have a `linear_attn_config` whose `kda_layers`
count from 0, unlike Kimi's.
"""

from __future__ import annotations

from typing import Any

from reference.config import Activation, Index, Kda, LayerKind, ModelConfig, Residual, Vision
from reference.errors import CheckpointError
from reference.families.deepseek import latent_attention, mixture
from reference.families.keys import Keys
from reference.families.parts import SPARSE, check_quantisation, draft_layer, indexer_types, must_be, tokens

SAFE_BOUND = -5.0
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SPARSE_NAMES = ("indexed_attention", "deepseek_sparse_attention", "full_attention")


def glm5_next(keys: Keys, preprocessor: dict[str, Any], tokenizer: dict[str, Any]) -> ModelConfig:
    """GLM-5.3; a text-only configuration may hold the text keys at the top level."""
    text = keys.part("text_config", optional=True) or keys
    check_quantisation(keys, text)
    for key in ("qk_head_dim", "output_router_logits", "router_aux_loss_coef"):
        text.used.add(key)
    # Nothing is rotated; iterations of drafting share a selection, which one draft does not need.
    for key in ("indexer_rope_interleave", "index_share_for_mtp_iteration"):
        text.used.add(key)
    for key in (
        "video_token_id",
        *(f"{kind}_{end}_token_id" for kind in ("image", "video") for end in ("start", "end")),
    ):
        keys.used.add(key)
    must_be(text, "attention_bias", False)
    must_be(text, "hidden_act", "silu")
    must_be(text, "mla_use_nope", True)
    must_be(text, "moe_router_dtype", "float32")
    must_be(text, "topk_method", "noaux_tc")
    count = text.integer("num_hidden_layers")
    eps = text.number("rms_norm_eps")
    linear = text.part("linear_attn_config", optional=True)
    return ModelConfig(
        name=keys.text("name", "glm5_next"),
        hidden=text.integer("hidden_size"),
        layers=_layers(text, linear, count),
        vocab=text.integer("vocab_size"),
        max_positions=text.integer("max_position_embeddings"),
        mlp_width=text.integer("intermediate_size"),
        mla=latent_attention(text, latent_eps=eps),  # this family alone gives rms_norm_eps to the latent norms
        index=_index(text),
        kda=_kda(text, linear),
        moe=mixture(text, layers=count),
        vision=_vision(keys.part("vision_config", optional=True), preprocessor),
        draft=draft_layer(text, kind="dsa"),
        residual=_residual(text),
        activation=Activation("clamped", limit=text.number("swiglu_limit", 10.0)),
        eps=eps,
        tied_head=keys.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False)),
        tokens=tokens(keys, text, tokenizer=tokenizer, media_pad="image_token_id"),
    )


def _residual(text: Keys) -> Residual:
    streams, sinkhorn = text.integer("hc_mult", 4), text.integer("hc_sinkhorn_iters", 20)
    hc_eps = text.number("hc_eps", 1e-6)
    must_be(text, "mhc", True)
    return Residual("mhc", streams=streams, sinkhorn=sinkhorn, hc_eps=hc_eps)


def _layers(text: Keys, linear: Keys | None, count: int) -> tuple[LayerKind, ...]:
    names = text.value("layer_types", list, None)
    kda = None if linear is None else linear.integers("kda_layers", None)
    if linear is not None:
        linear.integers("full_attn_layers", None)
    if kda is not None and not set(kda) <= set(range(count)):
        raise CheckpointError(
            f"kda_layers must lie in 0 to {count - 1}", where=f"config.json: {linear.path}.kda_layers"
        )
    if names is None:
        kda = [n for n in range(count) if n % 4 != 3] if kda is None else kda
        names = ["linear_attention" if n in set(kda) else SPARSE_NAMES[0] for n in range(count)]
    where = f"config.json: {text.path + '.' if text.path else ''}layer_types"
    if len(names) != count or not set(names) <= {"linear_attention", *SPARSE_NAMES}:
        raise CheckpointError(
            f"layer_types must hold {count} of linear_attention, {', '.join(SPARSE_NAMES)}", where=where
        )
    if kda is not None and [n for n, name in enumerate(names) if name == "linear_attention"] != sorted(kda):
        raise CheckpointError("layer_types contradicts kda_layers, which count from 0", where=where)
    types = indexer_types(text, layers=count)
    return tuple("kda" if name == "linear_attention" else SPARSE[types[n]] for n, name in enumerate(names))


def _index(text: Keys) -> Index:
    must_be(text, "index_kpool_compress", True)
    topk, pool = text.integer("index_topk"), text.integer("index_kpool", 16)
    if pool < 1 or topk % pool:
        raise CheckpointError(f"index_topk {topk} is not a multiple of index_kpool {pool}", where="config.json")
    return Index(
        heads=text.integer("index_n_heads"),
        dim=text.integer("index_head_dim"),
        topk=topk,
        rope_layout="none",
        pool=pool,
        pool_tail=text.flag("index_kpool_always_select_tail", True),
    )


def _kda(text: Keys, linear: Keys | None) -> Kda:
    heads, dim = text.integer("linear_num_heads", 64), text.integer("linear_head_dim", 128)
    conv, bound = text.integer("linear_conv_kernel_dim", 4), text.number("linear_lower_bound", None)
    if "linear_lower_bound" not in text.data:
        bound = SAFE_BOUND
    if linear is not None:
        heads, dim = linear.integer("num_heads", heads), linear.integer("head_dim", dim)
        conv = linear.integer("short_conv_kernel_size", conv)
        bound = linear.number("gate_lower_bound", bound)
        if linear.flag("safe_gate", True) and bound is None:
            bound = SAFE_BOUND
    return Kda(heads=heads, dim=dim, conv=conv, gate_lower_bound=bound, full_rank_gate=False, rank=dim)


def _vision(vision: Keys | None, preprocessor: dict[str, Any]) -> Vision | None:
    """The GLM tower; sizes of images from preprocessor_config.json, with the processor's own defaults."""
    if vision is None:
        return None
    must_be(vision, "hidden_act", "silu")
    must_be(vision, "in_channels", 3)
    vision.used.add("image_size")  # images keep their aspect; nothing reads it
    rotary = vision.part("rope_parameters", optional=True)
    if rotary is not None:
        must_be(rotary, "rope_type", "axial")
    hidden, heads = vision.integer("hidden_size"), vision.integer("num_heads")
    return Vision(
        kind="glm",
        hidden=hidden,
        layers=vision.integer("depth"),
        heads=heads,
        head_dim=hidden // heads,
        mlp=vision.integer("intermediate_size"),
        patch=vision.integer("patch_size", 14),
        merge=vision.integer("spatial_merge_size", 2),
        frames=vision.integer("temporal_patch_size", 2),
        eps=vision.number("rms_norm_eps", 1e-5),
        bias=vision.flag("attention_bias", True),
        out_hidden=vision.integer("out_hidden_size"),
        projector_width=vision.integer("projection_intermediate_size"),
        limit=vision.number("swiglu_limit", 10.0),
        rope_theta=10000.0 if rotary is None else rotary.number("rope_theta", 10000.0),
        min_tokens=int(preprocessor.get("min_image_tokens", 16)),
        max_tokens=int(preprocessor.get("max_image_tokens", 8000)),
        image_mean=tuple(float(m) for m in preprocessor.get("image_mean", CLIP_MEAN)),
        image_std=tuple(float(s) for s in preprocessor.get("image_std", CLIP_STD)),
    )
