"""What the checks over further runs share: from the comparisons of their runs to one answer. It fails closed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from day0check.checks.evidence import FINISHED, Answer, Evidence, Extra, answer, ended
from day0check.checks.invariants.extra_runs import ExtraRun
from day0check.checks.propagated import consequences_apart
from day0check.compare.locate import findings_from
from day0check.compare.run_comparison import RunComparison
from day0check.types import Finding, Measure, Outputs, RunCase, finding_id

Runs = Callable[[RunCase, Outputs, Any], tuple[ExtraRun, ...]]
CONTROL = "again"  # the run that says whether this candidate repeats itself to the byte
_NAMED = 4
_REST = 5  # steps in a row without a row of a request that was away


@dataclass(frozen=True)
class _Verdict:
    """What one run says: it could not be asked (`not_run`), or `findings`, or neither."""

    run: ExtraRun
    not_run: str = ""
    findings: tuple[Finding, ...] = ()
    comparison: RunComparison | None = None


def judge_runs(name: str, evidence: Evidence, runs: Runs, *, nothing: str) -> Answer:
    """The answer of check `name` from the comparisons of the runs that it wants.

    Failed with the findings of the first run that is wrong; not run when one of them could not be made or compared, or
    did not do what it was for; `nothing` is the reason where the case has nothing to ask.
    """
    if not evidence.finished or evidence.outputs is None:
        reason = f"the candidate {ended(evidence.run)}, and further runs follow its answers"
        return answer(name, evidence, "not_run", reason)
    if evidence.config is None:
        return answer(name, evidence, "not_run", "the configuration of the model is not known")
    wanted = runs(evidence.case, evidence.outputs, evidence.config)
    if not wanted:
        return answer(name, evidence, "not_run", nothing)
    basis = {run.against for run in wanted} | ({CONTROL} if len(wanted) > 1 else set())  # others are held against them
    verdicts = [_judge_run(name, evidence, run) for run in wanted if run.label not in basis]
    wrong = [v for v in verdicts if v.findings]
    if wrong:
        findings = _with_others(wrong)
        return answer(name, evidence, "failed", findings[0].message, findings)
    unasked = [v for v in verdicts if v.not_run]
    if unasked:
        labels = ", ".join(v.run.label for v in unasked[:_NAMED]) + (", …" if len(unasked) > _NAMED else "")
        text = f"{len(unasked)} of {len(verdicts)} runs could not be compared ({labels}): {unasked[0].not_run}"
        return answer(name, evidence, "not_run", text)
    return answer(name, evidence, "passed", _summary(verdicts))


def _summary(verdicts: Sequence[_Verdict]) -> str:
    rows = sum(v.comparison.rows for v in verdicts)
    different = sum(v.comparison.different for v in verdicts)
    behind = sum(bool(v.comparison.explained) for v in verdicts)
    text = f"{len(verdicts)} run{'s' * (len(verdicts) != 1)}, {rows} rows compared, {different} with other bytes"
    if behind:
        text += f"; in {behind} a legal choice fell otherwise, and the oracle that follows it agrees"
    return text


def _with_others(wrong: Sequence[_Verdict]) -> tuple[Finding, ...]:
    """Findings of the first wrong run, the labels of the others among their evidence."""
    first, others = wrong[0], [v.run.label for v in wrong[1:]]
    named = {"run": first.run.label, "other_runs": others}
    return tuple(replace(f, evidence={**f.evidence, **named}) for f in first.findings)


def _judge_run(name: str, evidence: Evidence, run: ExtraRun) -> _Verdict:
    extra = evidence.extra.get(run.label)
    if extra is None:
        return _Verdict(run, "it was not made")
    if extra.status == "unavailable":
        return _Verdict(run, extra.message)
    if extra.status != FINISHED:
        return _Verdict(run, findings=(_fell(name, run, extra),))
    found = extra.comparison
    if found is None:
        return _Verdict(run, extra.reason or "it was not compared")
    if found.strayed:
        return _Verdict(run, findings=(_strayed(name, run, found),))
    wrong = _wrong_measures(evidence, run, found)
    if wrong:
        told = findings_from(name, wrong, evidence.config, context=found.measures)
        told = consequences_apart(told)
        return _Verdict(run, findings=tuple(replace(f, message=f"with {run.words}: {f.message}") for f in told))
    lacking = found.missing or _unshown(run, found) or _without_control(evidence, run)
    return _Verdict(run, lacking, comparison=found)


def _wrong_measures(evidence: Evidence, run: ExtraRun, found: RunComparison) -> list[Measure]:
    wrong = [m for m in found.measures if not m.passed]
    if found.explained and not _oracle_agrees(evidence):
        wrong += found.set_aside  # of the two runs that chose differently the judged one is not within the noise
    if wrong or not run.bits or not found.different:
        return wrong
    control = _control(evidence)
    return [_other_bytes(run, found)] if run.label != CONTROL and control and not control.different else []


def _oracle_agrees(evidence: Evidence) -> bool:
    """Whether the judged run, too, is within the noise of an oracle that follows its choices."""
    return bool(evidence.net) and all(m.passed or m.not_judged for m in evidence.net)


def _control(evidence: Evidence) -> RunComparison | None:
    control = evidence.extra.get(CONTROL)
    return None if control is None else control.comparison


def _without_control(evidence: Evidence, run: ExtraRun) -> str:
    if run.bits and _control(evidence) is None:
        return "whether the candidate repeats itself to the byte is not known"
    return ""


def _other_bytes(run: ExtraRun, found: RunComparison) -> Measure:
    """The first tap with other bytes, in a run that promises the same."""
    first = next(m for m in found.measures if m.tap == found.first_tap)
    message = (
        f"{found.different} of {found.rows} rows have other bytes, where a second run of the same schedule has none"
    )
    return replace(
        first,
        passed=False,
        failing="other_bytes",
        statistics={**first.statistics, "other_bytes": float(found.different)},
        limits={"other_bytes": 0.0},
        request=found.first_request,
        position=found.first_position,
        pattern="other bytes",
        message=message,
    )


def _unshown(run: ExtraRun, found: RunComparison) -> str:
    """What the run was for and did not do; empty when it did."""
    did = found.computed
    for request in run.recomputed:
        if request not in did or did[request].rows <= did[request].positions:
            return f"request {request} was never preempted: no position of it was computed twice"
    for request in run.reused:
        if request in did and did[request].positions >= _length(run, request):
            return f"request {request} took nothing from the cache: it computed every position"
    for request in run.once:
        if request in did and did[request].rows > did[request].positions:
            return f"request {request} computed a position twice: its memory did not come back"
    for request in run.rested:
        if request not in did or did[request].longest_rest < _REST:
            return f"request {request} never rested: it had rows in almost every step"
    for request in run.chunked:
        if request in did and did[request].prefill_steps < 2:
            return f"the prompt of request {request} was computed in one step"
    for request in run.merged:
        if request in did and not did[request].merged:
            return f"nothing was merged for request {request}: its prefix was attended to whole"
    return ""


def _length(run: ExtraRun, request: str) -> int:
    """Positions of a forced request that go through the model: a token chosen last is never an input."""
    mine = next(r for r in run.requests if r.id == request)
    answers = sum(map(len, mine.forced))
    open_end = bool(mine.forced and mine.forced[-1])
    return sum(len(t.tokens) for t in mine.turns) + answers - open_end


def _fell(name: str, run: ExtraRun, extra: Extra) -> Finding:
    message = f"with {run.words} the candidate {ended({'status': extra.status})}: {extra.message}"
    return Finding(
        id=finding_id(name, None, "", None, extra.status),
        severity="blocker",
        check=name,
        operator=None,
        message=message,
        stack_layer="framework",
        evidence={"run": run.label, "pattern": extra.status},
    )


def _strayed(name: str, run: ExtraRun, found: RunComparison) -> Finding:
    request = found.strayed[0]
    message = f"with {run.words} request {request} was not answered with the tokens that were prescribed"
    return Finding(
        id=finding_id(name, None, "", None, "strayed"),
        severity="blocker",
        check=name,
        operator=None,
        message=message,
        request=request,
        stack_layer="framework",
        evidence={"run": run.label, "pattern": "strayed"},
    )
