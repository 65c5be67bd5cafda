"""The JSON files of the `tiny-<family>` presets: configurations as the family's releases spell them, made small.

All share the byte vocabulary of `tiny` and reach 4,096 positions, several pages and more keys than a selection keeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reference.storage import Form

JsonFiles = dict[str, dict[str, Any]]

IDS = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 320,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_DEEPSEEK = {
    **_SIZES,
    **IDS,
    "dtype": "bfloat16",
    "num_hidden_layers": 5,
    "max_position_embeddings": 8192,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
MXFP4 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "group_size": 32,
                "symmetric": True,
                "strategy": "group",
                "scale_dtype": "torch.uint8",
            },
        }
    },
    "ignore": [],
}
# What every small Kimi K3 tower and the processors of K3 and K2.5 share, as the releases spell it.
KIMI_K3_VISION = {
    "vt_hidden_size": 64,
    "vt_num_hidden_layers": 2,
    "vt_intermediate_size": 128,
    "patch_size": 14,
    "merge_kernel_size": [2, 2],
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "init_pos_emb_time": 4,
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "norm_type": "rmsnorm",
    "linear_bias": False,
    "attn_bias": False,
    "patch_embed_proj_bias": False,
    "mm_hidden_size": 64,
    "text_hidden_size": 128,
    "mm_projector_type": "patchmergerv2",
    "projector_ln_eps": 1e-5,
}
KIMI_MEDIA = {
    "in_patch_limit": 144,
    "patch_limit_on_one_side": 16,
    "patch_size": 14,
    "merge_kernel_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_INDEXER = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 64}


def _files(config: dict[str, Any]) -> JsonFiles:
    return {"config.json": config, "generation_config.json": {**IDS, "do_sample": False}}


def deepseek_v32(name: str) -> JsonFiles:
    """Grouped routing and YaRN from 2,048 positions, so that a long case passes the original context."""
    own = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    architecture = {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], "name": name}
    return _files({**architecture, **_DEEPSEEK, **_INDEXER, **own, "rope_scaling": _YARN})


def deepseek_v32_fp8(name: str) -> JsonFiles:
    """The same with linears in block FP8, as released."""
    files = deepseek_v32(name)
    files["config.json"]["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    return files


def glm_5(name: str) -> JsonFiles:
    """No groups, no YaRN, heads whose value is wider than their key, every other indexer shared, a draft layer."""
    own = {
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "qk_nope_head_dim": 24,
        "v_head_dim": 32,
        "indexer_rope_interleave": True,
        "indexer_types": ["full", "full", "shared", "full", "shared"],
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "num_nextn_predict_layers": 1,
    }
    architecture = {"model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"], "name": name}
    return _files({**architecture, **_DEEPSEEK, **_INDEXER, **own})


def kimi_linear(name: str) -> JsonFiles:
    """Softplus decay and low-rank output gate; full attention without rotation, queries without a latent."""
    own = {
        "num_hidden_layers": 8,
        "model_max_length": 8192,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": None,
        "qk_rope_head_dim": 16,
        "mla_use_nope": True,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "full_attn_layers": [4, 8],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
    }
    architecture = {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "name": name}
    return _files({**architecture, **_SIZES, **IDS, "dtype": "bfloat16", **own})


def glm_5_3(name: str) -> JsonFiles:
    """Pools of four with their tail, streams, bounded decay, clamped activations, a tower; nothing is rotated."""
    text = {
        **_SIZES,
        "model_type": "glm5_next_text",
        "dtype": "bfloat16",
        "num_hidden_layers": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 0,
        **_INDEXER,
        "index_kpool": 4,
        "index_kpool_always_select_tail": True,
        "layer_types": [_GLM_LAYERS[letter] for letter in "kkkskkss"],
        "indexer_types": ["full"] * 7 + ["shared"],
        "linear_attn_config": {
            "kda_layers": [0, 1, 2, 4, 5],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "safe_gate": True,
        },
        "mlp_layer_types": ["dense"] + ["sparse"] * 7,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "swiglu_limit": 10.0,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        **IDS,
    }
    vision = {
        "model_type": "glm5_next_vision",
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 128,
        "out_hidden_size": 128,
        "projection_intermediate_size": 192,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "image_size": 168,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "swiglu_limit": 10.0,
    }
    architecture = {"model_type": "glm5_next", "architectures": ["Glm5NextForConditionalGeneration"], "name": name}
    media = {"image_token_id": 259, "video_token_id": 259, "image_start_token_id": 260, "image_end_token_id": 262}
    media |= {"video_start_token_id": 266, "video_end_token_id": 267}
    files = _files({**architecture, **IDS, **media, "text_config": text, "vision_config": vision})
    processor = {"image_processor_type": "Glm5NextImageProcessor", "min_image_tokens": 4, "max_image_tokens": 36}
    return files | {"preprocessor_config.json": processor}


def kimi_k2_5(name: str) -> JsonFiles:
    """Full latent attention under YaRN, a tower with LayerNorms and biases, a projector with the norm in front."""
    text = {
        **_DEEPSEEK,
        "model_type": "deepseek_v3",
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_interleave": True,
        "rope_scaling": _YARN,
    }
    vision = {
        "model_type": "kimi_k25_vision",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "hidden_act": "gelu_pytorch_tanh",
        "patch_size": 14,
        "merge_kernel_size": [2, 2],
        "pos_emb_height": 8,
        "pos_emb_width": 8,
        "pos_emb_time": 4,
    }
    architecture = {"model_type": "kimi_k25", "architectures": ["Kimi_K25ForConditionalGeneration"], "name": name}
    media = {"image_token_id": 259, "vision_start_token_id": 260, "vision_end_token_id": 262}
    projector = {"projection_hidden_size": 64, "projection_layer_norm_eps": 1e-5, "tie_word_embeddings": False}
    files = _files({**architecture, **IDS, **media, **projector, "text_config": text, "vision_config": vision})
    return files | {"preprocessor_config.json": {"media_proc_cfg": KIMI_MEDIA}}


def kimi_k3(name: str) -> JsonFiles:
    """The switches of the release: dense gated latent attention without rotation, bounded decay, full-rank gates,
    attention residuals, SiTU, packed latent experts, a tower. The last layer breaks the period, as there."""
    text = {
        **_SIZES,
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": "bfloat16",
        "num_hidden_layers": 9,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 4,
        "q_lora_rank": 48,
        "qk_rope_head_dim": 8,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "full_attn_layers": [4, 8, 9],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_shared_experts": 2,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "routed_expert_hidden_size": 64,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "quantization_config": MXFP4,
    }
    del text["attention_bias"]
    vision = {**KIMI_K3_VISION, "vt_num_attention_heads": 3, "qkv_hidden_size": 96}
    architecture = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "name": name}
    outer = {"dtype": "bfloat16", **IDS, "media_placeholder_token_id": 259, "tie_word_embeddings": False}
    files = _files({**architecture, **outer, "text_config": text, "vision_config": vision})
    return files | {"preprocessor_config.json": {"media_proc_cfg": KIMI_MEDIA}}


def kimi_k2_5_int4(name: str) -> JsonFiles:
    """The same with routed experts in INT4, as released."""
    files = kimi_k2_5(name)
    files["config.json"]["text_config"]["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|(gate|up|down)_proj)$"],
    }
    return files


_GLM_LAYERS = {"k": "linear_attention", "s": "indexed_attention"}
FAMILY_PRESETS = {
    "tiny-deepseek-v3.2": deepseek_v32,
    "tiny-deepseek-v3.2-fp8": deepseek_v32_fp8,
    "tiny-glm-5": glm_5,
    "tiny-kimi-linear": kimi_linear,
    "tiny-glm-5.3": glm_5_3,
    "tiny-kimi-k2.5": kimi_k2_5,
    "tiny-kimi-k2.5-int4": kimi_k2_5_int4,
    "tiny-kimi-k3": kimi_k3,
}
# What a family's release stores in another form than plain tensors: preset -> forms of `reference.storage`.
FORMS: dict[str, tuple[Form, ...]] = {
    "tiny-deepseek-v3.2-fp8": ("block-fp8",),
    "tiny-kimi-k2.5-int4": ("int4-experts",),
    "tiny-kimi-k3": ("padded-a-log",),
}
