"""Every legal variant x every small preset it applies to x ten seeds through the main job: how often a false alarm?

    PYTHONPATH=tests python tests/benign/kinds_sweep.py --seeds 10 --state reports/benign-kinds.jsonl --jobs 2

Resumable: each run is a line of the state file; beside it lie the models and what operators each preset calls. A line
says the entry, the preset, the seed and what the verdict was; seed 0 has the preset's own weights and the entry's own
prompts.
An alarm is any verdict but `ready`; `--only B-22 --model tiny --seed 3` repeats one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benign.counting import done_by, read_lines, upper_bound
from benign.legal_variants import TINY, Task, applies, documented, entries, judged, models_of, operators_called

from reference.presets import preset_names


def called_by(model: str) -> dict[str, Any]:
    return {"model": model, "operators": operators_called(model)}


def calls_of(state: Path, models: tuple[str, ...], jobs: int) -> dict[str, list[str]]:
    """Which operators each preset calls, run once for each and kept beside the state file."""
    file = state.with_suffix(".calls.jsonl")
    known = {line["model"] for line in read_lines(file)}
    for _ in done_by(called_by, [m for m in models if m not in known], file, jobs=jobs):
        pass
    return {line["model"]: line["operators"] for line in read_lines(file)}


def tasks(seeds: int, calls: dict[str, list[str]]) -> list[Task]:
    """All runs: the documented kinds, then ours, each seed by seed, so that a sweep that is cut short is even."""
    pairs = [(i, m) for i, located in entries().items() for m in models_of(located) if applies(located, m, calls[m])]
    every = [Task(entry, model, seed) for seed in range(seeds) for entry, model in pairs]
    return sorted(every, key=lambda task: not documented(task.entry))


def sweep(
    wanted: list[Task], state: Path, calls: dict[str, list[str]], *, jobs: int, until: float
) -> Iterator[dict[str, Any]]:
    """The runs that have no line yet, until all are done or the time `until` (monotonic seconds) is over."""
    done = {Task(line["entry"], line["model"], line["seed"]) for line in read_lines(state)}
    yield from done_by(judged, [(t, calls[t.model]) for t in wanted if t not in done], state, jobs=jobs, until=until)


def table(state: Path) -> str:
    """Runs of each entry on each preset, alarms, and the bound over all of them."""
    lines = read_lines(state)
    models = sorted({line["model"] for line in lines}, key=lambda m: preset_names().index(m))
    head = f"{'entry':6} {'title':58} " + " ".join(f"{n:>3}" for n in range(1, len(models) + 1)) + "  alarms"
    text = [*(f"{n:>3} {model}" for n, model in enumerate(models, 1)), head]
    for entry in sorted({line["entry"] for line in lines}):
        own = [line for line in lines if line["entry"] == entry]
        runs = [sum(line["model"] == model for line in own) for model in models]
        title = entries()[entry].entry.title if entry in entries() else ""
        alarms = sum(line["status"] != "ready" for line in own)
        text.append(f"{entry:6} {title[:58]:58} " + " ".join(f"{n or '–':>3}" for n in runs) + f"  {alarms}")
    for name, own in (("documented", [line for line in lines if documented(line["entry"])]), ("all", lines)):
        text.append(_sum(name, own))
    return "\n".join(text)


def _sum(name: str, lines: list[dict[str, Any]]) -> str:
    alarms, seconds = sum(line["status"] != "ready" for line in lines), sum(line["seconds"] for line in lines)
    kinds, models, seeds = (len({line[by] for line in lines}) for by in ("entry", "model", "seed"))
    return (
        f"{name}: {alarms} alarms in {len(lines):,} runs ({kinds} kinds, {models} presets, {seeds} seeds): at most "
        f"{upper_bound(len(lines), alarms):.3%} at 95%; {seconds:.0f} s of processor time"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measures how often legal variants of a model's code raise an alarm.")
    parser.add_argument("--seeds", type=int, default=10, help="weights and prompts of so many seeds")
    parser.add_argument("--state", type=Path, default=Path("reports/benign-kinds.jsonl"), help="the file to go on from")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time; call again to go on")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--only", default="", help="entries whose ids begin with this")
    parser.add_argument("--model", default="", help="this preset alone")
    parser.add_argument("--seed", type=int, default=None, help="this seed alone")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["DAY0CHECK_CACHE"] = str(given.state.with_suffix("").absolute())  # 700 MB of models that are ours alone
    until, begin = time.monotonic() + given.seconds, time.monotonic()
    models = dict.fromkeys((*TINY, *(m for located in entries().values() for m in models_of(located))))
    calls = calls_of(given.state, tuple(models), given.jobs)
    wanted = [
        t
        for t in tasks(given.seeds if given.seed is None else given.seed + 1, calls)
        if t.entry.startswith(given.only)
        and given.model in ("", t.model)
        and (given.seed is None or t.seed == given.seed)
    ]
    for line in sweep(wanted, given.state, calls, jobs=given.jobs, until=until):
        if line["status"] != "ready":
            print("alarm:", json.dumps(line, ensure_ascii=False), flush=True)
    lines = read_lines(given.state)
    print(table(given.state))
    done = {Task(line["entry"], line["model"], line["seed"]) for line in lines}
    print(
        f"{sum(t in done for t in wanted):,} of {len(wanted):,} wanted runs; {time.monotonic() - begin:.0f} s just now"
    )
    alarms = any(line["status"] != "ready" for line in lines)
    return 1 if alarms else 0 if wanted and set(wanted) <= done else 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
