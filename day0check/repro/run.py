"""Runs the case of a finding once more to keep its failing call, and makes the reproducer of it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from day0check import runner
from day0check.compare.locate import LOCAL, split_tap
from day0check.contracts import CONTRACTS
from day0check.contracts.profiles import profile_named
from day0check.errors import Day0Error, Unavailable
from day0check.repro.issue import issue_text
from day0check.snapshot import case_directory
from day0check.types import Finding

# endings of taps that stand for what happened between calls, or between ranks
NO_CALL = (".link", ".kept", ".ranks", ".reduced", ".once", ".pairs", ".numbers")


def reproduce_finding(finding: Finding, plan: runner.RunPlan, folder: Path, facts: Mapping[str, str]) -> bool:
    """Whether `folder` now holds a reproducer; otherwise its issue.md says why not.

    `plan` has the one case of the finding. Raises Interrupted; nothing else that goes wrong spoils the verdict.
    """
    from day0check.repro.make import make_repro

    try:
        with tempfile.TemporaryDirectory(prefix="day0check-repro-") as scratch:
            out = Path(scratch) / "run"
            wanted = witness_of(finding)
            layout = {**plan.layout, **rank_of(finding)}
            runner.run(replace(plan, out=out, reference=False, repeats=0, witness=wanted, layout=layout))
            witness = case_directory(out, plan.cases[0].id, "candidate") / "witness"
            make_repro(witness, folder, finding, profile_named(plan.profile), facts)
    except runner.Interrupted:
        raise
    except Day0Error as error:
        return _without(finding, folder, facts, " ".join(str(error).split()))
    except Exception as error:  # the call is a candidate's: whatever is odd about it must not cost the verdict
        return _without(finding, folder, facts, f"the call cannot be repeated: {type(error).__name__}: {error}")
    return True


def _without(finding: Finding, folder: Path, facts: Mapping[str, str], reason: str) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    text = issue_text(finding, None, {}, (), facts, reason=reason)
    (folder / "issue.md").write_text(text, encoding="utf-8")
    return False


def rank_of(finding: Finding) -> dict[str, Any]:
    """The key of a layout that says whose call is wanted, where the finding is one of a rank."""
    rank = finding.evidence.get("rank")
    return {} if rank is None else {"witness_rank": rank}


def witness_of(finding: Finding) -> dict[str, Any]:
    """The call of a finding, for `probe.witness.Witness`. Raises Unavailable when it is not one call of an operator."""
    tap = str(finding.evidence.get("tap", ""))
    if finding.check not in LOCAL or finding.check == "parameters" or tap.endswith(NO_CALL):
        raise Unavailable(f"check {finding.check} does not accuse a single call of an operator", where=tap)
    _, operator = split_tap(tap)
    if operator is None or finding.phase is None:
        raise Unavailable("there is no contract of this operator", where=tap)
    contract = CONTRACTS[operator]
    if contract.joined:
        raise Unavailable(f"{operator} needs what other ranks hold: it is no call of one process", where=tap)
    written = ["0" if name == contract.args[0].name else name for name in contract.mutates]
    found = {"tap": tap, "phase": finding.phase, "request": finding.request, "position": finding.position}
    return found | {"written": written}
