"""The plan against counts made by hand, and its budget as a fixed order."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from day0check.plan import (
    CasePlan,
    Plan,
    all_weights,
    attention_weights,
    duration,
    feed_forward_weights,
    image_multiplies,
    make_plan,
    model_bytes,
    sequence_multiplies,
    sized,
)
from day0check.types import Request, RunCase, Schedule, Turn
from reference.config import Index, Kda, Mla, ModelConfig, Moe, Tokens, Vision

CONFIG = ModelConfig(
    "small",
    hidden=8,
    layers=("kda", "mla", "dsa"),
    vocab=10,
    max_positions=100,
    mlp_width=5,
    mla=Mla(heads=2, kv_lora=4, nope=3, rope=1, v=2, q_lora=6, gate=True),
    index=Index(heads=4, dim=2, topk=3),
    kda=Kda(heads=2, dim=3, rank=2),
    moe=Moe(experts=7, topk=2, width=4, shared_width=3, latent=6, first_dense=1),
    vision=Vision(hidden=4, layers=2, heads=1, head_dim=2, mlp=3),
    tokens=Tokens(media_pad=9),
)


def case(name: str, *prompts: int, new: int = 4, pads: int = 0, **schedule) -> RunCase:
    requests = tuple(
        Request(f"{name}/{i}#1", (Turn((1,) * (n - pads) + (9,) * pads, ("x.png",) * bool(pads)),), new)
        for i, n in enumerate(prompts)
    )
    return RunCase(name, requests, Schedule(**schedule))


def test_counts_by_hand():
    """Catches a sublayer left out of the plan, or counted twice."""
    assert attention_weights(CONFIG, "kda") == 3 * 48 + 2 * (8 + 6) + 16 + 48 + 48
    mla = 6 * (8 + 8) + 8 * 5 + 4 * 2 * 5 + 2 * 4 * 8
    assert attention_weights(CONFIG, "mla") == mla
    assert attention_weights(CONFIG, "dsa") == mla + 6 * 8 + 8 * (4 + 2)
    assert attention_weights(CONFIG, "dsa_shared") == mla
    assert feed_forward_weights(CONFIG, 0, active=True) == 3 * 8 * 5
    assert feed_forward_weights(CONFIG, 1, active=True) == 56 + 3 * 2 * 24 + 3 * 24 + 96
    assert feed_forward_weights(CONFIG, 1, active=False) == 56 + 3 * 7 * 24 + 3 * 24 + 96
    assert (
        all_weights(CONFIG)
        == sum(
            attention_weights(CONFIG, k) + feed_forward_weights(CONFIG, n, active=False)
            for n, k in enumerate(CONFIG.layers)
        )
        + 2 * 80
    )
    per_row = 80 + sum(
        attention_weights(CONFIG, k) + feed_forward_weights(CONFIG, n, active=True) for n, k in enumerate(CONFIG.layers)
    )
    # 4 rows: 10 pairs for mla and the index, 12 selected at most for dsa; width 2 * (2*4 + 1) = 18; index 8; kda 3*18
    assert sequence_multiplies(CONFIG, 4) == 4 * per_row + 4 * 54 + 10 * 18 + 10 * 18 + 10 * 8
    assert image_multiplies(CONFIG, case("image", 5, pads=2)) == 8 * 2 * (32 + 24 + 2 * 8 * 2)
    assert image_multiplies(dataclasses.replace(CONFIG, vision=None), case("image", 5, pads=2)) == 0


def test_rows_and_steps_of_a_case(tmp_path):
    """Catches prompt rows or decode steps that are not those of the run."""
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "config.json").write_bytes(b"x")
    cases = (case("operators/x"), case("text/a", 10, new=4), case("text/b", 6, 8, 9, new=5, max_batch=2, chunk=4))
    plan = make_plan(CONFIG, cases, "bf16", "cpu", model_dir=tmp_path, cores=2)
    operators, a, b = plan.cases
    assert (a.prompt_rows, a.decode_steps, a.images) == (10, 4, 0)
    assert (b.prompt_rows, b.decode_steps) == (23, 8)
    assert operators.reference_s == 0 < operators.candidate_s
    assert b.candidate_s > a.candidate_s
    assert plan.model_bytes == 100
    assert plan.peak_bytes > 512 << 20
    assert make_plan(CONFIG, cases[:1], "bf16", "cpu", cores=2).reference_bytes == 0
    assert model_bytes(tmp_path / "absent") == 0
    text = plan.text()
    assert all(word in text for word in ("operators/x", "text/b", "3 cases", "100 B", "beside it", "About"))
    assert "after it" in make_plan(CONFIG, cases, "bf16", "cpu", cores=1).text()


def test_two_cores_are_faster_and_an_accelerator_needs_no_host_copies():
    cases = (case("text/a", 50), case("text/b", 90))
    on_two = make_plan(CONFIG, cases, "bf16", "cpu", cores=2)
    assert on_two.seconds < make_plan(CONFIG, cases, "bf16", "cpu", cores=1).seconds
    assert make_plan(CONFIG, cases, "bf16", "cuda:0", cores=2).candidate_bytes < on_two.candidate_bytes


def test_further_runs_of_the_checks_are_in_the_plan():
    """Catches a plan that hides most of the work of a case, and a default case that is told to have any."""
    plain_case = case("text/a", 50, 20)
    asked = dataclasses.replace(plain_case, checks=("alone_equals_batched", "chunked_equals_one_shot"))
    plain, more = (make_plan(CONFIG, (c,), "bf16", "cpu", cores=2) for c in (plain_case, asked))
    assert (plain.cases[0].further_runs, more.cases[0].further_runs) == (
        0,
        2 + 4,
    )  # chunks of 1 to 4; 63 are more than the prompts have
    assert more.cases[0].candidate_s > plain.cases[0].candidate_s
    assert more.cases[0].reference_s > plain.cases[0].reference_s
    assert "further runs of the candidate: 6 of text/a" in more.text()
    assert "further" not in plain.text()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), max_size=6), st.floats(0, 300), st.booleans())
def test_a_budget_keeps_the_order_and_names_the_rest(seconds, budget_s, parallel):
    """Catches a case that is neither run nor named, an order that depends on the budget, a budget that is exceeded."""
    cases = tuple(CasePlan(f"text/{i}", 1, 1, 0, c, r) for i, (c, r) in enumerate(seconds))
    plan = Plan(cases, 0, 0, 0, 3.0, parallel)
    fit, left = plan.within(budget_s)
    assert [*fit, *(n.check.removeprefix("case ") for n in left)] == [c.id for c in cases]
    assert not fit or plan.seconds_of(cases[: len(fit)]) <= budget_s
    assert not left or plan.seconds_of(cases[: len(fit) + 1]) > budget_s
    assert all("budget" in n.reason for n in left)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min"), (90, "1 min 30 s"), (3600, "1 h"), (5400, "1 h 30 min")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_sizes():
    assert [sized(n) for n in (0, 1023, 1536, 3 << 30, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "3 GiB", "5 TiB"]
