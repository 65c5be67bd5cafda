"""Latencies by their definitions, from handmade times."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.load.metrics import Timing, client_bound, distribution, meets, quantile, summary, timing
from day0check.load.records import Answer, Piece, Reply, Usage
from day0check.load.traffic import Load, OwnCost

MS = 1_000_000
QUIET = OwnCost((0.1, 0.2), (0.0,), 0.1, 0.01)


def reply(*, scheduled: int = 0, sent: int = 0, end: int = 200, fault: str = "") -> Reply:
    return Reply(200, scheduled * MS, sent * MS, end * MS, fault=fault, streamed=True)  # type: ignore[arg-type]


def answer(*at_ms: int, tokens: int | None = None, per_chunk: int = 0, last: int | None = None) -> Answer:
    usage = None if tokens is None else Usage(7, tokens)
    pieces = tuple(Piece(at * MS, "x", per_chunk) for at in at_ms)
    return Answer(
        "x" * len(at_ms), choices=1, pieces=pieces, usage=usage, role_ns=5 * MS, last_ns=(last or at_ms[-1]) * MS
    )


def test_definitions() -> None:
    """Would catch TTFT from the role chunk, TPOT with the first token in it, and gaps divided by tokens."""
    t = timing(reply(scheduled=0, sent=10), answer(30, 40, 60, tokens=4, per_chunk=1, last=70))
    assert (t.ttft_ms, t.ttft_sent_ms, t.role_ms, t.e2e_ms) == (30, 20, 5, 70)
    assert t.gaps_ms == (10, 20)
    assert (t.itl_ms, t.tpot_ms) == (10, pytest.approx(40 / 3))
    assert (t.prompt_tokens, t.output_tokens, t.ok) == (7, 4, True)


def test_several_tokens_in_the_first_chunk() -> None:
    """Would catch an ITL that is too small because the first chunk counts as one token."""
    assert timing(reply(), answer(30, 50, tokens=6, per_chunk=4)).itl_ms == 10
    one = timing(reply(), answer(30, tokens=1))
    assert (one.itl_ms, one.tpot_ms, one.gaps_ms) == (None, None, ())


def test_chunks_are_counted_where_there_is_no_usage() -> None:
    """Would catch a throughput of zero on servers without usage."""
    assert timing(reply(), answer(1, 2, 3)).output_tokens == 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_quantiles_are_numpys(values: list[float], percent: float) -> None:
    """Would catch a rank off by one."""
    assert quantile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)), abs=1e-6, rel=1e-9)


def test_p99_needs_samples() -> None:
    """Would catch a p99 of ten samples, which is the maximum."""
    assert "p99" not in distribution(range(99))
    assert "p99" in distribution(range(100))
    assert distribution([]) == {"samples": 0}


def sample(**fields) -> Timing:  # type: ignore[no-untyped-def]
    base = dict(
        ok=True, ttft_ms=10.0, ttft_sent_ms=10.0, role_ms=None, e2e_ms=50.0, gaps_ms=(), itl_ms=2.0, tpot_ms=2.0
    )
    return Timing(**{**base, "prompt_tokens": 3, "output_tokens": 20, **fields})


def test_objectives() -> None:
    """Would catch failed requests left out of goodput, and one objective that hides another."""
    slos = {"ttft_ms": 10.0, "tpot_ms": 3.0}
    assert meets(sample(), slos)
    assert not meets(sample(ttft_ms=10.1), slos)
    assert not meets(sample(tpot_ms=9.0), slos)
    assert not meets(sample(ok=False), slos)
    assert not meets(sample(ttft_ms=None), slos)
    assert meets(sample(tpot_ms=None, output_tokens=1), slos)
    assert not meets(sample(tpot_ms=None), slos)


def test_summary_counts_failures_and_rates() -> None:
    """Would catch rates over the wrong span and failed requests that vanish."""
    load = Load((), 0, 2_000 * MS, QUIET)
    row = summary([sample(), sample(), sample(ok=False, failure="dropped")], load, slos={"ttft_ms": 20})
    assert (row["requests"], row["failed"], row["failure"]) == (3, 1, "dropped")
    assert (row["requests_per_s"], row["output_tokens_per_s"]) == (1, 20)
    assert row["slo"] == {"met": 2, "share": pytest.approx(2 / 3), "goodput_requests_per_s": 1}
    assert row["client_bound"] == ""


def test_a_failed_request_is_not_ok() -> None:
    """Would catch a dropped stream whose first half counts as an answer."""
    assert timing(reply(fault="dropped"), answer(1)).failure == "dropped"
    assert timing(Reply(500, 0, 0, 1), Answer(error="boom")).failure == "HTTP 500: boom"
    assert "after status 200" in timing(reply(), Answer(error="boom", choices=1)).failure
    assert timing(reply(), Answer()).failure == "an empty answer"


@pytest.mark.parametrize(
    ("own", "word"),
    [
        (OwnCost((), (), 0.95, 1.0), "core"),
        (OwnCost((), (0.0, 30.0), 0.1, 1.0), "sent"),
        (OwnCost((30.0,), (), 0.1, 1.0), "read"),
        (QUIET, ""),
    ],
)
def test_the_client_at_its_limit_is_told(own: OwnCost, word: str) -> None:
    """Would catch a verdict on the endpoint's speed that is about the client."""
    reason = client_bound(own, {"ttft_ms": {"p50": 20.0}})
    assert bool(reason) == bool(word)
    assert word in reason
