"""Readers of the families beside Kimi K3: what they refuse, what they leave to defaults, what they report."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from reference.errors import CheckpointError
from reference.families import read_config, read_config_and_rest
from reference.preset_families import FAMILY_PRESETS
from reference.presets import preset, preset_dir
from reference.weights import INDEX, SINGLE, Checkpoint


def changed(name: str, path: str, value: object) -> dict:
    """A preset's config.json with the value at a dotted path replaced; None removes the key."""
    data = copy.deepcopy(preset(name).json_files["config.json"])
    *parents, last = path.split(".")
    part = data
    for key in parents:
        part = part[key]
    part.pop(last, None)
    if value is not None:
        part[last] = value
    return data


@pytest.mark.parametrize("name", FAMILY_PRESETS)
def test_presets_are_read_without_a_rest(name):
    """Catches a preset with a key that its own reader does not know, and a tensor that no configuration asks for."""
    checkpoint = Checkpoint(preset_dir(name))
    assert (checkpoint.unknown_keys, checkpoint.unexpected) == ((), ())
    assert checkpoint.config.max_positions >= 4096
    assert checkpoint.config.index is None or checkpoint.config.index.heads >= 16


@pytest.mark.parametrize(
    ("name", "path", "value", "words"),
    [
        ("tiny-deepseek-v3.2", "quantization_config", {"quant_method": "fp8", "fmt": "e4m3"}, "quantisation"),
        ("tiny-deepseek-v3.2", "mlp_layer_types", ["sparse", "dense", "sparse", "sparse", "sparse"], "mlp_layer_types"),
        ("tiny-deepseek-v3.2", "attention_bias", True, "attention_bias"),
        ("tiny-deepseek-v3.2", "hidden_act", "gelu", "hidden_act"),
        ("tiny-deepseek-v3.2", "scoring_func", "softmax", "scoring_func"),
        ("tiny-deepseek-v3.2", "rope_scaling.type", "dynamic", "dynamic"),
        ("tiny-deepseek-v3.2", "rope_scaling.factor", None, "rope_scaling.factor"),
        ("tiny-deepseek-v3.2", "index_topk", None, "index_topk"),
        ("tiny-deepseek-v3.2", "q_lora_rank", None, "q_lora_rank"),
        ("tiny-glm-5", "indexer_types", ["full", "half", "shared", "full", "shared"], "indexer_types"),
        ("tiny-glm-5", "indexer_types", ["full"], "indexer_types"),
        ("tiny-kimi-linear", "layer_types", ["linear_attention"] * 8, "contradicts"),
        ("tiny-kimi-linear", "linear_attn_config.kda_layers", [0, 1, 2, 4, 5, 6], "layers 1 to 8"),
        ("tiny-kimi-linear", "attention_bias", True, "attention_bias"),
        ("tiny-glm-5.3", "text_config.index_kpool", 7, "index_kpool"),
        ("tiny-glm-5.3", "text_config.index_kpool", 0, "index_kpool"),
        ("tiny-glm-5.3", "text_config.layer_types", ["linear_attention"] * 7, "layer_types"),
        ("tiny-glm-5.3", "text_config.linear_attn_config.kda_layers", [1, 2, 3, 5, 6], "count from 0"),
        ("tiny-glm-5.3", "text_config.linear_attn_config.kda_layers", [0, 1, 2, 4, 8], "kda_layers"),
        ("tiny-glm-5.3", "text_config.mhc", False, "mhc"),
        ("tiny-glm-5.3", "vision_config.hidden_act", "gelu", "hidden_act"),
        ("tiny-kimi-k2.5", "text_config.model_type", "llama", "model_type"),
        ("tiny-kimi-k2.5", "projection_hidden_size", 1152, "projection_hidden_size"),
        ("tiny-kimi-k2.5", "text_config.quantization_config", {"format": "pack-quantized"}, "pack-quantized"),
    ],
)
def test_what_the_mathematics_does_not_cover_is_refused_by_key(name, path, value, words):
    """Catches a switch that would be read as if it were not there, and a bare KeyError."""
    with pytest.raises(CheckpointError) as caught:
        read_config(changed(name, path, value))
    assert words in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("name", FAMILY_PRESETS)
def test_unknown_keys_are_reported(name):
    """Catches a key that would change the mathematics and is ignored in silence."""
    config = changed(name, "attention_sink", 4)
    part = config.get("text_config", config)
    part["attention_window"] = 128
    assert [key.split(".")[-1] for key in read_config_and_rest(config)[1]] == ["attention_sink", "attention_window"]


def test_defaults_are_those_of_upstreams_classes():
    """Catches GLM-5.3 pools of 4 by default (its class says 16), DeepSeek without groups, a first layer of experts."""
    assert read_config(changed("tiny-glm-5.3", "text_config.index_kpool", None)).index.pool == 16
    deepseek = read_config(changed("tiny-deepseek-v3.2", "n_group", None))
    assert (deepseek.moe.groups, read_config(changed("tiny-glm-5", "n_group", None)).moe.groups) == (8, 1)
    assert read_config(changed("tiny-glm-5", "first_k_dense_replace", None)).moe.first_dense == 3
    linear = changed("tiny-glm-5.3", "text_config.linear_attn_config.gate_lower_bound", None)
    assert read_config(linear).kda.gate_lower_bound == -5.0
    linear["text_config"]["linear_attn_config"]["safe_gate"] = False
    linear["text_config"]["linear_lower_bound"] = None
    assert read_config(linear).kda.gate_lower_bound is None


def test_shared_selections_by_pattern_and_by_frequency():
    """Catches a pattern read from the end, and an offset counted from 0."""
    config = changed("tiny-glm-5", "indexer_types", None)
    assert read_config(config | {"index_topk_pattern": "FSFSS"}).layers == (
        "dsa",
        "dsa_shared",
        "dsa",
        "dsa_shared",
        "dsa_shared",
    )
    every_second = read_config(config | {"index_topk_freq": 2, "index_skip_topk_offset": 2})
    assert every_second.layers == ("dsa", "dsa", "dsa_shared", "dsa", "dsa_shared")
    assert set(read_config(config).layers) == {"dsa"}


def test_two_names_of_one_tensor_are_refused(tmp_path):
    """Catches a stale duplicate under an older spelling that would silently win or lose."""
    source = preset_dir("tiny-kimi-linear")
    checkpoint = Checkpoint(source)
    tensors = {}
    for name in checkpoint.names():
        tensors[f"model.{name}"] = checkpoint.tensor(name)
    gate = "layers.1.block_sparse_moe.gate.weight"
    tensors["model.layers.1.mlp.gate.weight"] = torch.zeros_like(tensors[f"model.{gate}"])
    save_file(tensors, tmp_path / SINGLE)
    for file in ("config.json", "tokenizer_config.json"):
        (tmp_path / file).write_text((source / file).read_text())
    assert not Path(tmp_path / INDEX).exists()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert "model.layers.1.mlp.gate.weight" in str(caught.value)
    assert f"model.{gate}" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("group_size", 128), ("num_bits", 8), ("symmetric", False), ("strategy", "channel"), ("type", "float")],
)
def test_int4_of_another_form_is_refused(key, value):
    """Catches a declaration of codes that would be decoded as something else: other groups, widths or zero points."""
    files = copy.deepcopy(preset("tiny-kimi-k2.5-int4").json_files["config.json"])
    read_config(files)
    files["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"][key] = value
    with pytest.raises(CheckpointError, match="pack-quantized"):
        read_config(files)
