"""After thousands of requests, many of them given up: nothing is held, nothing failed, golden prompts as before."""

from __future__ import annotations

from day0check.checks.endpoint.answer import answered, found
from day0check.checks.endpoint.cancel import ABORT
from day0check.checks.endpoint.compare import difference
from day0check.checks.evidence import Answer
from day0check.load.observed import Observed
from day0check.types import Finding

QUESTION = "After many requests and many clients that left, is everything given back and every answer as before?"
NAME = "endpoint.soak"
GOOD = ("answered", "left", "busy")


def judge(observed: Observed) -> Answer:
    """Not run when no client left: then nothing was given up."""
    counts = observed.soak
    total = sum(counts.values())
    if not total:
        return answered(NAME, (), "", not_run=observed.stopped or "no soak was run")
    findings = [*_failed(observed, total), *_golden(observed), *_held(observed, total)]
    left = counts.get("left", 0)
    not_run = (
        "" if left and counts.get("answered") else f"of {total} requests {left} were given up: that proves nothing"
    )
    if "soak" not in observed.done:
        not_run = not_run or observed.stopped or "the soak was not finished"
    counted = "back where they were" if observed.counter("soak/after/1") else "not there"
    summary = f"{total} requests, {left} of them given up; counters are {counted}, golden prompts as before"
    return answered(NAME, findings, summary, not_run=not_run)


def _failed(observed: Observed, total: int) -> list[Finding]:
    bad = {name: n for name, n in observed.soak.items() if name not in (*GOOD, "unsent") and n}
    if not bad:
        return []
    first = next((e for e in observed.exchanges if e.label.startswith("soak/request/")), None)
    why = ", ".join(f"{n} {name}" for name, n in sorted(bad.items()))
    said = f" ({first.answer.error or first.reply.detail})" if first else ""
    text = f"{sum(bad.values())} of {total} requests failed: {why}{said}"
    return [
        found(NAME, "failed", text, label=first.label if first else None, value=float(sum(bad.values())), limit=0.0)
    ]


def _golden(observed: Observed) -> list[Finding]:
    """Golden prompts; those whose answer is not steady say nothing."""
    before = observed.under("soak/before")
    for again in range(2):
        for key, e in observed.under(f"soak/after/{again}").items():
            one = before.get(key)
            if e.reply.fault or not e.good:
                how = e.reply.fault or f"HTTP {e.reply.status}"
                return [found(NAME, "hangs", f"after the soak a golden prompt gets no answer ({how})", label=e.label)]
            if one is None or not one.good:
                continue
            apart = difference(one.answer, e.answer)
            beyond = apart.beyond(observed.profile)
            if beyond or (beyond is None and not apart.same_text):
                text = f"after the soak a golden prompt gets another answer: {e.label!r}"
                return [found(NAME, "changed", text, label=e.label, value=apart.delta)]
    return []


def _held(observed: Observed, total: int) -> list[Finding]:
    before, last = observed.counter("soak/before"), observed.counter("soak/after/1")
    held = last.get("running", 0.0) + last.get("waiting", 0.0)
    if held > 0:
        text = f"seconds after {total} requests the endpoint still counts {held:.0f} as running or waiting"
        return [found(NAME, "held", text, operator=ABORT, value=held, limit=0.0)]
    usage, was = last.get("kv_usage"), before.get("kv_usage")
    if usage is not None and was is not None and usage > was:
        text = f"after {total} requests nothing runs, and the cache holds {usage:.1%} where it held {was:.1%} before"
        return [found(NAME, "cache held", text, operator=ABORT, value=usage, limit=was)]
    return []
