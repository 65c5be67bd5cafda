"""Links: an overwritten result is found with its address; buffers used again and pools in place are no fault."""

import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from day0check.probe.provenance import PATTERN, Provenance
from day0check.probe.recorder import Caller, Recorder
from day0check.probe.registry import Operators
from day0check.probe.rows import RowMap
from day0check.types import Measure, from_json
from day0check.worker.observe import memory_arguments, written_arguments

READS_WITH_THE_HARNESS = pytest.mark.skipif(sys.version_info < (3, 11), reason="our own side needs Python 3.11")

ROWS = RowMap(("r#1",), (0, 0, 0, -1), (4, 5, 6, -1))


class Bench:
    """A recorder with links and the functions that a test gives as operators."""

    def __init__(self, **limits):
        self.found = []
        self.links = Provenance(self.found.append, memory=memory_arguments(), mutates=written_arguments(), **limits)
        self.recorder = Recorder([self.links])

    def call(self, operator, function, first, place="layers.01", site="", **kwargs):
        return Caller(Operators({operator: function}), self.recorder).at(place)(operator, first, site=site, **kwargs)

    def step(self, phase="prefill"):
        return self.recorder.step(phase, ROWS, 0)


def twice(x, **_):
    return x * 2


def x4():
    return torch.arange(12, dtype=torch.float32).reshape(4, 3)


@READS_WITH_THE_HARNESS
@pytest.mark.parametrize("limits", [{}, {"copy_bytes": 0}, {"step_bytes": 0}])
def test_an_overwritten_result_is_found_with_its_address(limits):
    """Catches links that are not looked at: the consumer's own replay cannot see that its input was changed."""
    bench = Bench(**limits)
    with bench.step():
        y = bench.call("norm.rms", twice, x4(), site="input")
        bench.call("kda.project", twice, y, site="q")
        y[1, 2] = 99.0
        bench.call("kda.project", twice, y, site="k")
        bench.call("kda.project", twice, y, site="v")
    (line,) = bench.found
    measure = from_json(Measure, line)
    assert measure.tap == "layers.01.norm.rms.input.link"
    assert (measure.operator, measure.kind, measure.phase, measure.layer) == ("norm.rms", "move", "prefill", 1)
    assert (measure.passed, measure.pattern, measure.request) == (False, PATTERN, "r#1")
    assert measure.position == (4 if limits else 5)  # without a copy the rows are not known apart
    assert "kda.project.k" in measure.message
    assert bench.links.links == {"checked": 2, "changed": 1, "unchecked": 0}


def test_the_call_that_wrote_over_its_own_input_is_accused():
    """Catches the producer being blamed for what an operator in between did."""

    def spoils(x):
        y = x + 1
        x[2] = 0
        return y

    bench = Bench()
    with bench.step():
        y = bench.call("mla.latent", twice, x4())
        bench.call("norm.rms", spoils, y, site="kv_latent")
        assert not bench.found  # an input used up is no fault as long as nobody reads it
        bench.call("mla.output", twice, y)
    (line,) = bench.found
    assert line["operator"] == "norm.rms"
    assert line["position"] == 6
    assert "overwritten by layers.01.norm.rms.kv_latent before layers.01.mla.output" in line["message"]


def test_views_of_a_result_are_followed():
    """Catches a split result that is changed in the part that is read, and an alarm for the part that is not."""
    bench = Bench()
    with bench.step():
        y = bench.call("mla.latent", lambda x: x @ torch.ones(3, 8), x4())
        left, right = y[:, :5], y[:, 5:]
        left[0, 0] = -1
        bench.call("rope.apply", twice, right, site="key")
        assert not bench.found
        bench.call("norm.rms", twice, left, site="kv_latent")
    assert [line["position"] for line in bench.found] == [4]


def test_one_workspace_for_two_results_that_are_both_still_needed():
    """Catches a shared workspace whose second user destroys what the first consumer still reads."""
    workspace = torch.zeros(4, 3)

    def convert(packed, *, payload_out):
        payload_out.copy_(packed)
        return payload_out[:]

    def experts(x, *, w1, w3):
        return x

    for separate in (True, False):
        bench = Bench()
        with bench.step():
            w1 = bench.call(
                "moe.convert", convert, x4(), site="w1", payload_out=workspace.clone() if separate else workspace
            )
            w3 = bench.call("moe.convert", convert, x4() + 1, site="w3", payload_out=workspace)
            bench.call("moe.experts", experts, x4(), w1=w1, w3=w3)
        assert [line["tap"] for line in bench.found] == ([] if separate else ["layers.01.moe.convert.w1.link"])


