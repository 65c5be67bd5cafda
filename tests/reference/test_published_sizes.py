"""Released full-size configurations: every tensor of the model is in the table, none is invented."""

import math

import pytest

from reference.config import Rope
from reference.families.gpt_oss import gpt_oss_sizes
from reference.published import published, published_names
from reference.sizes import (
    cache_bytes_per_token,
    gpt_oss_size,
    size_of,
    state_bytes_per_request,
)
from reference.tensors import canonical_name, expected_tensors, stored_name

READ = tuple(name for name in published_names() if name != "gpt-oss-120b")


def test_the_families_of_the_issue_are_here():
    """Catches a data file that the package does not carry, or that nothing reads."""
    assert published_names() == (
        "deepseek-v3.2",
        "glm-5",
        "glm-5.3",
        "gpt-oss-120b",
        "kimi-k2.5",
        "kimi-k3",
        "kimi-linear",
    )
    with pytest.raises(KeyError):
        published("kimi-k4")


@pytest.mark.parametrize("name", READ)
def test_a_release_is_read_without_a_rest(name):
    """Catches a warning on a real config.json: a key that its own family's reader does not know."""
    release = published(name)
    config, rest = release.config_and_rest()
    assert rest == ()
    assert config.name == name
    assert release.source


def test_kimi_k3_has_every_tensor_byte_and_parameter():
    """Catches a tensor that is left out, invented or misshapen: the released checkpoint has 497,220 tensors and
    1,560,860,324,864 bytes, 2.7799T parameters of which 104.2B work for a token. Its 69 A_log tensors are padded from
    96 to 128 float32 entries."""
    release = published("kimi-k3")
    counts = size_of(release.config())
    assert counts.tensors == release.published["tensors"]
    assert counts.stored_bytes + 69 * 32 * 4 == release.published["bytes"]
    assert (round(counts.total / 1e8), round(counts.activated / 1e8)) == (27_799, 1_042)
    assert round(counts.routed / 1e8) == 27_227


def test_kimi_k3_schedule_and_switches():
    """Catches a period-4 schedule (layer 92, 0-based, is attention right after 91), rotation where there is none, and
    a latent eps taken from rms_norm_eps."""
    release = published("kimi-k3")
    config, full = release.config(), release.config_json["text_config"]["linear_attn_config"]["full_attn_layers"]
    assert [n for n, kind in enumerate(config.layers) if kind == "mla"] == [n - 1 for n in full]
    assert config.layers[-2:] == ("mla", "mla")
    assert (config.rope, config.index, config.mla.latent_eps) == (Rope("none"), None, 1e-6)
    assert config.softmax_scale() == pytest.approx(192**-0.5)
    assert (config.moe.shared_width, config.moe.packed, config.moe.latent) == (6144, "mxfp4", 3584)
    assert (config.activation.kind, config.activation.beta, config.activation.linear_beta) == ("situ", 4.0, 25.0)
    assert (config.residual.kind, config.residual.block) == ("attention", 12)
    assert (config.vision.head_dim, config.vision.eps) == (128, 2.0**-23)
    assert config.max_positions == 1_048_576


def test_the_caches_of_kimi_k3_are_as_its_note_says():
    """Catches a cache counted for a layer that has none: 27,648 bytes a token in 24 layers, 414 MiB of states and 14.6
    MiB of convolution rows in 69."""
    config = published("kimi-k3").config()
    assert cache_bytes_per_token(config) == 27_648
    assert state_bytes_per_request(config) == 69 * (6_291_456 + 221_184)


def test_deepseek_v32_has_v3s_parameters_and_an_indexer_per_layer():
    """Catches a tensor left out, invented or misshapen: V3 without its draft layer has 671,026,419,200 parameters, and
    each of the 61 indexers 13,959,424. With the draft layer and its copies of embedding and head they are 685 billion.
    """
    config = published("deepseek-v3.2").config()
    size = size_of(config)
    assert size.total == 671_026_419_200 + 61 * 13_959_424
    assert round((size.total + size.draft + 2 * config.vocab * config.hidden) / 1e9) == 685
    assert (config.rope.layout, config.index.rope_layout, config.index.rope) == ("interleaved", "half", 64)
    assert config.softmax_scale() == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


