"""Latencies of one request and of a phase. Every definition is written where it is computed; all times in ms.

Like-named figures of other tools differ: here TTFT ends at the first chunk with content, reasoning or a tool call (a
chunk with the role alone is admission, reported apart), chunk gaps are pooled over requests, and ITL is per token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from day0check.load.records import Answer, Reply
from day0check.load.traffic import Load, OwnCost

QUANTILES = (50, 90, 95, 99)
FEWEST_FOR_P99 = 100  # below this the p99 is the maximum under another name, and is left out
CURVES = ("ttft_ms", "itl_ms", "e2e_ms")
CURVE_STEPS, TIMELINE_STEPS = 20, 48
MOST_LAG_MS = 5.0
MOST_LAG_SHARE = 0.1  # of the median chunk gap or first-token time: more than that is the client's own time
MOST_CPU_SHARE = 0.85
BUSY = (429, 503)  # come back later: a clear no to more at once than there is room for


@dataclass(frozen=True)
class Timing:
    """One request. Times count from `scheduled` but `ttft_sent_ms`, which counts from when it was really sent.

    `gaps_ms`: between chunks with content. `itl_ms`: (last - first content) / (tokens - tokens of the first chunk).
    `tpot_ms`: (end - first content) / (tokens - 1), the end being the last chunk with a choice. None where an answer
    has too few tokens or did not stream.
    """

    ok: bool
    ttft_ms: float | None
    ttft_sent_ms: float | None
    role_ms: float | None
    e2e_ms: float
    gaps_ms: tuple[float, ...]
    itl_ms: float | None
    tpot_ms: float | None
    prompt_tokens: int
    output_tokens: int
    failure: str = ""


def timing(reply: Reply, answer: Answer) -> Timing:
    """The latencies of a reply whose answer has been read. Output tokens: usage, else the chunks' own counts."""
    pieces = answer.pieces
    tokens = answer.usage.completion_tokens if answer.usage else sum(p.tokens or 1 for p in pieces)
    failure = failure_of(reply, answer)
    first = pieces[0].at_ns if pieces and reply.streamed else None
    last = pieces[-1].at_ns if pieces else None
    end = answer.last_ns if reply.streamed and answer.last_ns else reply.end_ns
    in_first = max(1, pieces[0].tokens) if pieces else 1
    several = first is not None and tokens > in_first
    return Timing(
        ok=not failure,
        ttft_ms=_ms(first, reply.scheduled_ns),
        ttft_sent_ms=_ms(first, reply.sent_ns),
        role_ms=_ms(answer.role_ns, reply.scheduled_ns) if reply.streamed else None,
        e2e_ms=(end - reply.scheduled_ns) / 1e6,
        gaps_ms=tuple((b.at_ns - a.at_ns) / 1e6 for a, b in itertools.pairwise(pieces)) if several else (),
        itl_ms=(last - first) / 1e6 / (tokens - in_first) if several else None,
        tpot_ms=(end - first) / 1e6 / (tokens - 1) if several and tokens > 1 else None,
        prompt_tokens=answer.usage.prompt_tokens if answer.usage else 0,
        output_tokens=tokens,
        failure=failure,
    )


def failure_of(reply: Reply, answer: Answer) -> str:
    """Why a request of the load counts as failed, "" when it does not."""
    if reply.fault:
        return f"{reply.fault}: {reply.detail}" if reply.detail else reply.fault
    if reply.status != 200:
        return f"HTTP {reply.status}: {answer.error}"
    if answer.error:
        return f"an error after status 200: {answer.error}"
    if not answer.choices or not (answer.pieces or answer.tokens or answer.token_ids or answer.finish):
        return "an empty answer"
    return ""


def _ms(at_ns: int | None, since_ns: int) -> float | None:
    return None if at_ns is None else (at_ns - since_ns) / 1e6


