"""Decode steps keep nothing and stay below what one step at the start has shown; what does not is seen."""

import pytest
import torch

from bench.decode_memory import decode_steps
from day0check.accelerated.engine import Engine
from day0check.accelerated.ops import TABLE, WEIGHTS
from day0check.probe.registry import Operators
from reference.presets import preset_dir
from reference.weights import Checkpoint


@pytest.fixture(scope="module")
def engine():
    return Engine(Checkpoint(preset_dir("tiny")), dtype=torch.float32, device=torch.device("cpu"))


def operators():
    return Operators(TABLE, weights=WEIGHTS, pools=("kv", "index", "state"))


def test_a_hundred_decode_steps_take_nothing_that_stays(engine):
    """Catches memory that a step keeps, and a step that needs more than the one at the longest context."""
    found = decode_steps(engine, operators(), steps=100)
    assert found.met, str(found)
    assert 0 < found.peak <= found.bound


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_that_stays_or_grows_with_the_steps_is_seen(engine, keeps):
    """Would catch a count that sees neither a copy of a state that every step keeps nor a step larger than the first
    ones showed."""
    kept, calls = [], []

    def store(pool, *, value, slots):
        calls.append(value)
        if keeps:
            kept.append(value.clone())
        elif len(calls) > 60:
            torch.empty(1 << 22).zero_()
        calls[-1] = None
        TABLE["state.store"](pool, value=value, slots=slots)

    own = operators()
    with own.instead({"state.store": store}):
        found = decode_steps(engine, own, steps=12)
    assert not found.met
    assert (found.kept > 0) == keeps
    assert (found.peak > found.bound) == (not keeps)
