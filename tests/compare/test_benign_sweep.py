"""Healthy operators raise no alarm: a small sample that differs from day to day in CI, and the proof of 1,000 each."""

import datetime
import json
import time

import pytest
import torch
from benign_sweep import Subject, healthy, one, read_state, subjects, sweep, table

from day0check.compare.compute import judge_compute
from day0check.compare.replay import Replay
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import generate

SAMPLE_SECONDS = 20.0


def test_a_rotating_sample_of_healthy_operators_raises_no_alarm():
    """Catches a limit that cries wolf on inputs that no fixed test holds. The day is the seed; it is in the message."""
    day = datetime.datetime.now(datetime.UTC).date().toordinal()
    begin = time.monotonic()
    every = [subject for profile in ("bf16", "eager-bf16", "fp32") for subject in subjects(profile)]
    for number in range(len(every)):
        if time.monotonic() - begin > SAMPLE_SECONDS:
            break
        run = one(every[(day * 17 + number) % len(every)], 10_000 + day)
        assert not run.alarm, run
    assert number >= 4


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_thousand_healthy_runs_of_every_operator_and_form_raise_no_alarm(tmp_path):
    """The measured benign column: count, time and upper bound are printed."""
    alarms = [alarm for batch in sweep(1000, tmp_path / "benign.jsonl") for alarm in batch["alarms"]]
    print(table(tmp_path / "benign.jsonl"))
    assert not alarms


def test_every_compute_operator_and_form_is_swept():
    """Catches an operator that is claimed to be free of false alarms and was never tried."""
    names = {s.operator for s in subjects()}
    assert names >= {"norm.rms", "mla.attention", "kda.attention", "moe.experts", "vision.attention", "head.logits"}
    assert {s.form for s in subjects() if s.operator == "dsa.attention"} == {"flash", "eager", "float32_p"}
    assert Subject("mla.attention", "flash").kinds() == ("float32", "float64", "last_only", "kernel")
    assert "kernel" not in Subject("mla.attention", "eager").kinds()


def test_the_sweep_counts_an_alarm(monkeypatch):
    """Catches a sweep that cannot fail: a kernel that is one percent too large must be counted."""
    subject = Subject("mlp.dense", "fused")
    contract = CONTRACTS[subject.operator]
    hard = generate(contract, "plain", 0, torch.bfloat16)
    arguments = {contract.args[0].name: hard.args[0], **hard.kwargs}
    y = healthy(contract, arguments | {"down": arguments["down"] * 1.05}, subject.profile(), "float32")
    assert not judge_compute(Replay(contract, arguments), y, subject.profile(), seed=0)[0].passed
    monkeypatch.setattr("benign_sweep.healthy", lambda *_: y)
    assert one(subject, 0).alarm


def test_a_sweep_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    """Catches batches that are counted twice, and a state that is lost to a line cut off in the middle."""
    few = (Subject("norm.rms", "fused"), Subject("moe.combine", ""))
    monkeypatch.setattr("benign_sweep.subjects", lambda: few)
    state = tmp_path / "benign.jsonl"
    first = next(iter(sweep(40, state)))
    assert (first["operator"], first["first"], first["runs"]) == ("norm.rms", 0, 20)
    with state.open("a") as file:
        file.write('{"operator": "norm.rms", "fo\n')
    rest = [(b["operator"], b["first"]) for b in sweep(40, state)]
    assert rest == [("moe.combine", 0), ("norm.rms", 20), ("moe.combine", 20)]
    assert {s: sum(b["runs"] for b in batches) for s, batches in read_state(state).items()} == dict.fromkeys(few, 40)
    assert not list(sweep(40, state))
    assert "norm.rms" in table(state)
    assert json.loads(state.read_text().splitlines()[0])["runs"] == 20


def test_a_row_that_decayed_away_is_judged_by_the_float32_sums_of_its_terms():
    """Catches a floor taken from a row's own size where its terms are far larger: with the draws of this run a healthy
    float32 row, a millionth of the others, is 3.25 times its bf16 noise."""
    run = one(Subject("kda.attention", "chunked_bf16"), 759)
    assert (run.input, run.kind, run.alarm) == ("beta_extremes", "float32", "")
    assert run.used < 0.9


@pytest.mark.parametrize("operator", ["kv.dequantise", "kv.unpack"])
def test_values_of_an_fp8_record_are_bfloat16_under_a_claim_of_float32(operator):
    """Catches a profile that asks float32 precision of a result whose contract fixes bfloat16: the kernels of the fast
    path failed `run operators --profile fp32` by 1,160 times the bound."""
    kinds = Subject(operator, "", "fp32").kinds()
    seed = kinds.index("kernel") * len(CONTRACTS[operator].hard_inputs)
    run = one(Subject(operator, "", "fp32"), seed)
    assert (run.kind, run.alarm) == ("kernel", "")
