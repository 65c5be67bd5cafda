"""The gate: what it may call ready, what it may not, and the bytes of verdict.json."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check import gate
from day0check.errors import Day0Error, ExitCode, InputError
from day0check.gate import Scene, decide, exit_code, read_verdict, render, write_verdict
from day0check.types import CheckOutcome, Finding, NotRun, Verdict, finding_id

SCHEMA = json.loads((Path(gate.__file__).parent / "verdict.schema.json").read_text())
SCENE = Scene(model={"name": "tiny", "digest": "0123456789ab"}, profile="bf16", cases=("text/a", "text/b"))


def blocker(check: str = "compute", **changes) -> Finding:
    fields = {
        "id": finding_id(check, "norm.rms", "dsa+moe", "prefill", "one row"),
        "severity": "blocker",
        "check": check,
        "operator": "norm.rms",
        "message": "norm.rms is wrong",
        "evidence": {"case": "text/a", "order": 7},
    }
    return Finding(**{**fields, **changes})


def outcome(
    name: str = "compute", status: str = "passed", case: str = "text/a", summary: str = "3 of 3"
) -> CheckOutcome:
    return CheckOutcome(name, status, case, summary)


def test_everything_run_and_passed_is_ready() -> None:
    """Would catch a gate that cries wolf on a clean run."""
    verdict = decide((outcome(),), (), replace(SCENE, expected=(("text/a", "compute"),)))
    assert (verdict.status, verdict.first_fault, exit_code(verdict)) == ("ready", None, ExitCode.READY)


@pytest.mark.parametrize(
    ("outcomes", "findings", "scene", "status"),
    [
        ((), (), SCENE, "inconclusive"),
        ((outcome(status="not_run"),), (), SCENE, "inconclusive"),
        ((outcome(),), (), replace(SCENE, expected=(("text/a", "compute"), ("text/b", "compute"))), "inconclusive"),
        ((outcome(),), (), replace(SCENE, not_run=(NotRun("case text/c", "no budget"),)), "inconclusive"),
        ((outcome(status="failed"),), (), SCENE, "not_ready"),
        ((outcome(),), (blocker(),), SCENE, "not_ready"),
        ((outcome(status="not_run"),), (blocker(),), SCENE, "not_ready"),
        ((outcome(),), (blocker(), blocker("capture", stack_layer="harness")), SCENE, "error"),
        ((outcome(),), (blocker(severity="warning"), blocker(severity="note")), SCENE, "ready"),
    ],
    ids=[
        "no check at all",
        "a check not run",
        "a check without an answer",
        "a case left out",
        "failed without a finding",
        "a blocker though the check says passed",
        "a blocker is stronger than not run",
        "the harness is stronger than a blocker",
        "warnings and notes do not fail",
    ],
)
def test_it_fails_closed(outcomes, findings, scene, status) -> None:
    """Would catch each way to be falsely green, and a weaker status hiding a stronger one."""
    assert decide(outcomes, findings, scene).status == status


def test_what_gave_no_answer_is_named() -> None:
    """Would catch a check that is dropped in silence."""
    verdict = decide((outcome(),), (), replace(SCENE, expected=(("text/a", "compute"), ("text/b", "logits"))))
    assert verdict.not_run == (NotRun("logits of text/b", "it gave no answer"),)


def test_the_first_fault_is_the_earliest_local_one_and_the_harness_before_all() -> None:
    """Would catch a first fault that is the loudest or the first written, not the first to repair."""
    net = blocker("propagated", evidence={"order": 1})
    late, early = blocker(evidence={"order": 9}), blocker("choose", evidence={"order": 3})
    slow = blocker("baseline.speed", evidence={})
    assert decide((outcome(),), (slow, net, late, early), SCENE).first_fault == early
    ours = blocker("capture", stack_layer="harness", evidence={})
    assert decide((outcome(),), (early, ours), SCENE).first_fault == ours
    assert decide((outcome(),), (slow,), SCENE).first_fault == slow
    assert decide((outcome(),), (slow, net), SCENE).first_fault == net


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["passed", "failed", "not_run"]), max_size=5),
    st.lists(
        st.tuples(st.sampled_from(["blocker", "warning", "note"]), st.sampled_from(["operator", "harness"])), max_size=4
    ),
)
def test_ready_only_when_nothing_speaks_against_it(statuses: list[str], findings: list[tuple[str, str]]) -> None:
    """Would catch any combination that slips through to ready, or a clean one that does not."""
    outcomes = tuple(outcome(f"check{i}", status) for i, status in enumerate(statuses))
    found = tuple(blocker(f"check{i}", severity=s, stack_layer=layer) for i, (s, layer) in enumerate(findings))
    clean = bool(statuses) and set(statuses) == {"passed"} and all(s != "blocker" for s, _ in findings)
    assert (decide(outcomes, found, SCENE).status == "ready") == clean


def test_the_file_is_sorted_rounded_and_plain_json() -> None:
    """Would catch a last digit of noise in the file, an unsorted key, or a bare NaN that no browser reads."""
    scene = replace(
        SCENE,
        operators=({"b": 1 / 3, "a": math.nan, "c": -0.0, "d": math.inf, "e": 123456789, "f": {"g": 1e-9 / 3}},),
    )
    text = render(decide((outcome(),), (), scene))
    assert json.loads(text, parse_constant=pytest.fail)["operators"] == [
        {"a": "NaN", "b": 0.333333, "c": 0.0, "d": "Infinity", "e": 123456789, "f": {"g": 3.33333e-10}}
    ]
    assert '"c": 0.0' in text
    shuffled = replace(scene, operators=({k: scene.operators[0][k] for k in reversed(scene.operators[0])},))
    assert render(decide((outcome(),), (), shuffled)) == text
    assert text.endswith("}\n")


def test_a_verdict_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Would catch a field that is lost on the way to the file."""
    verdict = decide((outcome(),), (blocker(value=math.inf, limit=0.5),), SCENE)
    write_verdict(verdict, tmp_path / "new" / "verdict.json")
    assert read_verdict(tmp_path / "new" / "verdict.json") == verdict
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["verdict.json"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"schema_version": 1, "status"', "JSON"),
        ("[]", "schema_version"),
        ('{"schema_version": 99}', "99"),
        ('{"schema_version": 1, "status": "green"}', "verdict"),
    ],
)
def test_a_file_that_is_no_verdict(tmp_path: Path, text: str, word: str) -> None:
    """Would catch a traceback, and a verdict of a newer day0check that is read as if it were ours."""
    path = tmp_path / "verdict.json"
    path.write_text(text)
    with pytest.raises(InputError, match=word):
        read_verdict(path)
    assert path.read_text() == text


