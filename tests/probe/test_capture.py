"""Captures and digests: what is kept, what is named as dropped, and that they are those of the moment of the call."""

import json
import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from day0check.probe import capture
from day0check.probe.capture import Capture, Digests
from day0check.probe.digest import digest, lanes
from day0check.probe.recorder import Caller, Recorder
from day0check.probe.registry import Operators
from day0check.probe.rows import RowMap
from day0check.snapshot import Snapshot

READS_WITH_THE_HARNESS = pytest.mark.skipif(sys.version_info < (3, 11), reason="our own side needs Python 3.11")

ROWS = RowMap(("r#1", "s#1"), (0, 0, 1, -1), (4, 5, 0, -1))


def double(x, *, by=2, weight=None):
    return x * by


def pair(x):
    return x.sum(-1), torch.arange(3)


TABLE = Operators({"norm.rms": double, "moe.route": pair, "embed.tokens": double})


def run_two_steps(observer):
    recorder = Recorder([observer])
    at = Caller(TABLE, recorder).at("layers.02")
    kept = []
    for step in range(2):
        with recorder.step("prefill" if step == 0 else "decode", ROWS, step):
            x = torch.full((4, 3), float(step + 1))
            y = at("norm.rms", x, site="input", weight=torch.ones(2), by=3)
            kept.append(y.clone())
            at("moe.route", y)
            at("embed.tokens", y)
            y.zero_()  # the buffer is used again before the step ends
    recorder.end_case()
    return kept


def manifest(directory):
    return [json.loads(line) for line in (directory / "manifest.jsonl").read_text().splitlines()]


@READS_WITH_THE_HARNESS
def test_rows_come_back_by_request_and_position(tmp_path):
    """Catches bytes taken after the buffer was used again, wrong row maps, operators that were not asked for."""
    y0, y1 = run_two_steps(Capture(tmp_path, {"norm.rms", "moe.route"}))
    (tmp_path / "run.json").write_text('{"status": "finished"}')
    snapshot = Snapshot(tmp_path)
    assert snapshot.taps() == ("layers.02.norm.rms.input", "layers.02.moe.route")
    positions, values = snapshot.rows("layers.02.norm.rms.input", "r#1")
    assert positions == (4, 5)
    assert torch.equal(values, y1[:2])  # the latest write of a position wins
    lines = manifest(tmp_path)
    assert {line["operator"] for line in lines} == {"norm.rms", "moe.route"}
    assert [line["file"] for line in lines if line["step"] == 1] == ["step-000001.safetensors"] * 3
    second = next(line for line in lines if line["operator"] == "moe.route" and line["result"] == 1)
    assert second["owner"] == second["position"] == []
    assert lines[0]["owner"] == list(ROWS.owner)
    assert lines[0]["dtype"] == "float32"
    assert not torch.equal(y0, y1)


def test_what_the_cap_drops_is_named(tmp_path):
    """Catches bytes that are missing without a word, and a cap that is exceeded."""
    capture = Capture(tmp_path, {"norm.rms"}, byte_cap=60)
    run_two_steps(capture)
    kept, dropped = manifest(tmp_path)
    assert kept["file"] == "step-000000.safetensors"
    assert "dropped" not in kept
    assert dropped["file"] == dropped["key"] == ""
    assert "48 bytes beyond the cap of 60 bytes" in dropped["dropped"]
    assert (capture.bytes_kept, capture.bytes_dropped) == (48, 48)
    assert not (tmp_path / "step-000001.safetensors").exists()


@READS_WITH_THE_HARNESS
def test_full_mode_keeps_row_arguments_as_they_came_in(tmp_path):
    """Catches arguments missing from a full capture, and weights in it."""
    run_two_steps(Capture(tmp_path, {"norm.rms"}, mode="full"))
    lines = manifest(tmp_path)
    assert [(line["result"], line.get("arg")) for line in lines[:2]] == [(-1, "0"), (0, None)]
    (tmp_path / "run.json").write_text('{"status": "finished"}')
    positions, values = Snapshot(tmp_path).rows("layers.02.norm.rms.input", "s#1", result=-1)
    assert positions == (0,)
    assert torch.equal(values, torch.full((1, 3), 2.0))
    with pytest.raises(ValueError, match="judge"):
        Capture(tmp_path, mode="all")


