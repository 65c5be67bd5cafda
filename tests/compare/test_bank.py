"""Guards the memory between the store of a residual block and the mixes that read it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.compare.bank import PATTERN, BankMemory
from day0check.probe.recorder import Recorder
from day0check.probe.rows import RowMap


class Bank:
    """A bank of three slots whose calls a BankMemory watches."""

    def __init__(self, rows: int = 5) -> None:
        self.found = []
        self.recorder = Recorder([BankMemory(self.found.append)])
        self.bank, self.rows = torch.full((3, rows, 8), float("nan"), dtype=torch.bfloat16), rows

    def store(self, layer: int, slot: int, value: torch.Tensor) -> None:
        def function(bank, *, value, slot):
            bank[slot] = value

        keywords = {"value": value, "slot": slot}
        self.recorder.call(f"layers.{layer:02d}", "residual.store", function, (self.bank,), keywords)

    def mix(self, layer: int, sources: torch.Tensor) -> None:
        function = lambda s: s.sum(1)  # noqa: E731
        self.recorder.call(f"layers.{layer:02d}", "residual.mix", function, (sources,), {}, site="mlp")

    def step(self):
        return self.recorder.step("prefill", RowMap(("a",), (0,) * self.rows, tuple(range(self.rows))), 0)

    def end(self) -> list:
        self.recorder.end_case()
        return self.found


def blocks(rows: int, count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 8, generator=generator).bfloat16() for _ in range(count)]


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(4)), st.sampled_from([torch.bfloat16, torch.float32]))
def test_slots_that_are_kept_pass_in_any_order_and_type(order, dtype):
    """Catches a false alarm about the order of the sources, which is free, or about sources in a wider type."""
    b = Bank()
    first, second, partial, more = blocks(5, 4)
    with b.step():
        b.store(0, 0, first)
        b.store(3, 1, second)
        b.mix(3, torch.stack([[first, second, partial, more][i] for i in order], 1).to(dtype))
        b.mix(7, torch.stack([first, second], 1)[:2])  # fewer rows: says nothing of the slots
    assert [(m.tap, m.passed) for m in b.end()] == [
        ("layers.00.residual.store.kept", True),
        ("layers.03.residual.store.kept", True),
    ]


def test_a_slot_that_changes_is_named_at_its_store():
    """Catches a store that is right and a slot that is not: the accused is the slot, not the mix that reads it."""
    b = Bank()
    first, second, partial = blocks(5)
    with b.step():
        b.store(0, 0, first)
        b.store(3, 1, second)
        b.mix(3, torch.stack([b.bank[0], b.bank[1], partial], 1))
        b.bank[1][2, 3] += 1
        b.mix(4, torch.stack([b.bank[0], b.bank[1], partial], 1))
        b.mix(5, torch.stack([b.bank[0], b.bank[1], partial], 1))
    healthy, wrong = b.end()
    assert (healthy.layer, healthy.passed) == (0, True)
    assert (wrong.tap, wrong.operator, wrong.layer, wrong.phase) == (
        "layers.03.residual.store.kept",
        "residual.store",
        3,
        "prefill",
    )
    assert (wrong.passed, wrong.pattern, wrong.request) == (False, PATTERN, "a")
    assert "slot 1" in wrong.message
    assert "layers.04.residual.mix.mlp" in wrong.message


@pytest.mark.parametrize("stores", [0, 1])
def test_a_new_step_begins_with_an_empty_bank(stores):
    """Catches slots of one step that are looked for in the next: a bank belongs to the rows of its step."""
    b = Bank()
    first, second, partial = blocks(5)
    with b.step():
        b.store(0, 0, first)
    with b.step():
        if stores:
            b.store(0, 0, second)
        b.mix(0, torch.stack([second, partial], 1))
    assert all(m.passed for m in b.end())
