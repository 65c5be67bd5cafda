"""The switches of the `fault-*` presets on the fast path: its operators and the engine beside the reference."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_accelerated_variants import BASE, INDEX, Seeded

from day0check.accelerated.engine import Engine
from day0check.accelerated.ops import TABLE
from day0check.accelerated.scheduler import Scheduler
from day0check.contracts import CONTRACTS
from day0check.probe.recorder import Caller, Observer, Recorder
from day0check.probe.registry import Operators
from day0check.types import Request, Schedule, ScheduleEvent, Turn
from reference.config import Gqa, Rope
from reference.model import Model

CPU = torch.device("cpu")
PAD, BREAK = 120, 121


def change(part, **fields):
    return dataclasses.replace(part, **fields)


IN_ROWS = change(BASE.tokens, media_pad=PAD, row_break=BREAK)
VARIANTS = {
    "three axes": change(BASE, rope=Rope("half", sections=(1, 2, 1)), tokens=IN_ROWS),
    "grouped queries": change(BASE, layers=("gqa", "kda", "dsa", "gqa"), gqa=Gqa(6, 2, 8), rope=Rope("half")),
    "grouped queries of three axes, one key head": change(
        BASE,
        layers=("gqa", "mla", "kda"),
        gqa=Gqa(4, 1, 8),
        rope=Rope("interleaved", sections=(1, 2, 1)),
        tokens=IN_ROWS,
    ),
    "a decay for each head": change(BASE, layers=("kda", "mla", "kda"), kda=change(BASE.kda, decay="per_head")),
    "overlapping pools": change(
        BASE, layers=("dsa", "kda", "dsa_shared", "dsa"), index=change(INDEX, topk=12, pool=4, overlap=True)
    ),
    "overlapping pools, nothing rotated": change(
        BASE, layers=("dsa", "mla"), index=change(INDEX, topk=9, pool=3, overlap=True, rope=0), rope=Rope("interleaved")
    ),
}


def in_rows(rows: int, columns: int) -> tuple[int, ...]:
    return ((PAD,) * columns + (BREAK,)) * rows


def text(seed: int, count: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, 100, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


PROMPTS = {
    "a": (*text(1, 12), *in_rows(3, 5), *text(2, 3), *in_rows(4, 2), *text(3, 8)),
    "b": (*text(4, 5), *in_rows(2, 7), *text(5, 22)),
    "c": (*text(1, 12), *in_rows(3, 5), *text(6, 9)),  # begins as the first does, and comes when that is done
}
ARRIVE = {"c": 30}
SCHEDULES = {
    "in one piece": (Schedule(page=16), ()),
    "mixed, in chunks that cut images, preempted, decode steps of fixed rows": (
        Schedule(page=16, chunk=19, mixed=True, fixed_rows=5, events=(ScheduleEvent(5, "preempt", "a"),)),
        (),
    ),
    "behind a prefix that was computed before, in host memory for a while": (
        Schedule(
            page=12,
            chunk=26,
            prefix_cache=True,
            host_pages=16,
            events=(ScheduleEvent(6, "offload", "b"), ScheduleEvent(9, "reload", "b")),
        ),
        ("prefix.restore", "kv.offload", "kv.reload"),
    ),
}


class Logits(Observer):
    """Each row of the logits by (request, position), and the operators that were called."""

    def __init__(self) -> None:
        self.rows, self.called = {}, set()

    def after(self, call, token, results):
        self.called.add(call.operator)
        if call.operator == "head.logits":
            self.rows |= {call.rows.address(i): row.double().clone() for i, row in enumerate(results[0])}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_switch_equals_the_reference_under_every_schedule(name, schedule):
    """Catches a switch that the engine reads differently, and what it forgets or keeps too long between steps."""
    checkpoint = Seeded(VARIANTS[name])
    engine = Engine(checkpoint, dtype=torch.float32, device=CPU)
    oracle = Model(checkpoint)
    seen = Logits()
    requests = tuple(
        Request(r, (Turn(p), Turn(text(9, 7))), max_new_tokens=5, arrive_step=ARRIVE.get(r, 0))
        for r, p in PROMPTS.items()
    )
    given, expected = SCHEDULES[schedule]
    outputs = Scheduler(engine, requests, given, Caller(Operators(TABLE), Recorder([seen]))).run()
    assert set(expected) <= seen.called
    for request in requests:
        logits = oracle.forward(list(outputs.sequences[request.id]))
        mine = {position: row for (r, position), row in seen.rows.items() if r == request.id}
        assert len(mine) == 10
        worst = max(float((row - logits[position]).abs().max()) for position, row in mine.items())
        assert worst / float(logits.abs().max()) < 2e-5


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.sampled_from([1, 2, PAD, PAD, PAD, BREAK]), min_size=1, max_size=40))
def test_positions_as_the_reference_counts_them(tokens):
    """Catches an image that begins or ends with a break, an empty row, two breaks in a row, an open last row."""
    arguments = {"media_pad": PAD, "row_break": BREAK}
    ids = torch.tensor(tokens, dtype=torch.int64)
    expected = CONTRACTS["rope.positions"].function()(ids, **arguments)
    assert torch.equal(TABLE["rope.positions"](ids, **arguments), expected)
