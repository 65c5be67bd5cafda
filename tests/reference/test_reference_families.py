"""config.json to ModelConfig, and the tensor table that follows from it."""

import copy

import pytest

from reference.config import Tokens
from reference.errors import CheckpointError
from reference.families import read_config, read_config_and_rest
from reference.presets import preset
from reference.tensors import canonical_name, expected_tensors, stored_name


def changed(path: str, value: object) -> dict:
    """tiny's config.json with the value at a dotted path replaced; None removes the key."""
    data = copy.deepcopy(preset("tiny").json_files["config.json"])
    *parents, last = path.split(".")
    part = data
    for key in parents:
        part = part[key]
    part.pop(last, None)
    if value is not None:
        part[last] = value
    return data


def test_tiny_is_the_composition():
    """Catches a reader that drops one of the switches of the composition."""
    files = preset("tiny").json_files
    config = preset("tiny").config()
    assert config.layers == ("kda", "kda", "kda", "dsa", "kda", "mla", "kda", "dsa")
    assert (config.rope.layout, config.index.rope, config.index.rope_layout) == ("interleaved", 16, "half")
    assert (config.index.heads, config.index.dim, config.index.topk) == (16, 32, 64)
    assert (config.moe.groups, config.moe.kept_groups, config.moe.scale) == (4, 2, 2.5)
    assert (config.vision.patch_limit, config.vision.side_limit) == (144, 16)
    assert config.tokens == Tokens(256, 257, 258, 259, 260, 261, 262, 263, 264, 265)
    assert read_config_and_rest(files["config.json"])[1] == ()


def test_shared_selection_and_default_of_indexer_types():
    """Catches an indexer given to a layer that shares, and full layers without one when the list is absent."""
    types = ["none", "none", "none", "full", "none", "shared", "none", "none"]
    config = read_config(changed("text_config.indexer_types", types))
    assert config.layers[3::2] == ("dsa", "dsa_shared", "mla")
    names = expected_tensors(config)
    assert "layers.3.self_attn.indexer.wq_b.weight" in names
    assert "layers.5.self_attn.indexer.wq_b.weight" not in names
    assert read_config(changed("text_config.indexer_types", None)).layers.count("dsa") == 3


def test_unknown_keys_are_reported():
    """Catches a key that would change the mathematics and is ignored in silence."""
    config = changed("text_config.swiglu_limit", 7.0)
    config["text_config"]["linear_attn_config"]["allow_neg_eigval"] = True
    config["text_config"]["num_nextn_predict_layers"] = 1
    assert read_config_and_rest(config)[1] == (
        "text_config.linear_attn_config.allow_neg_eigval",
        "text_config.num_nextn_predict_layers",
        "text_config.swiglu_limit",
    )


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model_type", "llama", "kimi_k3"),
        ("model_type", None, "model_type"),
        ("text_config", None, "text_config"),
        ("text_config", [], "text_config"),
        ("text_config.hidden_size", None, "text_config.hidden_size"),
        ("text_config.hidden_size", "128", "text_config.hidden_size"),
        ("text_config.hidden_size", True, "text_config.hidden_size"),
        ("text_config.hidden_size", 0, "hidden_size"),
        ("text_config.linear_attn_config.kda_layers", [0, 1, 2, 4, 6], "layers 1 to 8"),
        ("text_config.linear_attn_config.kda_layers", [1, 2, 3, 5.0, 7], "kda_layers"),
        ("text_config.indexer_types", ["full"], "indexer_types"),
        ("text_config.index_topk", None, "index_topk"),
        ("text_config.q_lora_rank", None, "q_lora_rank"),
        ("text_config.num_experts_per_token", 17, "num_experts_per_token"),
        ("text_config.num_expert_group", 3, "num_expert_group"),
        ("text_config.moe_intermediate_size", 48, "32"),
        ("text_config.quantization_config.format", "nvfp4-pack-quantized", "nvfp4"),
        ("vision_config.qkv_hidden_size", 24, "vision"),
        ("vision_config.vt_num_attention_heads", 0, "no sense"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_key(path, value, words):
    """Catches a bare KeyError or TypeError, or a model built from a configuration that contradicts itself."""
    with pytest.raises(CheckpointError) as caught:
        read_config(changed(path, value))
    assert words in str(caught.value)
    assert "config.json" in str(caught.value)


def test_stored_and_canonical_names_are_inverse():
    """Catches a prefix that is not the released one, or a canonical name that cannot be found again."""
    for name in expected_tensors(preset("tiny").config()):
        assert canonical_name(stored_name(name)) == name
    assert stored_name("layers.3.self_attn.A_log") == "language_model.model.layers.3.self_attn.A_log"
    assert stored_name("lm_head.weight") == "language_model.lm_head.weight"
    assert stored_name("mm_projector.proj.0.weight") == "mm_projector.proj.0.weight"
