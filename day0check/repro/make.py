"""Makes a reproducer of the recorded call of a finding: arguments cut to few rows, both results, noise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from day0check.compare.replay import Replay
from day0check.compare.rounding import Rounder, round_nearest, ulp
from day0check.contracts import CONTRACTS
from day0check.contracts.contract import Contract
from day0check.contracts.profiles import Profile
from day0check.errors import InputError, Unavailable
from day0check.probe.safetensors_writer import write
from day0check.probe.witness import CALL, TENSORS
from day0check.repro import script
from day0check.repro.issue import issue_text
from day0check.types import Finding

BYTE_CAP = 16 * 2**20
KEPT_ROWS = 64  # of the failing ones, before all rows are kept
REPLICATES = 8
CLOSE = 1e-6  # relative: numbers that a choice gives beside what it chose
FLOOR = 8.0  # sums in float32 may be so many times further off than ours
_ROW_ROLES = ("rows", "owner")
_CUT_ROLES = (*_ROW_ROLES, "batch", "shared", "static")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Result:
    """One result of the call: the candidate's, the right one, and its noise and bound where it is computed."""

    name: str
    candidate: torch.Tensor
    expected: torch.Tensor
    noise: torch.Tensor | None
    bound: torch.Tensor | None
    rows: str
    free_order: bool = False

    def tensors(self) -> Tensors:
        found = {f"candidate.{self.name}": self.candidate, f"expected.{self.name}": self.expected}
        if self.noise is not None:
            found |= {f"noise.{self.name}": self.noise, f"bound.{self.name}": self.bound}
        return found


def make_repro(witness: Path, folder: Path, finding: Finding, profile: Profile, facts: Mapping[str, str]) -> Path:
    """Writes `repro.py`, `call.json`, `tensors.safetensors` and `issue.md` into `folder`; returns it.

    `facts`: what the issue says of versions and device. Raises Unavailable when the call cannot be repeated alone.
    """
    call, tensors = _read(witness)
    contract = CONTRACTS[call["operator"]]
    arguments = _arguments(contract, call, tensors)
    results = _results(contract, call, tensors, arguments, profile)
    rows = _rows_to_keep(contract, arguments, results)
    told, kept = _cut(contract, call, arguments, results, rows)
    judged = script.judge(told, kept, [kept[f"candidate.{r['name']}"] for r in told["results"]])
    if rows is not None and not script.failing(judged):  # what is wrong shows in all rows together alone
        rows = None
        told, kept = _cut(contract, call, arguments, results, rows)
        judged = script.judge(told, kept, [kept[f"candidate.{r['name']}"] for r in told["results"]])
    size = sum(t.numel() * t.element_size() for t in kept.values())
    if size > BYTE_CAP:
        raise Unavailable(f"the call needs {size / 2**20:.0f} MiB, more than {BYTE_CAP >> 20}", where=call["tap"])
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / TENSORS, kept)
    (folder / CALL).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(script.__file__, folder / "repro.py")
    (folder / "issue.md").write_text(issue_text(finding, told, kept, judged, facts), encoding="utf-8")
    return folder


def _read(witness: Path) -> tuple[dict[str, Any], Tensors]:
    from safetensors.torch import load_file

    if not (witness / CALL).is_file():
        raise Unavailable("the candidate made no such call when it was run again", where=str(witness))
    try:
        return json.loads((witness / CALL).read_text(encoding="utf-8")), load_file(witness / TENSORS)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error}", where=str(witness), todo="run again") from error


