"""The laws around the experts of a run that left nothing to ask them of: nothing is judged, and that is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from day0check.checks.invariants import experts_once
from day0check.compare.run_comparison import RunComparison
from day0check.probe.records import replace_json
from day0check.snapshot import Snapshot
from day0check.types import Outputs, Request, RunCase, Schedule, Turn
from day0check.worker.extra import _with_law
from day0check.worker.job import Job
from reference.presets import preset_dir
from reference.weights import Checkpoint

REQUEST = Request("x/a#1", (Turn((1, 2, 3)),), 2)
CASE = RunCase("x", (REQUEST,), Schedule(page=16), checks=("experts_once",))
OUTPUTS = Outputs({"x/a#1": (1, 2, 3, 4, 5)}, {"x/a#1": ((3, 5),)}, {"x/a#1": "length"})


@pytest.mark.parametrize(
    ("layout", "words"), [({"expert": 2}, "rank 0 recorded no pairs"), (None, "its dispatch were not seen")]
)
def test_a_run_that_shows_no_experts_is_said_not_to_be_judged(tmp_path: Path, layout, words):
    """Would catch a run that passes although its experts were not seen, on one device or over ranks."""
    folder = tmp_path / "extra" / "identity-experts"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"label": "identity-experts", "status": "finished", "message": ""}))
    if layout is not None:
        replace_json(tmp_path / "ranks.json", {"layout": layout, "folders": ["0", "1"]})
    model = str(preset_dir("tiny"))
    (run,) = experts_once.runs(CASE, OUTPUTS, Checkpoint(model).config)
    job = Job("candidate", str(tmp_path), "", (CASE,), model, "accelerated", "bf16")
    found = _with_law(job, run, Snapshot(folder), None, RunComparison(run.label))
    assert found.measures == ()
    assert words in found.missing
