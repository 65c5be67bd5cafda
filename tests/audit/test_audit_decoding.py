"""Stored codes by a second decoder, which shares nothing with the reference's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from edited_checkpoint import PACKED, Edited

from day0check.audit import audit, decoding
from day0check.audit.decoding import FORMS, audit_decoding, e4m3_values, int4_row, mxfp4_row
from reference.formats import mxfp4_decode
from reference.inventory import take_inventory
from reference.presets import preset_dir

SCALES = PACKED.replace("_packed", "_scale")
OF = {"MXFP4": "tiny", "block FP8": "tiny-deepseek-v3.2-fp8", "INT4": "tiny-kimi-k2.5-int4"}
WRONG = {
    "MXFP4": lambda theirs, codes, scales: theirs(codes >> 4 | codes << 4, scales),  # the high four bits first
    "block FP8": lambda theirs, codes, scales: theirs(codes, 1 / scales),  # what the name of the scales says
    "INT4": lambda theirs, codes, scales: theirs(codes, scales) + scales.float().repeat_interleave(32, 1).bfloat16(),
}


def test_every_code_means_what_the_tables_of_the_formats_say():
    """Catches a table that was written down wrongly: both decoders could not both be right."""
    codes = np.arange(256, dtype=np.uint8)
    same = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3_values(codes), same, equal_nan=True)
    assert np.signbit(e4m3_values(codes[128:129]))[0]
    assert mxfp4_row(codes[[0x2F] * 16], codes[[128]])[:2].tolist() == [-12.0, 2.0]
    assert mxfp4_row(np.zeros(16, np.uint8) + 0x11, codes[[0]])[0] == 2.0**-128
    assert int4_row(np.array([0x876543F0] * 4, np.uint32), np.array([0.5], np.float32))[:4].tolist() == [
        -4,
        3.5,
        -2.5,
        -2,
    ]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_both_decoders_read_a_preset_alike_and_one_that_is_wrong_is_told(form, monkeypatch):
    """Catches a comparison of the decoders that reads no tensor of a form, or that lets a wrong one pass."""
    directory = preset_dir(OF[form.name])
    assert decoding._coded(take_inventory(directory), form)
    assert list(audit_decoding(take_inventory(directory))) == []
    wrong = replace(form, theirs=lambda codes, scales: WRONG[form.name](form.theirs, codes, scales))
    monkeypatch.setattr(decoding, "FORMS", tuple(wrong if f is form else f for f in FORMS))
    found = audit(directory)
    assert {f.evidence["pattern"] for f in found} == {"decoders disagree"}
    assert {f.severity for f in found} == {"blocker"}
    assert sum(f.evidence["count"] for f in found) > decoding.SAMPLED / 2
    assert f"by two decoders of {form.name}" in found[0].message


def test_experts_in_one_stack_are_read_row_by_row(tmp_path):
    """Catches a row of a stack of more axes that is counted otherwise in the file than in the tensor."""
    edited = Edited("tiny", tmp_path / "m")
    codes, scales = (torch.stack([edited.read(n), edited.read(n).flip(0)]) for n in (PACKED, SCALES))
    edited.put("stack.weight_packed", codes)
    edited.put("stack.weight_scale", scales)
    inventory = take_inventory(edited.directory)
    assert ("stack.weight_packed", "stack.weight_scale") in decoding._coded(inventory, FORMS[0])
    names = ("stack.weight_packed", "stack.weight_scale")
    for row in (0, codes.shape[1] - 1, codes.shape[1], 2 * codes.shape[1] - 1):
        own = mxfp4_row(*(decoding._raw_row(edited.directory, edited.index[n], n, row) for n in names))
        theirs = decoding._of_reference(inventory, FORMS[0], names, row)
        assert np.array_equal(own, theirs.numpy())
        whole = mxfp4_decode(codes.flatten(0, 1)[row : row + 1], scales.flatten(0, 1)[row : row + 1])
        assert torch.equal(theirs, whole[0])
