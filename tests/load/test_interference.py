"""Prompts beside others: how a surge grows until memory runs short, what is injected when, and what proves it."""

from __future__ import annotations

import dataclasses

import pytest
from mock_endpoint import CONTEXT, Endpoint, serving

from day0check.checks.endpoint import judge_endpoint
from day0check.checks.endpoint.exercised import most_at_once, paths
from day0check.load.client import Limits, target_of
from day0check.load.interference import MOST_AT_ONCE, MOST_GROWTH, Size, grown, larger, spread
from day0check.load.observe import observe
from day0check.load.observed import Observed
from day0check.load.records import Counters
from day0check.load.scenario import Wish
from day0check.load.speed import SpeedPlan

SIZE = Size(16, 100, 40)


@pytest.fixture(autouse=True)
def _shorter_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("day0check.load.scenario.SETTLE_S", 0.4)


def seen(*flags: str, together: int = 8, delay_s: float = 0.003) -> Observed:
    with serving(Endpoint(*flags, delay_s=delay_s)) as url:
        wish = Wish(parts=("interference",), together=together, words=6)
        limits = Limits(stall_s=10, request_s=20)
        return observe(target_of(url), wish, limits=limits, speed=SpeedPlan()).observed


def by_name(observed: Observed) -> dict[str, tuple[bool, str]]:
    return {path.name: (path.exercised, path.proof) for path in paths(observed)}


def test_a_surge_grows_by_what_it_lacks() -> None:
    """Would catch a surge that never fills a cache that it could fill, and one that grows without end."""
    peak = {"preemptions": 0.0, "kv_usage": 0.5, "waiting": 0.0}
    more = grown(SIZE, peak, seconds=1.0, room_s=150.0)
    assert (more.words, more.tokens) == (SIZE.words, SIZE.tokens)
    assert more.count * peak["kv_usage"] / SIZE.count > 1.2
    longer = grown(SIZE, peak | {"waiting": 3.0}, seconds=1.0, room_s=150.0)
    assert longer.count == SIZE.count  # more of them would only wait
    assert longer.words / SIZE.words == pytest.approx(2.6, abs=0.02)
    both = grown(Size(MOST_AT_ONCE // 2, 100, 40), peak | {"kv_usage": 0.26}, seconds=1.0, room_s=150.0)
    assert both.count == MOST_AT_ONCE
    assert both.words == 250


@pytest.mark.parametrize("usage", [0.94, 1.0])
def test_answers_outgrow_a_cache_that_prompts_have_filled(usage: float) -> None:
    """Would catch a surge whose prompts fill the cache to the last page, round after round, and whose answers fit."""
    peak = {"preemptions": 0.0, "kv_usage": usage, "waiting": 3.0}
    more = grown(SIZE, peak, seconds=10.0, room_s=150.0)
    assert (more.count, more.words) == (SIZE.count, SIZE.words)
    assert more.tokens >= 2 * SIZE.tokens
    assert grown(SIZE, peak, seconds=60.0, room_s=150.0) is None


@pytest.mark.parametrize(
    ("peak", "seconds", "room_s"),
    [
        ({}, 1.0, 150.0),
        ({"preemptions": 0.0}, 1.0, 150.0),
        ({"kv_usage": 0.5}, 1.0, 150.0),
        ({"preemptions": 0.0, "kv_usage": 1.0 / (2 * MOST_GROWTH)}, 1.0, 150.0),
        ({"preemptions": 0.0, "kv_usage": 0.5}, 60.0, 150.0),
    ],
)
def test_a_surge_that_cannot_fill_the_cache_is_not_tried(peak: dict, seconds: float, room_s: float) -> None:
    """Would catch minutes of load on a cache that is too large, or on an endpoint that could not show it."""
    assert grown(SIZE, peak, seconds=seconds, room_s=room_s) is None


def test_a_slow_machine_is_given_the_time_that_is_left() -> None:
    """Would catch a surge that grows only while its rounds are quick: a busy machine would never show preemption."""
    peak = {"preemptions": 0.0, "kv_usage": 0.5, "waiting": 0.0}
    more = grown(SIZE, peak, seconds=50.0, room_s=150.0)
    assert larger(SIZE, more) == pytest.approx(2.6, abs=0.05)


def test_what_is_compared_is_spread_over_the_surge() -> None:
    """Would catch comparing only those who came first, whose memory is hardly ever taken."""
    assert spread(31, 16) == list(range(0, 31, 2))
    assert spread(3, 16) == [0, 1, 2]
    assert spread(1, 16) == [0]


def test_memory_is_made_to_run_short() -> None:
    """Would catch preemption that is claimed without the server's counters, and a surge that stops too early."""
    observed = seen("preempts")
    exercised, proof = by_name(observed)["preemption"]
    assert exercised, proof
    assert "preemptions" in proof
    rounds = {key.partition(".")[0] for key in observed.under("surge/together")}
    assert len(rounds) > 1  # the first sixteen did not fill it
    exercised, proof = by_name(seen())["preemption"]
    assert not exercised
    assert "none with 16 requests at once, its cache was at most 0% full" in proof
    assert "a smaller one would show it" in proof


def test_long_prompts_come_while_answers_are_on_their_way() -> None:
    """Would catch long prompts that are sent before or after the answers that they should disturb."""
    observed = seen(together=4)
    found = by_name(observed)
    assert found["long prompts into running answers"][0], found
    assert found["requests together"][0], found
    left, proof = found["clients that leave"]
    assert left
    assert proof.endswith("left in the middle of an answer; its counters: nothing runs or waits afterwards")
    assert found["canaries between requests"][0], found
    assert not found["warm prefix"][0]
    streams = [e for key, e in observed.under("together").items() if key.startswith("1/")]
    early = [
        dataclasses.replace(e, reply=dataclasses.replace(e.reply, sent_ns=min(s.reply.sent_ns for s in streams)))
        if e.label.startswith("long/")
        else e
        for e in observed.exchanges
    ]
    assert not by_name(dataclasses.replace(observed, exchanges=tuple(early)))["long prompts into running answers"][0]


def test_what_no_counter_shows_is_not_exercised() -> None:
    """Would catch a path that counts as taken because nobody can say that it was not."""
    nothing = by_name(Observed("m", "chat", ("interference",)))
    assert not any(exercised for exercised, _ in nothing.values()), nothing
    hits = tuple(Counters(f"{when}_warm/0", {"prefix_hits": n}) for when, n in (("between", 1.0), ("after", 65.0)))
    assert by_name(Observed("m", "chat", (), counters=hits))["warm prefix"] == (
        True,
        "its counters: 64 tokens of prompts found in the cache",
    )
    assert not by_name(Observed("m", "chat", (), counters=hits[:1]))["warm prefix"][0]
    assert most_at_once([]) == 0


@pytest.mark.parametrize("habit", ["short_context", "names_context"])
def test_a_short_context_is_no_fault(habit: str) -> None:
    """Would catch a healthy server of few positions that is blamed for refusing prompts that cannot fit."""
    observed = seen(habit)
    answers = {a.outcome.name: a for a in judge_endpoint(observed, reference=False)}
    assert [f.message for a in answers.values() for f in a.findings] == []
    warm = observed.under("prefix/warm")
    assert observed.context == (CONTEXT if habit == "names_context" else None)
    assert all(e.good == (habit == "names_context") for e in warm.values())  # a known context is kept to
    if habit == "short_context":
        assert "longer than the context" in by_name(observed)["warm prefix"][1]
