"""Every invariant on every tiny preset, as a user asks for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from day0check.checks import INVARIANTS, MEASURED
from reference.preset_families import FAMILY_PRESETS


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", ["tiny", *FAMILY_PRESETS])
def test_the_invariants_hold(model, tmp_path):
    """Would catch a false alarm of an invariant on a family, and an invariant that is not run on any of its cases."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "day0check.cli", "run", "invariants", "--stage", "t1", "--model", model]
    ended = subprocess.run(
        [*command, "--time-limit", "30m", "--out", str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    verdict = json.loads((out / "verdict.json").read_text())
    assert (verdict["status"], ended.returncode) == ("ready", 0), (verdict["first_fault"], verdict["not_run"])
    asked = {outcome["name"] for outcome in verdict["checks"]} & set(INVARIANTS)
    assert {"decode_equals_prefill", "chunked_equals_one_shot", "warm_prefix", "poisoned_memory"} <= asked


def test_every_invariant_is_asked_by_a_case_of_stage_t1():
    """Would catch an invariant that no case asks for."""
    from day0check.case_format import catalogue

    asked = {name for located in catalogue() if "t1" in located.entry.stage for name in located.entry.expect.checks}
    assert {*INVARIANTS, *MEASURED} <= asked
