"""Clients that leave: what they held is given back, and the next answers are as before."""

from __future__ import annotations

from day0check.checks.endpoint.answer import answered, found
from day0check.checks.endpoint.compare import difference
from day0check.checks.evidence import Answer
from day0check.load.observed import Observed
from day0check.types import Finding

QUESTION = "After clients left in the middle of an answer, is everything given back and the next answer right?"
NAME = "endpoint.cancel"
ABORT = "serve.abort"  # no operator: the path on which a request ends before its time


def judge(observed: Observed) -> Answer:
    """Not run when no client left inside an answer: then the answers ended sooner than it could."""
    left = [e for e in observed.under("cancel").values() if e.reply.fault == "cut" and e.answer.finish is None]
    after = observed.under("after_cancel")
    if not left:
        return answered(NAME, (), "", not_run="no client left in the middle of an answer")
    findings, gone = [], f"{len(left)} clients left"
    silent = [e for e in after.values() if e.reply.fault]
    if silent:
        text = f"after {gone}, the next request gets no answer ({silent[0].reply.fault})"
        findings.append(found(NAME, "hangs", text, label=silent[0].label))
    for key, e in after.items():
        alone = observed.get(f"alone/{key}")
        if alone is None or not alone.good or silent:
            continue
        if not e.good:
            text = f"after {gone}, a prompt that was answered before gets {e.reply.status}: {e.answer.error}"
            findings.append(found(NAME, "refused", text, label=e.label))
            break
        again = observed.get(f"again/{key}")
        steady = again is not None and again.good and difference(alone.answer, again.answer).same_text
        apart = difference(alone.answer, e.answer)
        if steady and (
            apart.beyond(observed.profile) or (apart.beyond(observed.profile) is None and not apart.same_text)
        ):
            text = f"after {gone}, {e.label!r} gets another answer than before they came"
            findings.append(found(NAME, "changed", text, label=e.label, value=apart.delta))
            break
    counters = observed.counter("after_cancel/1")
    findings += _held(observed, gone, left[0].label)
    proof = "its counters are back at zero" if counters else "it has no counters that could show what it still holds"
    not_run = "" if after else "nothing was asked after clients left"
    return answered(NAME, findings, f"{gone}, the next answers are as before; {proof}", not_run=not_run)


def _held(observed: Observed, gone: str, label: str) -> list[Finding]:
    """What the endpoint's own counters say it still holds."""
    first, last = (observed.counter(f"after_cancel/{again}") for again in range(2))
    held = last.get("running", 0.0) + last.get("waiting", 0.0)
    if held > 0:
        text = f"seconds after {gone} the endpoint still counts {held:.0f} requests as running or waiting"
        return [found(NAME, "held", text, operator=ABORT, label=label, value=held, limit=0.0)]
    before, after = first.get("kv_usage"), last.get("kv_usage")
    if before is not None and after is not None and after > before:
        text = (
            f"after {gone} in two rounds nothing runs, and the cache holds {after:.1%}, {before:.1%} after the first "
            "round: what they held is not given back"
        )
        return [found(NAME, "cache held", text, operator=ABORT, label=label, value=after, limit=before)]
    return []