def test_a_step_number_used_twice_keeps_both(tmp_path):
    """Catches the second file of a step number written over the first."""
    recorder = Recorder([Capture(tmp_path)])
    at = Caller(TABLE, recorder).at("")
    for value in (1.0, 2.0):
        with recorder.step("prefill", ROWS, 7):
            at("norm.rms", torch.full((4, 1), value))
    recorder.end_case()
    assert [line["file"] for line in manifest(tmp_path)] == ["step-000007.safetensors", "step-000007-1.safetensors"]


def test_digests_are_numbers_only_and_those_of_the_call():
    """Catches a digest taken after the buffer was used again."""
    lines = []
    y0, y1 = run_two_steps(Digests(lines.append, {"norm.rms"}))
    assert [line["digest"] for line in lines] == [digest(y0), digest(y1)]
    assert lines[0]["tap"] == "layers.02.norm.rms.input"


def test_digests_of_a_device_are_fetched_once_when_all_is_over(monkeypatch):
    """Catches an observer that waits for the device while the case runs: it hides what only shows without waits."""
    lines, waits = [], []

    def waiting(name):
        real = getattr(torch.Tensor, name)
        return lambda tensor, *args: (waits.append(name), real(tensor, *args))[1]

    class Observed(Digests):
        def end_case(self):
            assert (lines, waits) == ([], [])
            super().end_case()

    with monkeypatch.context() as patched:
        patched.setattr(capture, "_on_host", lambda tensor: False)
        for name in ("cpu", "item", "tolist", "numpy", "__int__", "__bool__", "__float__"):
            patched.setattr(torch.Tensor, name, waiting(name))
        y0, y1 = run_two_steps(Observed(lines.append, {"norm.rms"}))
    assert [line["digest"] for line in lines] == [digest(y0), digest(y1)]
    assert waits.count("cpu") == 1


def test_many_digests_of_a_device_are_fetched_before_the_end(monkeypatch):
    """Catches digests of a long case that fill a device's memory."""
    lines = []
    monkeypatch.setattr(capture, "_on_host", lambda tensor: False)
    monkeypatch.setattr(capture, "HELD", 1)
    observer = Digests(lines.append, {"norm.rms"})
    recorder = Recorder([observer])
    with recorder.step("prefill", ROWS, 0):
        Caller(TABLE, recorder).at("layers.02")("norm.rms", torch.ones(4, 3), by=3)
    assert len(lines) == 1


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=2, max_size=200), st.data())
def test_digest_sees_a_changed_byte_and_exchanged_lanes(data, draw):
    """Catches a digest blind to one byte, to an exchange of equal sums, or to the last bytes of an odd length."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    at = draw.draw(st.integers(0, len(data) - 1))
    changed = tensor.clone()
    changed[at] ^= draw.draw(st.integers(1, 255))
    assert digest(changed) != digest(tensor)
    words = lanes(tensor)
    turned = words.flip(0)
    if not torch.equal(words, turned):
        assert digest(turned) != digest(words)


def test_digest_is_that_of_the_values_in_row_major_order():
    """Catches a digest that depends on strides or on the place of a view in its storage."""
    base = torch.arange(40, dtype=torch.bfloat16).reshape(4, 10)
    assert digest(base.T) == digest(base.T.contiguous())
    assert digest(base[1:, 3:6]) == digest(base[1:, 3:6].clone())
    assert digest(base.reshape(-1)[3:8]) == digest(base.reshape(-1)[3:8].clone())
    assert len(digest(torch.tensor(1.0))) == 32
    assert digest(torch.empty(0)) == "0" * 32
