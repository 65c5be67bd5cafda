"""A candidate that computes everything rightly, with weights or settings that are not those of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import case_file, command

BACKEND = Path(__file__).parent / "backends" / "other_parameters.py"


@pytest.mark.parametrize(
    ("name", "operator", "layer", "words"),
    [
        ("OtherTheta", "rope.apply", 3, "theta is 1000000.0 where the checkpoint has 10000.0"),
        ("OtherScaleByte", "moe.convert", 6, "scale of 1 of 16 experts is not that of the checkpoint: expert 15"),
    ],
)
def test_the_first_fault_is_what_was_read_wrongly(
    tmp_path: Path, name: str, operator: str, layer: int, words: str
) -> None:
    """Would catch a verdict that accuses a kernel, or nobody, of what the loader did."""
    ended = command("run", case_file("short"), "--backend", f"{BACKEND}:{name}", cwd=tmp_path)
    assert ended.code == 1, ended.stderr
    first = ended.first
    assert (first["check"], first["operator"], first["layer"], first["phase"]) == (
        "parameters",
        operator,
        layer,
        "prefill",
    ), first
    assert words in first["message"]
