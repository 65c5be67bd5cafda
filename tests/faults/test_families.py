"""Every model family is ready on the embedded path: all of stage t0 in the long target, two families a day in CI."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from command_line import command

from reference.preset_families import FAMILY_PRESETS

FAMILIES = tuple(sorted(FAMILY_PRESETS))
_DAY = datetime.datetime.now(datetime.UTC).toordinal()
TODAY = tuple(FAMILIES[(2 * _DAY + i) % len(FAMILIES)] for i in range(2))


@pytest.mark.parametrize("model", TODAY)
def test_two_families_a_day_are_ready(tmp_path: Path, model: str) -> None:
    """Would catch a change for one family that breaks another, or raises a false alarm on it."""
    ended = command("run", "text/one_turn", "--model", model, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert ended.verdict["status"] == "ready"
    assert ended.verdict["model"]["name"] == model


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", FAMILIES)
def test_every_family_is_ready(tmp_path: Path, model: str) -> None:
    """Would catch a family that some case of stage t0 (chunks, ragged batches, images, pages) does not pass."""
    ended = command("run", "--model", model, cwd=tmp_path, limit_s=1100)
    assert ended.code == 0, ended.stderr
    assert ended.verdict["status"] == "ready"
