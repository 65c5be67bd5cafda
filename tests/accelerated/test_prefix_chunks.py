"""Chunks of prefixes: every key once, in no more memory than there is, with the same answers and nothing unjudged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_model import small_model

from day0check.accelerated.batch import Part, make_batch
from day0check.accelerated.prefix_chunks import PrefixWorkspace, plan_prefix
from day0check.accelerated.records import Formats
from day0check.backends.accelerated import Accelerated
from day0check.backends.loader import lay_over, read_operators
from day0check.compare.checkpoint_parameters import compare_parameters
from day0check.compare.local import Judge
from day0check.compare.parameters import Recorded
from day0check.compare.shadow import Shadow
from day0check.contracts.profiles import profile_named
from day0check.errors import InputError
from day0check.probe.recorder import Recorder
from day0check.types import Request, Schedule, Turn
from reference.presets import preset_dir
from reference.weights import Checkpoint

CPU = torch.device("cpu")


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=4),
    page=st.integers(1, 9),
    tokens=st.integers(4, 70),
)
def test_every_key_is_in_one_part(parts, page, tokens):
    """Catches a key that counts twice or never, a row that sees a key of the future, a chunk beyond the workspace."""
    made = [
        Part(f"r{n}", (5,) * count, start, tuple(range((start + count) // page + 1)), n, False)
        for n, (start, count) in enumerate(parts)
    ]
    batch = make_batch("prefill", made, page=page, device=CPU)
    plan = plan_prefix(batch, tokens=tokens, page=page)
    longest = max(start for start, _ in parts)
    room = tokens // len(parts)
    if plan is None:
        assert longest <= room
        return
    assert longest > room // page * page
    assert all(chunk.indices.numel() <= tokens for chunk in plan.chunks)
    for row, position in enumerate(batch.positions.tolist()):
        seen = [keys.indices[batch.owner[row]][: keys.visible[row]].tolist() for keys in (*plan.chunks, plan.own)]
        assert [key for part in seen for key in part] == list(range(position + 1))


def test_decode_and_fitting_prefixes_are_left_alone():
    """Catches partial results where the pages can be read as they lie, and a step that has no workspace."""
    part = Part("a", (5,), 40, (0, 1, 2, 3, 4, 5), 0, True)
    for phase, tokens in (("decode", 8), ("prefill", 40), ("prefill", 0)):
        assert plan_prefix(make_batch(phase, [part], page=8, device=CPU), tokens=tokens, page=8) is None


def test_a_workspace_is_as_large_as_its_widest_row():
    """Catches memory for a narrower layer than there is, and memory where no layer needs it."""
    rows = ((40, torch.bfloat16), (36, torch.float32))
    workspace = PrefixWorkspace(rows, tokens=7, device=CPU)
    assert workspace.bytes == 7 * 144
    view = workspace.rows(torch.Size((2, 3)), 36, torch.float32)
    assert (view.shape, view.data_ptr()) == ((2, 3, 36), workspace.memory.data_ptr())
    assert bool(view.isnan().all())
    assert PrefixWorkspace((), tokens=7, device=CPU).bytes == 0


def words(seed: int, count: int) -> tuple[int, ...]:
    return tuple(97 + (seed * 31 + n * n * 7 + n * 3) % 26 for n in range(count))


REQUESTS = (
    Request("x/short#1", (Turn(words(2, 11)),), 6),
    Request("x/long#1", (Turn(words(1, 40)), Turn(words(3, 9))), 2),
)


SCHEDULE = Schedule(page=8, chunk=12, max_batch=2, mixed=True, prefix_workspace=24)
LAYOUT = Path(__file__).resolve().parent.parent / "faults" / "operators" / "blocked_layout.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(small_model(tmp_path_factory.mktemp("dense") / "model", dense=True))


@pytest.mark.parametrize(
    ("grouped", "formats"), [(False, Formats()), (False, Formats(kv="fp8")), (True, Formats())], ids=str
)
def test_the_parts_are_judged_and_nothing_is_accused(model, grouped, formats):
    """Catches a part that no contract judges, an alarm over healthy parts, and reads that nobody follows."""
    model = str(preset_dir("fault-gqa")) if grouped else model
    backend = Accelerated()
    backend.formats = formats
    backend.load(model, "bf16", "cpu", {})
    measures = []
    profile = profile_named("fp8-cache" if formats.kv == "fp8" else "bf16")
    recorder = Recorder([Judge(profile, measures.append), Shadow(measures.append, REQUESTS)])
    with torch.no_grad():
        backend.run(REQUESTS, SCHEDULE, recorder)
    recorder.end_case()
    assert [m for m in measures if not m.passed] == []
    taps = {m.tap for m in measures}
    parts = {"prefix.gather", "prefix.gather.content", "mla.partial.prefix", "mla.partial.own", "mla.merge"}
    assert {f"layers.0{1 if grouped else 2}.{part}" for part in parts} <= taps


@pytest.mark.parametrize("site", ["prefix", "own"])
def test_parts_have_the_settings_of_the_whole(model, site):
    """Catches a softmax scale that is wrong in a part alone: the replay takes the candidate's own."""
    scale = Checkpoint(model).config.softmax_scale()
    for factor, pattern in ((1.0, ""), (1.01, "other setting: scale")):
        tap = f"layers.02.mla.partial.{site}"
        recorded = Recorded(tap, "mla.partial", "prefill", 2, 5, {"scale": scale * factor})
        (measure,) = compare_parameters(model, "bf16", [recorded])
        assert (measure.tap, measure.passed, measure.pattern) == (tap, not pattern, pattern)


def test_pools_of_another_layout_go_through_it_all_the_same(model):
    """Catches a gather into the workspace that reaches into memory that is not its own."""
    found = {}
    for name in ("own", "blocked"):
        backend, measures = Accelerated(), []
        if name == "blocked":
            lay_over(backend.operators(), read_operators(str(LAYOUT)), path=str(LAYOUT), backend="accelerated")
        backend.load(model, "bf16", "cpu", {})
        recorder = Recorder([Judge(profile_named("bf16"), measures.append)])
        with torch.no_grad():
            backend.run(REQUESTS, SCHEDULE, recorder)
        recorder.end_case()
        assert [m for m in measures if not m.passed] == []
        found[name] = {(m.tap, m.phase): m.digest for m in measures}
    assert found["blocked"] == found["own"]


def test_a_workspace_without_a_row_for_each_request_is_refused(model):
    """Catches a division by more requests than there are rows."""
    backend = Accelerated()
    backend.load(model, "bf16", "cpu", {})
    with pytest.raises(InputError, match=r"schedule\.prefix_workspace"):
        backend.run(REQUESTS, Schedule(max_batch=2, prefix_workspace=1), Recorder())
