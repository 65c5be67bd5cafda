"""A candidate that dies, hangs or outgrows its memory in one case: a finding says so, the other cases are reported."""

from __future__ import annotations

from pathlib import Path

from command_line import Ended, case_file, command, operators_file

from day0check.case import load_cases
from reference.presets import preset_dir
from reference.weights import Checkpoint

CASES = ("before", "dies", "after")


def run_with(operators: str, tmp_path: Path, *options: str) -> Ended:
    return command("run", *map(case_file, CASES), "--ops", operators_file(operators), *options, cwd=tmp_path)


def assert_death_is_reported(ended: Ended, *words: str) -> None:
    """The dying case has the one blocker; each other case has its checks, and they passed."""
    assert ended.code == 1, ended.stderr
    assert ended.verdict["status"] == "not_ready"
    assert sorted(ended.verdict["cases"]) == sorted(CASES)
    first = ended.first
    assert (first["check"], first["operator"], first["layer"]) == ("candidate", "dsa.attention", 3), first
    assert (first["phase"], first["severity"]) == ("prefill", "blocker")
    for word in words:
        assert word in first["message"].lower(), first["message"]
    for case in ("before", "after"):
        outcomes = {c["name"]: c["status"] for c in ended.verdict["checks"] if c["case"] == case}
        assert {"candidate", "compute", "choose", "propagated", "logits"} <= set(outcomes), outcomes
        assert set(outcomes.values()) == {"passed"}, outcomes
        assert not [f for f in ended.of_case(case) if f["severity"] == "blocker"]


def test_the_dying_case_is_the_only_one_of_its_length() -> None:
    """Would catch a change of the chat format that makes the files in operators/ die nowhere or everywhere."""
    config = Checkpoint(preset_dir("tiny")).config
    cases = load_cases(tuple(map(case_file, CASES)), config=config, model="tiny")
    rows = {case.id: len(case.requests[0].turns[0].tokens) for case in cases}
    assert list(rows) == list(CASES)  # the order in which they run
    assert rows["dies"] == 47
    assert list(rows.values()).count(47) == 1


def test_abort(tmp_path: Path) -> None:
    """Would catch a harness that dies with its candidate or loses the case without a word."""
    assert_death_is_reported(run_with("aborts", tmp_path), "sigabrt")


def test_sleep_without_end(tmp_path: Path) -> None:
    """Would catch a harness that waits for ever, or kills the cases that come after."""
    assert_death_is_reported(run_with("sleeps", tmp_path), "6 s")


def test_allocation_without_end(tmp_path: Path) -> None:
    """Would catch a harness that lets the machine run out of memory instead of its candidate."""
    assert_death_is_reported(run_with("allocates", tmp_path, "--time-limit", "60s"), "gib")
