"""Healthy results of every compute operator in each of its legal forms, judged again and again: how often is there a
false alarm?  PYTHONPATH=tests python tests/compare/benign_sweep.py --runs 1000 --state reports/benign.jsonl --jobs 2

Resumable: every batch is a line of the state file, and a later call goes on where the file ends. Inputs are the hard
inputs of the contracts with new values each time; the healthy implementations are the reference in float32 and in
float64, rounded to nearest at the points of the form, at none but the last, and the kernels of the fast path. Profile
bf16 has every form of every contract and, fused, those on quantised rows; other profiles have the form they claim.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benign.counting import done_by, read_lines, upper_bound

from day0check.accelerated.ops import TABLE
from day0check.compare.choices import judge_choice
from day0check.compare.compute import judge_compute
from day0check.compare.judgement import excess
from day0check.compare.quantise import judge_quantiser
from day0check.compare.replay import Replay
from day0check.compare.rounding import Rounder, round_blocks, round_nearest
from day0check.contracts import CONTRACTS
from day0check.contracts.contract import Contract
from day0check.contracts.hard_inputs import generate
from day0check.contracts.profiles import (
    FP8_FORM,
    FP8_INPUTS,
    FUSED_FORMS,
    PROFILES,
    QUANTISED,
    Profile,
    with_form,
)
from reference.formats import fp8_columns_decode

BATCH = 20
KINDS = ("float32", "float64", "last_only", "kernel")
FP8_KINDS = (
    "codes",
    "powers_of_two",
    "half_up",
    "bf16_scale",
    "inside",
    "inside_float64",
)  # quantised rows: by whom, how


CHOICES = ("dsa.select", "moe.route", "sample.token")  # what chooses is judged by its scores, under the tie rule


@dataclass(frozen=True)
class Subject:
    """An operator in one of its forms; `form` is "" where it has none, FP8_FORM for the fused one on quantised rows.
    `claimed`: the profile that it is judged by, with its form in place of the profile's own."""

    operator: str
    form: str
    claimed: str = "bf16"

    def profile(self) -> Profile:
        if self.form == FP8_FORM:
            return PROFILES[QUANTISED]
        base = PROFILES[self.claimed]
        return with_form(base, CONTRACTS[self.operator], self.form) if self.form else base

    def kinds(self) -> tuple[str, ...]:
        """The kernels of the fast path claim the fused form only."""
        if self.form == FP8_FORM:
            return FP8_KINDS
        if self.operator in CHOICES:
            return ("float32", "kernel")
        fused = not self.form or FUSED_FORMS.get(self.operator) == self.form or self.claimed != "bf16"
        return KINDS if fused and self.operator in TABLE else KINDS[:3]


@dataclass(frozen=True)
class Run:
    subject: Subject
    seed: int
    kind: str
    input: str
    alarm: str  # the statistic that failed, empty when all passed
    used: float  # the largest statistic / limit
    message: str = ""


def subjects(claimed: str = "bf16") -> tuple[Subject, ...]:
    """All that is swept under a profile: for bf16 every form and quantised rows, for others the form they claim."""
    computed = [c for c in CONTRACTS.values() if c.hard_inputs and (c.kind == "compute" or c.name in CHOICES)]
    if claimed != "bf16":
        return tuple(Subject(c.name, PROFILES[claimed].forms.get(c.name, ""), claimed) for c in computed)
    plain = [Subject(c.name, form) for c in computed for form in ([f.name for f in c.forms] or [""])]
    return (*plain, *(Subject(name, FP8_FORM) for name in FP8_INPUTS))


def healthy(contract: Contract, arguments: dict[str, Any], profile: Profile, kind: str) -> tuple[torch.Tensor, ...]:
    """The results of a healthy implementation of one kind, in the dtypes of the contract."""
    first, *_ = (a.name for a in contract.args)
    if kind == "kernel":
        found = TABLE[contract.name](arguments[first], **{k: v for k, v in arguments.items() if k != first})
        return found if isinstance(found, tuple) else (found,)
    if contract.kind == "choose":
        return Replay(contract, arguments).run()
    wide = Replay(contract, arguments).wide(torch.float64 if kind == "float64" else torch.float32)
    points = {} if kind == "last_only" else profile.points_of(contract.name)
    results = wide.run(Rounder(points, leave=contract.result_points()))
    return tuple(
        y if not y.is_floating_point() else y.float() if to is None else round_nearest(y, to).to(getattr(torch, to))
        for y, to in zip(results, (profile.rounding_of(contract.name, r) for r in contract.results), strict=True)
    )


