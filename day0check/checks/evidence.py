"""What a check reads, and what it answers. A check never runs anything."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from day0check.compare.cost import Costs, read_costs
from day0check.compare.locate import findings_from
from day0check.compare.run_comparison import RunComparison, read_comparison
from day0check.errors import InputError
from day0check.snapshot import Snapshot, case_directory, read_measures
from day0check.types import CheckOutcome, Finding, Measure, Outputs, RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

FINISHED = "finished"
EXTRA = "extra"  # the folder of the further runs, beside the records of the judged one
_NAMED = 3  # taps named in a summary


@dataclass(frozen=True)
class Extra:
    """One further run: how it ended, and how it compares; `reason`: why there is no comparison."""

    status: str
    message: str = ""
    comparison: RunComparison | None = None
    reason: str = ""


@dataclass(frozen=True)
class Evidence:
    """All that was recorded of one case.

    `run` is the candidate's run.json; `measures` its local replay; `net` the propagated comparison, or None when the
    reference pass did not finish, and then `net_reason` says why; `parameters` the comparison of weights and settings,
    None where there was none; `capabilities` are those of the backend, and an empty set means that they are not known.
    `extra`: the further runs that its checks asked for, by label. `costs`: the sweep of the cost check.
    """

    case: RunCase
    config: ModelConfig | None
    profile: str
    run: dict[str, Any]
    measures: tuple[Measure, ...] = ()
    net: tuple[Measure, ...] | None = None
    outputs: Outputs | None = None
    capabilities: frozenset[str] = frozenset()
    net_reason: str = ""
    notes: tuple[str, ...] = ()
    parameters: tuple[Measure, ...] | None = None
    extra: dict[str, Extra] = field(default_factory=dict)
    costs: Costs | None = None
    capture: tuple[Measure, ...] = ()  # what was captured last beside the logits that came of it

    @property
    def finished(self) -> bool:
        return self.run.get("status") == FINISHED


@dataclass(frozen=True)
class Answer:
    outcome: CheckOutcome
    findings: tuple[Finding, ...] = ()


def read_evidence(
    root: Path | str,
    case: RunCase,
    *,
    config: ModelConfig | None,
    profile: str,
    capabilities: frozenset[str] = frozenset(),
) -> Evidence:
    """The evidence of `case` under the output directory `root`. Raises InputError for files that cannot be read."""
    snapshot = Snapshot(case_directory(root, case.id, "candidate"))
    net, reason, notes = _read_net(case_directory(root, case.id, "reference"))
    parameters = _read_lines(case_directory(root, case.id, "reference") / "parameters.jsonl", notes)
    capture = _read_lines(case_directory(root, case.id, "reference") / "capture.jsonl", notes)
    return Evidence(
        case=case,
        config=config,
        profile=profile,
        run=snapshot.run,
        measures=snapshot.measures,
        net=net,
        outputs=snapshot.outputs,
        capabilities=capabilities or frozenset(snapshot.run.get("capabilities") or ()),
        net_reason=reason,
        notes=(*snapshot.notes, *notes),
        parameters=parameters,
        capture=capture or (),
        extra=_read_extra(snapshot.directory / EXTRA, case_directory(root, case.id, "reference") / EXTRA, reason),
        costs=read_costs(snapshot.directory),
    )


def _read_extra(runs: Path, comparisons: Path, reason: str) -> dict[str, Extra]:
    found = {}
    for path in sorted(runs.glob("*/run.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            label, status, message = record["label"], str(record["status"]), str(record.get("message", ""))
        except (ValueError, KeyError) as error:
            raise InputError(f"no record of a run: {error}", where=str(path), todo="run the case again") from error
        found[label] = Extra(status, message, read_comparison(comparisons, label), reason)
    return found


def _read_lines(path: Path, notes: list[str]) -> tuple[Measure, ...] | None:
    return read_measures(path, notes) if path.is_file() else None


def _read_net(directory: Path) -> tuple[tuple[Measure, ...] | None, str, list[str]]:
    notes: list[str] = []
    if not (directory / "run.json").exists():
        return None, "the reference pass of this case was not run", notes
    run = Snapshot(directory).run
    if run["status"] != FINISHED:
        return None, f"the reference pass {run['status']}: {run.get('message', '')}".rstrip(": "), notes
    return read_measures(directory / "net.jsonl", notes), "", notes


def answer(name: str, evidence: Evidence, status: str, summary: str, findings: tuple[Finding, ...] = ()) -> Answer:
    """The answer of check `name` for this case; `summary` is one line."""
    return Answer(CheckOutcome(name, status, evidence.case.id, " ".join(summary.split())), findings)


def answer_from(name: str, measures: tuple[Measure, ...], evidence: Evidence, *, nothing: str) -> Answer:
    """Failed with one finding per group when any measure fails; not run when a tap could not be judged, when there is
    no measure at all (`nothing` is then the reason) or when the candidate did not finish; passed otherwise.
    """
    every = (*evidence.measures, *(evidence.net or ()))
    findings = findings_from(name, measures, evidence.config, context=measures if len(measures) > 1 else every)
    skipped = [m for m in measures if m.not_judged]
    judged = len(measures) - len(skipped)
    if findings:
        failed = sum(not m.passed and not m.not_judged for m in measures)
        text = f"{failed} of {judged} judgements failed, the first: {findings[0].message}"
        return answer(name, evidence, "failed", text, findings)
    if not measures:
        return answer(name, evidence, "not_run", nothing)
    if skipped:
        taps = ", ".join(m.tap for m in skipped[:_NAMED]) + (", …" if len(skipped) > _NAMED else "")
        text = f"{len(skipped)} of {len(measures)} taps could not be judged ({taps}): {skipped[0].not_judged}"
        return answer(name, evidence, "not_run", text)
    if not evidence.finished:
        text = f"{judged} judgements passed until the candidate {ended(evidence.run)}"
        return answer(name, evidence, "not_run", text)
    return answer(name, evidence, "passed", f"{judged} of {judged} judgements passed")


def ended(run: dict[str, Any]) -> str:
    """How the candidate ended, as the end of a sentence that begins with "the candidate"."""
    words = {
        FINISHED: "finished",
        "failed": "failed",
        "aborted": "aborted",
        "timeout": "ran out of time",
        "memory": "outgrew its memory limit",
        "unavailable": "could not run",
    }
    return words.get(run.get("status", ""), "ended without a status")
