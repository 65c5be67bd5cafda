"""From comparisons to an answer: what fails, what passes, and above all what is not run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from day0check.checks import INVARIANTS, Evidence, judge_case
from day0check.checks.evidence import Extra
from day0check.checks.invariants.extra_runs import ExtraRun
from day0check.checks.invariants.judging import judge_runs
from day0check.compare.pairing import Pairing
from day0check.compare.run_comparison import Computed, RunComparison, read_comparison, write_comparison
from day0check.errors import InputError
from day0check.types import Measure, Outputs, Request, RunCase, Schedule, Turn
from reference.config import ModelConfig, Residual

CONFIG = ModelConfig("x", hidden=8, layers=("kda", "dsa"), vocab=8, max_positions=64, mlp_width=8)
A = Request("x/a#1", (Turn((1, 2, 3)),), 2, forced=((4, 5),))
CASE = RunCase("x", (A,))
OUTPUTS = Outputs({"x/a#1": (1, 2, 3, 4, 5)}, {"x/a#1": ((3, 5),)}, {"x/a#1": "length"})
RUN = ExtraRun("r", "another schedule", (A,), Schedule(), (Pairing("x/a#1", "x/a#1"),))
GOOD = Measure(
    "layers.01.residual.add.mlp", "residual.add", "exact", "decode", 1, 7, 4, 8, True, {"row": 1.0}, {"row": 9.0}
)
BAD = replace(
    GOOD, passed=False, failing="row", statistics={"row": 99.0}, pattern="one row", request="x/a#1", position=4
)
FOUND = RunComparison("r", (GOOD,), rows=4, computed={"x/a#1": Computed(4, 4, 1, 1)})
CONTROL = Extra("finished", comparison=RunComparison("again", (GOOD,), rows=4))


def judge(found: RunComparison | None, asked: ExtraRun = RUN, **changes):
    extra = {"r": Extra("finished", comparison=found), "again": CONTROL}
    evidence = Evidence(CASE, CONFIG, "bf16", {"status": "finished"}, outputs=OUTPUTS, net=(GOOD,), extra=extra)
    return judge_runs("reordered", replace(evidence, **changes), lambda *_: (asked,), nothing="nothing to ask")


def test_a_run_within_the_noise_passes_and_says_how_much_it_compared():
    """Would catch a pass that does not say on how many rows it stands."""
    answer = judge(replace(FOUND, different=2))
    assert (answer.outcome.status, answer.findings) == ("passed", ())
    assert "1 run, 4 rows compared, 2 with other bytes" in answer.outcome.summary


def test_a_wrong_measure_is_a_finding_with_the_run_in_words():
    """Would catch a finding without its address or without the schedule that shows it."""
    answer = judge(replace(FOUND, measures=(GOOD, BAD)))
    (found,) = answer.findings
    assert answer.outcome.status == "failed"
    assert found.message.startswith("with another schedule: residual.add (mlp) in layer 1 (decode)")
    assert (found.layer, found.request, found.position, found.evidence["run"]) == (1, "x/a#1", 4, "r")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"extra": {}}, "it was not made"),
        ({"extra": {"r": Extra("unavailable", "the backend has no chunk")}}, "has no chunk"),
        ({"extra": {"r": Extra("finished", reason="the reference pass failed")}}, "the reference pass failed"),
        ({"outputs": None}, "further runs follow its answers"),
        ({"run": {"status": "failed"}}, "the candidate failed"),
        ({"config": None}, "configuration"),
    ],
)
def test_what_was_not_compared_is_not_run(changes, reason):
    """Would catch a check that passes without its runs: a schedule outside the backend's capabilities is named."""
    answer = judge(FOUND, **changes)
    assert answer.outcome.status == "not_run"
    assert reason in answer.outcome.summary


@pytest.mark.parametrize(
    ("wish", "computed", "reason"),
    [
        ({"recomputed": ("x/a#1",)}, Computed(4, 4, 1, 1), "never preempted"),
        ({"once": ("x/a#1",)}, Computed(8, 4, 2, 1), "computed a position twice"),
        ({"reused": ("x/a#1",)}, Computed(4, 4, 1, 1), "took nothing from the cache"),
        ({"rested": ("x/a#1",)}, Computed(4, 4, 1, 1, 0), "never rested"),
        ({"chunked": ("x/a#1",)}, Computed(4, 4, 1, 1), "in one step"),
        ({"bits": True}, Computed(4, 4, 1, 1), ""),
    ],
)
def test_a_run_that_did_not_do_what_it_was_for_shows_nothing(wish, computed, reason):
    """Would catch a backend that ignores the schedule and is green for it."""
    answer = judge(replace(FOUND, computed={"x/a#1": computed}), replace(RUN, **wish))
    assert answer.outcome.status == ("not_run" if reason else "passed")
    assert reason in answer.outcome.summary


