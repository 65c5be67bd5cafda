"""Handmade verdicts that the report tests share."""

from __future__ import annotations

import math

from day0check.types import CheckOutcome, Finding, NotRun, Verdict, finding_id

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\" ' & ]]> {{ 7*7 }} |`x`| \x1b[31m \x00 \ud800 é"
)


def finding(check: str = "choose", message: str = "dsa.select in layer 3 (prefill): selects the future", **changes):
    fields = {
        "id": finding_id(check, "dsa.select", "dsa+moe", "prefill", message[:20]),
        "severity": "blocker",
        "check": check,
        "operator": "dsa.select",
        "message": message,
        "layer": 3,
        "phase": "prefill",
        "request": "text/one_turn/a#1",
        "position": 83,
        "value": 12.0,
        "limit": 0.0,
        "evidence": {"pattern": "selects the future", "statistics": {"illegal": 12.0, "regret": math.inf}},
    }
    return Finding(**{**fields, **changes})


def drift(case: str, *, layers: int = 8, bad: int | None = None) -> tuple[dict, ...]:
    return tuple(
        {
            "case": case,
            "layer": layer,
            "phase": phase,
            "tap": f"layers.{layer:02d}.residual.add.mlp",
            "relative_l2": 0.003 * (1 + layer) * (8.0 if bad is not None and layer >= bad else 0.7),
            "noise_relative_l2": 0.003 * (1 + layer),
            "whole": 8.0 if bad is not None and layer >= bad else 0.7,
            "whole_limit": 1.1,
            "passed": bad is None or layer < bad,
        }
        for phase in ("prefill", "decode")
        for layer in range(layers)
    )


def choices() -> tuple[dict, ...]:
    row = {
        "tap": "layers.03.dsa.select",
        "operator": "dsa.select",
        "layer": 3,
        "phase": "prefill",
        "seen": "local",
        "rows": 1024,
        "passed": False,
        "case": "text/one_turn",
        "pattern": "selects the future",
        "statistics": {"illegal": 12.0, "regret": math.inf},
        "limits": {"illegal": 0.0, "regret": 8.0},
    }
    return (row, {**row, "tap": "layers.07.dsa.select", "passed": True, "pattern": "", "statistics": {"illegal": 0.0}})


def operators() -> tuple[dict, ...]:
    row = {
        "operator": "norm.rms",
        "kind": "compute",
        "taps": 40,
        "rows": 40960,
        "elements": 5_242_880,
        "failed": 0,
        "not_judged": 0,
        "power": 0.0004,
        "used": 0.71,
        "statistic": "row",
        "tap": "layers.02.norm.rms.input",
        "phase": "prefill",
        "case": "text/one_turn",
        "worst": {"row": 1.07, "whole": 0.71},
        "limits": {"row": 1.5, "whole": 1.1},
    }
    return (row, {**row, "operator": "dsa.select", "kind": "choose", "failed": 2, "used": math.inf, "power": None})


def ready() -> Verdict:
    return Verdict(
        status="ready",
        model={"name": "tiny", "digest": "ab12", "backend": "accelerated", "device": "cpu"},
        profile="bf16",
        cases=("text/one_turn", "image/one_photo"),
        checks=tuple(
            CheckOutcome(name, "passed", case, "412 of 412 judgements passed")
            for case in ("text/one_turn", "image/one_photo")
            for name in ("candidate", "choose", "compute", "propagated")
        ),
        drift=drift("text/one_turn") + drift("image/one_photo"),
        choices=choices()[1:],
        operators=operators()[:1],
        environment={
            "torch": "2.13.0",
            "code": {"commit": "0123456789abcdef", "dirty": False},
            "cores": 2,
            "variables": {},
            "accelerators": [],
        },
        measured={
            "cases": {"text/one_turn": {"seconds": 3.25, "peak_rss_bytes": 812_000_000}},
            "fused": {"residual + norm": 1312, "index score + block maxima": 1},
        },
    )


def not_ready() -> Verdict:
    base = ready()
    first = finding()
    second = finding(
        "propagated", "error beyond its noise from layer 3 on", operator="residual.add", value=8.0, limit=1.1
    )
    known = finding("compute", "a known one", waived=True, operator="kda.gates", value=1.3, limit=1.1)
    return Verdict(
        status="not_ready",
        model=base.model,
        profile="bf16",
        cases=base.cases,
        findings=(known, second, first),
        first_fault=first,
        checks=(
            *base.checks[:4],
            CheckOutcome("choose", "failed", "text/one_turn", "2 of 40 judgements failed"),
            CheckOutcome("logits", "not_run", "text/one_turn", "the reference pass of this case was not run"),
        ),
        not_run=(NotRun("logits of text/one_turn", "the reference pass of this case was not run"),),
        drift=drift("text/one_turn", bad=3) + drift("image/one_photo"),
        choices=choices(),
        operators=operators(),
        environment=base.environment,
        measured={
            **base.measured,
            "baseline": {
                "name": "cpu-2026-11",
                "sentence": "Against baseline cpu-2026-11: decode is slower than it allows.",
                "environment_changes": ["torch: 2.12.0 -> 2.13.0"],
                "numbers": [{"operator": "norm.rms", "taps": 40, "bits_changed": 3, "statistic": "whole", "was": 0.71,
                             "now": 0.72, "verdict": "changed"}],
                "speed": [{"what": "decode", "ratio": 1.31, "low": 1.28, "high": 1.33, "fair_ratio": 1.3,
                           "wall_ratio": 1.4, "limit": 1.1,
                           "floor": 0.15, "samples": 64, "verdict": "failed"}],
                "memory": [{"what": "text/one_turn", "was_bytes": 800_000_000, "now_bytes": 812_000_000, "limit": 1.1,
                            "verdict": "passed"}],
            },
        },
    )  # fmt: skip


def hostile() -> Verdict:
    """Every text that a run can bring from outside (answers, file names, versions, messages) tries to be markup."""
    bad = finding("choose", f"says {HOSTILE}", request=f"{HOSTILE}/a#1", evidence={HOSTILE: HOSTILE, "case": HOSTILE})
    return Verdict(
        status="not_ready",
        model={"name": HOSTILE, "backend": HOSTILE, "device": HOSTILE, "ops": HOSTILE},
        profile=HOSTILE,
        cases=(HOSTILE,),
        findings=(bad,),
        first_fault=bad,
        checks=(CheckOutcome("choose", "failed", HOSTILE, HOSTILE),),
        not_run=(NotRun(HOSTILE, HOSTILE),),
        drift=drift(HOSTILE),
        choices=({**choices()[0], "tap": HOSTILE, "pattern": HOSTILE, "statistics": {HOSTILE: 1.0}},),
        operators=({**operators()[0], "operator": HOSTILE, "tap": HOSTILE},),
        environment={HOSTILE: HOSTILE, "code": {"commit": HOSTILE}},
        measured={HOSTILE: HOSTILE, "fused": {HOSTILE: 1},
                  "baseline": {"sentence": HOSTILE, "environment_changes": [HOSTILE],
                                                 "speed": [{"what": HOSTILE, "verdict": HOSTILE}]}},
    )  # fmt: skip
