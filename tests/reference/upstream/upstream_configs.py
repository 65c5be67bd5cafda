"""Tiny configurations of upstream's own classes, every switch of their family on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
}
INDEXER = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 32}  # few heads tie at zero (model.md 6.4)

# theta 256 over 8 dims, and a YaRN ramp of halves, make every frequency a short binary fraction: the float32 angle is
# then exact, so that a float64 comparison sees the formula and not the rounding of the angle.
MEDIA_ENDS = (("image", "start"), ("image", "end"), ("video", "start"), ("video", "end"))
YARN = {
    "rope_type": "yarn",
    "rope_theta": 256.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}


def deepseek_v32() -> Any:
    from transformers import DeepseekV32Config

    return DeepseekV32Config(
        **COMMON, **DEEPSEEK, **INDEXER, n_group=2, topk_group=1, first_k_dense_replace=1, rope_parameters=YARN
    )


def glm_5() -> Any:
    from transformers import GlmMoeDsaConfig

    return GlmMoeDsaConfig(
        **COMMON | {"qk_nope_head_dim": 24, "v_head_dim": 20},
        **DEEPSEEK,
        **INDEXER,
        mlp_layer_types=["dense", "sparse", "sparse"],
        indexer_types=["full", "shared", "full"],
        rope_parameters={"rope_type": "default", "rope_theta": 256.0},
    )


def kimi_linear() -> Any:
    from transformers import KimiLinearConfig

    linear = {
        "kda_layers": [1, 2, 3, 5],  # counted from 1; the default schedule of the class counts otherwise
        "full_attn_layers": [4, 6],
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
    }
    return KimiLinearConfig(
        **COMMON,
        num_hidden_layers=6,
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=1,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        first_k_dense_replace=1,
        num_expert_group=2,
        topk_group=1,
        model_max_length=512,
        linear_attn_config=linear,
    )


def glm_5_3() -> Any:
    from transformers import Glm5NextConfig

    text = COMMON | {
        "vocab_size": 200,
        "num_hidden_layers": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 0,
        "index_topk": 16,
        "index_head_dim": 16,
        "index_n_heads": 16,
        "index_kpool": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense"] + ["sparse"] * 7,
        # a shared layer must directly follow the full one: upstream hands a selection no further
        "layer_types": [{"k": "linear_attention", "s": "indexed_attention"}[c] for c in "kkkskkss"],
        "indexer_types": ["full"] * 7 + ["shared"],
        "swiglu_limit": 1.0,  # small enough to cut
        "max_position_embeddings": 512,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "projection_intermediate_size": 48,
        "image_size": 56,
        "swiglu_limit": 0.5,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 256.0},
    }
    ids = {f"{kind}_{end}_token_id": 192 + n for n, (kind, end) in enumerate(MEDIA_ENDS)}
    return Glm5NextConfig(text_config=text, vision_config=vision, image_token_id=190, video_token_id=191, **ids)


def kimi_k2_5() -> Any:
    from transformers import Kimi_K25Config

    text = COMMON | DEEPSEEK | {"model_type": "deepseek_v3", "vocab_size": 200, "n_group": 1, "topk_group": 1}
    text |= {"first_k_dense_replace": 1, "rope_parameters": YARN | {"mscale_all_dim": 1.0}}
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 256.0},
    }
    return Kimi_K25Config(
        image_token_id=190,
        projection_hidden_size=32,  # its default is the released width
        tie_word_embeddings=False,
        text_config=text,
        vision_config=vision,
    )


def _image_text() -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText


def _causal() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "deepseek-v3.2": (deepseek_v32, _causal),
    "glm-5": (glm_5, _causal),
    "kimi-linear": (kimi_linear, _causal),
    "glm-5.3": (glm_5_3, _image_text),
    "kimi-k2.5": (kimi_k2_5, _image_text),
}


def upstream_model(family: str) -> Any:
    """An upstream model of the family with whatever weights upstream starts from, attention in plain operators."""
    config, model_class = FAMILIES[family]
    return model_class().from_config(config(), attn_implementation="eager")