def test_a_run_that_falls_or_strays_is_a_finding():
    """Would catch a crash under another schedule that is only named as not run."""
    fell = judge(FOUND, extra={"r": Extra("failed", "IndexError: 7")})
    assert fell.outcome.status == "failed"
    assert "with another schedule the candidate failed: IndexError: 7" in fell.findings[0].message
    strayed = judge(replace(FOUND, strayed=("x/a#1",)))
    assert (strayed.outcome.status, strayed.findings[0].request) == ("failed", "x/a#1")


def test_bytes_count_only_where_the_candidate_repeats_itself():
    """Would catch an alarm on a device whose sums run in another order each time, and bytes that nobody looks at."""
    run = replace(RUN, bits=True)
    other = replace(FOUND, different=1, first_tap=GOOD.tap, first_request="x/a#1", first_position=2)
    answer = judge(other, run)
    assert answer.outcome.status == "failed"
    assert (answer.findings[0].evidence["pattern"], answer.findings[0].position) == ("other bytes", 2)
    shaky = Extra("finished", comparison=RunComparison("again", (GOOD,), rows=4, different=3))
    extra = {"r": Extra("finished", comparison=other), "again": shaky}
    assert judge(other, run, extra=extra).outcome.status == "passed"
    assert judge(other, run, extra={"r": extra["r"]}).outcome.status == "not_run"


def test_a_legal_choice_excuses_only_beside_a_sound_judged_run():
    """Would catch a judged run that is wrong and calls its own choices legal."""
    excused = replace(FOUND, explained=("x/a#1",), set_aside=(BAD,))
    assert "a legal choice fell otherwise" in judge(excused).outcome.summary
    assert judge(excused, net=(GOOD, BAD)).outcome.status == "failed"
    assert judge(excused, net=None).outcome.status == "failed"


def test_a_comparison_survives_its_file(tmp_path):
    """Would catch a field that a reader takes for another value, and a damaged file that counts as none."""
    found = replace(FOUND, label="a/b", measures=(GOOD, BAD), flips={"x/a#1": 3}, set_aside=(BAD,))
    write_comparison(tmp_path, found)
    assert read_comparison(tmp_path, "a/b") == found
    assert read_comparison(tmp_path, "c") is None
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(InputError, match="label"):
        read_comparison(tmp_path, "c")


def test_the_residual_bank_needs_its_digests_in_both_phases():
    """Would catch a bank that nobody watched in decode, and one that was overwritten."""
    config = replace(CONFIG, residual=Residual("attention", block=1))
    kept = replace(GOOD, tap="layers.01.residual.store.kept", operator="residual.store", kind="move")
    case = replace(CASE, checks=("residual_bank",))
    evidence = Evidence(case, config, "bf16", {"status": "finished"}, outputs=OUTPUTS)

    def answer(*measures):
        every = judge_case(replace(evidence, measures=measures))
        return next(a for a in every if a.outcome.name == "residual_bank")

    assert answer().outcome.status == "not_run"
    assert "decode" in answer(replace(kept, phase="prefill")).outcome.summary
    assert answer(kept, replace(kept, phase="prefill")).outcome.status == "passed"
    lost = replace(
        kept, passed=False, failing="overwritten", statistics={"overwritten": 1.0}, limits={"overwritten": 0.0}
    )
    assert answer(lost, replace(kept, phase="prefill")).outcome.status == "failed"


def test_no_invariant_passes_on_nothing():
    """Would catch an invariant that is green without evidence."""
    for name, module in INVARIANTS.items():
        case = RunCase("x", (A,), checks=(name,))
        answer = module.judge(Evidence(case, CONFIG, "bf16", {"status": "finished"}, outputs=OUTPUTS))
        assert (answer.outcome.name, answer.outcome.status) == (name, "not_run")
        assert answer.outcome.summary
