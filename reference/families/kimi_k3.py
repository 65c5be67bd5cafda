"""Kimi K3 (model.md 1.1 and 4), and compositions of it with an indexer and rotary embedding."""

from __future__ import annotations

from typing import Any

from reference.config import Activation, Index, Kda, LayerKind, Mla, ModelConfig, Moe, Residual, Rope, Vision
from reference.errors import CheckpointError
from reference.families.keys import Keys
from reference.families.parts import SPARSE, leading_dense, must_be, rope, tokens


def kimi_k3(keys: Keys, preprocessor: dict[str, Any], tokenizer: dict[str, Any]) -> ModelConfig:
    """Kimi K3 (model.md 1.1 and 4): the text model inside `text_config`, a vision tower beside it."""
    text = keys.part("text_config")
    vision = _moonvit(keys.part("vision_config", optional=True), preprocessor)
    return _model(keys, text, tokenizer, vision=vision, first_dense=0)


def kimi_linear(keys: Keys, preprocessor: dict[str, Any], tokenizer: dict[str, Any]) -> ModelConfig:
    """Kimi Linear: the same keys at the top level; softplus decay, low-rank output gate, queries without a latent."""
    for key in ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "qk_head_dim", "pretraining_tp"):
        keys.used.add(key)  # what transformers adds says again what linear_attn_config says
    keys.used.add("output_router_logits")
    must_be(keys, "attention_bias", False)
    return _model(keys, keys, tokenizer, vision=None, first_dense=1)


def _model(
    keys: Keys, text: Keys, tokenizer: dict[str, Any], *, vision: Vision | None, first_dense: int
) -> ModelConfig:
    linear = text.part("linear_attn_config")
    layers = _layer_kinds(text, linear)
    nope = text.flag("mla_use_nope", True)
    if nope:  # nothing is rotated, whatever these say
        text.used.update(("rope_theta", "rope_scaling", "rope_parameters"))
    rope_dims = text.integer("qk_rope_head_dim")
    block = text.integer("attn_res_block_size", None)
    linear_beta = text.number("activation_situ_linear_beta", None)
    must_be(text, "hidden_act", "silu", "situ")
    situ = text.text("hidden_act", "silu") == "situ"
    if text.data.get("num_nextn_predict_layers") == 0:  # any other number stays among the unknown keys
        text.used.add("num_nextn_predict_layers")
    return ModelConfig(
        name=keys.text("name", keys.text("model_type")),
        hidden=text.integer("hidden_size"),
        layers=layers,
        vocab=text.integer("vocab_size"),
        max_positions=text.integer("max_position_embeddings", text.integer("model_max_length", 0)),
        mlp_width=text.integer("intermediate_size"),
        mla=_full_attention(text, rope_dims),
        index=_index(text, 0 if nope else rope_dims),
        kda=_kda(linear),
        moe=_kimi_moe(text, layers=len(layers), first_dense=first_dense),
        vision=vision,
        residual=Residual() if block is None else Residual("attention", block=block),
        activation=Activation("situ", text.number("activation_situ_beta", 1.0), linear_beta) if situ else Activation(),
        rope=Rope() if nope else rope(text),
        eps=text.number("rms_norm_eps"),
        tied_head=keys.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False)),
        tokens=tokens(keys, text, tokenizer=tokenizer),
    )


def _layer_kinds(text: Keys, linear: Keys) -> tuple[LayerKind, ...]:
    """Attention kind of each layer: the two lists are 1-based; `indexer_types` (0-based, one per layer) says which
    full-attention layers select keys. A period would be wrong: the last layer of K3 breaks it (model.md 6.8)."""
    count = text.integer("num_hidden_layers")
    kda, full = linear.integers("kda_layers"), linear.integers("full_attn_layers")
    if sorted(kda + full) != list(range(1, count + 1)):
        raise CheckpointError(
            f"kda_layers and full_attn_layers together must name each of the layers 1 to {count} once",
            where=f"config.json: {linear.path}",
        )
    names = ["linear_attention" if n in set(kda) else "full_attention" for n in range(1, count + 1)]
    if text.value("layer_types", list, names) != names:
        raise CheckpointError(
            "layer_types contradicts kda_layers and full_attn_layers, which count from 1",
            where=f"config.json: {linear.path}",
            todo="make the two lists say the same",
        )
    has_index = text.integer("index_topk", None) is not None
    types = text.value("indexer_types", list, ["full" if has_index else "none"] * count)
    kinds: dict[str, LayerKind] = {**SPARSE, "none": "mla"}
    if len(types) != count or not set(types) <= set(kinds):
        raise CheckpointError(
            f"indexer_types must hold {count} of {', '.join(kinds)}", where="config.json: text_config.indexer_types"
        )
    return tuple("kda" if i + 1 in set(kda) else kinds[types[i]] for i in range(count))


