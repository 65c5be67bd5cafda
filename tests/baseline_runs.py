"""A handmade run on disk: what `baseline.collect` reads, with knobs for what a candidate may change."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

from day0check.gate import Scene, decide, write_verdict
from day0check.types import CheckOutcome, Measure, Outputs, to_json

ENVIRONMENT = {"cpu": {"model": "Test CPU", "cores": 2}, "torch": {"version": "2.13.0"}, "accelerators": []}
LIMITS = {"whole": 1.1, "row": 1.5}


@dataclass(frozen=True)
class Knobs:
    """`slow`: factor on every step. `noise`: spread of a step. `machine`: factor on everything, the machine's own work
    too. `busy`: time given to others, as a factor. `rule`: the digest of the selection changes though its scores do
    not. `scores`: they change both."""

    slow: float = 1.0
    noise: float = 0.04
    machine: float = 1.0
    busy: float = 1.0
    rule: bool = False
    scores: bool = False
    whole: float = 0.71
    row: float = 1.0
    peak_rss_bytes: int = 500_000_000
    decode_steps: int = 30
    prefill_steps: int = 6
    torch: str = "2.13.0"
    digest: str = "0123456789ab"


def measures(knobs: Knobs) -> list[Measure]:
    def compute(tap: str, operator: str, order: int, digest: str, phase: str = "prefill") -> Measure:
        statistics = {"whole": knobs.whole, "row": knobs.row}
        return Measure(
            tap, operator, "compute", phase, 3, order, 64, 4096, True, statistics, dict(LIMITS), digest=digest
        )  # fmt: skip

    scores = "b2" if knobs.scores else "b1"
    chosen = "c2" if knobs.rule or knobs.scores else "c1"
    illegal = ({"illegal": 0.0}, {"illegal": 0.0})
    return [
        compute("layers.03.norm.rms.input", "norm.rms", 1, "a1"),
        compute("layers.03.dsa.score", "dsa.score", 2, scores),
        Measure("layers.03.dsa.select", "dsa.select", "choose", "prefill", 3, 3, 64, 64, True, *illegal, digest=chosen),
        compute("layers.03.dsa.attention", "dsa.attention", 4, "d" + chosen),
        compute("layers.03.norm.rms.input", "norm.rms", 9, "e" + chosen, "decode"),
    ]  # fmt: skip


def steps(knobs: Knobs, seed: int) -> list[dict]:
    draw = random.Random(seed)
    lines = []
    for i in range(knobs.prefill_steps + knobs.decode_steps):
        phase, base = ("prefill", 0.2 + 0.05 * i) if i < knobs.prefill_steps else ("decode", 0.03)
        noise = [draw.lognormvariate(0, knobs.noise) for _ in range(2)]
        own = base * knobs.slow * knobs.machine * noise[0]
        lines.append(
            {
                "phase": phase,
                "step": i,
                "rows": 64 if phase == "prefill" else 1,
                "seconds": own * knobs.busy,
                "waited_seconds": own * (knobs.busy - 1),
                "machine_seconds": 0.0007 * knobs.machine * noise[1],
            }
        )
    return lines


def write_run(folder: Path, knobs: Knobs = Knobs(), *, seed: int = 0, cases: tuple[str, ...] = ("text/a",)) -> Path:
    """A finished, ready run in `folder`."""
    for number, case in enumerate(cases):
        candidate = folder / "snapshots" / case.replace("/", "__") / "candidate"
        candidate.mkdir(parents=True)
        told = [json.dumps(to_json(m)) + "\n" for m in measures(knobs)]
        (candidate / "measures.jsonl").write_text("".join(told))
        timed = [json.dumps(line) + "\n" for line in steps(knobs, seed * 100 + number)]
        (candidate / "timing.jsonl").write_text("".join(timed))
        run = {"status": "finished", "repeat_equal": True, "peak_rss_bytes": knobs.peak_rss_bytes, "seconds": 1.0}
        (candidate / "run.json").write_text(json.dumps(run))
        outputs = Outputs({f"{case}/r#1": (1, 2, 3)}, {f"{case}/r#1": ((2, 3),)})
        (candidate / "outputs.json").write_text(json.dumps(to_json(outputs)))
        net = candidate.parent / "reference"
        net.mkdir()
        (net / "run.json").write_text(json.dumps({"status": "finished"}))
        drift = replace(measures(knobs)[0], tap="layers.03.residual.add.mlp", operator="residual.add", digest="")
        (net / "net.jsonl").write_text(json.dumps(to_json(drift)) + "\n")
    write_verdict(decide(tuple(outcomes(cases)), (), scene(knobs, cases)), folder / "verdict.json")
    return folder


def outcomes(cases: tuple[str, ...]) -> list[CheckOutcome]:
    return [CheckOutcome("compute", "passed", case, "5 of 5 judgements passed") for case in cases]


def scene(knobs: Knobs, cases: tuple[str, ...]) -> Scene:
    return Scene(
        model={"name": "tiny", "digest": knobs.digest, "device": "cpu", "layout": {"tensor_parallel": 1}},
        profile="bf16",
        cases=cases,
        environment={**ENVIRONMENT, "torch": {"version": knobs.torch}},
        measured={"cases": {case: {"load": {"requests": 1, "prompt_tokens": 2}} for case in cases}},
    )