def test_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    """Would catch a traceback of open(), and a half-written file left behind."""
    (tmp_path / "file").write_text("")
    with pytest.raises(Day0Error, match="cannot be written"):
        write_verdict(decide((outcome(),), (), SCENE), tmp_path / "file" / "verdict.json")


def test_the_schema_is_a_schema_and_knows_every_field() -> None:
    """Would catch a field of the records that the published schema does not have."""
    import dataclasses

    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert set(SCHEMA["properties"]) == {f.name for f in dataclasses.fields(Verdict)}
    assert set(SCHEMA["$defs"]["finding"]["properties"]) == {f.name for f in dataclasses.fields(Finding)}
    assert set(SCHEMA["$defs"]["check"]["properties"]) == {f.name for f in dataclasses.fields(CheckOutcome)}


def test_verdicts_fit_the_schema_and_others_do_not() -> None:
    """Would catch a schema that refuses what we write, or takes everything."""
    validator = jsonschema.Draft202012Validator(SCHEMA)
    verdict = decide((outcome(),), (blocker(value=math.nan),), SCENE)
    data = json.loads(render(verdict))
    validator.validate(data)
    for broken in ({**data, "status": "green"}, {**data, "extra": 1}, {**data, "findings": [{"id": "x"}]}):
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(broken)
