"""Forms in which releases store tensors: block FP8 with its scales, a padded A_log, and the presets that have them."""

import copy
import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference.config import Activation
from reference.errors import CheckpointError
from reference.presets import preset, preset_dir
from reference.storage import stored_as
from reference.weights import Checkpoint, write_checkpoint

FP8 = "tiny-deepseek-v3.2-fp8"
WIDE = "layers.0.mlp.gate_proj.weight"  # [256, 128]: two blocks


def e4m3_value(byte: int) -> float:
    """The value of an E4M3 byte from its fields: sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, (byte >> 3) & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def changed(directory, change, *, name=FP8, weight=WIDE):
    """A copy of the preset in which `change` has altered the tensors of the shard that holds `weight`."""
    copy = shutil.copytree(preset_dir(name), directory)
    entry = Checkpoint(copy).entry(weight)
    tensors = load_file(entry.file)
    change(tensors, entry.stored)
    save_file(tensors, entry.file)
    index = copy / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    own = {name for name, file in data["weight_map"].items() if file == entry.file.name}
    for name in own - set(tensors):
        del data["weight_map"][name]
    index.write_text(json.dumps(data))
    return copy


def refused(directory, *words, weight=WIDE):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(directory).tensor(weight)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("rows", "columns"), [(300, 200), (128, 128), (1, 130), (257, 64)])
def test_a_block_fp8_weight_is_code_times_the_scale_of_its_block(tmp_path, rows, columns):
    """Catches a division by `scale_inv`, blocks counted along the wrong axis, and a last block that is not whole."""
    files = preset("tiny-deepseek-v3.2").json_files
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 5
    scales = torch.rand(math.ceil(rows / 128), math.ceil(columns / 128), generator=generator) + 0.01
    extra = "layers.0.mlp.extra.weight"
    tensors = [*preset("tiny-deepseek-v3.2").tensors(), (extra, codes.view(torch.float8_e4m3fn))]
    checkpoint = Checkpoint(
        write_checkpoint(tmp_path / "m", [*tensors, (f"{extra}_scale_inv", scales)], json_files=files)
    )
    got = checkpoint.tensor(extra)
    assert got.dtype == torch.bfloat16
    table = torch.tensor([e4m3_value(byte) for byte in range(256)], dtype=torch.float32)
    for row in range(0, rows, 7):
        for column in range(0, columns, 5):
            due = table[codes[row, column].long()] * scales[row // 128, column // 128]
            assert got[row, column] == due.to(torch.bfloat16), (row, column)


def test_the_preset_is_the_plain_one_to_the_precision_of_the_codes():
    """Catches scales that belong to another tensor, and a linear whose codes are read without them."""
    plain, coded = Checkpoint(preset_dir("tiny-deepseek-v3.2")), Checkpoint(preset_dir(FP8))
    quantised = [name for name in plain.names() if coded.is_block_fp8(name)]
    assert WIDE in quantised
    assert "layers.3.block_sparse_moe.experts.7.w2.weight" in quantised
    assert coded.unexpected == ()
    for name in plain.names():
        due, got = plain.tensor(name).float(), coded.tensor(name).float()
        limit = due.abs().max() / 16 if name in quantised else 0.0
        assert float((due - got).abs().max()) <= limit, name


def test_released_exceptions_stay_in_high_precision():
    """Catches a router, an index weight or a norm in FP8, which no release of these families has (model.md 4)."""
    coded = Checkpoint(preset_dir(FP8))
    for name in ("lm_head.weight", "embed_tokens.weight", "layers.3.block_sparse_moe.gate.weight", "norm.weight"):
        assert not coded.is_block_fp8(name)
    assert not coded.is_block_fp8("layers.0.self_attn.indexer.weights_proj.weight")


def test_presence_decides_which_linears_are_quantised(tmp_path):
    """Catches a reader that believes the declaration: one linear left in BF16 must be read as it is."""
    plain = torch.full((256, 128), 0.75, dtype=torch.bfloat16)

    def change(tensors, stored):
        tensors[stored] = plain
        del tensors[f"{stored}_scale_inv"]

    checkpoint = Checkpoint(changed(tmp_path / "m", change))
    assert torch.equal(checkpoint.tensor(WIDE), plain)
    assert checkpoint.unexpected == ()


def test_fp8_codes_without_their_scales_are_refused(tmp_path):
    """Catches codes read as weights: the shapes fit and every value would be wrong by its scale."""
    refused(changed(tmp_path / "a", lambda t, s: t.pop(f"{s}_scale_inv")), WIDE, "without scales")
    whole = lambda t, s: t.update({f"{s}_scale_inv": torch.ones(1, 1)})  # noqa: E731
    refused(changed(tmp_path / "b", whole), f"{WIDE}_scale_inv", "[1, 1]", "[2, 1]")
    half = lambda t, s: t.update({f"{s}_scale_inv": t[f"{s}_scale_inv"].half()})  # noqa: E731
    refused(changed(tmp_path / "c", half), f"{WIDE}_scale_inv", "F16")
    integer = lambda t, s: t.update({s: t[s].view(torch.int8)})  # noqa: E731
    refused(changed(tmp_path / "d", integer), WIDE, "I8")


def test_weights_that_are_not_finite_are_refused(tmp_path):
    """Catches a NaN code or a broken scale that would make every token NaN, far from its cause."""

    def code(tensors, stored):
        tensors[stored].view(torch.uint8)[3, 4] = 0x7F

    refused(changed(tmp_path / "a", code), WIDE, "not finite")
    scale = lambda t, s: t[f"{s}_scale_inv"].fill_(float("inf"))  # noqa: E731
    refused(changed(tmp_path / "b", scale), WIDE, "not finite")


def test_tiny_kimi_k3_has_the_switches_of_the_release():
    """Catches a preset that drifts from the release: an indexer, a rotation, a low-rank gate, a plain residual."""
    config = preset("tiny-kimi-k3").config()
    assert config.index is None
    assert config.layers == ("kda", "kda", "kda", "mla", "kda", "kda", "kda", "mla", "mla")
    assert (config.mla.gate, config.rope.layout, config.mla.q_lora is not None) == (True, "none", True)
    assert (config.kda.gate_lower_bound, config.kda.full_rank_gate) == (-5.0, True)
    assert config.residual.kind == "attention"
    assert config.activation == Activation("situ", 4.0, 25.0)
    moe = config.moe
    assert (moe.packed, moe.latent, moe.latent_norm, moe.groups, moe.scale) == ("mxfp4", 64, True, 1, 1.0)
    assert (moe.shared_width, moe.first_dense) == (2 * moe.width, 1)
    assert (config.vision.norm, config.vision.bias, config.vision.interpolation) == ("rms", False, "bilinear")
    assert config.vision.heads * config.vision.head_dim > config.vision.hidden  # as 12 x 128 over 1024


def test_tiny_kimi_k3_stores_a_log_padded():
    """Catches padding read as heads: the values behind the active ones are far from any trained one."""
    checkpoint = Checkpoint(preset_dir("tiny-kimi-k3"))
    name = "layers.0.self_attn.A_log"
    assert checkpoint.stored(name).shape == (16,)
    assert checkpoint.tensor(name).shape == (4,)
    assert float(checkpoint.tensor(name).abs().max()) < 1.0
    assert torch.equal(checkpoint.stored(name)[4:], torch.full((12,), 9.0))


@pytest.mark.parametrize("name", ["tiny-glm-5", "tiny-kimi-k2.5", "tiny-glm-5.3"])
def test_other_families_in_block_fp8(tmp_path, name):
    """Catches a family whose declaration is refused, or whose renamed experts lose their scales."""
    chosen = preset(name)
    files = copy.deepcopy(chosen.json_files)
    files["config.json"]["quantization_config"] = preset(FP8).json_files["config.json"]["quantization_config"]
    stored = (
        pair
        for tensor_name, tensor in chosen.tensors()
        for pair in stored_as(tensor_name, tensor, forms=("block-fp8",), head_width=None)
    )
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "m", stored, json_files=files))
    assert (checkpoint.unexpected, checkpoint.unknown_keys) == ((), ())
    expert = "layers.4.block_sparse_moe.experts.3.w2.weight"
    assert checkpoint.is_block_fp8(expert)
    assert checkpoint.tensor(expert).dtype == torch.bfloat16
    assert not checkpoint.is_block_fp8("layers.4.block_sparse_moe.gate.weight")


def test_int4_experts_are_the_plain_ones_to_half_a_step():
    """Catches scales or shapes of another expert, a word order of our own, and a linear outside the experts in INT4."""
    plain, coded = Checkpoint(preset_dir("tiny-kimi-k2.5")), Checkpoint(preset_dir("tiny-kimi-k2.5-int4"))
    assert (coded.unexpected, coded.unknown_keys) == ((), ())
    for name in plain.names():
        due, got = plain.tensor(name).float(), coded.tensor(name).float()
        assert coded.is_int4(name) == (".experts." in name)
        if coded.is_int4(name):
            step = coded.stored(f"{name}_scale").float().repeat_interleave(32, 1)
            assert bool(((due - got).abs() <= 1.01 * step).all()), name
            assert float((due - got).norm() / due.norm()) < 0.15, name
        else:
            assert torch.equal(due, got), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda t, n: t.pop(f"{n}_scale"), ["_packed", "without scales"], id="no scales"),
        pytest.param(lambda t, n: t.update({f"{n}_scale": torch.ones(128, 1)}), ["[128, 1]", "[128, 2]"], id="groups"),
        pytest.param(lambda t, n: t[f"{n}_scale"].fill_(float("inf")), ["not finite"], id="infinite"),
        pytest.param(lambda t, n: t[f"{n}_shape"].fill_(64), ["_shape", "[64, 64]", "[128, 64]"], id="shape"),
    ],
)
def test_int4_words_that_are_not_the_weight_are_refused(tmp_path, change, words):
    """Catches codes read without their scales, and words that the file itself says hold another matrix."""
    at = {"name": "tiny-kimi-k2.5-int4", "weight": "layers.2.block_sparse_moe.experts.5.w2.weight"}
    copy = changed(tmp_path / "m", lambda tensors, n: change(tensors, n.removesuffix("_packed")), **at)
    refused(copy, *words, weight=at["weight"])


def test_forms_change_nothing_else():
    """Catches a form that reaches tensors it is not about."""
    tensor = torch.ones(4)
    both = ("block-fp8", "padded-a-log")
    assert [n for n, _ in stored_as("norm.weight", tensor, forms=both, head_width=8)] == ["norm.weight"]
    assert [n for n, _ in stored_as("x.weight", torch.ones(4, 4), forms=(), head_width=None)] == ["x.weight"]
    coded = dict(stored_as("x.weight", torch.ones(4, 4), forms=both, head_width=None))
    assert set(coded) == {"x.weight", "x.weight_scale_inv"}
