"""The sweep of the cost check: where work steps up, it is narrowed to two sizes beside each other."""

import pytest
import torch
import torch._dynamo

from day0check.compare.cost import judge_costs, read_costs
from day0check.compare.cost_step import NEAR
from day0check.probe.rows import RowMap
from day0check.types import Outputs, Request, RunCase, Turn
from day0check.worker.costs import measure_costs, point_of


@pytest.fixture(autouse=True)
def _no_graphs_before():
    """Graphs are counted by process, and other tests make some."""
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


CASE = RunCase("cost/x", (Request("cost/x/a#0", (Turn(tuple(range(20))),), max_new_tokens=2),))


def norm_twice_from(threshold: int):
    """A candidate of one operator, which does its work twice from `threshold` rows on."""

    def norm(x, *, weight):
        y = x * weight
        return x * weight if len(x) >= threshold else y

    return calls(norm)


def calls(norm):
    """A candidate that calls `norm` once for each prompt."""

    def run(requests, schedule, recorder):
        for step, request in enumerate(requests):
            length = len(request.turns[0].tokens)
            rows = RowMap((request.id,), (0,) * length, tuple(range(length)))
            with recorder.step("prefill", rows, step):
                keywords = {"weight": torch.ones(16)}
                recorder.call("layers.00", "norm.rms", norm, (torch.ones(length, 16),), keywords, "input")
        return Outputs({}, {})

    return run


def swept(tmp_path, threshold):
    measure_costs(norm_twice_from(threshold), CASE, tmp_path, positions=300, device="cpu")
    costs = read_costs(tmp_path)
    return costs, next(m for m in judge_costs(costs) if m.phase == "prefill")


def test_a_threshold_is_found_between_the_sizes_of_the_sweep(tmp_path):
    """Catches a sweep that stops at its own sizes, near sizes that are mixed up with them, and clocks at near sizes."""
    costs, measure = swept(tmp_path, 150)
    near = [line for line in costs.lines if line.sweep.startswith(NEAR)]
    assert {149, 150} <= {line.size for line in near}
    assert len(near) <= 8
    assert all(line.seconds is None for line in near)
    assert measure.failing == "step_length"
    assert "from size 150 on (at size 149 not yet)" in measure.message


def test_nobody_looks_where_nothing_steps_up(tmp_path):
    """Catches a sweep that takes twice as long for a healthy candidate."""
    costs, measure = swept(tmp_path, 10_000)
    assert measure.passed, measure.message
    assert not any(line.sweep.startswith(NEAR) for line in costs.lines)


def test_points_are_requests_of_a_length_or_batches_of_equal_ones():
    """Catches a near size of a batch that is taken for a length."""
    single, batch = point_of(CASE, "length", 77, positions=300), point_of(CASE, "batch", 3, positions=300)
    assert [len(r.turns[0].tokens) for r in single.requests] == [77]
    assert [len(r.turns[0].tokens) for r in batch.requests] == [128] * 3
    assert len({r.id for r in batch.requests}) == 3


@pytest.mark.parametrize(("dynamic", "anew"), [(True, False), (False, True)])
def test_what_is_compiled_is_asked_for_graphs_and_not_counted(tmp_path, dynamic, anew):
    """Catches graphs that are run under counters, which they refuse, counts of nothing that pass, and graphs of every
    length that nobody hears of."""
    norm = torch.compile(lambda x, *, weight: x * weight, backend="eager", dynamic=dynamic, fullgraph=True)
    measure_costs(calls(norm), CASE, tmp_path, positions=300, device="cpu")
    costs = read_costs(tmp_path)
    assert (costs.lines, "cannot be counted" in costs.missing) == ((), True)
    assert bool(costs.recompiled) == anew
    assert not anew or costs.recompiled[0] == ("length", 32, 1)