def _full_attention(text: Keys, rope_dims: int) -> Mla:
    return Mla(
        heads=text.integer("num_attention_heads"),
        q_lora=text.integer("q_lora_rank", None),
        kv_lora=text.integer("kv_lora_rank"),
        nope=text.integer("qk_nope_head_dim"),
        rope=rope_dims,
        v=text.integer("v_head_dim"),
        gate=text.flag("mla_use_output_gate", False),
    )


def _index(text: Keys, rope_dims: int) -> Index | None:
    topk = text.integer("index_topk", None)
    if topk is None:
        return None
    return Index(
        heads=text.integer("index_n_heads"),
        dim=text.integer("index_head_dim"),
        topk=topk,
        rope=rope_dims,
        rope_layout=(
            "none" if not rope_dims else "interleaved" if text.flag("indexer_rope_interleave", False) else "half"
        ),
    )


def _kda(linear: Keys) -> Kda:
    dim = linear.integer("head_dim")
    return Kda(
        heads=linear.integer("num_heads"),
        dim=dim,
        conv=linear.integer("short_conv_kernel_size", 4),
        gate_lower_bound=linear.number("gate_lower_bound", None),
        full_rank_gate=linear.flag("use_full_rank_gate", False),
        rank=dim,  # no key of its own: f_a_proj has head_dim rows in every released checkpoint
    )


def _kimi_moe(text: Keys, *, layers: int, first_dense: int) -> Moe | None:
    experts = text.integer("num_experts", None)
    if experts is None:
        return None
    quantization = text.part("quantization_config", optional=True)
    packed = "none"
    if quantization is not None:
        stated = quantization.data.get("format")
        if stated != "mxfp4-pack-quantized":
            raise CheckpointError(
                f"quantisation format {stated!r} has no reader",
                where="config.json: text_config.quantization_config.format",
                todo="known: mxfp4-pack-quantized",
            )
        packed = "mxfp4"
        quantization.used.update(quantization.data)
    width = text.integer("moe_intermediate_size")
    text.text("topk_method", "noaux_tc"), text.flag("use_grouped_topk", True)
    return Moe(
        experts=experts,
        topk=text.integer("num_experts_per_token"),
        width=width,
        shared_width=width * text.integer("num_shared_experts", 0),
        groups=text.integer("num_expert_group", 1),
        kept_groups=text.integer("topk_group", 1),
        renormalise=text.flag("moe_renormalize", True),
        scale=text.number("routed_scaling_factor", 1.0),
        scoring=text.text("moe_router_activation_func", "sigmoid"),
        latent=text.integer("routed_expert_hidden_size", None),
        latent_norm=text.flag("latent_moe_use_norm", False),
        first_dense=leading_dense(text, layers=layers, default=first_dense),
        frequency=text.integer("moe_layer_freq", 1),
        packed=packed,
    )


def _moonvit(vision: Keys | None, preprocessor: dict[str, Any]) -> Vision | None:
    if vision is None:
        return None
    media = preprocessor.get("media_proc_cfg", preprocessor)
    heads = vision.integer("vt_num_attention_heads")
    merge = vision.integers("merge_kernel_size", [2, 2])
    for key in ("mm_hidden_size", "text_hidden_size", "init_pos_emb_time"):
        vision.integer(key, None)
    for key in (
        "merge_type",
        "mlp_type",
        "mm_projector_type",
        "pos_emb_type",
        "projector_hidden_act",
        "activation_func",
    ):
        vision.text(key, None)
    vision.flag("attn_bias", False), vision.flag("patch_embed_proj_bias", False)
    return Vision(
        hidden=vision.integer("vt_hidden_size"),
        layers=vision.integer("vt_num_hidden_layers"),
        heads=heads,
        head_dim=vision.integer("qkv_hidden_size") // heads,
        mlp=vision.integer("vt_intermediate_size"),
        patch=vision.integer("patch_size", 14),
        merge=merge[0],
        table=(vision.integer("init_pos_emb_height", 64), vision.integer("init_pos_emb_width", 64)),
        interpolation=vision.text("pos_emb_interpolation_mode", "bilinear"),
        norm="rms" if vision.text("norm_type", "rmsnorm") == "rmsnorm" else "layer",
        bias=vision.flag("linear_bias", False),
        projector_eps=vision.number("projector_ln_eps", 1e-5),
        patch_limit=int(media.get("in_patch_limit", 65536)),
        side_limit=int(media.get("patch_limit_on_one_side", 512)),
        image_mean=tuple(float(m) for m in media.get("image_mean", (0.5, 0.5, 0.5))),
        image_std=tuple(float(s) for s in media.get("image_std", (0.5, 0.5, 0.5))),
    )
