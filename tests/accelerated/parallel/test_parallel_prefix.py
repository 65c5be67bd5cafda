"""Attention in parts with heads cut over ranks: the merged rows are those of one device, and every part is judged."""

import pytest
import torch
from small_model import small_model
from thread_ranks import run_ranks

from day0check.backends.accelerated import Accelerated
from day0check.compare.local import Judge
from day0check.contracts.profiles import profile_named
from day0check.probe.flow import Flow
from day0check.probe.recorder import Recorder
from day0check.types import Request, Schedule, Turn

REQUESTS = (
    Request("x/short#1", (Turn(tuple(range(97, 108))),), 5),
    Request("x/long#1", (Turn(tuple(97 + n * n % 26 for n in range(40))),), 2),
)
SCHEDULE = Schedule(page=8, chunk=12, max_batch=2, mixed=True, prefix_workspace=24)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(small_model(tmp_path_factory.mktemp("dense") / "model", dense=True))


def test_parts_over_ranks_are_those_of_one_device(model):
    """Catches log-sum-exps of other heads than the parts they belong to, an alarm over them, and ranks that cut the
    prefix otherwise."""
    backend = Accelerated()
    backend.load(model, "fp32", "cpu", {})
    with torch.no_grad():
        outputs = backend.run(REQUESTS, SCHEDULE, Recorder())
    measures, flow = [], []

    def observers(rank):
        return [Judge(profile_named("fp32"), measures.append), Flow(flow.append)]

    found = run_ranks(model, "fp32", {"tensor_parallel": 2}, REQUESTS, SCHEDULE, observers)
    assert [own for own, _ in found] == [outputs, outputs]
    assert {m.operator for m in measures} >= {"prefix.gather", "mla.partial", "mla.merge"}
    assert [m for m in measures if not m.passed] == []
    assert all(record["passed"] for record in flow)