def test_a_workspace_that_every_layer_uses_again_is_no_fault():
    """Catches the alarm on the engine's own way of working."""
    workspace = torch.zeros(4, 3)

    def convert(packed, *, payload_out):
        payload_out.copy_(packed)
        return payload_out

    bench = Bench()
    with bench.step():
        for layer in range(3):
            w1 = bench.call("moe.convert", convert, x4() + layer, place=f"layers.0{layer}", payload_out=workspace)
            bench.call("moe.experts", lambda x, *, w1: x + 1, x4(), place=f"layers.0{layer}", w1=w1)
    assert not bench.found
    assert bench.links.links["checked"] == 3


def test_pools_written_in_place_are_no_fault():
    """Catches the alarm on a cache whose views are handed about while it is written."""
    pool = torch.zeros(6, 3)

    def load(pool, *, slots):
        return pool[:4]

    def store(pool, *, value, slots):
        pool[:4] = value

    slots = torch.arange(4)
    bench = Bench()
    with bench.step():
        state = bench.call("state.load", load, pool, site="kda", slots=slots)
        new = bench.call("kda.attention", lambda q, *, state: state + 1, x4(), state=state)
        bench.call("state.store", store, pool, site="kda", value=new, slots=slots)
        bench.call("kda.attention", lambda q, *, state: state + 1, x4(), state=state)
        bench.call("norm.rms", twice, pool[:4])
    assert not bench.found


@pytest.mark.parametrize("returns_view", [True, False])
def test_operators_that_work_in_place_on_their_input_are_no_fault(returns_view):
    """Catches the alarm on a fused kernel that returns its argument, whichever object the engine reads on."""

    def in_place(x):
        x.mul_(2)
        return x[:] if returns_view else x

    bench = Bench()
    with bench.step():
        y = bench.call("mla.query", twice, x4())
        z = bench.call("rope.apply", in_place, y)
        bench.call("mla.absorb", twice, z)
        bench.call("mla.absorb", twice, y)
    assert not bench.found


def test_padding_rows_and_the_next_step_are_no_fault():
    """Catches the alarm on padding that an engine clears, and on buffers that a new step fills again."""
    bench = Bench()
    with bench.step():
        y = bench.call("norm.rms", twice, x4())
        y[3] = 0
        bench.call("kda.project", twice, y)
    y[0] = 7
    with bench.step("decode"):
        bench.call("kda.project", twice, y)
    assert not bench.found


def test_a_new_tensor_at_an_old_address_is_no_fault():
    """Catches products recognised by address: allocators give an address again at once."""
    bench = Bench()
    with bench.step():
        addresses = set()
        for i in range(50):
            y = bench.call("norm.rms", twice, x4())
            addresses.add(y.data_ptr())
            del y
            fresh = torch.full((4, 3), float(i))
            addresses.add(fresh.data_ptr())
            bench.call("kda.project", lambda x: None, fresh)
            del fresh
        assert len(addresses) < 100  # addresses did come again
    assert not bench.found


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.float8_e4m3fn]),
    st.integers(0, 3),
    st.integers(0, 4),
    st.integers(0, 2),
)
def test_every_cell_of_every_view_is_compared(dtype, row, column, start):
    """Catches strides or offsets read wrongly: a change is found exactly where the view that is read contains it."""
    bench = Bench()
    with bench.step():
        y = bench.call("mla.latent", lambda x: torch.zeros(4, 6).to(dtype)[:, 1:], x4())
        view = y[:, start : start + 3].T if start == 2 else y[start:, start : start + 3]
        y.view(torch.uint8)[row, column * y.element_size()] ^= 1
        inside = start <= column < start + 3 and (start == 2 or row >= start)
        bench.call("kda.project", lambda x: None, view)
    if start == 2:  # transposed: columns come first, so no row is padding
        assert bool(bench.found) == inside
    elif start == 0:
        assert bool(bench.found) == (inside and row != 3)
    else:
        assert bool(bench.found) == inside


def test_nan_and_scalars():
    """Catches an alarm because NaN is not equal to itself."""
    bench = Bench()
    with bench.step():
        y = bench.call("norm.rms", lambda x: torch.tensor(float("nan")), x4())
        bench.call("kda.project", lambda x: None, y)
        assert not bench.found
        y.fill_(1.0)
        bench.call("kda.project", lambda x: None, y)
    assert len(bench.found) == 1
