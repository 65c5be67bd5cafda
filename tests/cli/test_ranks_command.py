"""`run --tp N --ep N`: layouts that cannot be are refused before anything is started, and the plan counts ranks."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from day0check.cli.app import cli
from day0check.errors import ExitCode


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (("--tp", "2", "--ep", "4"), "do not fit"),
        (("--tp", "0"), "--tp: 0 ranks"),
        (("--ep", "65"), "--ep: 65 ranks"),
        (("--ep", "2", "--sums", "reduce_scatter"), "--sums: there are no sums"),
    ],
)
def test_a_layout_that_cannot_be_is_a_usage_error(layout, words, tmp_path):
    """Catches a layout that fails only when the processes of its ranks are there, or is taken for another one."""
    result = CliRunner().invoke(cli, ["run", "text/one_turn", *layout, "--out", str(tmp_path / "out")])
    assert result.exit_code == ExitCode.USAGE
    assert words in result.output
    assert not (tmp_path / "out").exists()


def test_the_plan_counts_the_processes_of_ranks():
    """Catches a plan that promises the memory and the time of one process."""

    def planned(*layout: str) -> tuple[float, float]:
        result = CliRunner().invoke(cli, ["run", "text/one_turn", *layout, "--dry-run"])
        assert result.exit_code == 0, result.output
        seconds, mib = (
            re.search(r"  (\d+) s +\d+ s", result.output),
            re.search(r"\(([\d.]+) (\w)iB cand", result.output),
        )
        return float(seconds[1]), float(mib[1]) * {"M": 1, "G": 1024}[mib[2]]

    alone, four = planned(), planned("--tp", "4", "--ep", "4")
    assert four[0] >= 3 * alone[0]
    assert four[1] >= 3 * alone[1]
