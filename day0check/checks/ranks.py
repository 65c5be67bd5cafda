"""A candidate over ranks: what they hold in common, give each other and sum must have been seen, and be right.

What is wrong with it is found by the checks of the kinds; this one asks whether it was looked at: a sharded run of
which no exchange was recorded proves nothing about the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from day0check.checks.evidence import Answer, Evidence
from day0check.types import CheckOutcome, Measure

QUESTION = "Do the ranks of a sharded run together compute what one device computes, and was all that they share seen?"
NAME = "ranks"
OPERATORS = "operators/"
_NAMED = 3


def judge_run(evidence: Sequence[Evidence]) -> Answer | None:
    """The answer over all cases with a model; None for a run on one device.

    Not run, by name: a finished case in which no exchange between ranks was judged, no result that all of them share,
    or no pair of row and expert was counted. Failed when one of these is wrong.
    """
    cases = [e for e in evidence if e.run.get("ranks", 1) > 1 and not e.case.id.startswith(OPERATORS)]
    if not cases:
        return None
    blind = {e.case.id: lacking for e in cases if e.finished and (lacking := _lacking(e.measures))}
    unfinished = [e.case.id for e in cases if not e.finished]
    wrong = [m for e in cases for m in _joined(e.measures) if not m.passed]
    judged = sum(len(_joined(e.measures)) for e in cases)
    if wrong:
        return _answer("failed", f"{len(wrong)} of {judged} judgements of what ranks share failed: {wrong[0].message}")
    if blind:
        case, lacking = next(iter(blind.items()))
        return _answer("not_run", f"{len(blind)} of {len(cases)} cases, the first {case}: {', '.join(lacking)}")
    if unfinished:
        named = ", ".join(unfinished[:_NAMED]) + (", …" if len(unfinished) > _NAMED else "")
        return _answer("not_run", f"{len(unfinished)} of {len(cases)} cases did not finish: {named}")
    return _answer("passed", f"{judged} of {judged} judgements of what ranks share passed in {len(cases)} cases")


def _joined(measures: Sequence[Measure]) -> list[Measure]:
    """The judgements that need the records of more than one rank, or say how parts become a whole."""
    return [m for m in measures if m.operator.startswith("comm.") or m.tap.endswith((".ranks", ".once", ".pairs"))]


def _lacking(measures: Sequence[Measure]) -> list[str]:
    """What of the ranks' common work was judged nowhere."""
    seen = _joined(measures)
    due = {
        "no exchange between ranks was judged": any(m.operator in ("comm.all_gather", "comm.all_to_all") for m in seen),
        "no result that ranks share was compared": any(m.tap.endswith(".ranks") for m in seen),
    }
    if any(m.operator == "moe.experts" for m in measures):
        due["the pairs of row and expert were not counted"] = any(m.tap.endswith(".once") for m in seen)
    return [words for words, there in due.items() if not there]


def _answer(status: str, summary: str) -> Answer:
    return Answer(CheckOutcome(NAME, status, "", " ".join(summary.split())))
