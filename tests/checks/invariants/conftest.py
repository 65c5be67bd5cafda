from __future__ import annotations

import pytest
from invariant_stage import Stage

from day0check.case_format import packaged_root
from day0check.types import Request, RunCase, Schedule, Turn


def words(seed: int, count: int) -> tuple[int, ...]:
    return tuple(97 + (seed * 31 + n * n * 7 + n * 3) % 26 for n in range(count))


def picture(name: str) -> str:
    return str(packaged_root() / "data" / f"{name}.png")


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


@pytest.fixture(scope="session")
def prefixes(tmp_path_factory) -> Stage:
    """A request of many pages and one that answers beside it, on a model that attends to every latent."""
    requests = (
        Request("invariants/z/long#1", (Turn(words(1, 44)),), 2),
        Request("invariants/z/short#1", (Turn(words(2, 11)),), 9),
    )
    case = RunCase("invariants/z", requests, Schedule(page=8, max_batch=2))
    return Stage(case, tmp_path_factory.mktemp("prefixes"), dense=True)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Stage:
    """Two requests that begin alike but for the picture, one with two of them; no grid is the native one."""
    one, tall = (259,) * 12, (259,) * 15
    requests = (
        Request(
            "invariants/y/two#1",
            (Turn((*words(1, 3), *one, 98, *tall, *words(2, 3)), (picture("waves"), picture("tall"))),),
            3,
        ),
        Request("invariants/y/one#1", (Turn((*words(1, 3), *one, *words(4, 2)), (picture("rings"),)),), 2),
    )
    case = RunCase("invariants/y", requests, Schedule(page=8, max_batch=2))
    return Stage(case, tmp_path_factory.mktemp("pictures"))
