"""The candidate itself: did it live, and did it answer what was asked?"""

from __future__ import annotations

from typing import Any

from day0check.checks.evidence import FINISHED, Answer, Evidence, answer, ended
from day0check.compare.locate import split_tap
from day0check.types import Finding, Measure, finding_id

QUESTION = "Does the candidate finish every request of the case within its time and memory?"
NAME = "candidate"
_PHASES = ("start", "load", "prefill", "decode", "serve")


def judge(evidence: Evidence) -> Answer:
    status = evidence.run.get("status", "")
    message = str(evidence.run.get("message", ""))
    if status == "unavailable":
        return answer(NAME, evidence, "not_run", f"the candidate could not run: {message}")
    if status != FINISHED:
        found = _death(evidence, status, message)
        return answer(NAME, evidence, "failed", found.message, (found,))
    wrong = () if evidence.case.id.startswith("operators/") else _answers(evidence)
    if wrong:
        return answer(NAME, evidence, "failed", wrong[0].message, wrong)
    return answer(NAME, evidence, "passed", f"{len(evidence.case.requests)} requests answered")


def _death(evidence: Evidence, status: str, message: str) -> Finding:
    last: dict[str, Any] = evidence.run.get("last") or {}
    tap = str(last.get("tap") or "")
    place, operator = split_tap(tap)
    layer = int(place[7:]) if place.startswith("layers.") and place[7:].isdigit() else None
    phase = last.get("phase") if last.get("phase") in _PHASES else None
    where = f" in {operator}" if operator else (f" after tap {tap}" if tap else "")
    where += f" of layer {layer}" if layer is not None else ""
    where += f" ({phase})" if phase else ""
    text = f"the candidate {ended(evidence.run)}{where} in case {evidence.case.id}"
    text += f": {' '.join(message.split())}" if message else ""
    layer_class = ""
    if layer is not None and evidence.config is not None and layer < len(evidence.config.layers):
        layer_class = evidence.config.layer_class(layer)
    measured = [m for m in evidence.measures if m.passed]
    return Finding(
        id=finding_id(NAME, operator, layer_class, phase, status or "no status"),
        severity="blocker",
        check=NAME,
        operator=operator,
        message=text,
        layer=layer,
        phase=phase,
        stack_layer="operator" if operator else "framework",
        evidence={
            "case": evidence.case.id,
            "status": status,
            "last": {k: last[k] for k in ("phase", "step", "tap") if k in last},
            "passed_before": len(measured),
            "last_passed": _last(measured),
            "printed_last": list(evidence.run.get("output", ())),
            **({"rank": evidence.run["rank"]} if evidence.run.get("rank") is not None else {}),
        },
    )


def _last(measures: list[Measure]) -> str:
    return max(measures, key=lambda m: (m.order, m.tap)).tap if measures else ""


def _answers(evidence: Evidence) -> tuple[Finding, ...]:
    """A finding for the first request without the answer that it asked for, by what is wrong with it."""
    if evidence.outputs is None:
        return (_unanswered(evidence, None, "no answer", "finished without writing its answers"),)
    found: dict[str, Finding] = {}
    for request in evidence.case.requests:
        pattern, what = _wrong(evidence, request.id)
        if pattern and pattern not in found:
            found[pattern] = _unanswered(evidence, request.id, pattern, what)
    return tuple(found.values())


def _wrong(evidence: Evidence, request_id: str) -> tuple[str, str]:
    request = next(r for r in evidence.case.requests if r.id == request_id)
    outputs = evidence.outputs
    sequence = outputs.sequences.get(request_id)
    if sequence is None:
        return "request lost", "gave no sequence for it"
    if outputs.finish.get(request_id) == "aborted":
        if any(e.do == "abort" and e.request == request_id for e in evidence.case.schedule.events):
            return "", ""
        return "request aborted", "aborted it, which the schedule did not ask for"
    prompt = request.turns[0].tokens
    if sequence[: len(prompt)] != prompt:
        return "prompt changed", "answered a sequence that does not begin with the tokens of its prompt"
    spans = outputs.generated.get(request_id, ())
    if any(not 0 <= a <= b <= len(sequence) for a, b in spans):
        return "wrong spans", f"names generated spans outside its {len(sequence)} tokens"
    if request.max_new_tokens > 0:
        if len(spans) < len(request.turns):
            return "turn lost", f"answered {len(spans)} of {len(request.turns)} turns"
        if any(b - a > request.max_new_tokens for a, b in spans):
            return "too many tokens", f"generated more than {request.max_new_tokens} tokens in a turn"
        stops = set(request.stop_tokens)
        for a, b in spans:
            stopped = b > a and sequence[b - 1] in stops
            if b - a < request.max_new_tokens and not stopped:
                return "too few tokens", f"generated {b - a} of {request.max_new_tokens} tokens without a stop token"
    return "", ""


def _unanswered(evidence: Evidence, request: str | None, pattern: str, what: str) -> Finding:
    subject = f"request {request}" if request else f"case {evidence.case.id}"
    return Finding(
        id=finding_id(NAME, None, "", None, pattern),
        severity="blocker",
        check=NAME,
        operator=None,
        message=f"{subject}: the candidate {what}",
        request=request,
        stack_layer="framework",
        evidence={"case": evidence.case.id, "pattern": pattern},
    )
