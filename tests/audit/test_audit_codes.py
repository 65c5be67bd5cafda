"""The audit of quantised weights: codes, their scales, and the declaration that they are there."""

import pytest
import torch
from edited_checkpoint import PACKED, PREFIX, Edited, only

from day0check.audit import audit
from reference.presets import preset


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_block_scales_that_are_no_scale(tmp_path, value):
    """Catches a block FP8 scale with which a block of weights is NaN, infinite, gone or mirrored."""
    edited = Edited("tiny-deepseek-v3.2-fp8", tmp_path / "m")
    name = "model.layers.0.mlp.gate_proj.weight_scale_inv"
    scales = edited.read(name)
    scales[1, 0] = value
    edited.put(name, scales)
    only(audit(edited.directory), "scale is no number", name, "[1, 0]")


def test_fp8_codes_and_their_scales(tmp_path):
    """Catches codes without scales, and scales for blocks of another size."""
    edited = Edited("tiny-deepseek-v3.2-fp8", tmp_path / "m")
    name = "model.layers.0.mlp.gate_proj.weight"
    edited.put(f"{name}_scale_inv", torch.ones(4, 2))
    only(audit(edited.directory), "scales do not cover", f"{name}_scale_inv", "[4, 2]", "[2, 1]")
    edited.drop(f"{name}_scale_inv")
    only(audit(edited.directory), "codes without scales", name)


def test_int4_codes_and_what_lies_beside_them(tmp_path):
    """Catches INT4 words without scales, with scales of other groups or none at all, and a shape that they do not hold;
    each is told once, and by the names of both tensors."""
    edited = Edited("tiny-kimi-k2.5-int4", tmp_path / "m")
    name = f"{PREFIX}layers.2.mlp.experts.5.down_proj.weight"
    scales, shape = edited.read(f"{name}_scale"), edited.read(f"{name}_shape")
    edited.put(f"{name}_shape", shape.flip(0))
    only(audit(edited.directory), "packed width", f"{name}_shape", "[64, 128]", "[128, 64]")
    edited.drop(f"{name}_shape")  # says nothing that the words do not say
    assert audit(edited.directory) == ()
    edited.put(f"{name}_scale", scales[:, :1].contiguous())
    only(audit(edited.directory), "scales do not cover", f"{name}_scale", f"{name}_packed", "[128, 1]", "[128, 2]")
    edited.put(f"{name}_scale", scales.index_fill(1, torch.tensor([1]), float("nan")))
    only(audit(edited.directory), "scale is no number", f"{name}_scale", "[0, 1]", "128 of 256")
    edited.drop(f"{name}_scale")
    only(audit(edited.directory), "codes without scales", f"{name}_packed", f"{name}_scale")


def test_int4_words_where_mxfp4_bytes_are_due(tmp_path):
    """Catches words taken for a plain weight although the configuration asks for packed bytes."""
    tiny = Edited("tiny", tmp_path / "m")
    tiny.put(PACKED, tiny.read(PACKED).view(torch.int32))
    patterns = {f.evidence["pattern"] for f in audit(tiny.directory)}
    assert "dtype" in patterns


def test_quantisation_declared_against_present(tmp_path):
    """Catches a declaration that does not fit the files, in each direction, told once and not once per tensor."""
    undeclared = Edited("tiny-deepseek-v3.2-fp8", tmp_path / "a")
    undeclared.config(lambda c: c.pop("quantization_config"))
    only(audit(undeclared.directory), "quantised, undeclared", "block-fp8")
    declared = Edited("tiny-deepseek-v3.2", tmp_path / "b")
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    declared.config(lambda c: c.update(quantization_config=quantised))
    only(audit(declared.directory), "declared, not quantised", "block-fp8")
    words = Edited("tiny-kimi-k2.5-int4", tmp_path / "d")
    words.config(lambda c: c["text_config"].pop("quantization_config"))
    only(audit(words.directory), "quantised, undeclared", "int4")
    plain = Edited("tiny-kimi-k2.5", tmp_path / "e")
    quantised = preset("tiny-kimi-k2.5-int4").json_files["config.json"]["text_config"]["quantization_config"]
    plain.config(lambda c: c["text_config"].update(quantization_config=quantised | {"ignore": []}))
    only(audit(plain.directory), "declared, not quantised", "int4")
    packed = Edited("tiny", tmp_path / "c")
    packed.config(lambda c: c["text_config"].pop("quantization_config"))
    only(audit(packed.directory), "quantised, undeclared", "mxfp4")
