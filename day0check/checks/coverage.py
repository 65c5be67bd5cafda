"""What a run must have exercised as a whole: what was replaced and never judged, and inputs that ordinary data hide
faults from and that never occurred, prove nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from day0check.checks.evidence import Answer, Evidence
from day0check.contracts import CONTRACTS
from day0check.types import CheckOutcome, Finding, finding_id

QUESTION = "Was every replaced operator judged, and every operator on each class of hard input that its contract lists?"
NAME = "coverage"
OPERATORS = "operators/"  # the cases that supply hard inputs; a tap is operators.<operator>.<input>
_NAMED = 3


def judge_run(evidence: Sequence[Evidence]) -> Answer | None:
    """The answer over all cases of a run; None when nothing was replaced and no case supplies hard inputs.

    Not run, by name: a replaced operator that was judged in no case (layouts and prepared weights are named like
    operators, and those are judged through the operators that use them), and a class of hard inputs that did not occur
    for an operator that was judged.
    """
    replaced = sorted({name for e in evidence for name in e.run.get("replaced", ()) if "." in name})
    judged = {m.operator for e in evidence for m in e.measures if not m.not_judged}
    never = [name for name in replaced if name not in judged]
    supplied = [e for e in evidence if e.case.id.startswith(OPERATORS)]
    asked, lacking = _hard_inputs(judged, supplied) if supplied else ([], [])
    if never:
        return _answer("not_run", f"{', '.join(never)}: replaced, but judged in no case of this run")
    if lacking:
        named = ", ".join(lacking[:_NAMED]) + (", …" if len(lacking) > _NAMED else "")
        return _answer("not_run", f"{len(lacking)} of {len(asked)} classes of hard inputs did not occur: {named}")
    said = [f"{len(replaced)} of {len(replaced)} replaced operators were judged"] if replaced else []
    if asked:
        operators = len({name.rpartition(" on ")[0] for name in asked})
        said.append(f"{len(asked)} of {len(asked)} classes of hard inputs of {operators} operators occurred")
    return _answer("passed", "; ".join(said)) if said else None


def left_out(evidence: Sequence[Evidence]) -> tuple[Finding, ...]:
    """Notes on what no check was asked about and none answers: hard inputs, in a run that leaves out the cases of
    operators, and the draft layer of a model, where the candidate did not run it."""
    return (*_hard_inputs_left_out(evidence), *_draft_left_out(evidence))


def _hard_inputs_left_out(evidence: Sequence[Evidence]) -> tuple[Finding, ...]:
    if not evidence or any(e.case.id.startswith(OPERATORS) for e in evidence):
        return ()
    operators = _with_hard_inputs({m.operator for e in evidence for m in e.measures if not m.not_judged})
    message = (
        f"the hard inputs of {len(operators)} operators were not tried: this run leaves out the cases of operators, "
        "which supply them"
    )
    return (_note("hard inputs left out", message),) if operators else ()


def _draft_left_out(evidence: Sequence[Evidence]) -> tuple[Finding, ...]:
    config = next((e.config for e in evidence if e.config is not None), None)
    finished = [e for e in evidence if not e.case.id.startswith(OPERATORS) and e.measures]
    if config is None or config.draft is None or not finished:
        return ()
    layer = len(config.layers)
    if any(m.layer == layer for e in finished for m in e.measures):
        return ()
    message = (
        f"layer {layer} drafts tokens, and the candidate did not run it: nothing is said about drafts; the model's own "
        "tokens do not depend on them"
    )
    return (_note("draft layer left out", message),)


def _note(pattern: str, message: str) -> Finding:
    return Finding(
        id=finding_id(NAME, None, "", None, pattern),
        severity="note",
        check=NAME,
        operator=None,
        message=message,
        evidence={"pattern": pattern, "case": ""},
    )


def _answer(status: str, summary: str) -> Answer:
    return Answer(CheckOutcome(NAME, status, "", summary))


def _with_hard_inputs(judged: Iterable[str]) -> list[str]:
    return sorted(name for name in judged if name in CONTRACTS and CONTRACTS[name].hard_inputs)


def _hard_inputs(judged: set[str], supplied: Sequence[Evidence]) -> tuple[list[str], list[str]]:
    """("operator on input" that had to occur, those of them that no judgement saw)."""
    seen = {m.tap for e in supplied for m in e.measures if not m.not_judged}
    asked = [(name, hard) for name in _with_hard_inputs(judged) for hard in CONTRACTS[name].hard_inputs]
    lacking = [f"{name} on {hard}" for name, hard in asked if f"operators.{name}.{hard}" not in seen]
    return [f"{name} on {hard}" for name, hard in asked], lacking
