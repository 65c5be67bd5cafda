"""The further runs as pure functions: what they ask is what their words say, on any case."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from day0check.checks import INVARIANTS, checks_of, extra_runs_of
from day0check.checks.invariants.extra_runs import answered, as_prompt, edges, forced, other_words, predicted
from day0check.types import Outputs, Request, RunCase, Schedule, Turn
from reference.config import Index, Kda, Mla, ModelConfig, Moe, Residual, Tokens, Vision

CONFIG = ModelConfig(
    "small",
    hidden=8,
    layers=("kda", "dsa"),
    vocab=300,
    max_positions=999,
    mlp_width=5,
    mla=Mla(heads=2, kv_lora=4, nope=3, rope=1, v=2),
    index=Index(heads=4, dim=2, topk=12),
    kda=Kda(heads=2, dim=3, rank=2, chunk=10),
    moe=Moe(experts=7, topk=2, width=4, shared_width=3, first_dense=1),
    vision=Vision(hidden=4, layers=2, heads=1, head_dim=2, mlp=3),
    residual=Residual("attention", block=1),
    tokens=Tokens(bos=256, media_pad=259),
)
ALL = tuple(INVARIANTS)
BACKWARDS = Outputs({"x/a#1": (1, 2, 3, 7, 8)}, {"x/a#1": ((3, 5),)}, {"x/a#1": "length"})
A = Request("x/a#1", (Turn((1, 2, 3)),), 2)


def test_forced_and_as_prompt_are_what_was_answered():
    """Would catch a run that is forced to other tokens, or that feeds a token which the judged run never computed."""
    assert forced(A, BACKWARDS).forced == ((7, 8),)
    assert as_prompt(A, BACKWARDS).turns == (Turn((1, 2, 3, 7)),)
    no_answer = Outputs({"x/a#1": (1, 2, 3)}, {"x/a#1": ((3, 3),)})
    assert as_prompt(dataclasses.replace(A, max_new_tokens=0), no_answer).turns == (Turn((1, 2, 3)),)
    aborted = dataclasses.replace(BACKWARDS, finish={"x/a#1": "aborted"})
    assert answered(RunCase("x", (A,)), aborted) == ()


def test_edges_are_around_page_chunk_and_topk():
    """Would catch a chunk size that avoids every edge."""
    assert edges(RunCase("x", (A,), Schedule(page=16)), CONFIG) == (9, 10, 11, 12, 13, 15, 16, 17)


@given(st.lists(st.integers(0, 255), min_size=1, max_size=40), st.integers(0, 40), st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_other_words_change_every_plain_token_and_nothing_else(tokens, begin, salt):
    """Would catch a neighbour that says the same, a changed prefix, and pads without their image."""
    given_tokens = (256, *tokens, 259)
    changed = other_words(given_tokens, CONFIG, begin=begin, salt=salt)
    assert len(changed) == len(given_tokens)
    assert (changed[0], changed[-1]) == (256, 259)
    for at, (a, b) in enumerate(zip(given_tokens[1:-1], changed[1:-1], strict=True), 1):
        assert (a != b) == (at >= begin)
        assert 0 <= b < CONFIG.vocab
        assert b not in (256, 259)


requests = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 9), st.integers(0, 5), st.booleans()), min_size=1, max_size=4
)


@given(requests, st.sampled_from([4, 8, 16]))
@settings(max_examples=60, deadline=None)
def test_runs_of_any_case_make_sense(shapes, page):
    """Would catch two runs under one label, a pairing with a request that is not there, and a prompt that grows."""
    made = tuple(
        Request(
            f"x/r{n}#1",
            (Turn((97,) * length + (259,) * (3 * image), ("p.png",) * image),),
            new,
            arrive_step=step,
        )
        for n, (length, new, step, image) in enumerate(shapes)
    )
    case = RunCase("x", made, Schedule(page=page), checks=ALL)
    outputs = predicted(case)
    runs = extra_runs_of(case, outputs, CONFIG)
    labels = [run.label for run in runs]
    assert len(labels) == len(set(labels))
    for run in runs:
        here = {r.id: r for r in run.requests}
        assert len(here) == len(run.requests)
        assert not run.against or run.against in labels[: labels.index(run.label)]
        for pairing in run.pairings:
            assert pairing.here in here
            assert pairing.there in outputs.sequences
        for request in run.requests:
            length = sum(len(t.tokens) for t in request.turns) + sum(map(len, request.forced))
            assert 0 < length <= len(outputs.sequences[request.id.partition("~")[0]])


def test_checks_of_parts_that_a_model_does_not_have_are_left_out():
    """Would catch a text model that is inconclusive because it has no images."""
    case = RunCase("x", (A,), checks=("spliced", "images_alone", "experts_once", "residual_bank", "reordered"))
    plain = dataclasses.replace(CONFIG, vision=None, moe=None, residual=Residual())
    assert [name for name in checks_of(case, plain) if name in INVARIANTS] == ["reordered"]
    assert set(case.checks) <= set(checks_of(case, CONFIG))
    assert extra_runs_of(case, BACKWARDS, plain) == ()


def test_two_meanings_of_one_label_are_refused(monkeypatch):
    """Would catch a check that is judged by another check's run of the same name."""
    module = INVARIANTS["repeated"]
    (run,) = module.runs(RunCase("x", (A,)), BACKWARDS, CONFIG)
    monkeypatch.setattr(INVARIANTS["reordered"], "runs", lambda *_: (dataclasses.replace(run, bits=False),))
    with pytest.raises(ValueError, match="different runs by 'again'"):
        extra_runs_of(RunCase("x", (A,), checks=("repeated", "reordered")), BACKWARDS, CONFIG)
