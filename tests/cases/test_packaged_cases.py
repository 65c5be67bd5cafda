"""The cases that are shipped: that they hold what the issue asks of them, and how large they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from day0check.case import find_image, load_cases
from day0check.case_format import WITHOUT_MODEL, catalogue, packaged_root
from day0check.types import RunCase
from reference.presets import preset_dir
from reference.weights import Checkpoint


@pytest.fixture(scope="module")
def config():
    return Checkpoint(preset_dir("tiny")).config


@pytest.fixture(scope="module")
def cases(config) -> dict[str, RunCase]:
    return {case.id: case for case in load_cases((), config=config, model="tiny")}


def prompt_rows(case: RunCase) -> int:
    return sum(len(turn.tokens) for request in case.requests for turn in request.turns)


def decode_steps(case: RunCase) -> int:
    return sum(len(request.turns) * request.max_new_tokens for request in case.requests)


def test_every_id_is_the_path_of_its_file() -> None:
    """Would catch a case that cannot be found by its id."""
    for located in catalogue():
        assert located.file == packaged_root() / f"{located.entry.id.split('[')[0]}.toml"


def test_the_stage_t0_asks_every_question_of_the_issue(cases: dict[str, RunCase]) -> None:
    """Would catch a default run that lost a kind of case."""
    assert {"text", "image", "long_context", "agent", "operators", "service"} == {name.split("/")[0] for name in cases}
    assert any(len(r.turns) >= 2 for c in cases.values() for r in c.requests)
    assert any(turn.images for c in cases.values() for r in c.requests for turn in r.turns)
    assert decode_steps(cases["text/decode_64"]) >= 64
    assert [c.id for c in cases.values() if not c.requests] == ["operators/contracts", "service/embedded"]


def test_the_long_case_is_over_every_edge(cases: dict[str, RunCase], config) -> None:
    """Would catch a long context that fits in a page, a chunk or the top-k, and so tests none of them."""
    case = cases["long_context/over_pages"]
    rows = prompt_rows(case)
    assert rows >= 4 * case.schedule.page + 1
    assert rows > 4 * config.index.topk
    assert rows > config.kda.chunk
    assert case.schedule.chunk is not None
    assert rows > 2 * case.schedule.chunk


def test_the_long_decode_crosses_the_edges_itself(cases: dict[str, RunCase], config) -> None:
    """Would catch a decode that never meets a new page or a selection that drops keys."""
    case = cases["text/decode_64"]
    assert prompt_rows(case) < config.index.topk < prompt_rows(case) + decode_steps(case)
    assert prompt_rows(case) < case.schedule.page < prompt_rows(case) + decode_steps(case)


def test_the_ragged_batch_is_ragged(cases: dict[str, RunCase]) -> None:
    """Would catch requests of like length that arrive together."""
    case = cases["text/ragged_batch"]
    lengths = [len(request.turns[0].tokens) for request in case.requests]
    assert len(lengths) == case.schedule.max_batch == 4
    assert max(lengths) > 20 * min(lengths)
    assert len({request.arrive_step for request in case.requests}) == 4


def test_the_size_of_the_stages(cases: dict[str, RunCase], config) -> None:
    """Would catch a case that makes the default run too slow to be run by everybody."""
    assert sum(map(prompt_rows, cases.values())) <= 3600
    assert sum(map(decode_steps, cases.values())) <= 260
    smoke = load_cases((), config=config, model="tiny", stage="smoke")
    assert next(case.id for case in smoke).startswith(WITHOUT_MODEL)
    assert any(turn.images for c in smoke for r in c.requests for turn in r.turns)
    assert sum(map(prompt_rows, smoke)) <= 400


def test_texts_reach_beyond_ascii(cases: dict[str, RunCase]) -> None:
    """Would catch data that never leaves the first 128 bytes: accents, CJK and emoji are in the default run."""
    tokens = [t for r in cases["text/two_turns"].requests for turn in r.turns for t in turn.tokens]
    text = bytes(t for t in tokens if t < 256).decode("utf-8")
    assert {"ñ", "潮", "🌊"} <= set(text)


def test_photographs_are_those_of_the_wheels(cases: dict[str, RunCase]) -> None:
    """Would catch an image that is only there after a download: each must be listed in the package's own record."""
    from importlib.metadata import files

    shipped = {Path(f.locate()).resolve() for d in ("scikit-image", "matplotlib") for f in files(d) or ()}
    used = {Path(i) for c in cases.values() for r in c.requests for turn in r.turns for i in turn.images}
    assert len(used) >= 5
    assert used <= shipped
    assert find_image("package:skimage/chelsea.png", folders=()) in used


def test_the_source_code_of_the_code_case_is_ours() -> None:
    """Would catch a data file that is no longer Python."""
    compile((packaged_root() / "data" / "code.py.txt").read_text(encoding="utf-8"), "code.py.txt", "exec")
