from __future__ import annotations

import pytest
from invariant_stage import Stage

from day0check.types import Request, RunCase, Schedule, Turn


def words(seed: int, count: int) -> tuple[int, ...]:
    return tuple(97 + (seed * 31 + n * n * 7 + n * 3) % 26 for n in range(count))


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Stage:
    """Two requests over the edges of pages and of the top-k, and a third, short one."""
    requests = (
        Request("invariants/x/long#1", (Turn(words(1, 30)),), 8),
        Request("invariants/x/turns#1", (Turn(words(2, 12)), Turn(words(3, 4))), 3),
        Request("invariants/x/short#1", (Turn(words(4, 5)),), 9, arrive_step=2),
    )
    case = RunCase("invariants/x", requests, Schedule(page=8, max_batch=4))
    return Stage(case, tmp_path_factory.mktemp("texts"))
