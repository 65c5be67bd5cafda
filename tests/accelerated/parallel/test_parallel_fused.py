"""A fused all-reduce hides the parts that it gathers: it is judged where the records of all ranks meet."""

import pytest
import torch
from thread_ranks import run_ranks

from day0check.accelerated.ops import TABLE
from day0check.backends.accelerated import Accelerated
from day0check.compare.local import Judge
from day0check.compare.merge import read_lines
from day0check.compare.merge_sums import sum_measures
from day0check.contracts.profiles import profile_named
from day0check.probe.capture import MANIFEST
from day0check.probe.flow import Flow
from day0check.probe.fused_sums import FusedSums
from day0check.probe.recorder import Recorder
from day0check.probe.registry import Registration
from day0check.probe.rows import RowMap
from day0check.types import Request, Schedule, Turn
from reference.presets import preset_dir

TP = {"tensor_parallel": 2}
REQUESTS = (Request("a", (Turn(tuple(range(3, 20))),), 2),)
COVERS = ("comm.all_gather", "comm.all_reduce")


def whole(x, group):
    parts = group.parts(x.unsqueeze(1), axis=1, sizes=(1,) * group.size)
    return TABLE["comm.all_reduce"](torch.cat(parts, 1))


def fused(function):
    """A backend whose all-reduce gathers by itself."""

    class Fused(Accelerated):
        def __init__(self):
            super().__init__()
            self._operators.apply((Registration("replace", "comm.all_reduce", function, None, COVERS),))

    return Fused


def judged(tmp_path, function):
    """(measures of the sums, what single ranks found wrong, folders)."""
    folders, own = [tmp_path / "0", tmp_path / "1"], []

    def observers(rank):
        judge = Judge(profile_named("bf16"), own.append, of_rank=True)
        return [judge, Flow(own.append), FusedSums(folders[rank])]

    backend = fused(function)
    run_ranks(preset_dir("fault-ranks"), "bf16", TP, REQUESTS, Schedule(), observers, backend=backend)
    lines = [read_lines(folder / MANIFEST) for folder in folders]
    wrong = [m for m in own if not (m["passed"] if isinstance(m, dict) else m.passed)]
    return sum_measures(lines, folders, profile="bf16"), wrong, folders


def test_a_healthy_fused_sum_is_judged_at_the_sum(tmp_path):
    """Catches a fused all-reduce that raises an alarm, and one that nobody judges: every tap in both phases is."""
    found, wrong, folders = judged(tmp_path, lambda x, *, group: whole(x, group))
    assert wrong == []
    assert [m for m in found if not m.passed] == []
    sites = ("attention", "mlp", "routed", "shared")
    for tail in ("", ".ranks"):
        taps = [(m.tap, m.phase) for m in found if m.tap.endswith(tuple(f"all_reduce.{s}{tail}" for s in sites))]
        assert len(taps) == len(set(taps)) > 20
        assert {phase for _, phase in taps} == {"prefill", "decode"}
    lost = [read_lines(folders[0] / MANIFEST), []]
    unasked = sum_measures(lost, folders, profile="bf16")
    assert unasked
    assert all(m.not_judged == "rank 1 left no part or no sum of it" for m in unasked)


@pytest.mark.parametrize(
    ("function", "tail", "words"),
    [
        (lambda x, *, group: x, "attention", "further from the exact result"),
        (lambda x, *, group: whole(x, group) * 1.01, "attention", "% too large"),
        (lambda x, *, group: whole(x, group) * (1 + group.rank * 2.0**-7), "attention.ranks", "rank 1 got another sum"),
    ],
    ids=("never-summed", "one-percent", "ranks-differ"),
)
def test_a_wrong_fused_sum_is_told(tmp_path, function, tail, words):
    """Catches a fused all-reduce that gives its own part, a factor, or another sum to one rank, and passes."""
    found, _, _ = judged(tmp_path, function)
    first = min((m for m in found if not m.passed), key=lambda m: (m.order, m.tap))
    assert first.tap == f"layers.00.comm.all_reduce.{tail}"
    assert words in first.message


def test_a_sum_that_gathers_itself_is_not_judged_alone():
    """Catches a sum of hidden parts that is green where no records of other ranks come together."""
    found, rows = [], RowMap(("a",), (0,), (0,))
    recorder = Recorder([Judge(profile_named("bf16"), found.append)])
    x = torch.ones(1, 4)
    with recorder.step("prefill", rows, 0):
        recorder.call("layers.00", "comm.all_reduce", lambda y, *, group: y, (x,), {"group": None}, "mlp")
    recorder.end_case()
    assert (found[-1].passed, bool(found[-1].not_judged)) == (False, True)
