"""The further runs in the worker's process: what the backend cannot do is named, what kills it is recorded."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from day0check.runner import RunPlan, run
from day0check.snapshot import case_directory
from day0check.types import Request, RunCase, Schedule, Turn
from reference.presets import preset_dir

BACKEND = """
import os
from types import SimpleNamespace

class Answers:
    can = {"forced_tokens", "batch", "chunk"}

    def capabilities(self): return self.can
    def operators(self): return None
    def load(self, model_dir, profile, device, layout): pass
    def pools(self): return None
    def close(self): pass

    def run(self, requests, schedule, recorder):
        self.met(schedule)
        answer = lambda r: r.forced[0] if r.forced else [5] * r.max_new_tokens
        sequences = {r.id: (*r.turns[0].tokens, *answer(r)) for r in requests}
        generated = {r.id: ((len(r.turns[0].tokens), len(sequences[r.id])),) for r in requests}
        return SimpleNamespace(sequences=sequences, generated=generated, finish={r.id: "length" for r in requests})

    def met(self, schedule): pass

class Dies(Answers):
    def met(self, schedule):
        if schedule.chunk: os._exit(9)

class Raises(Answers):
    def met(self, schedule):
        if schedule.chunk == 1: raise IndexError("page 7 is not there")"""
CHECKS = ("chunked_equals_one_shot", "preempted")


def made(tmp_path: Path, name: str):
    """The result of one case on a backend that shows no operators, and the records of its further runs by label."""
    file = tmp_path / "answers.py"
    file.write_text(textwrap.dedent(BACKEND))
    request = Request("x/a#1", (Turn(tuple(range(1, 30))),), 2)
    case = RunCase("x", (request,), Schedule(page=16), checks=CHECKS)
    plan = RunPlan(
        (case,), tmp_path / "out", str(preset_dir("tiny")), f"{file}:{name}", mode="digest", repeats=0, reference=False
    )
    (result,) = run(plan)
    folder = case_directory(tmp_path / "out", "x", "candidate") / "extra"
    records = [json.loads(path.read_text()) for path in folder.glob("*/run.json")]
    return result.candidate, {record["label"]: record for record in records}


def test_what_a_schedule_kills_is_recorded_with_its_name(tmp_path):
    """Would catch a death in a further run that is told as one of the judged run, or not at all."""
    record, extra = made(tmp_path, "Dies")
    assert record.status == "aborted"
    assert "while making the further run 'chunk-15' of the case" in record.message
    assert extra == {}


def test_what_a_schedule_raises_and_what_it_lacks_is_its_own_outcome(tmp_path):
    """Would catch an exception under one schedule that ends the case, and a lacking capability that is tried anyway."""
    record, extra = made(tmp_path, "Raises")
    assert record.status == "finished"
    failed = {label: e["message"] for label, e in extra.items() if e["status"] == "failed"}
    assert failed == {"chunk-1": "IndexError: page 7 is not there"}
    lacking = {label: e["message"] for label, e in extra.items() if e["status"] == "unavailable"}
    assert lacking == {"preempt-a": "the backend has no preempt, which this run needs"}
    assert {label for label, e in extra.items() if e["status"] == "finished"} == {"chunk-15", "chunk-16", "chunk-17"}
