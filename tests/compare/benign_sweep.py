"""Healthy results of every compute operator in each of its legal forms, judged again and again: how often is there a
false alarm?  python tests/compare/benign_sweep.py --runs 1000 --state reports/benign.jsonl

Resumable: every batch is a line of the state file, and a later call goes on where the file ends. Inputs are the hard
inputs of the contracts with new values each time; the healthy implementations are the reference in float32 and in
float64, rounded to nearest at the points of the form, at none but the last, and the kernels of the fast path.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
    """An operator in one of its forms; `form` is "" where it has none, FP8_FORM for the fused one on quantised rows."""

    operator: str
    form: str

    def profile(self) -> Profile:
        if self.form == FP8_FORM:
            return PROFILES[QUANTISED]
        base = PROFILES["bf16"]
        return with_form(base, CONTRACTS[self.operator], self.form) if self.form else base

    def kinds(self) -> tuple[str, ...]:
        """The kernels of the fast path claim the fused form only."""
        if self.form == FP8_FORM:
            return FP8_KINDS
        if self.operator in CHOICES:
            return ("float32", "kernel")
        fused = not self.form or FUSED_FORMS.get(self.operator) == self.form
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


def subjects() -> tuple[Subject, ...]:
    computed = [c for c in CONTRACTS.values() if c.hard_inputs and (c.kind == "compute" or c.name in CHOICES)]
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
    hard = generate(contract, name, seed, torch.bfloat16, device=device)
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


def upper_bound(runs: int, alarms: int) -> float:
    """Rate that is not exceeded at 95%: 3 / n without an alarm (Poisson); with alarms by the same distribution."""
    from scipy.special import gammaincinv

    return float(gammaincinv(alarms + 1, 0.95)) / runs if runs else 1.0


def read_state(path: Path) -> dict[Subject, list[dict[str, Any]]]:
    """Lines of finished batches by subject; a last line that was cut off is left out."""
    found: dict[Subject, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            batch = json.loads(line)
        except ValueError:
            continue
        found.setdefault(Subject(batch["operator"], batch["form"]), []).append(batch)
    return found


def sweep(
    runs: int, state: Path, *, until: float = float("inf"), device: str = "cpu", part: tuple[int, int] = (0, 1)
) -> Iterator[dict[str, Any]]:
    """Batches until every subject has `runs` runs or the time `until` (monotonic seconds) is over; subjects take
    turns, so that a sweep that is cut short is even. `part` (i, n): only the subjects i, i + n, ..."""
    own = subjects()[part[0] :: part[1]]
    done = {s: sum(b["runs"] for b in batches) for s, batches in read_state(state).items()}
    state.parent.mkdir(parents=True, exist_ok=True)
    with state.open("a") as file:
        while open_ := [s for s in own if done.get(s, 0) < runs]:
            fewest = min(done.get(s, 0) for s in open_)
            for subject in [s for s in open_ if done.get(s, 0) == fewest]:
                if time.monotonic() > until:
                    return
                batch = _batch(subject, done.get(subject, 0), min(BATCH, runs - done.get(subject, 0)), device)
                done[subject] = done.get(subject, 0) + batch["runs"]
                file.write(json.dumps(batch) + "\n")
                file.flush()
                yield batch


def _batch(subject: Subject, first: int, count: int, device: str) -> dict[str, Any]:
    begin = time.monotonic()
    found = [one(subject, seed, device=device) for seed in range(first, first + count)]
    return {
        "operator": subject.operator,
        "form": subject.form,
        "first": first,
        "runs": count,
        "alarms": [[r.seed, r.kind, r.input, r.alarm, r.message] for r in found if r.alarm],
        "used": max(r.used for r in found),
        "seconds": round(time.monotonic() - begin, 3),
    }


def table(state: Path) -> str:
    """The benign column: runs, alarms, upper bound, closest approach to a limit, seconds."""
    lines = [f"{'operator':24} {'form':14} {'alarms':>6} {'of':>5} {'at most':>8} {'used':>6} {'seconds':>8}"]
    for subject, batches in sorted(read_state(state).items(), key=lambda s: (s[0].operator, s[0].form)):
        runs, alarms = sum(b["runs"] for b in batches), sum(len(b["alarms"]) for b in batches)
        used, seconds = max(b["used"] for b in batches), sum(b["seconds"] for b in batches)
        bound = upper_bound(runs, alarms)
        name = f"{subject.operator:24} {subject.form or '–':14}"
        lines.append(f"{name} {alarms:6} {runs:5} {bound:8.2%} {used:6.2f} {seconds:8.1f}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Measures how often healthy operators raise an alarm.")
    parser.add_argument("--runs", type=int, default=1000, help="runs per operator and form")
    parser.add_argument("--state", type=Path, default=Path("reports/benign.jsonl"), help="the file to go on from")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time; call again to go on")
    parser.add_argument(
        "--device", default="cpu", help="where operators and judge run; a state file of its own for each"
    )
    parser.add_argument(
        "--part", default="0/1", help="i/n: every n-th operator from i on, for n processes side by side"
    )
    given = parser.parse_args(arguments)
    number, of = (int(n) for n in given.part.split("/"))
    torch.set_num_threads(1)
    until = time.monotonic() + given.seconds
    for batch in sweep(given.runs, given.state, until=until, device=given.device, part=(number, of)):
        for alarm in batch["alarms"]:
            print("alarm:", batch["operator"], batch["form"], *alarm, flush=True)
    print(table(given.state))
    done = read_state(given.state)
    alarms = sum(len(b["alarms"]) for batches in done.values() for b in batches)
    own = subjects()[number::of]
    complete = all(sum(b["runs"] for b in done.get(s, [])) >= given.runs for s in own)
    return 1 if alarms else 0 if complete else 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
