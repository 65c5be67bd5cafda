"""The reader of a candidate's records: what it must give back, and the files that it must refuse."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.errors import InputError
from day0check.probe.capture import Capture
from day0check.probe.recorder import Call
from day0check.probe.rows import RowMap
from day0check.snapshot import Snapshot, case_directory, read_measures
from day0check.types import Measure, to_json

TAP = "layers.00.residual.add.mlp"


def call(step: int, order: int, rows: RowMap, phase: str = "prefill", place: str = "layers.00") -> Call:
    return Call(place, "residual.add", "mlp", phase, step, order, rows, (), {})


def record(directory: Path, steps: list[tuple[str, list[tuple[str, int]], torch.Tensor]], **options) -> Snapshot:
    """One capture: per step (phase, [(request, position)], values)."""
    directory.mkdir(parents=True, exist_ok=True)
    capture = Capture(directory, **options)
    for step, (phase, addresses, values) in enumerate(steps):
        names = tuple(dict.fromkeys(name for name, _ in addresses if name))
        owner = tuple(names.index(name) if name else -1 for name, _ in addresses)
        rows = RowMap(names, owner, tuple(position for _, position in addresses))
        capture.after(call(step, step, rows, phase), None, (values,))
        capture.end_step(step)
    capture.end_case()
    return Snapshot(directory)


@settings(max_examples=25, deadline=None)
@given(
    order=st.permutations([("a", p) for p in range(5)] + [("b", p) for p in range(3)]),
    cuts=st.lists(st.integers(0, 8), max_size=3),
)
def test_rows_come_back_by_position_however_they_were_batched(tmp_path_factory, order, cuts):
    """Would catch a reader that trusts the order of steps, batches or requests instead of the row map."""
    edges = sorted({0, *cuts, len(order)})
    steps = []
    for start, stop in itertools.pairwise(edges):
        here = order[start:stop]
        values = torch.tensor([[10.0 * p + (100 if name == "b" else 0)] for name, p in here], dtype=torch.bfloat16)
        steps.append(("prefill", list(here), values))
    snapshot = record(tmp_path_factory.mktemp("s"), steps)
    positions, values = snapshot.rows(TAP, "a")
    assert positions == tuple(range(5))
    assert values.flatten().tolist() == [0, 10, 20, 30, 40]
    assert snapshot.rows(TAP, "b")[1].flatten().tolist() == [100, 110, 120]


def test_latest_write_of_a_position_wins_and_padding_is_left_out(tmp_path):
    """Would catch rows of a first attempt that survive a recompute after preemption, and padding taken for data."""
    snapshot = record(
        tmp_path,
        [
            ("prefill", [("a", 0), ("a", 1), ("", -1)], torch.tensor([[1.0], [2.0], [9.0]])),
            ("decode", [("a", 1)], torch.tensor([[5.0]])),
        ],
    )
    found = snapshot.recorded(TAP, "a")
    assert (found.positions, found.phases, found.orders) == ((0, 1), ("prefill", "decode"), (0, 1))
    assert found.values.flatten().tolist() == [1.0, 5.0]
    assert snapshot.rows(TAP, "nobody")[0] == ()
    assert snapshot.taps() == (TAP,)


def test_patches_of_one_position_keep_their_own_order(tmp_path):
    """Would catch image patches that are sorted or merged because they share the position of their token."""
    addresses = [("a", 1), ("a", 0), ("a", 1), ("a", 0)]
    snapshot = record(tmp_path, [("prefill", addresses, torch.arange(4.0)[:, None])])
    assert snapshot.rows(TAP, "a")[1].flatten().tolist() == [1.0, 3.0, 0.0, 2.0]
    assert snapshot.recorded(TAP, "a", by_position=False).values.flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_dropped_bytes_are_named_not_zero(tmp_path):
    """Would catch a byte cap that makes a tap look as if it had never been there."""
    snapshot = record(tmp_path, [("prefill", [("a", 0)], torch.ones(1, 64))], byte_cap=8)
    assert "cap" in snapshot.dropped(TAP)
    assert snapshot.rows(TAP, "a")[0] == ()


def test_cut_last_line_is_left_out_and_said(tmp_path):
    """Would catch a reader that gives up on the records of a process that was killed while it wrote."""
    snapshot = record(tmp_path, [("prefill", [("a", 0)], torch.ones(1, 1)), ("decode", [("a", 1)], torch.ones(1, 1))])
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    snapshot = Snapshot(tmp_path)
    assert len(snapshot.entries) == 1
    assert snapshot.notes == ["manifest.jsonl: the last line was cut and is left out"]


def edit_manifest(directory: Path, **changes) -> None:
    path = directory / "manifest.jsonl"
    lines = [json.loads(line) | changes for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"shape": [1, 2]}, "manifest says"),
        ({"dtype": "float64"}, "manifest says"),
        ({"key": "nothing"}, "cannot be read"),
        ({"file": "absent.safetensors"}, "missing"),
        ({"file": "../../etc.safetensors"}, "outside"),
        ({"owner": [0, 0]}, "owners for"),
        ({"owner": [3]}, "does not name"),
        ({"owner": [0, 0], "position": [0, 1]}, "row map"),
        ({"step": "x"}, "wrong form"),
    ],
)
def test_lying_manifest_is_refused(tmp_path, changes, word):
    """Would catch tensors that are read although the manifest contradicts the file."""
    record(tmp_path, [("prefill", [("a", 0)], torch.ones(1, 1))])
    edit_manifest(tmp_path, **changes)
    with pytest.raises(InputError, match=word) as error:
        Snapshot(tmp_path).rows(TAP, "a")
    assert str(tmp_path) in str(error.value)
    assert error.value.todo


@pytest.mark.parametrize("size", [0, 4, 60, -1])
def test_truncated_tensor_file_is_refused(tmp_path, size):
    """Would catch a traceback of the file format's library, or half a tensor taken for a whole one."""
    record(tmp_path, [("prefill", [("a", 0)], torch.ones(1, 64))])
    path = next(tmp_path.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InputError, match="cannot be read"):
        Snapshot(tmp_path).rows(TAP, "a")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_broken_run_record_is_refused(tmp_path, text):
    """Would catch a run without a status that counts as finished."""
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match=r"run\.json"):
        _ = Snapshot(tmp_path).run


def test_last_measure_of_a_tap_counts(tmp_path):
    """Would catch a failing line that the judge repeats being counted twice, and broken lines in the middle passing."""
    path = tmp_path / "measures.jsonl"
    first = Measure(
        "t", "norm.rms", "compute", "prefill", 0, 1, 1, 1, False, {"row": float("inf")}, {"row": 1.5}, "row"
    )
    lines = [json.dumps(to_json(m)) for m in (first, Measure("t", "norm.rms", "compute", "prefill", 0, 1, 9, 9, False))]
    path.write_text("\n".join(lines) + "\n")
    assert [m.rows for m in read_measures(path, [])] == [9]
    path.write_text(lines[0] + "\nnot json\n" + lines[1] + "\n")
    with pytest.raises(InputError, match=r"measures\.jsonl:2"):
        read_measures(path, [])
    assert read_measures(tmp_path / "none.jsonl", []) == ()


def test_directories():
    """Would catch a reader that looks elsewhere than the writer writes."""
    assert case_directory("out", "text/one_turn", "candidate") == Path("out/snapshots/text__one_turn/candidate")
    with pytest.raises(InputError, match="no snapshot"):
        Snapshot("/nowhere/at/all")
