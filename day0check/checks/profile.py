"""Whether the claimed profile is the tightest that the candidate fits: slack in a claim hides faults of its size."""

from __future__ import annotations

from collections.abc import Sequence

from day0check.checks.evidence import Answer, Evidence
from day0check.contracts.profiles import MISFIT, fitting_form, profile_named, tightest_profile
from day0check.types import CheckOutcome, Finding, finding_id

QUESTION = "Is the claimed profile the tightest one that every judged operator fits?"
NAME = "profile"


def judge_run(evidence: Sequence[Evidence]) -> Answer | None:
    """A note that names the tighter built-in profile that all results fit; None where the claim is the tightest."""
    if not evidence:
        return None
    claimed = profile_named(evidence[0].profile)
    fits = {
        operator: fitting_form(claimed.forms.get(operator, ""), statistics)
        for operator, statistics in worst_misfits(evidence).items()
    }
    tightest = tightest_profile(claimed, fits)
    if not fits or tightest.name == claimed.name:
        return None
    message = (
        f"every operator that was judged fits profile {tightest.name}, which rounds less than {claimed.name}: "
        "claim it, slack in a claim hides faults"
    )
    note = Finding(
        id=finding_id(NAME, None, "", None, tightest.name),
        severity="note",
        check=NAME,
        operator=None,
        message=message,
        evidence={"pattern": "a tighter profile fits", "case": "", "forms": dict(sorted(fits.items()))},
    )
    return Answer(CheckOutcome(NAME, "passed", "", message), (note,))


def worst_misfits(evidence: Sequence[Evidence]) -> dict[str, dict[str, float]]:
    """Of every operator judged: each tighter form that was tried, and 1 where some judgement did not fit it."""
    found: dict[str, dict[str, float]] = {}
    for measure in (m for e in evidence for m in e.measures if m.kind == "compute" and not m.not_judged):
        forms = found.setdefault(measure.operator, {})
        for key, value in measure.statistics.items():
            if key.startswith(MISFIT):
                forms[key] = max(forms.get(key, 0.0), value)
    return found