def test_glm_5_has_every_tensor_of_its_release_and_of_its_draft_layer():
    """Catches a tensor of the draft layer left out or invented: the release has 59,870 tensors of 753,864,139,008
    parameters, one layer in 79 of them drafting, and copies neither embedding nor head."""
    release = published("glm-5")
    size = size_of(release.config())
    assert size.tensors == release.published["tensors"]
    assert size.total + size.draft == release.published["parameters"]


def test_kimi_k2_5_has_every_tensor_of_its_release():
    """Catches a tensor left out, invented or misshapen: the release has 208,550 tensors of 170,738,182,128 elements,
    each routed matrix in INT4 as eight codes a word, a scale for 32, and its shape."""
    release = published("kimi-k2.5")
    table = expected_tensors(release.config())
    routed = [math.prod(s.shape) for name, s in table.items() if ".experts." in name]
    rest = [math.prod(s.shape) for name, s in table.items() if ".experts." not in name]
    assert len(rest) + 3 * len(routed) == release.published["tensors"]
    assert sum(rest) + sum(n // 8 + n // 32 + 2 for n in routed) == release.published["stored_elements"]
    size = size_of(release.config())
    assert round(size.bytes_with_experts_in("int4") / 2**30) == 554  # as the files of the release, 554.3 GiB


@pytest.mark.parametrize(
    ("name", "total", "activated"),
    [("glm-5", 744, 41), ("kimi-linear", 49, 3), ("kimi-k2.5", 1027, 32), ("deepseek-v3.2", 672, 37)],
)
def test_the_published_size_is_that_of_the_table(name, total, activated):
    """Catches a tensor left out, invented or misshapen, to the published billion."""
    counts = size_of(published(name).config())
    assert (round(counts.total / 1e9), round(counts.activated / 1e9)) == (total, activated)


def test_gpt_oss_120b_has_the_parameters_of_its_model_card():
    """Catches a bias, a sink or a matrix that its table lacks: 116.83B in all, 5.13B for a token."""
    sizes, rest = gpt_oss_sizes(published("gpt-oss-120b").config_json)
    counts = gpt_oss_size(sizes)
    assert rest == ()
    assert (round(counts.total / 1e7), round(counts.activated / 1e7)) == (11_683, 513)


def test_glm_5_3_with_its_draft_layer_has_the_published_size():
    """Catches a layer list counted from 1: the model and one more expert layer, the draft, make 321 billion."""
    config = published("glm-5.3").config()
    size = size_of(config)
    assert round((size.total + size.draft) / 1e9) == 321
    assert [n for n, kind in enumerate(config.layers) if kind == "dsa"] == list(range(3, 45, 4))
    assert (config.mla.latent_eps, config.index.pool, config.kda.gate_lower_bound) == (1e-5, 4, -5.0)


def test_kimi_linear_counts_layers_from_one():
    """Catches the schedule of period 4, which the last layer breaks, and rotated dims where only their width counts."""
    config = published("kimi-linear").config()
    assert [n + 1 for n, kind in enumerate(config.layers) if kind == "mla"] == [4, 8, 12, 16, 20, 24, 27]
    assert (config.rope.layout, config.mla.latent_eps, config.kda.gate_lower_bound) == ("none", 1e-6, None)


@pytest.mark.parametrize("name", [n for n in READ if n != "kimi-k3"])
def test_names_of_a_release_and_canonical_names_are_inverse(name):
    """Catches a name that is written under one spelling and not found again under the canonical one."""
    release = published(name)
    family = release.config_json["model_type"]
    for tensor in expected_tensors(release.config()):
        assert canonical_name(stored_name(tensor, family=family)) == tensor


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
