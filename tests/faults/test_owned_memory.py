"""Whole runs of operators files that own memory: a layout and repacked weights that are right, and one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import case_file, command, operators_file


@pytest.mark.parametrize("name", ["blocked_layout", "prepared_weights"])
def test_what_is_right_in_another_form_is_ready(tmp_path: Path, name: str) -> None:
    """Would catch a run that cannot judge memory or weights in a form of the candidate's own, or that cries wolf."""
    ended = command("run", case_file("short"), "--ops", operators_file(name), cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert ended.verdict["status"] == "ready"


def test_a_row_that_a_layout_drops_is_named(tmp_path: Path) -> None:
    """Would catch a dropped row that is only seen where it is read: the write is accused, with layer and position."""
    ended = command("run", case_file("short"), "--ops", operators_file("layout_drops_row"), cwd=tmp_path)
    assert ended.code == 1, ended.stderr
    first = ended.first
    assert (first["check"], first["operator"], first["layer"], first["phase"]) == ("move", "kv.write", 3, "prefill")
    assert first["position"] % 64 == 63
