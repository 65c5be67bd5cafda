"""Guards what every sweep for false alarms counts by."""

import time

import pytest
from benign.counting import done_by, read_lines, upper_bound


def test_the_upper_bound_is_that_of_clopper_and_pearson():
    """Catches a bound of another tail or from a normal approximation; figures by hand: 1 - 0.05^(1/n) for no alarm."""
    assert upper_bound(1000, 0) == pytest.approx(1 - 0.05 ** (1 / 1000), rel=1e-9)
    assert upper_bound(1000, 1) == pytest.approx(0.004735, rel=1e-3)
    assert upper_bound(0, 0) == 1.0
    assert upper_bound(3, 3) == 1.0


def double(number: int) -> dict[str, int]:
    return {"number": number, "twice": 2 * number}


def test_processes_side_by_side_lose_and_repeat_nothing(tmp_path):
    """Catches a result that is yielded and not kept, or kept twice, with several processes."""
    state = tmp_path / "state.jsonl"
    told = list(done_by(double, range(9), state, jobs=2))
    assert sorted(r["number"] for r in told) == list(range(9))
    assert read_lines(state) == told


def test_nothing_begins_after_its_time(tmp_path):
    """Catches a limit of time that is looked at only when all was handed out."""
    assert list(done_by(double, range(9), tmp_path / "a.jsonl", until=time.monotonic() - 1)) == []
    assert list(done_by(double, range(9), tmp_path / "b.jsonl", jobs=2, until=time.monotonic() - 1)) == []
