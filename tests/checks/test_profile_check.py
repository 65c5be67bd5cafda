"""The claimed profile against the tightest one that everything judged fits."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.checks import profile
from day0check.checks.evidence import Evidence
from day0check.contracts import CONTRACTS
from day0check.contracts.profiles import FP8_FORM, PLAIN_ROWS, PROFILES, fitting_form, fitting_profile
from day0check.types import Measure, RunCase

CASE = RunCase("text/x", ())


def measure(operator: str, **statistics: float) -> Measure:
    tap = f"layers.01.{operator}"
    return Measure(tap, operator, "compute", "prefill", 1, 7, 4, 8, True, {"whole": 0.7, **statistics}, {"whole": 1.1})


def evidence(name: str, *measures: Measure) -> Evidence:
    return Evidence(CASE, None, name, {"status": "finished"}, measures)


def test_a_claim_that_everything_undercuts_is_told_with_the_profile_to_claim():
    """Catches a loose claim that stays in silence, and one misfit that is lost among fits."""
    norm, mlp = measure("norm.rms", misfit_fused=0.0), measure("mlp.dense", misfit_fused=0.0)
    answer = profile.judge_run([evidence("eager-bf16", norm), evidence("eager-bf16", mlp)])
    assert (answer.outcome.status, answer.findings[0].severity) == ("passed", "note")
    assert "fits profile bf16" in answer.findings[0].message
    misfit = replace(norm, tap="layers.02.norm.rms", statistics={"misfit_fused": 1.0})
    assert profile.judge_run([evidence("eager-bf16", norm, mlp, misfit)]) is None


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_the_tightest_claim_of_its_type_gives_no_answer(name):
    assert (
        profile.judge_run([evidence(name, measure("norm.rms"), measure("mla.attention", misfit_float32_p=0.0))]) is None
    )


def test_failures_that_one_looser_profile_explains_are_a_finding_of_their_own():
    """Catches a lost claim that is told operator by operator only, and a profile named that explains but a part."""

    def wrong(operator, **statistics):
        return replace(measure(operator, **statistics), passed=False, failing="row")

    norm, mlp = wrong("norm.rms", looser_cast_first=0.0), wrong("mlp.dense", looser_eager=0.0)
    answer = profile.judge_run([evidence("bf16", norm, mlp, wrong("norm.rms"))])
    assert (answer.outcome.status, answer.findings[0].severity) == ("failed", "blocker")
    assert "consistent with profile eager-bf16" in answer.findings[0].message
    assert profile.judge_run([evidence("bf16", norm, wrong("mla.query"))]) is None
    quantised = wrong("mla.query", **{f"looser_{FP8_FORM}": 0.0})
    (finding,) = profile.judge_run([evidence("bf16", quantised)]).findings
    assert "consistent with profile fp8-activations" in finding.message
    assert profile.judge_run([evidence("bf16", norm, quantised)]) is None


def test_quantised_rows_are_needed_until_plain_rows_fit():
    """Catches bf16 proposed to a candidate whose codes were judged as they are."""
    fp8 = PROFILES["fp8-activations"]
    assert fitting_profile(fp8, {"mla.query": "", "norm.rms": "fused"}).name == "fp8-activations"
    assert fitting_profile(fp8, {"mla.query": PLAIN_ROWS, "norm.rms": "fused"}).name == "bf16"
    assert fitting_profile(PROFILES["fp8-cache"], {"mla.query": "", "norm.rms": "fused"}).name == "fp8-cache"


@given(st.sampled_from(sorted(PROFILES)), st.data())
@settings(max_examples=40, deadline=None)
def test_the_tightest_profile_is_never_looser_than_the_claim(name, data):
    """Catches a proposal that rounds where the found forms do, and at more points than the claim."""
    claimed = PROFILES[name]
    operators = data.draw(st.lists(st.sampled_from(sorted(o for o, c in CONTRACTS.items() if c.forms)), unique=True))
    fits = {}
    for o in operators:
        held = [f.name for f in CONTRACTS[o].forms if set(f.points) <= {*claimed.points_of(o), "out"}]
        fits[o] = data.draw(st.sampled_from(held or [""]))
    found = fitting_profile(claimed, fits)
    assert found.act_dtype == claimed.act_dtype
    assert found.name == claimed.name or sum(map(len, found.points.values())) <= sum(map(len, claimed.points.values()))


def test_the_tightest_fitting_form_is_the_first_that_was_tried():
    assert fitting_form("eager", {"misfit_float32_p": 1.0, "misfit_flash": 0.0, "whole": 0.4}) == "flash"
    assert fitting_form("eager", {"misfit_float32_p": 1.0, "misfit_flash": 1.0}) == "eager"
    assert fitting_form("", {}) == ""


def test_states_that_were_narrowed_where_they_were_stored_need_their_profile():
    """Catches a proposal of bf16 to an engine whose pool of states rounds, since its operator returned float32."""
    operator = measure("kda.attention", misfit_recurrent=0.0)
    store = replace(measure("state.store", narrowed=1.0), kind="move")
    tighter = profile.judge_run([evidence("bf16-states", operator)])
    assert "fits profile bf16," in tighter.outcome.summary
    assert profile.judge_run([evidence("bf16-states", operator), evidence("bf16-states", store)]) is None