def quantile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between order statistics, as NumPy's default. Raises ValueError for no values."""
    if not values:
        raise ValueError("there are no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, maximum and quantiles with the number of samples; p99 only where there are enough of them."""
    if not values:
        return {"samples": 0}
    row: dict[str, float] = {"samples": len(values), "mean": sum(values) / len(values), "max": max(values)}
    for percent in QUANTILES:
        if percent < 99 or len(values) >= FEWEST_FOR_P99:
            row[f"p{percent}"] = quantile(values, percent)
    return row


def meets(sample: Timing, slos: Mapping[str, float]) -> bool:
    """Whether a request met every objective, e.g. {"ttft_ms": 200}. A failed one, or one without the figure, did not;
    a figure that needs two tokens does not count against an answer of one."""
    if not sample.ok:
        return False
    for name, limit in slos.items():
        value = getattr(sample, name)
        if value is None and name in ("itl_ms", "tpot_ms") and sample.output_tokens <= 1:
            continue
        if value is None or value > limit:
            return False
    return True


def summary(samples: Sequence[Timing], load: Load, *, slos: Mapping[str, float]) -> dict[str, Any]:
    """The figures of one phase; latencies of successful requests, failed ones counted beside them."""
    good, seconds = [s for s in samples if s.ok], max((load.end_ns - load.begin_ns) / 1e9, 1e-9)
    row: dict[str, Any] = {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "busy": sum(r.status in BUSY for r in load.replies),
        **({"failure": next(s.failure for s in samples if not s.ok)} if len(good) < len(samples) else {}),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": sum(s.output_tokens for s in good) / seconds,
        "output_tokens": sum(s.output_tokens for s in good),
        "prompt_tokens": sum(s.prompt_tokens for s in good),
        "chunk_gap_ms": distribution([g for s in good for g in s.gaps_ms]),
        "client": own_figures(load.own, sum(s.output_tokens for s in samples)),
    }
    for name in ("ttft_ms", "ttft_sent_ms", "role_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        row[name] = distribution([v for s in good if (v := getattr(s, name)) is not None])
    if slos:
        met = sum(meets(s, slos) for s in samples)
        row["slo"] = {
            "met": met,
            "share": met / len(samples) if samples else 0.0,
            "goodput_requests_per_s": met / seconds,
        }
    row["curves"] = {name: curve([v for s in good if (v := getattr(s, name)) is not None]) for name in CURVES}
    row["timeline"] = timeline(samples, load)
    row["client_bound"] = client_bound(load.own, row)
    return row


def curve(values: Sequence[float]) -> list[float]:
    """Quantiles from 0 to 100 % in equal steps; [] for no values."""
    return [quantile(values, 100 * i / CURVE_STEPS) for i in range(CURVE_STEPS + 1)] if values else []


def timeline(samples: Sequence[Timing], load: Load) -> dict[str, Any]:
    """Mean number of requests in flight, and output tokens per second as their chunks came, in equal steps."""
    begin, seconds = load.begin_ns, max((load.end_ns - load.begin_ns) / 1e9, 1e-9)
    step_s = seconds / TIMELINE_STEPS
    flight, tokens = [0.0] * TIMELINE_STEPS, [0.0] * TIMELINE_STEPS
    for reply, sample in zip(load.replies, samples, strict=False):
        since, until = (reply.sent_ns - begin) / 1e9, (reply.end_ns - begin) / 1e9
        for place in range(TIMELINE_STEPS):
            overlap = min(until, (place + 1) * step_s) - max(since, place * step_s)
            flight[place] += max(0.0, overlap) / step_s
        for at_ns, _ in reply.reads:
            place = min(TIMELINE_STEPS - 1, max(0, int((at_ns - begin) / 1e9 / step_s)))
            tokens[place] += sample.output_tokens / len(reply.reads) / step_s
    return {"step_s": step_s, "in_flight": flight, "output_tokens_per_s": tokens}


def own_figures(own: OwnCost, tokens: int) -> dict[str, Any]:
    return {
        "loop_lag_ms": distribution(own.loop_lag_ms),
        "dispatch_lag_ms": distribution(own.dispatch_lag_ms),
        "cpu_share": own.cpu_share,
        "cpu_us_per_token": own.cpu_seconds * 1e6 / tokens if tokens else 0.0,
    }


def client_bound(own: OwnCost, row: Mapping[str, Any]) -> str:
    """Why the figures of a phase are the client's own and not the endpoint's; "" when they are the endpoint's."""
    if own.cpu_share > MOST_CPU_SHARE:
        return f"the client used {own.cpu_share:.0%} of a core"
    for what, lags, figure in (
        ("sent", own.dispatch_lag_ms, row["ttft_ms"].get("p50", 0.0)),
        ("read", own.loop_lag_ms, row["ttft_ms"].get("p50", 0.0)),
    ):
        percent = 99 if len(lags) >= FEWEST_FOR_P99 else 90  # one hiccup in a short phase is no bottleneck
        lag = quantile(lags, percent) if lags else 0.0
        if lag > max(MOST_LAG_MS, MOST_LAG_SHARE * figure):
            return f"the client itself {what} up to {lag:.1f} ms late (p{percent})"
    return ""
