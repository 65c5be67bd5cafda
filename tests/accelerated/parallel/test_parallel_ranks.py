"""A model over ranks gives what it gives alone: heads that do not come out even, shared key heads, unequal routing."""

import pytest
import torch
from thread_ranks import run_ranks

from day0check.accelerated.parallel.group import Group, ThreadTransport
from day0check.backends.accelerated import Accelerated
from day0check.compare.local import Judge
from day0check.compare.merge_exchanges import exchange_measures, pair_measures
from day0check.contracts.profiles import profile_named
from day0check.probe.exchanges import Exchanges
from day0check.probe.flow import Flow
from day0check.probe.recorder import Observer, Recorder
from day0check.types import Request, Schedule, ScheduleEvent, Turn
from reference.presets import preset_dir

TP, EP = "tensor_parallel", "expert_parallel"
CLOSE = 1e-5  # of float32 sums in another order, over eight layers


class Travelling(Observer):
    """Results of the residual spine by (tap, step)."""

    def __init__(self):
        self.values = {}

    def after(self, call, token, results):
        if call.operator in ("residual.add", "residual.update"):
            self.values[call.tap, call.phase, call.step] = results[0].clone()


def text(seed, count):
    return tuple(torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def requests():
    """Two requests, so that a decode step has two rows: fewer than some of the groups have ranks."""
    return Request("a", (Turn(text(1, 21)),), 3), Request("b", (Turn(text(2, 9)),), 3)


def alone(model, schedule):
    backend, seen = Accelerated(), Travelling()
    backend.load(str(preset_dir(model)), "fp32", "cpu", {})
    return backend.run(requests(), schedule, Recorder([seen])), seen.values


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("fault-ranks", {TP: 2}),
        ("fault-ranks", {TP: 4, EP: 4}),
        ("fault-ranks", {EP: 4}),
        ("fault-ranks", {TP: 2, EP: 2, "expert_dispatch": "reduce", "redundant_experts": 5}),
        ("fault-gqa", {TP: 4, EP: 4}),
        ("tiny-glm-5", {TP: 2, EP: 2}),  # with a draft layer
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(f"{k[:2]}{n}" for k, n in v.items()),
)
def test_ranks_together_are_one(model, layout):
    """Catches a head, column, expert or row that is lost, taken twice or put elsewhere on its way over ranks."""
    schedule = Schedule(chunk=16, max_batch=2)
    expected, values = alone(model, schedule)
    seen = {rank: Travelling() for rank in range(max(layout.get(TP, 1), layout.get(EP, 1)))}
    found = run_ranks(preset_dir(model), "fp32", layout, requests(), schedule, lambda rank: [seen[rank]])
    for rank, (outputs, _) in enumerate(found):
        assert outputs == expected
        assert seen[rank].values.keys() == values.keys()
        for at, value in values.items():
            error = (seen[rank].values[at] - value).norm() / value.norm()
            assert error < CLOSE, (rank, at)


def test_what_ranks_exchange_is_judged_and_healthy():
    """Catches a false alarm of the replay, of the flow of parts, of exchanged bytes or of pairs; and a rank whose calls
    nobody judged."""
    layout = {TP: 2, EP: 2}
    found = [{"measures": [], "flow": [], "lines": []} for _ in range(2)]

    def observers(rank):
        mine = found[rank]
        judge = Judge(profile_named("bf16"), mine["measures"].append)
        return [judge, Flow(mine["flow"].append), Exchanges(mine["lines"].append)]

    schedule = Schedule(max_batch=2, events=(ScheduleEvent(2, "preempt", "b"),))
    results = run_ranks(preset_dir("fault-ranks"), "bf16", layout, requests(), schedule, observers)
    assert abs(results[0][1].order - results[1][1].order) == 0
    for mine in found:
        assert {m.operator for m in mine["measures"]} >= {"comm.all_reduce", "moe.experts", "mla.output"}
        assert [m for m in mine["measures"] if not m.passed] == []
        assert mine["flow"]
        assert all(record["passed"] for record in mine["flow"])
    lines = [mine["lines"] for mine in found]
    joined = exchange_measures(lines) + pair_measures(lines, expert_parallel=True)
    assert {m.operator for m in joined} == {"comm.all_gather", "comm.all_to_all", "moe.dispatch", "moe.combine"}
    assert [m for m in joined if not m.passed] == []
    assert sum(m.rows for m in joined) > 1000


def test_groups_move_bytes_of_any_type_and_size():
    """Catches a rank whose part is cut by another one's size, and bytes that are read as another type."""
    transports = ThreadTransport.make(3)
    parts = [torch.arange(4 * n, dtype=torch.float32).view(2, 2 * n).bfloat16() + n for n in (1, 0, 2)]
    sizes = [2, 0, 4]
    gathered, exchanged = {}, {}

    def work(rank):
        group = Group("tp", transports[rank])
        gathered[rank] = group.parts(parts[rank], axis=1, sizes=sizes)
        sent = torch.full((rank + 1, 2), rank, dtype=torch.int64)
        send = [rank + 1 if to == (rank + 1) % 3 else 0 for to in range(3)]
        exchanged[rank] = group.exchange(sent, send=send, receive=group.counts(send))

    import threading

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for rank in range(3):
        assert all(torch.equal(a, b) for a, b in zip(gathered[rank], parts, strict=True))
        before = (rank - 1) % 3
        assert exchanged[rank].tolist() == [[before, before]] * (before + 1)
    with pytest.raises(ValueError, match="rank 0 has 2 along axis 1 where 3 are due"):
        Group("tp", transports[0]).parts(parts[0], axis=1, sizes=[3, 3, 3])
