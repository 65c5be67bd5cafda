"""Released full-size configurations: every tensor of the model is in the table, none is invented."""

import math

import pytest

from reference.families import read_config, read_config_and_rest
from reference.tensors import canonical_name, expected_tensors, stored_name

DEEPSEEK = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK_V32 = DEEPSEEK | {
    "model_type": "deepseek_v32",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "index_n_heads": 64,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
GLM_5 = DEEPSEEK | {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "eos_token_id": [154820, 154827, 154829],
}
KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "head_dim": 72,
    "hidden_act": "silu",
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": KIMI_FULL,
        "kda_layers": [n for n in range(1, 28) if n not in KIMI_FULL],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "model_max_length": 1048576,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
GLM_5_3_TEXT = {
    key: value for key, value in DEEPSEEK.items() if key not in ("scoring_func", "topk_method", "moe_layer_freq")
} | {
    "vocab_size": 154880,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "n_routed_experts": 288,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 32,
    "index_kpool": 4,
    "mhc": True,
    "layer_types": ["deepseek_sparse_attention" if n % 4 == 3 else "linear_attention" for n in range(45)],
    "linear_attn_config": {
        "num_heads": 64,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "kda_layers": [n for n in range(45) if n % 4 != 3],
    },
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
}
GLM_5_3 = {"model_type": "glm5_next", "text_config": GLM_5_3_TEXT}


def parameters(config) -> int:
    return sum(math.prod(stored.shape) for stored in expected_tensors(config).values())


def test_deepseek_v32_has_v3s_parameters_and_an_indexer_per_layer():
    """Catches a tensor left out, invented or misshapen: V3 without its draft layer has 671,026,419,200 parameters, and
    each of the 61 indexers 13,959,424."""
    config, unknown = read_config_and_rest(DEEPSEEK_V32)
    assert unknown == ()
    assert parameters(config) == 671_026_419_200 + 61 * 13_959_424
    assert (config.rope.layout, config.index.rope_layout, config.index.rope) == ("interleaved", "half", 64)
    assert config.softmax_scale() == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


@pytest.mark.parametrize(
    ("config_json", "billions"),
    [pytest.param(GLM_5, 744, id="GLM-5"), pytest.param(KIMI_LINEAR, 49, id="Kimi Linear")],
)
def test_the_published_size_is_that_of_the_table(config_json, billions):
    """Catches a tensor left out, invented or misshapen, to the published billion."""
    config, unknown = read_config_and_rest(config_json)
    assert unknown == ()
    assert round(parameters(config) / 1e9) == billions


def test_glm_5_3_with_its_draft_layer_has_the_published_size():
    """Catches a layer list counted from 1: the text model and one more expert layer, the draft, make 321 billion."""
    config, unknown = read_config_and_rest(GLM_5_3)
    draft_experts = 3 * 288 * 4096 * 2048
    assert unknown == ()
    assert 320e9 < parameters(config) + draft_experts < 322e9
    assert [n for n, kind in enumerate(config.layers) if kind == "dsa"] == list(range(3, 45, 4))
    assert (config.mla.latent_eps, config.index.pool, config.kda.gate_lower_bound) == (1e-5, 4, -5.0)


def test_kimi_linear_counts_layers_from_one():
    """Catches the schedule of period 4, which the last layer breaks, and rotated dims where only their width counts."""
    config = read_config(KIMI_LINEAR)
    assert [n + 1 for n, kind in enumerate(config.layers) if kind == "mla"] == KIMI_FULL
    assert (config.rope.layout, config.mla.latent_eps, config.kda.gate_lower_bound) == ("none", 1e-6, None)


@pytest.mark.parametrize("config_json", [DEEPSEEK_V32, GLM_5, KIMI_LINEAR, GLM_5_3], ids=lambda c: c["model_type"])
def test_names_of_a_release_and_canonical_names_are_inverse(config_json):
    """Catches a name that is written under one spelling and not found again under the canonical one."""
    family = config_json["model_type"]
    for name in expected_tensors(read_config(config_json)):
        assert canonical_name(stored_name(name, family=family)) == name


def test_names_of_releases_are_as_published():
    """Catches a prefix or an expert's part that only our own reader would understand."""
    deepseek, kimi = "deepseek_v32", "kimi_linear"
    expert = "layers.4.block_sparse_moe.experts.7"
    assert stored_name(f"{expert}.w1.weight", family=deepseek) == "model.layers.4.mlp.experts.7.gate_proj.weight"
    assert stored_name(f"{expert}.w3.weight", family=deepseek) == "model.layers.4.mlp.experts.7.up_proj.weight"
    assert stored_name(f"{expert}.w2.weight", family=deepseek) == "model.layers.4.mlp.experts.7.down_proj.weight"
    assert stored_name(f"{expert}.w1.weight", family=kimi) == f"model.{expert}.w1.weight"
    assert stored_name("lm_head.weight", family=deepseek) == "lm_head.weight"
    gate = "layers.4.block_sparse_moe.gate.e_score_correction_bias"
    assert stored_name(gate, family="glm5_next") == "model.language_model.layers.4.mlp.gate.e_score_correction_bias"
    assert canonical_name("model.layers.0.block_sparse_moe.up_proj.weight") == "layers.0.mlp.up_proj.weight"