def quantised(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes and scales of rows by one of the legal ways; each of them is judged before it is used."""
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    amax = blocks.abs().amax(-1)
    scale = torch.where(amax > 0, amax / 448, 1.0)
    if kind == "powers_of_two":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    elif kind == "bf16_scale":
        scale = scale.bfloat16().float()
    away = 1 + 2.0**-22 if kind == "half_up" else 1.0
    codes = (blocks / scale.unsqueeze(-1) * away).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
    return codes[:, : x.shape[1]].contiguous(), scale


def on_quantised_rows(
    contract: Contract, arguments: dict[str, Any], profile: Profile, kind: str
) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """(arguments as the operator gets them, healthy results): codes of its rows, or plain rows that it quantises."""
    if kind.startswith("inside"):
        rows = round_blocks(arguments["x"].float(), profile.inputs[contract.name])
        return arguments, healthy(contract, arguments | {"x": rows}, profile, kind[len("inside_") :] or "float32")
    codes, scale = quantised(arguments["x"], kind)
    judged = judge_quantiser(arguments["x"], (codes, scale))[0]
    assert judged.passed, judged.message
    given = arguments | {"x": codes, "x_scale": scale}
    plain = arguments | {"x": fp8_columns_decode(codes, scale, dtype=torch.float32)}
    return given, healthy(contract, plain, profile, "float32" if kind != "codes" else "float64")


def one(subject: Subject, seed: int, *, device: str = "cpu") -> Run:
    """The run of one seed: inputs take turns, then kinds of implementation."""
    contract, profile, kinds = CONTRACTS[subject.operator], subject.profile(), subject.kinds()
    name = contract.hard_inputs[seed % len(contract.hard_inputs)]
    kind = kinds[seed // len(contract.hard_inputs) % len(kinds)]
    hard = generate(contract, name, seed, getattr(torch, profile.act_dtype), device=device)
    arguments = {contract.args[0].name: hard.args[0], **hard.kwargs}
    if subject.form == FP8_FORM:
        arguments, results = on_quantised_rows(contract, arguments, profile, kind)
    else:
        results = healthy(contract, arguments, profile, kind)
    replay = Replay(contract, arguments)
    if contract.kind == "choose":
        judged = judge_choice(replay, results, claims_tie_rule=True)
    else:
        judged = judge_compute(replay, results, profile, seed=seed)
    used = [excess(j.statistics[k], limit) for j in judged for k, limit in j.limits.items() if limit > 0]
    failed = next((j for j in judged if not j.passed), None)
    alarm, message = ("", "") if failed is None else (failed.failing or "not judged", failed.message)
    return Run(subject, seed, kind, name, alarm, max(used, default=0.0), message)


def read_state(path: Path) -> dict[Subject, list[dict[str, Any]]]:
    """Lines of finished batches by subject; a last line that was cut off is left out."""
    found: dict[Subject, list[dict[str, Any]]] = {}
    for batch in read_lines(path):
        subject = Subject(batch["operator"], batch["form"], batch.get("claimed", "bf16"))
        found.setdefault(subject, []).append(batch)
    return found


@dataclass(frozen=True)
class Batch:
    """The seeds first:first + count of one subject."""

    subject: Subject
    first: int
    count: int
    device: str


def missing(runs: int, state: Path, own: tuple[Subject, ...], device: str) -> list[Batch]:
    """The batches without a line in the state file; subjects take turns, so that a sweep that is cut short is even."""
    known = {
        subject: {seed for b in batches for seed in range(b["first"], b["first"] + b["runs"])}
        for subject, batches in read_state(state).items()
    }
    found = []
    for first in range(0, runs, BATCH):
        for subject in own:
            seeds = [s for s in range(first, min(first + BATCH, runs)) if s not in known.get(subject, ())]
            if seeds:
                found.append(Batch(subject, seeds[0], len(seeds), device))
    return found


def sweep(
    runs: int,
    state: Path,
    *,
    until: float = float("inf"),
    device: str = "cpu",
    jobs: int = 1,
    own: tuple[Subject, ...] | None = None,
) -> Iterator[dict[str, Any]]:
    """Batches until every subject (`own`; all of profile bf16 by default) has `runs` runs, or the time `until`
    (monotonic seconds) is over."""
    batches = missing(runs, state, subjects() if own is None else own, device)
    yield from done_by(_batch, batches, state, jobs=jobs, until=until)


def _batch(batch: Batch) -> dict[str, Any]:
    begin, subject = time.monotonic(), batch.subject
    found = [one(subject, seed, device=batch.device) for seed in range(batch.first, batch.first + batch.count)]
    return {
        "operator": subject.operator,
        "form": subject.form,
        "claimed": subject.claimed,
        "first": batch.first,
        "runs": batch.count,
        "alarms": [[r.seed, r.kind, r.input, r.alarm, r.message] for r in found if r.alarm],
        "used": max(r.used for r in found),
        "seconds": round(time.monotonic() - begin, 3),
    }


@dataclass(frozen=True)
class Row:
    """One subject of the benign column: `used` the closest approach to a limit, `seconds` of one processor."""

    subject: Subject
    runs: int
    alarms: int
    used: float
    seconds: float

    @property
    def at_most(self) -> float:
        return upper_bound(self.runs, self.alarms)


def column(state: Path) -> list[Row]:
    """The benign column, by profile, operator and form."""
    found = []
    for subject, batches in read_state(state).items():
        runs, alarms = sum(b["runs"] for b in batches), sum(len(b["alarms"]) for b in batches)
        used, seconds = max(b["used"] for b in batches), sum(b["seconds"] for b in batches)
        found.append(Row(subject, runs, alarms, used, seconds))
    return sorted(found, key=lambda r: (r.subject.claimed, r.subject.operator, r.subject.form))


def table(state: Path) -> str:
    """The benign column as people read it, with its sums."""
    rows = column(state)
    lines = [
        f"{'operator':24} {'form':14} {'profile':15} {'alarms':>6} {'of':>5} {'at most':>8} {'used':>6} {'seconds':>8}"
    ]
    for r in rows:
        name = f"{r.subject.operator:24} {r.subject.form or '–':14} {r.subject.claimed:15}"
        lines.append(f"{name} {r.alarms:6} {r.runs:5} {r.at_most:8.2%} {r.used:6.2f} {r.seconds:8.1f}")
    runs, alarms, seconds = sum(r.runs for r in rows), sum(r.alarms for r in rows), sum(r.seconds for r in rows)
    bound = upper_bound(runs, alarms)
    lines.append(f"{alarms} alarms in {runs:,} runs, at most {bound:.4%} of them; {seconds:.0f} s of processor time")
    return "\n".join(lines)


def markdown(state: Path) -> str:
    """The benign column as rows of the README's table."""
    return "\n".join(
        f"| `{r.subject.operator}` | {r.subject.form or '–'} "
        f"| {r.alarms} of {r.runs:,} | {r.at_most:.2%} | {r.used:.2f} |"
        for r in column(state)
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measures how often healthy operators raise an alarm.")
    parser.add_argument("--runs", type=int, default=1000, help="runs per operator and form")
    parser.add_argument("--state", type=Path, default=Path("reports/benign.jsonl"), help="the file to go on from")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time; call again to go on")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--profile", default="bf16", choices=list(PROFILES), help="the precision that is claimed")
    parser.add_argument("--only", default="", help="operators whose names begin with this")
    parser.add_argument("--markdown", action="store_true", help="print rows of a Markdown table")
    parser.add_argument(
        "--device", default="cpu", help="where operators and judge run; a state file of its own for each"
    )
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    own = tuple(s for s in subjects(given.profile) if s.operator.startswith(given.only))
    until = time.monotonic() + given.seconds
    for batch in sweep(given.runs, given.state, until=until, device=given.device, jobs=given.jobs, own=own):
        for alarm in batch["alarms"]:
            print("alarm:", batch["claimed"], batch["operator"], batch["form"], *alarm, flush=True)
    print(markdown(given.state) if given.markdown else table(given.state))
    rows = column(given.state)
    counted = {r.subject: r.runs for r in rows}
    complete = bool(own) and all(counted.get(s, 0) >= given.runs for s in own)
    return 1 if any(r.alarms for r in rows) else 0 if complete else 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
