"""Rows of the residual spine laid over ranks: sums are scattered, norms run on own rows, and it is still one model."""

import pytest
import torch
from thread_ranks import run_ranks

from day0check.accelerated.ops import TABLE
from day0check.accelerated.parallel.group import Group, ThreadTransport
from day0check.accelerated.parallel.spread import Spread, spread
from day0check.accelerated.quantised import QuantisingCaller
from day0check.backends.accelerated import Accelerated
from day0check.compare.local import Judge
from day0check.compare.merge_exchanges import exchange_measures, pair_measures
from day0check.contracts.profiles import profile_named
from day0check.probe.exchanges import Exchanges
from day0check.probe.flow import Flow
from day0check.probe.recorder import Observer, Recorder
from day0check.probe.registry import Operators
from day0check.probe.rows import RowMap
from day0check.types import Request, Schedule, ScheduleEvent, Turn
from reference.presets import preset_dir
from reference.weights import Checkpoint

TP, EP = "tensor_parallel", "expert_parallel"
SCATTERED = {"sums": "reduce_scatter"}
CLOSE = 1e-5  # of float32 sums in another order, over eight layers


class Rows(Observer):
    """Rows of the residual spine by (tap, phase, step, request, position), and how many each call had."""

    def __init__(self):
        self.values, self.sizes = {}, {}

    def after(self, call, token, results):
        if call.operator in ("residual.add", "residual.update"):
            assert len(call.rows) == results[0].shape[0]
            self.sizes[call.tap, call.phase, call.step] = len(call.rows)
            for row, value in enumerate(results[0].clone()):
                self.values[(call.tap, call.phase, call.step, *call.rows.address(row))] = value


def text(seed, count):
    return tuple(torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def requests():
    """Two requests: prompts whose rows do not come out even, and decode steps of two rows."""
    return Request("a", (Turn(text(1, 21)),), 3), Request("b", (Turn(text(2, 8)),), 3)


def alone(model, schedule):
    backend, seen = Accelerated(), Rows()
    backend.load(str(preset_dir(model)), "fp32", "cpu", {})
    return backend.run(requests(), schedule, Recorder([seen])), seen.values


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("fault-ranks", {TP: 2}),
        ("fault-ranks", {TP: 4, EP: 4}),
        ("fault-ranks", {TP: 2, EP: 2, "expert_dispatch": "reduce", "redundant_experts": 5}),
        ("tiny-glm-5", {TP: 2}),  # with a draft layer, whose sums go to all
        ("tiny", {TP: 2, EP: 2}),  # attention residuals
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(f"{k[:2]}{n}" for k, n in v.items()),
)
def test_own_rows_of_all_ranks_are_the_model(model, layout):
    """Catches a row that is lost or computed twice between ranks, a sum of other rows than the rank's own, and a spine
    that every rank holds whole although its sums are scattered."""
    schedule = Schedule(chunk=16, max_batch=2)
    expected, values = alone(model, schedule)
    seen = {rank: Rows() for rank in range(layout[TP])}
    found = run_ranks(preset_dir(model), "fp32", layout | SCATTERED, requests(), schedule, lambda rank: [seen[rank]])
    assert [outputs for outputs, _ in found] == [expected] * layout[TP]
    behind = f"layers.{len(Checkpoint(preset_dir(model)).config.layers):02d}"
    draft = {at for at in values if at[0].startswith(behind)}
    together = {}
    for rank in seen:
        own = {at: value for at, value in seen[rank].values.items() if at not in draft}
        if layout[TP] == 2:
            assert not together.keys() & own.keys()  # each row on one rank
        together |= own
    assert together.keys() == values.keys() - draft
    for at, value in together.items():
        assert (value - values[at]).norm() < CLOSE * values[at].norm(), at
    counts = {at: [seen[rank].sizes[at] for rank in seen] for at in seen[0].sizes if at[1] == "prefill"}
    assert any(len(set(each)) > 1 for each in counts.values())  # rows that do not come out even


def test_calls_on_own_rows_go_through_the_caller_of_all():
    """Catches a call on own rows that leaves out what its caller does around it, and one with the map of all rows."""
    seen = []

    class Seen(Observer):
        def after(self, call, token, results):
            seen.append((call.tap, call.rows.position))

    rows = RowMap(("a",), (0,) * 5, tuple(range(5)))
    own = Spread(Group("tp", ThreadTransport.make(2)[1]), ((0, 3), (3, 5)), rows)
    at = QuantisingCaller(Operators(TABLE), Recorder([Seen()])).at("layers.01")
    own.at(at)("moe.up", torch.ones(2, 128).bfloat16(), weight=torch.ones(4, 128).bfloat16())
    assert seen == [("layers.01.quantise.rows.moe.up", (3, 4)), ("layers.01.moe.up", (3, 4))]
    assert spread(own.group, rows, 1) is None
    assert spread(own.group, rows, 5) == own


def test_what_is_scattered_is_judged_and_healthy():
    """Catches a false alarm of the replay, of the flow of parts or of exchanged bytes where rows lie over ranks, padded
    and preempted ones among them; and scattered sums that nobody judges."""
    found = [{"measures": {}, "flow": [], "lines": []} for _ in range(2)]

    def observers(rank):
        mine = found[rank]
        judge = Judge(profile_named("bf16"), lambda m: mine["measures"].update({(m.tap, m.phase): m}))
        return [judge, Flow(mine["flow"].append), Exchanges(mine["lines"].append)]

    schedule = Schedule(chunk=15, max_batch=2, fixed_rows=4, mixed=True, events=(ScheduleEvent(3, "preempt", "b"),))
    layout = {TP: 2, EP: 2} | SCATTERED
    results = run_ranks(preset_dir("fault-ranks"), "bf16", layout, requests(), schedule, observers)
    assert results[0][0] == results[1][0]
    assert results[0][1].order == results[1][1].order
    for mine in found:
        sums = {phase for tap, phase in mine["measures"] if "comm.reduce_scatter" in tap}
        assert sums == {"prefill", "decode"}
        assert [m for m in mine["measures"].values() if not m.passed] == []
        assert {record["operator"] for record in mine["flow"] if record["passed"]} == {"comm.reduce_scatter"}
        assert all(record["passed"] for record in mine["flow"])
    lines = [mine["lines"] for mine in found]
    joined = exchange_measures(lines) + pair_measures(lines, expert_parallel=True)
    assert [m for m in joined if not m.passed] == []
    assert {m.operator for m in joined} == {"comm.all_gather", "comm.all_to_all", "moe.dispatch", "moe.combine"}
