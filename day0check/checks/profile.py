"""Whether the claimed profile is the tightest that the candidate fits: slack in a claim hides faults of its size."""

from __future__ import annotations

from collections.abc import Sequence

from day0check.checks.evidence import Answer, Evidence
from day0check.contracts.profiles import LOOSER, MISFIT, NARROWED, Profile, fitting_form, fitting_profile, profile_named
from day0check.types import CheckOutcome, Finding, Measure, Severity, finding_id

QUESTION = "Is the claimed profile the tightest one that every judged operator fits?"
NAME = "profile"


def judge_run(evidence: Sequence[Evidence]) -> Answer | None:
    """A note that names the tighter built-in profile that all results fit, or a finding that names the looser one that
    explains every failure of an operator that computes; None where the claim is the tightest or nothing explains."""
    if not evidence:
        return None
    claimed = profile_named(evidence[0].profile)
    failed = [m for e in evidence for m in e.measures if m.kind == "compute" and not m.passed and not m.not_judged]
    if failed:
        return _looser(claimed, failed)
    fits = {
        operator: fitting_form(claimed.forms.get(operator, ""), statistics)
        for operator, statistics in worst_misfits(evidence).items()
    }
    tightest = fitting_profile(claimed, fits)
    if not fits or tightest is None or tightest.name == claimed.name:
        return None
    message = (
        f"every operator that was judged fits profile {tightest.name}, which rounds less than {claimed.name}: "
        "claim it, slack in a claim hides faults"
    )
    note = _finding("note", message, f"a tighter profile fits: {tightest.name}", fits)
    return Answer(CheckOutcome(NAME, "passed", "", message), (note,))


def _looser(claimed: Profile, failed: Sequence[Measure]) -> Answer | None:
    """What the failures have in common: a looser profile than claimed, if one explains all their operators."""
    forms: dict[str, str] = {}
    for m in failed:
        found = next((k.removeprefix(LOOSER) for k in m.statistics if k.startswith(LOOSER)), "")
        forms[m.operator] = forms.get(m.operator) or found
    if not all(forms.values()):
        return None
    needed = fitting_profile(claimed, forms)
    if needed is None or needed.name == claimed.name:
        return None
    message = (
        f"every failure of {', '.join(sorted(forms))} is consistent with profile {needed.name}, which rounds more than "
        f"{claimed.name}: either the candidate has lost precision, or {needed.name} is what it should claim"
    )
    finding = _finding("blocker", message, f"consistent with profile {needed.name}", forms)
    return Answer(CheckOutcome(NAME, "failed", "", message), (finding,))


def _finding(severity: Severity, message: str, pattern: str, forms: dict[str, str]) -> Finding:
    return Finding(
        id=finding_id(NAME, None, "", None, pattern),
        severity=severity,
        check=NAME,
        operator=None,
        message=message,
        evidence={"pattern": pattern, "case": "", "forms": dict(sorted(forms.items()))},
    )


def worst_misfits(evidence: Sequence[Evidence]) -> dict[str, dict[str, float]]:
    """Of every operator judged: each tighter form that was tried, and 1 where some judgement did not fit it. States
    that the engine narrowed where it stored them fit no tighter form, however the operator itself returned them."""
    found: dict[str, dict[str, float]] = {}
    for measure in (m for e in evidence for m in e.measures if m.kind == "compute" and not m.not_judged):
        forms = found.setdefault(measure.operator, {})
        for key, value in measure.statistics.items():
            if key.startswith(MISFIT):
                forms[key] = max(forms.get(key, 0.0), value)
    if any(m.statistics.get(NARROWED) for e in evidence for m in e.measures):
        found["kda.attention"] = dict.fromkeys(found.get("kda.attention", {}), 1.0)
    return found
