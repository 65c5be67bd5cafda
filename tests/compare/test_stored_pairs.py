"""Two dumps on disk, read a slice at a time."""

import pytest
import torch
from safetensors.torch import save_file

from day0check.compare import stored_pairs as module
from day0check.compare.pair_statistics import pair_statistics
from day0check.compare.stored_pairs import stored_pairs
from day0check.errors import InputError


def dumps(tmp_path, own, oracle):
    save_file(own, tmp_path / "own.safetensors")
    save_file(oracle, tmp_path / "oracle.safetensors")
    return tmp_path / "own.safetensors", tmp_path / "oracle.safetensors"


def test_slices_of_a_file_are_the_whole_tensor(tmp_path, monkeypatch):
    """Catches a slice that is left out, and a tensor that is read whole."""
    truth = {
        "x": torch.randn(37, 3, 50),
        "codes": torch.randn(64, 16),
        "flat": torch.randn(9),
        "none": torch.empty(0, 4),
    }
    kinds = {"x": torch.bfloat16, "codes": torch.float8_e4m3fn, "flat": torch.float32, "none": torch.float32}
    own = {k: (v * 1.01).to(kinds[k]) for k, v in truth.items()}
    oracle = {k: v.to(kinds[k]) for k, v in truth.items()}
    monkeypatch.setattr(module, "SLICE_BYTES", 1000)
    sizes = []

    def counted(a, b, *, fast=None):
        sizes.append(a.nbytes)
        return pair_statistics(a, b, fast=fast)

    monkeypatch.setattr(module, "pair_statistics", counted)
    found = dict(stored_pairs(*dumps(tmp_path, own, oracle), fast=False))
    assert list(found) == sorted(truth)
    assert max(sizes) <= 1000 < own["x"].nbytes
    for key in truth:
        whole = pair_statistics(own[key], oracle[key], fast=False)
        assert (found[key].elements, found[key].largest, found[key].odd) == (whole.elements, whole.largest, whole.odd)
        torch.testing.assert_close(found[key].row_error, whole.row_error, rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(found[key].row_signal, whole.row_signal, rtol=1e-5, atol=1e-12)


def test_dumps_that_do_not_belong_together_are_refused(tmp_path):
    """Catches a tensor that only one side has and that nobody misses."""
    with pytest.raises(InputError, match="'y' is not in own"):
        list(stored_pairs(*dumps(tmp_path, {"x": torch.zeros(2)}, {"x": torch.zeros(2), "y": torch.zeros(1)})))
    with pytest.raises(InputError, match=r"is \[2\] here and \[3\]"):
        list(stored_pairs(*dumps(tmp_path, {"x": torch.zeros(2)}, {"x": torch.zeros(3)})))
    with pytest.raises(InputError, match="no such file"):
        list(stored_pairs(tmp_path / "gone", tmp_path / "own.safetensors"))
    (tmp_path / "cut").write_bytes(b"123")
    with pytest.raises(InputError, match="cannot be read"):
        list(stored_pairs(tmp_path / "cut", tmp_path / "own.safetensors"))
