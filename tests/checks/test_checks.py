"""The checks: passed, failed or not run, and never passed by default."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from day0check.checks import CHECKS, Evidence, checks_of, judge_case, judge_run, read_evidence
from day0check.compare.locate import first_fault
from day0check.snapshot import case_directory
from day0check.types import Measure, Outputs, Request, RunCase, Schedule, ScheduleEvent, Turn, to_json
from reference.config import ModelConfig

CONFIG = ModelConfig(name="x", hidden=8, layers=("kda", "dsa"), vocab=8, max_positions=64, mlp_width=8)
A = "text/x/a#1"
CASE = RunCase("text/x", (Request(A, (Turn((1, 2, 3)),), max_new_tokens=2),))
GOOD = Outputs({A: (1, 2, 3, 4, 5)}, {A: ((3, 5),)}, {A: "length"})


def measure(kind: str, **changes: Any) -> Measure:
    operator = {"exact": "moe.convert", "move": "kv.write", "choose": "dsa.select", "compute": "dsa.score"}[kind]
    base = Measure(f"layers.01.{operator}", operator, kind, "prefill", 1, 7, 4, 8, True, {"row": 0.8}, {"row": 1.5})
    return dataclasses.replace(base, **changes)


def wrong(kind: str, **changes: Any) -> Measure:
    return measure(kind, passed=False, failing="row", statistics={"row": 9.0}, pattern="one row", **changes)


KINDS = ("exact", "move", "choose", "compute")
NET = (
    dataclasses.replace(measure("compute"), tap="layers.01.residual.add.mlp", operator="residual.add", kind="exact"),
    dataclasses.replace(measure("compute"), tap="head.logits", operator="head.logits", layer=None, order=99),
)
HEALTHY = Evidence(
    CASE,
    CONFIG,
    "bf16",
    {"status": "finished", "repeat_equal": True},
    tuple(map(measure, KINDS)),
    NET,
    GOOD,
    parameters=(measure("exact"),),
)


def statuses(evidence: Evidence) -> dict[str, str]:
    return {a.outcome.name: a.outcome.status for a in judge_case(evidence)}


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_asks_one_question_and_fails_closed(name):
    """Would catch a new check that passes on no evidence at all, or that has no sentence for the report."""
    module = CHECKS[name]
    assert module.QUESTION.endswith("?")
    run = {"status": "finished"}
    empty = dataclasses.replace(HEALTHY, run=run, measures=(), net=None, outputs=None, parameters=None)
    answer = module.judge(empty)
    assert answer.outcome.status != "passed"
    assert answer.outcome.summary
    assert (answer.outcome.name, answer.outcome.case) == (name, "text/x")
    assert module.judge(HEALTHY).outcome.status == "passed"


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_measure_fails_its_own_check_only(kind):
    """Would catch a measure that no check reads, or that several accuse."""
    evidence = dataclasses.replace(HEALTHY, measures=(*HEALTHY.measures, wrong(kind, tap="layers.00.x.y", order=3)))
    assert statuses(evidence) == {name: "failed" if name == kind else "passed" for name in CHECKS}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_not_judged_is_not_passed(kind):
    """Would catch an operator without a judgement inside a green check."""
    unjudged = measure(kind, passed=False, not_judged="replay raised ValueError")
    evidence = dataclasses.replace(HEALTHY, measures=(*HEALTHY.measures, unjudged))
    answer = next(a for a in judge_case(evidence) if a.outcome.name == kind)
    assert answer.outcome.status == "not_run"
    assert unjudged.tap in answer.outcome.summary
    assert answer.findings == ()


def test_the_net_splits_into_travelling_taps_and_outputs():
    """Would catch logits that only the wrong check reads, and a missing reference pass that counts as passed."""
    bad = dataclasses.replace(NET[1], passed=False, failing="row", statistics={"row": 9.0})
    assert statuses(dataclasses.replace(HEALTHY, net=(NET[0], bad)))["logits"] == "failed"
    assert statuses(dataclasses.replace(HEALTHY, net=(NET[0], bad)))["propagated"] == "passed"
    none = dataclasses.replace(HEALTHY, net=None, net_reason="the reference pass failed: no memory")
    assert statuses(none)["propagated"] == statuses(none)["logits"] == "not_run"


def test_what_lies_behind_the_first_wrong_tap_is_a_warning():
    """Would catch one fault that accuses every layer behind it."""
    net = [wrong("compute", tap=f"layers.0{i}.residual.add.mlp", operator="residual.add", order=9 * i) for i in (0, 1)]
    net = [dataclasses.replace(m, layer=i) for i, m in enumerate(net)]
    evidence = dataclasses.replace(HEALTHY, net=(*net, NET[1]))
    found = next(a for a in judge_case(evidence) if a.outcome.name == "propagated").findings
    assert [(f.layer, f.severity) for f in found] == [(0, "blocker"), (1, "warning")]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("aborted", "aborted in dsa.select of layer 1 (decode)"),
        ("timeout", "ran out of time"),
        ("memory", "outgrew its memory limit"),
        ("failed", "failed"),
        ("", "without a status"),
    ],
)
def test_a_dead_candidate_is_a_finding_with_its_last_operator(status, words):
    """Would catch a crash that leaves a green or silent verdict."""
    last = {"tap": "layers.01.dsa.select", "phase": "decode", "step": 4}
    run = {"status": status, "message": "signal SIGABRT", "last": last}
    evidence = dataclasses.replace(HEALTHY, run=run, outputs=None, net=None)
    answers = {a.outcome.name: a for a in judge_case(evidence)}
    (found,) = answers["candidate"].findings
    assert words in found.message
    assert "signal SIGABRT" in found.message
    assert (found.operator, found.layer, found.phase, found.severity) == ("dsa.select", 1, "decode", "blocker")
    assert {n: a.outcome.status for n, a in answers.items() if n != "candidate"} == dict.fromkeys(
        list(CHECKS)[1:], "not_run"
    )
    assert first_fault(answers["candidate"].findings) is found


def test_other_weights_are_accused_before_the_results_of_the_same_call():
    """Would catch an operator that is sent to be repaired when it was given the weights of another model."""
    other = measure(
        "compute", passed=False, failing="different", statistics={"different": 1.0}, pattern="other weight: w"
    )
    late = wrong("compute")
    evidence = dataclasses.replace(HEALTHY, measures=(*HEALTHY.measures, late), parameters=(other,))
    found = [f for a in judge_case(evidence) for f in a.findings]
    assert {f.check for f in found} == {"parameters", "compute"}
    assert first_fault(found).check == "parameters"
    for reason, run in (
        ("never compared", {}),
        ("could not run", {"status": "unavailable", "message": "could not run"}),
    ):
        unknown = dataclasses.replace(HEALTHY, parameters=None, net_reason=reason, run={**HEALTHY.run, **run})
        (answer,) = [a for a in judge_case(unknown) if a.outcome.name == "parameters"]
        assert (answer.outcome.status, reason in answer.outcome.summary) == ("not_run", True)


def test_an_unavailable_candidate_is_not_run():
    """Would catch a device that is not there being called a fault, or a pass."""
    run = {"status": "unavailable", "message": "no such device"}
    evidence = dataclasses.replace(HEALTHY, run=run, measures=(), net=None, outputs=None, net_reason="never ran")
    assert set(statuses(evidence).values()) == {"not_run"}


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        (None, "no answer"),
        (Outputs({}, {}), "request lost"),
        (Outputs({A: (9, 2, 3, 4, 5)}, {A: ((3, 5),)}), "prompt changed"),
        (Outputs({A: (1, 2, 3, 4)}, {A: ((3, 4),)}), "too few tokens"),
        (Outputs({A: (1, 2, 3, 4, 5, 6)}, {A: ((3, 6),)}), "too many tokens"),
        (Outputs({A: (1, 2, 3)}, {A: ()}), "turn lost"),
        (Outputs({A: (1, 2, 3)}, {A: ((3, 5),)}), "wrong spans"),
        (Outputs({A: (1, 2, 3)}, {A: ()}, {A: "aborted"}), "request aborted"),
    ],
)
def test_a_lost_answer_is_a_finding(outputs, pattern):
    """Would catch a candidate that finishes without doing what was asked."""
    answer = CHECKS["candidate"].judge(dataclasses.replace(HEALTHY, outputs=outputs))
    assert answer.outcome.status == "failed"
    assert answer.findings[0].evidence["pattern"] == pattern


def test_stops_and_asked_aborts_are_answers():
    """Would catch a false alarm over an answer that ended early for a good reason."""
    request = dataclasses.replace(CASE.requests[0], stop_tokens=(7,), max_new_tokens=9)
    stopped = Outputs({A: (1, 2, 3, 4, 7)}, {A: ((3, 5),)}, {A: "stop"})
    case = RunCase("text/x", (request,))
    assert CHECKS["candidate"].judge(dataclasses.replace(HEALTHY, case=case, outputs=stopped)).findings == ()
    case = dataclasses.replace(case, schedule=Schedule(events=(ScheduleEvent(2, "abort", A),)))
    aborted = Outputs({A: (1, 2, 3, 4)}, {A: ((3, 4),)}, {A: "aborted"})
    assert CHECKS["candidate"].judge(dataclasses.replace(HEALTHY, case=case, outputs=aborted)).findings == ()


def test_checks_of_a_case():
    """Would catch cases of operators that wait for a net, and an expected check that is silently skipped."""
    assert "propagated" not in checks_of(RunCase("operators/contracts", ()))
    assert checks_of(CASE) == tuple(CHECKS)
    case = dataclasses.replace(CASE, checks=("no_such_check",))
    answer = judge_case(dataclasses.replace(HEALTHY, case=case))[-1]
    assert (answer.outcome.name, answer.outcome.status) == ("no_such_check", "not_run")


def write(directory: Path, **files: Any) -> None:
    directory.mkdir(parents=True)
    for name, value in files.items():
        if isinstance(value, tuple):
            (directory / f"{name}.jsonl").write_text("".join(json.dumps(to_json(m)) + "\n" for m in value))
        else:
            (directory / f"{name}.json").write_text(json.dumps(to_json(value)))


def test_evidence_is_read_from_the_directories_of_a_run(tmp_path):
    """Would catch a reader and a worker that disagree, and a failed reference pass whose lines are trusted."""
    candidate, reference = (case_directory(tmp_path, "text/x", role) for role in ("candidate", "reference"))
    run = {**HEALTHY.run, "capabilities": ["taps"]}
    write(candidate, run=run, outputs=GOOD, measures=HEALTHY.measures)
    evidence = read_evidence(tmp_path, CASE, config=CONFIG, profile="bf16")
    assert evidence.net is None
    assert "not run" in evidence.net_reason
    assert evidence.capabilities == {"taps"}
    write(reference, run={"status": "finished"}, net=NET, parameters=HEALTHY.parameters)
    evidence = read_evidence(tmp_path, CASE, config=CONFIG, profile="bf16")
    assert set(statuses(evidence).values()) == {"passed"}
    (reference / "run.json").write_text('{"status": "failed", "message": "out of memory"}')
    evidence = read_evidence(tmp_path, CASE, config=CONFIG, profile="bf16")
    assert evidence.net is None
    assert "out of memory" in evidence.net_reason


def test_other_tokens_in_the_repeat_are_a_warning():
    """Would catch a candidate that does not repeat itself, or that observing changes, passing without a word."""
    (answer,) = [
        a
        for a in judge_case(dataclasses.replace(HEALTHY, run={**HEALTHY.run, "repeat_equal": False}))
        if a.outcome.name == "repeat"
    ]
    assert [f.severity for f in answer.findings] == ["warning"]
    assert "second, unobserved run" in answer.findings[0].message


@pytest.mark.parametrize(
    ("figures", "status", "severity"),
    [
        ({"rows": 4.0, "different": 0.0, "non_finite": 0.0, "relative_l2": 0.0}, "passed", ()),
        ({"rows": 4.0, "different": 2.0, "non_finite": 0.0, "relative_l2": 1e-3}, "passed", ("note",)),
        ({"rows": 4.0, "different": 2.0, "non_finite": 1.0, "relative_l2": 1e-3}, "failed", ("blocker",)),
        ({"rows": 4.0, "different": 4.0, "non_finite": 0.0, "relative_l2": 1.3}, "failed", ("blocker",)),
    ],
)
def test_logits_of_the_unobserved_run_are_asked_about(figures, status, severity):
    """Catches a race that waiting for the observer hides: the run that nobody watches gives garbage, and is green."""
    run = {**HEALTHY.run, "unobserved": figures}
    found = next(a for a in judge_case(dataclasses.replace(HEALTHY, run=run)) if a.outcome.name == "repeat")
    assert found.outcome.status == status
    assert tuple(f.severity for f in found.findings) == severity
    unrelated = dataclasses.replace(HEALTHY, run={**run, "repeat_equal": False})
    again = next(a for a in judge_case(unrelated) if a.outcome.name == "repeat")
    assert again.outcome.status == status
    assert again.findings


def test_a_replaced_operator_that_no_case_judges_is_named():
    """Would catch a green verdict on an operators file whose kernel was never called."""
    assert judge_run((HEALTHY,)) == ()
    judged = dataclasses.replace(HEALTHY, run={**HEALTHY.run, "replaced": ["dsa.score", "kv"]})
    assert [a.outcome.status for a in judge_run((judged,))] == ["passed"]
    idle = dataclasses.replace(HEALTHY, run={**HEALTHY.run, "replaced": ["dsa.score", "mla.merge"]})
    (answer,) = judge_run((judged, idle))
    assert answer.outcome.status == "not_run"
    assert "mla.merge" in answer.outcome.summary
    assert "dsa.score" not in answer.outcome.summary