def _arguments(contract: Contract, call: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """By the contract's names. Raises Unavailable for memory of the candidate's own and for fused kernels."""
    hidden = [n for n, told in call["arguments"].items() if "unreadable" in told]
    if hidden:
        raise Unavailable(f"the argument {hidden[0]!r} is the candidate's own memory", where=call["tap"])
    first, keywords = script.arguments({**call, "first": "0"}, tensors)
    named = {contract.args[0].name: first, **keywords}
    names = {a.name for a in contract.args}
    if any(name not in names for name in named):
        raise Unavailable("a fused kernel receives other arguments than its contract has", where=call["tap"])
    return {name: value for name, value in named.items() if not name.endswith("_out")}


# ------------------------------------------------------------------------------------------------------ what is right


def _results(
    contract: Contract, call: dict[str, Any], tensors: Tensors, arguments: dict[str, Any], profile: Profile
) -> tuple[Result, ...]:
    if contract.mutates:
        return _written(contract, call, tensors, arguments)
    replay = Replay(contract, arguments)
    wide = replay.wide(torch.float64)
    right = wide.run() if contract.kind in ("compute", "exact") else replay.run()
    if [f"result.{i}" for i in range(len(right))] != call["results"]:
        raise Unavailable(
            f"it gave {len(call['results'])} results where {len(right)} tensors are due", where=call["tap"]
        )
    found = []
    for i, (spec, expected) in enumerate(zip(contract.results, right, strict=True)):
        candidate = tensors[f"result.{i}"]
        computed = contract.kind == "compute" and candidate.is_floating_point() and candidate.shape == expected.shape
        if computed:
            found.append(_computed(spec.name, i, candidate, expected, replay, profile, spec.rows))
            continue
        if contract.kind == "exact" and expected.dtype == torch.float64 and candidate.is_floating_point():
            expected = round_nearest(expected, str(candidate.dtype).removeprefix("torch."))
        right_kind = expected.to(candidate.dtype)
        found.append(Result(spec.name, candidate, right_kind, None, None, spec.rows, contract.kind == "choose"))
    return tuple(found)


def _written(
    contract: Contract, call: dict[str, Any], tensors: Tensors, arguments: dict[str, Any]
) -> tuple[Result, ...]:
    memory = {name: arguments[name].clone() for name in contract.mutates}
    Replay(contract, {**arguments, **memory}).run()
    first = contract.args[0].name
    after = {first if name == "0" else name: tensors[f"written.{name}"] for name in call["written"]}
    return tuple(Result(name, after[name], memory[name], None, None, "") for name in after)


def _computed(
    name: str, index: int, candidate: torch.Tensor, exact: torch.Tensor, replay: Replay, profile: Profile, rows: str
) -> Result:
    """Noise: the roundings inside at random, the rounding of the result, and float32 sums; the bound follows."""
    operator = replay.contract.name
    points = profile.points_of(operator)
    inner = {p: points[p] for p in profile.inner_points(operator)}
    variance = torch.zeros_like(exact)
    generator = torch.Generator().manual_seed(0)
    wide = replay.wide(torch.float64)
    for _ in range(REPLICATES if inner else 0):
        variance += (wide.run(Rounder(inner, "random", generator))[index] - exact).square() / REPLICATES
    float32 = (replay.wide(torch.float32).run()[index].double() - exact).square()
    floor = FLOOR * _by_row(float32).sqrt() + ulp(exact, "float32")
    rounding = profile.rounding_of(operator, replay.contract.results[index])
    step = ulp(exact, rounding) if rounding is not None else torch.zeros_like(exact)
    inside = _by_row(variance) + floor.square()
    noise = (step.square() / 6 + inside).sqrt()
    bound = step / 2 + (floor if not inner else FLOOR * inside.sqrt())
    return Result(name, candidate, exact, noise.float().clamp(min=1e-38), bound.float().clamp(min=1e-38), rows)


def _by_row(squares: torch.Tensor) -> torch.Tensor:
    """The mean of each row in each of its places."""
    squares = squares.nan_to_num(0, 0, 0)
    return squares.reshape(len(squares), -1).mean(1).reshape(-1, *[1] * (squares.dim() - 1)).expand_as(squares)


# --------------------------------------------------------------------------------------------------------- few rows


def _rows_to_keep(contract: Contract, arguments: dict[str, Any], results: Sequence[Result]) -> torch.Tensor | None:
    """Rows whose results are wrong, at most KEPT_ROWS; None where rows are not independent, or none stands out."""
    separable = all(r.rows == "rows" for r in results) and all(a.role in _CUT_ROLES for a in contract.args)
    if not separable or contract.mutates or any(r.candidate.shape != r.expected.shape for r in results):
        return None
    wrong = torch.zeros(len(results[0].candidate), dtype=torch.bool)
    for r in results:
        if r.noise is None:
            pair = (t.sort(-1).values if r.free_order else t for t in (r.candidate, r.expected))
            beyond = torch.ne(*pair)
        else:
            beyond = ~((r.candidate.double() - r.expected).abs() <= r.bound)
        wrong |= beyond.reshape(len(wrong), -1).any(1)
    found = wrong.nonzero().flatten()
    return found[:KEPT_ROWS] if len(found) else None


def _cut(
    contract: Contract,
    call: dict[str, Any],
    arguments: dict[str, Any],
    results: Sequence[Result],
    rows: torch.Tensor | None,
) -> tuple[dict[str, Any], Tensors]:
    """call.json and the tensors of a reproducer with these rows (None: all)."""
    roles = {a.name: a.role for a in contract.args}
    told, kept = {}, {}
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            told[name] = call["arguments"].get(name) or call["arguments"]["0"]
            continue
        told[name] = {"tensor": f"argument.{name}"}
        kept[f"argument.{name}"] = value if rows is None or roles[name] not in _ROW_ROLES else value[rows]
    for result in results:
        kept |= {k: v if rows is None else v[rows] for k, v in result.tensors().items()}
    numbers = range(len(call["owner"])) if rows is None else rows.tolist()
    line = {key: call[key] for key in ("tap", "operator", "site", "phase", "step", "requests")}
    return {
        **line,
        "owner": [call["owner"][n] for n in numbers],
        "position": [call["position"][n] for n in numbers],
        "rows_of_the_call": len(call["owner"]),
        "first": contract.args[0].name,
        "arguments": told,
        "results": [
            {
                "name": r.name,
                "free_order": r.free_order,
                "tolerance": r.free_order * r.expected.is_floating_point() * CLOSE,
            }
            for r in results
        ],
        "written": list(contract.mutates),
    }, kept
