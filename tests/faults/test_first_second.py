"""What is there before anything is loaded: the help."""

from __future__ import annotations

import os
import subprocess
import sys
import time

PROBE = """
import sys
from day0check.cli import main
sys.argv = ["day0check", "--help"]
try:
    main()
except SystemExit as ended:
    assert not ended.code
heavy = {"torch", "pandas", "matplotlib", "scipy", "pydantic"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_loads_nothing_heavy() -> None:
    """Would catch an import of torch on the way to the help."""
    ended = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "run" in ended.stdout


def test_help_within_three_tenths_of_a_second() -> None:
    """Would catch slow imports. The best of several starts counts, in processor time: a busy machine is no fault."""
    best = min(_processor_seconds() for _ in range(5))
    assert best <= 0.3, f"{best:.2f} s"


def _processor_seconds() -> float:
    before = os.times()
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "day0check.cli", "--help"], stdout=subprocess.DEVNULL, check=True, timeout=60)
    after = os.times()
    used = after.children_user - before.children_user + after.children_system - before.children_system
    return min(used, time.perf_counter() - start)
