"""A few random schedules in every run of the tests, and the proof that the comparison sees a broken engine."""

from __future__ import annotations

import pytest
import torch
from random_schedules import CONVERSATIONS, Asked, run_portion, trial

from day0check.accelerated.ops import TABLE
from day0check.types import Schedule, ScheduleEvent


@pytest.mark.parametrize(("portion", "happens"), [(7, "padded"), (8, "merged")])
def test_some_random_schedules_are_those_of_the_reference(portion, happens):
    """Would catch a schedule under which a request gets other numbers; `make schedules` draws 1,000."""
    counted = run_portion(portion, examples_of=10)
    assert counted["schedules"] >= 10
    assert counted[happens] > 0
    assert counted["rows"] > counted["requests"]
    assert counted["recomputed"] + counted["hits"] + counted["reloads"] + counted["padded"] > 0


@pytest.mark.parametrize("operator", ["state.load", "kv.reload"])
def test_a_broken_engine_is_seen(operator):
    """Would catch a comparison with itself: a state lost when a prompt goes on, a reload that brings nothing."""
    table = trial().backend.operators()

    def lost(pool, *, slots):
        return TABLE["state.load"](pool, slots=torch.full_like(slots, -1))

    def nothing(pool, **_):
        return None

    asked = (Asked(1, 6, 0).request("a"), Asked(3, 6, 0).request("b"))
    events = (ScheduleEvent(6, "offload", "a"), ScheduleEvent(9, "reload", "a"))
    schedule = Schedule(chunk=20, page=8, events=events, host_pages=20)
    rows, happened = trial().check(asked, schedule)
    assert (rows, happened["reloads"]) == (12, 1)
    with table.instead({operator: lost if operator == "state.load" else nothing}), pytest.raises(AssertionError):
        trial().check(asked, schedule)


def test_the_conversations_share_prefixes_and_differ_in_images():
    """Would catch a pool of conversations in which the prefix cache never has a hit, or never a wrong one to offer."""
    first = [turns[0].tokens for turns in CONVERSATIONS]
    assert first[0][:18] == first[1][:18]
    assert first[4] == first[5]
    assert CONVERSATIONS[4][0].images != CONVERSATIONS[5][0].images
