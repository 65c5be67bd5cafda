"""The load phases: no request may fail, objectives are met, and figures of a client at its own limit say nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from day0check.checks.endpoint.answer import answered, found
from day0check.checks.evidence import Answer
from day0check.load.observed import Observed

QUESTION = "Does every request of the load succeed, in the time that was asked for?"
NAME = "endpoint.speed"
WARMUP, CLOSED = "warmup", "closed/"
BUNCHED_MS = 100.0  # an answer shorter than this may come in one piece
BUNCHED_SHARE = 0.95


def judge(observed: Observed) -> Answer:
    """Phases in which the client was the bottleneck are not judged by time; failures count in all of them."""
    phases = observed.speed
    loads = {name: p for name, p in phases.items() if name != WARMUP}
    findings = _failures(phases)
    sound = {name: p for name, p in loads.items() if not p["client_bound"]}
    for name, figures in sound.items():
        findings += _objectives(name, figures, observed)
    findings += _bunched(sound)
    not_run = ""
    if not loads:
        not_run = observed.stopped or "no load phase was run"
    elif not sound:
        not_run = f"no verdict on speed: {next(iter(loads.values()))['client_bound']}"
    elif observed.slos and not any(name.startswith("open/") for name in sound):
        bound = next((p["client_bound"] for n, p in loads.items() if n.startswith("open/")), "it was not run")
        not_run = f"the objectives are of the open loop: {bound}"
    names = "objectives met" if observed.slos else "measured, no objective given"
    return answered(NAME, findings, f"every request of the load succeeded; {names}", not_run=not_run)


def _failures(phases: Mapping[str, Mapping[str, Any]]) -> list:
    wrong = {name: count for name, p in phases.items() if (count := p["failed"] - _more_than_it_takes(name, p))}
    if not wrong:
        return []
    failed, total = sum(wrong.values()), sum(p["requests"] for p in phases.values())
    name = next(iter(wrong))
    first = phases[name]
    why = first.get("failure", "no reason kept")
    text = f"{failed} of {total} requests of the load failed, in phase {name} first: {why}"
    return [found(NAME, "failed requests", text, label=name, value=failed, limit=0.0)]


def _more_than_it_takes(name: str, figures: Mapping[str, Any]) -> int:
    """Refusals by which an endpoint ends the sweep: it said clearly that so many at once are too many."""
    several = name.startswith(CLOSED) and name != f"{CLOSED}1"
    return figures.get("busy", 0) if several and figures["busy"] < figures["requests"] else 0


def _objectives(name: str, figures: Mapping[str, Any], observed: Observed) -> list:
    """Only the open loop has latencies that count from when a user would have asked."""
    if not observed.slos or not name.startswith("open/"):
        return []
    share = figures["slo"]["share"]
    if share >= observed.slo_share:
        return []
    wanted = ", ".join(f"{n} {v:g}" for n, v in observed.slos.items())
    text = f"{share:.1%} of the requests of {name} met {wanted}; {observed.slo_share:.1%} were asked for"
    return [found(NAME, "objectives", text, label=name, value=share, limit=observed.slo_share)]


def _bunched(sound: Mapping[str, Mapping[str, Any]]) -> list:
    names = [name for name, figures in sound.items() if _in_one_piece(figures)]
    if not names:
        return []
    text = (
        f"in {', '.join(names)} the first chunk comes when the answer is nearly complete: it is not streamed as it is "
        "generated"
    )
    return [found(NAME, "bunched", text, severity="warning", label=names[0])]


def _in_one_piece(figures: Mapping[str, Any]) -> bool:
    ttft, e2e = figures["ttft_ms"].get("p50"), figures["e2e_ms"].get("p50")
    tokens = figures["output_tokens"] / max(1, figures["requests"])
    return ttft is not None and e2e is not None and e2e >= BUNCHED_MS and tokens >= 8 and ttft >= BUNCHED_SHARE * e2e
