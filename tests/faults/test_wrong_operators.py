"""An operators file with one wrong operator: the verdict names the operator, its first layer and the phase."""

from __future__ import annotations

from pathlib import Path

from command_line import Ended, case_file, command, operators_file


def run_with(operators: str, tmp_path: Path) -> Ended:
    return command("run", case_file("short"), "--ops", operators_file(operators), cwd=tmp_path)


def assert_first_fault(ended: Ended, *, operator: str, layer: int, phase: str) -> None:
    assert ended.code == 1, ended.stderr
    assert ended.verdict["status"] == "not_ready"
    found = {key: ended.first.get(key) for key in ("operator", "layer", "phase")}
    assert found == {"operator": operator, "layer": layer, "phase": phase}, ended.first
    assert ended.first["severity"] == "blocker"
    assert ended.first["request"] == "short/a#1" or operator == "moe.convert"


def test_a_replacement_that_changes_nothing_is_ready(tmp_path: Path) -> None:
    """Would catch a false alarm, and every test below that fails for another reason than its fault."""
    ended = run_with("healthy", tmp_path)
    assert ended.code == 0, ended.stderr
    assert ended.verdict["status"] == "ready"
    assert ended.verdict["first_fault"] is None


def test_a_selection_that_sees_the_future(tmp_path: Path) -> None:
    """Would catch a judge that lets an illegal choice pass, or blames the attention that reads it."""
    ended = run_with("select_sees_future", tmp_path)
    assert_first_fault(ended, operator="dsa.select", layer=3, phase="prefill")
    assert "future" in ended.first["message"]


def test_swapped_nibbles_of_the_packed_experts(tmp_path: Path) -> None:
    """Would catch a judge that compares the experts but not the conversion of their weights."""
    assert_first_fault(run_with("nibbles_swapped", tmp_path), operator="moe.convert", layer=1, phase="prefill")


def test_the_router_bias_in_the_weights(tmp_path: Path) -> None:
    """Would catch a judge that looks at the chosen experts alone: they are right here."""
    assert_first_fault(run_with("bias_in_weights", tmp_path), operator="moe.route", layer=1, phase="prefill")


def test_one_row_of_the_attention_scaled(tmp_path: Path) -> None:
    """Would catch a judge that averages one wrong row away; the address is that row."""
    ended = run_with("row_scaled", tmp_path)
    assert_first_fault(ended, operator="dsa.attention", layer=3, phase="prefill")
    assert ended.first["position"] == PROMPT_ROWS // 2


def test_sigmoid_twice_in_decode_alone(tmp_path: Path) -> None:
    """Would catch a comparison of prefill alone, and one that cannot tell the phases apart."""
    assert_first_fault(run_with("beta_twice", tmp_path), operator="kda.gates", layer=0, phase="decode")


PROMPT_ROWS = 84 + 4  # the text of cases/short.toml with begin, user, end of turn and assistant
