"""What decode steps take of memory: nothing that stays, and never more at a time than one step known at the start.

The bound is measured before any other step: one decode step at the last position that the caches have room for, twice,
so that what is made once (copies of weights that are kept, tables) is there. Then many steps are counted one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from day0check.accelerated.batch import Part, make_batch
from day0check.accelerated.cache import Caches
from day0check.accelerated.engine import Engine
from day0check.accelerated.memory import storages
from day0check.probe.memory import Allocations
from day0check.probe.recorder import Caller
from day0check.probe.registry import Operators

PAGE, STEPS, PROMPT = 16, 128, 40


@dataclass(frozen=True)
class Taken:
    """Bytes: `bound` of the step at the last position; of `steps` further ones the largest `peak` at a time, what they
    `kept` together, by how much engine and caches `grew`; `reserved` more by a device's allocator (0 on a CPU)."""

    steps: int
    bound: int
    peak: int
    kept: int
    grew: int
    reserved: int

    @property
    def met(self) -> bool:
        return self.steps >= 100 and self.peak <= self.bound and not (self.kept or self.grew or self.reserved)

    def __str__(self) -> str:
        return (
            f"{self.steps} decode steps: a step takes at most {self.peak / 1e6:.3f} MB at a time for what lies between "
            f"operators, {self.bound / 1e6:.3f} MB are known from one step at the start; they keep {self.kept} bytes, "
            f"weights, workspace and caches grow by {self.grew}, the device's allocator takes {self.reserved} more: "
            f"{'met' if self.met else 'NOT MET'}"
        )


def decode_steps(engine: Engine, operators: Operators, *, steps: int = STEPS) -> Taken:
    """A prompt and `steps` decode steps of one request in caches that just hold them, counted."""
    pages = -(-(PROMPT + steps) // PAGE)
    caches, caller = engine.caches(pages=pages, page=PAGE, slots=1), Caller(operators)
    with Allocations() as taken:
        _step(engine, caller, caches, 0, PROMPT)
        for _ in range(2):
            bound = _peak_of(taken, engine, caller, caches, PROMPT + steps - 1)
        held, live, on_device = storages(engine, caches), taken.live_bytes, _reserved(engine.device)
        peak = max(_peak_of(taken, engine, caller, caches, position) for position in range(PROMPT, PROMPT + steps))
        kept = taken.live_bytes - live
    grew, reserved = storages(engine, caches) - held, _reserved(engine.device) - on_device
    return Taken(steps, bound, peak, kept, grew, reserved)


def _peak_of(taken: Allocations, engine: Engine, caller: Caller, caches: Caches, position: int) -> int:
    """Bytes that live at a time inside the decode step at `position`, beside what lives before it."""
    before = taken.live_bytes
    taken.restart_peak()
    _step(engine, caller, caches, position, 1)
    return taken.peak_bytes - before


def _step(engine: Engine, caller: Caller, caches: Caches, start: int, count: int) -> None:
    tokens = tuple(97 + (start + i) % 26 for i in range(count))
    part = Part("a", tokens, start, tuple(range(len(caches.pages))), 0, wants_logits=True)
    phase = "decode" if start else "prefill"
    batch = make_batch(phase, [part], page=PAGE, device=engine.device)
    with caller.recorder.step(phase, batch.rows, start):
        (engine.decode if start else engine.prefill)(caller, caches, batch)


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
