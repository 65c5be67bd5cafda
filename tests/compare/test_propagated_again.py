"""The net over a request that was computed again after a preemption: each computation by its own choices."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from net_fakes import REQUEST, MiniModel, candidate_call, fake_case, fake_tokens

from day0check.compare import propagated
from day0check.compare.computations import Computation
from day0check.compare.propagated import compare_case
from day0check.probe.capture import Capture
from day0check.probe.recorder import Call
from day0check.probe.rows import RowMap
from day0check.snapshot import Snapshot
from day0check.types import Measure, Outputs, to_json

LENGTH = 96


@functools.cache
def model() -> MiniModel:
    return MiniModel.seeded(1)


class Flip:
    """Takes the expert next in line at the row of the last layer where it costs least: `row`, once it has run."""

    def __init__(self, row: int | None = None) -> None:
        self.row, self._scores = row, None

    def __call__(self, tap: str, operator: str, result: Any, kwargs: dict) -> Any:
        if tap == "layers.02.moe.scores":
            self._scores = result
        if tap != "layers.02.moe.route":
            return result
        scores, ids = self._scores, result[0].clone()
        inside = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids, True)
        groups = inside.view(len(ids), 4, 2).any(-1).repeat_interleave(2, -1)
        rival, lowest = scores.masked_fill(inside | ~groups, -1).max(-1), scores.gather(1, ids).min(-1)
        gap = lowest.values - rival.values
        gap[:8], gap[-4:] = torch.inf, torch.inf
        self.row = int(gap.argmin()) if self.row is None else self.row
        ids[self.row, lowest.indices[self.row]] = rival.indices[self.row]
        weights = scores.gather(1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) * 2.0


def computed(fault: Any = None) -> list:
    keep: list = []
    with torch.inference_mode():
        model().forward(fake_tokens(LENGTH), torch.float32, candidate_call(keep, fault=fault))
    return keep


def write(directory: Path, keeps: list[tuple[list, list[tuple[str, int, int]]]]) -> Snapshot:
    """`keeps`: of each computation its results and its steps (phase, first row, row behind); logits of last rows."""
    directory.mkdir(parents=True, exist_ok=True)
    capture, order, number = Capture(directory), 0, 0
    for keep, steps in keeps:
        for phase, start, stop in steps:
            for place, operator, site, results in keep:
                first = stop - 1 if operator == "head.logits" else start
                rows = RowMap((REQUEST,), (0,) * (stop - first), tuple(range(first, stop)))
                if len(results[0]) == LENGTH:
                    call = Call(place, operator, site, phase, number, order, rows, (), {})
                    capture.after(call, None, tuple(r[first:stop] for r in results))
                order += 1
            capture.end_step(number)
            number += 1
    capture.end_case()
    outputs = Outputs({REQUEST: (*fake_tokens(LENGTH), 0)}, {REQUEST: ()}, {REQUEST: "length"})
    (directory / "outputs.json").write_text(json.dumps(to_json(outputs)))
    (directory / "run.json").write_text(json.dumps({"status": "finished", "message": "", "seconds": 1.0}))
    return Snapshot(directory)


def judged(directory: Path, before: list, after: list, row: int) -> list[Measure]:
    """The net's measures of a request that was preempted behind `row` and two more, and computed again at once."""
    steps = [("prefill", 0, row), ("decode", row, row + 1), ("decode", row + 1, row + 2)]
    snapshot = write(directory, [(before, steps), (after, [("prefill", 0, LENGTH)])])
    return compare_case(model().pair(), "bf16", fake_case(fake_tokens(LENGTH), prompt=row), snapshot)


def test_another_legal_choice_before_a_preemption_is_no_error(tmp_path, monkeypatch):
    """Catches logits of the time before a preemption beside an oracle that follows the choices of the time after it;
    the second half shows that they are then far off."""
    flip = Flip()
    before = computed(flip)
    after = computed()
    assert [m for m in judged(tmp_path / "own", before, after, flip.row) if not m.passed] == []
    monkeypatch.setattr(propagated, "computations", lambda snapshot, request: (Computation(snapshot),))
    wrong = [m for m in judged(tmp_path / "mixed", before, after, flip.row) if not m.passed]
    assert {(m.operator, m.phase) for m in wrong} == {("head.logits", "decode")}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_wrong_row_is_found_in_either_computation(tmp_path, when):
    """Catches a net that looks only at what was computed last, or only at what was computed first."""

    def fault(tap: str, operator: str, result: Any, kwargs: dict) -> Any:
        if tap == "layers.00.residual.add.mlp":
            result = result.clone()
            result[17] = result[18]
        return result

    healthy, broken = computed(), computed(fault)
    pair = (broken, healthy) if when == "before" else (healthy, broken)
    wrong = [m for m in judged(tmp_path, *pair, 40) if not m.passed]
    assert (wrong[0].tap, wrong[0].position, wrong[0].phase) == ("layers.00.residual.add.mlp", 17, "prefill")
