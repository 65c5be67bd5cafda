"""The matched filter on planted parameter faults that the ratio of the net does not see."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from net_fakes import MiniModel, candidate_call, fake_tokens

from day0check.compare.matched import Hypothesis, compare_matched, hypotheses, match
from day0check.compare.propagated import compare_case
from day0check.contracts.profiles import PROFILES
from day0check.probe.capture import Capture
from day0check.probe.recorder import Call
from day0check.probe.rows import RowMap
from day0check.snapshot import Snapshot
from day0check.types import Outputs, Request, RunCase, Turn, to_json

BF16, LENGTH, PROMPTS = PROFILES["bf16"], 48, 3
COMBINE = Hypothesis("layers.01.moe.combine", "moe.combine", "weights", "router weights", 0.01)


@functools.cache
def model() -> MiniModel:
    return MiniModel.seeded()


def planted(
    directory: Path, wrong: Hypothesis | None, *, seed: int = 0, mode: str = "nearest", taps: tuple[str, ...] = ()
) -> tuple[RunCase, Snapshot]:
    """A black box: outputs and travelling tensors (those at `taps`, or all) of PROMPTS prompts, with `wrong` in it."""
    directory.mkdir(parents=True)
    capture, order, requests = Capture(directory), 0, []
    for prompt in range(PROMPTS):
        tokens, keep = fake_tokens(LENGTH, seed=100 * seed + prompt), []
        rounding = candidate_call(keep, mode=mode, seed=seed * 50 + prompt)

        def call(
            place: str, operator: str, function: Any, *args: Any, inner: Any = rounding, site: str = "", **kwargs: Any
        ):
            if wrong is not None and f"{place}.{operator}" == wrong.tap:
                args, kwargs = wrong.applied(args, kwargs)
            return inner(place, operator, function, *args, site=site, **kwargs)

        with torch.inference_mode():
            model().forward(tokens, torch.float32, call)
        name = f"text/fake/{prompt}#1"
        rows = RowMap((name,), (0,) * LENGTH, tuple(range(LENGTH)))
        for place, operator, site, results in keep:
            if not taps or ".".join(p for p in (place, operator, site) if p) in taps:
                capture.after(Call(place, operator, site, "prefill", prompt, order, rows, (), {}), None, results)
            order += 1
        capture.end_step(prompt)
        requests.append(Request(name, (Turn(tuple(tokens)),), 1))
    capture.end_case()
    answers = {r.id: (*r.turns[0].tokens, 0) for r in requests}
    (directory / "outputs.json").write_text(json.dumps(to_json(Outputs(answers, dict.fromkeys(answers, ())))))
    (directory / "run.json").write_text(json.dumps({"status": "finished", "message": "", "seconds": 1.0}))
    return RunCase("text/fake", tuple(requests)), Snapshot(directory)


def asked(*operators: str) -> tuple[Hypothesis, ...]:
    every = hypotheses(model().pair()[0], fake_tokens(24))
    return tuple(h for h in every if h.operator in operators)


def test_hypotheses_are_the_parameters_of_the_contracts_where_a_pass_calls_them():
    """Catches parameters that are asked of operators which the model does not call, and places that are left out."""
    every = hypotheses(model().pair()[0], fake_tokens(24))
    assert COMBINE in every
    assert {h.operator for h in every} == {"dsa.score", "dsa.attention", "moe.combine"}
    assert len({h.tap for h in every if h.operator == "dsa.attention"}) == 3


def test_a_factor_that_the_ratio_does_not_see_is_named_and_sized(tmp_path):
    """Catches a filter that is blind, or names another layer: router weights of one layer one percent too large."""
    case, snapshot = planted(tmp_path / "wrong", COMBINE, seed=1)
    assert all(m.passed for m in compare_case(model().pair(), BF16, case, snapshot) if m.operator != "sample.token")
    found = match(model().pair(), BF16, case, snapshot, asked("moe.combine", "dsa.attention"))
    assert found[0].hypothesis == COMBINE
    assert found[0].found
    assert found[0].amplitude == pytest.approx(1.0, abs=0.15)
    assert not any(m.found and abs(m.shared) < 0.5 for m in found[1:])
    (measure,) = compare_matched(model().pair(), BF16, case, snapshot)
    assert (measure.passed, measure.operator, measure.layer) == (False, "moe.combine", 1)
    assert "router weights in layers.01.moe.combine" in measure.message


def test_healthy_candidates_match_nothing(tmp_path):
    """Catches a filter that cries wolf, under rounding to nearest and under random rounding."""
    for seed, mode in ((2, "nearest"), (3, "random"), (4, "random")):
        case, snapshot = planted(tmp_path / str(seed), None, seed=seed, mode=mode)
        found = match(model().pair(), BF16, case, snapshot, asked("moe.combine", "dsa.attention"), seed=seed)
        assert not any(m.found for m in found), found[0]
        assert all(m.prompts == PROMPTS for m in found)


def test_the_logits_alone_tell_a_large_error_and_how_many_prompts_a_small_one_needs(tmp_path):
    """Catches a filter that needs inner taps, and a number of prompts that does not grow with the noise."""
    choices = [f"layers.{i:02d}.{operator}" for i in range(3) for operator in ("dsa.select", "moe.route")]
    large = replace(COMBINE, tap="layers.02.moe.combine", size=0.08)
    case, snapshot = planted(tmp_path / "logits", large, seed=5, taps=("head.logits", *choices))
    found = match(model().pair(), BF16, case, snapshot, asked("moe.combine"))
    mine = next(m for m in found if m.hypothesis.tap == large.tap)
    assert mine.found
    assert mine.hypothesis.size * mine.amplitude == pytest.approx(0.08, rel=0.25), found
    assert mine is found[0] or mine.shared > 0.3  # the layer is only as good as the taps
    assert {m.seen_at for m in found} == {"head.logits"}
    noisier = sorted(found, key=lambda m: m.spread)
    assert [m.prompts_needed for m in noisier] == sorted(m.prompts_needed for m in noisier)


def test_a_head_is_its_query():
    """Catches a hypothesis about one head that changes others."""
    head = Hypothesis("layers.00.dsa.attention", "dsa.attention", "scale", "softmax scale", 0.02, head=1)
    q = torch.randn(5, 3, 8)
    (changed,), kwargs = head.applied((q,), {"scale": 0.5})
    assert torch.equal(changed[:, 1], q[:, 1] * 1.02)
    assert torch.equal(changed[:, [0, 2]], q[:, [0, 2]])
    assert kwargs == {"scale": 0.5}
    assert replace(head, head=None).applied((q,), {"scale": 0.5})[1]["scale"] == pytest.approx(0.51)
