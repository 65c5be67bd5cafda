"""Whole runs of the path as it is shipped, over presets, cases and profiles, through the command: how often not ready?

    PYTHONPATH=tests python tests/benign/whole_runs.py --runs 200 --state reports/benign-runs.jsonl --jobs 2

Resumable: each run is a line of the state file. The runs are the grid of presets, cases and profiles in an order that
is shuffled once and always the same; when it is used up it begins again, with the weights of the next seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benign.counting import done_by, read_lines, upper_bound
from benign.legal_variants import TINY

from day0check.case import load_cases
from day0check.contracts.profiles import PROFILES
from day0check.errors import NothingSelected
from reference.presets import preset, preset_dir

CASES = (
    "agent/tool_prompt",
    "image/one_photo",
    "image/two_photos",
    "long_context/over_pages",
    "operators/contracts",
    "text/code",
    "text/decode_64",
    "text/one_turn",
    "text/ragged_batch",
    "text/two_turns",
)
LIMIT_S = 570.0
SHUFFLE = 20261201


@dataclass(frozen=True)
class WholeRun:
    """`day0check run CASE --model MODEL --profile PROFILE`; `model` may carry a seed ("tiny@1")."""

    model: str
    case: str
    profile: str


@functools.cache
def grid() -> tuple[WholeRun, ...]:
    """Every preset with every case that is for it and every profile, in the order of the sweep."""
    found = []
    for model in TINY:
        config = preset(model).config()
        for case in CASES:
            for profile in PROFILES:
                try:
                    load_cases((case,), config=config, model=model, profile=profile)
                except NothingSelected:
                    continue
                found.append(WholeRun(model, case, profile))
    random.Random(SHUFFLE).shuffle(found)
    return tuple(found)


def run_number(n: int) -> WholeRun:
    """The n-th run of the sweep."""
    seed, place = divmod(n, len(grid()))
    chosen = grid()[place]
    return dataclasses.replace(chosen, model=f"{chosen.model}@{seed}") if seed else chosen


def ended(run: WholeRun) -> dict[str, Any]:
    """The line of a run: exit code, status and, where it is not ready, what the command printed last."""
    folder = Path(tempfile.mkdtemp(prefix="day0check-whole-"))
    command = [sys.executable, "-m", "day0check.cli", "run", run.case, "--model", str(preset_dir(run.model))]
    begin = time.monotonic()
    try:
        process = subprocess.run(
            [*command, "--profile", run.profile, "--out", str(folder / "out")],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        code, said = process.returncode, process.stderr[-1500:]
        file = folder / "out" / "verdict.json"
        status = json.loads(file.read_text(encoding="utf-8"))["status"] if file.is_file() else "none"
    except subprocess.TimeoutExpired:
        code, status, said = -1, "none", f"took more than {LIMIT_S:g} s"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    good = (code, status) == (0, "ready")
    seconds = round(time.monotonic() - begin, 2)
    line = {**dataclasses.asdict(run), "code": code, "status": status, "seconds": seconds}
    return line | {"said": "" if good else said}


def done_in(state: Path) -> set[WholeRun]:
    return {WholeRun(line["model"], line["case"], line["profile"]) for line in read_lines(state)}


def is_alarm(line: dict[str, Any]) -> bool:
    return (line["code"], line["status"]) != (0, "ready")


def table(state: Path) -> str:
    """Runs and alarms by preset, case and profile, and the bound over all of them."""
    lines = read_lines(state)
    text = []
    for by in ("model", "case", "profile"):
        runs = Counter(line[by].partition("@")[0] for line in lines)
        alarms = Counter(line[by].partition("@")[0] for line in lines if is_alarm(line))
        text += [f"{by:8} {name:26} {alarms[name]} of {count}" for name, count in sorted(runs.items())]
    alarms = sum(map(is_alarm, lines))
    seconds = sum(line["seconds"] for line in lines)
    bound = upper_bound(len(lines), alarms)
    text.append(f"{alarms} of {len(lines)} whole runs not ready: at most {bound:.2%} at 95%; {seconds:.0f} s in all")
    return "\n".join(text)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measures how often the shipped path is not found ready.")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--state", type=Path, default=Path("reports/benign-runs.jsonl"), help="the file to go on from")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after this time")
    parser.add_argument("--jobs", type=int, default=1, help="commands side by side")
    given = parser.parse_args(arguments)
    until = time.monotonic() + given.seconds
    wanted = [run_number(n) for n in range(given.runs)]
    done = done_in(given.state)
    for line in done_by(ended, [run for run in wanted if run not in done], given.state, jobs=given.jobs, until=until):
        if is_alarm(line):
            print("not ready:", json.dumps(line, ensure_ascii=False), flush=True)
    print(table(given.state))
    alarms = any(map(is_alarm, read_lines(given.state)))
    return 1 if alarms else 0 if done_in(given.state) >= set(wanted) else 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
