"""The propagated net on a small model of real operators: healthy runs pass, faults are named with their phase."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from net_fakes import REQUEST, MiniModel, candidate_call, fake_case, fake_tokens, write_snapshot

from day0check.compare.lockstep import run_together
from day0check.compare.propagated import compare_case
from day0check.errors import InputError
from day0check.types import Measure

LENGTH, PROMPT = 96, 64


@functools.cache
def model() -> MiniModel:
    return MiniModel.seeded(1)


def judge(directory: Path, *, seed: int = 0, fault: Any = None, length: int = LENGTH, **options: Any) -> list[Measure]:
    """The net's measures of a candidate that rounds to nearest and has `fault`."""
    tokens, keep = fake_tokens(length, seed), []
    with torch.inference_mode():
        model().forward(tokens, torch.float32, candidate_call(keep, fault=fault, seed=seed, **options))
    snapshot = write_snapshot(directory, keep, tokens, prompt=min(PROMPT, length))
    return compare_case(model().pair(), "bf16", fake_case(tokens, prompt=min(PROMPT, length)), snapshot, seed=seed)


def failing(measures: list[Measure]) -> list[Measure]:
    return [m for m in measures if not m.passed]


def test_healthy_candidates_raise_no_alarm(tmp_path):
    """Would catch a net that cries wolf over nearest rounding, or that is not run at all."""
    for seed in range(8):
        measures = judge(tmp_path / str(seed), seed=seed)
        assert failing(measures) == []
        assert {m.phase for m in measures} == {"prefill", "decode"}
        assert {m.tap for m in measures} >= {"embed.tokens", "layers.02.moe.route", "head.logits"}
        noisy = [m for m in measures if "whole" in m.statistics and m.operator != "embed.tokens"]
        values = [m.statistics["whole"] for m in noisy]
        assert 0.3 < min(values) <= max(values) < 1.0


def test_short_healthy_candidates_raise_no_alarm(tmp_path):
    """Would catch limits of large tensors that are applied to one or two rows."""
    for seed, length in enumerate((1, 2, 3, 5, 9, 66, 67)):
        assert failing(judge(tmp_path / str(seed), seed=seed, length=length)) == []


def test_same_seed_same_measures(tmp_path):
    """Would catch results that depend on which thread came first."""
    assert judge(tmp_path / "a") == judge(tmp_path / "b")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_fault_of_one_layer_and_phase_is_named(tmp_path, phase):
    """Would catch a net that pools the phases, or names another layer than the first that is wrong."""

    def fault(tap: str, operator: str, result: Any, kwargs: dict) -> Any:
        if tap != "layers.01.moe.combine":
            return result
        wrong = result.clone()
        rows = slice(None, PROMPT) if phase == "prefill" else slice(PROMPT, None)
        wrong[rows] *= 1.25
        return wrong

    found = failing(judge(tmp_path, fault=fault))
    assert (found[0].tap, found[0].phase, found[0].failing) == ("layers.01.residual.add.mlp", phase, "whole")
    assert found[0].layer == 1
    assert found[0].request == REQUEST
    if phase == "decode":
        assert {m.phase for m in found} == {"decode"}


def test_not_a_number_has_an_address(tmp_path):
    """Would catch NaN that vanishes in a mean, or whose row is not named."""

    def fault(tap: str, operator: str, result: Any, kwargs: dict) -> Any:
        if tap == "layers.02.residual.add.attention":
            result = result.clone()
            result[70, 3] = float("nan")
        return result

    first = failing(judge(tmp_path, fault=fault))[0]
    assert (first.failing, first.pattern, first.position, first.phase) == ("non_finite", "nan", 70, "decode")


def test_gross_row_has_an_address(tmp_path):
    """Would catch one lost row that hides among healthy ones."""

    def fault(tap: str, operator: str, result: Any, kwargs: dict) -> Any:
        if tap == "layers.00.residual.add.mlp":
            result = result.clone()
            result[17] = result[18]
        return result

    first = failing(judge(tmp_path, fault=fault))[0]
    assert (first.failing, first.position, first.phase, first.layer) == ("row", 17, "prefill", 0)


def test_legal_flips_are_replayed(tmp_path):
    """Would catch an oracle that keeps its own choice where the candidate's is as good: the row would be far off."""
    seen: dict[str, torch.Tensor] = {}
    swapped: list[int] = []

    def flips_a_near_tie(tap: str, operator: str, result: Any, kwargs: dict) -> Any:
        if tap == "layers.02.moe.scores":
            seen["scores"] = result
        if tap != "layers.02.moe.route":
            return result
        scores, ids = seen["scores"], result[0].clone()
        inside = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids, True)
        groups = inside.view(len(ids), 4, 2).any(-1).repeat_interleave(2, -1)
        rival = scores.masked_fill(inside | ~groups, -1).max(-1)
        lowest = scores.gather(1, ids).min(-1)
        row = int((lowest.values - rival.values).argmin())
        ids[row, lowest.indices[row]] = rival.indices[row]
        swapped.append(row)
        weights = scores.gather(1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) * 2.0

    measures = judge(tmp_path, fault=flips_a_near_tie)
    assert failing(measures) == []
    routes = [m for m in measures if m.tap == "layers.02.moe.route"]
    assert sum(m.statistics["flips"] for m in routes) >= 1
    assert swapped


@pytest.mark.parametrize(
    ("operator", "pattern"),
    [("dsa.select", "selects the future"), ("dsa.select", "duplicate"), ("dsa.select", "skips better keys")],
)
def test_illegal_selection_is_named(tmp_path, operator, pattern):
    """Would catch a selection that is replayed although no noise explains it."""

    def fault(tap: str, name: str, result: Any, kwargs: dict) -> Any:
        if tap != "layers.01.dsa.select":
            return result
        wrong = result.clone()
        if pattern == "selects the future":
            wrong[40, 0] = 41
        elif pattern == "duplicate":
            wrong[40, 0] = wrong[40, 1]
        else:
            wrong[40] = torch.tensor([i for i in range(40) if i not in result[40].tolist()][: wrong.shape[1]])
        return wrong

    first = failing(judge(tmp_path, fault=fault))[0]
    assert (first.tap, first.operator, first.kind) == ("layers.01.dsa.select", operator, "choose")
    assert (first.pattern, first.position, first.phase) == (pattern, 40, "prefill")


def test_worst_experts_are_named(tmp_path):
    """Would catch routes that are replayed whatever they give up."""

    def fault(tap: str, name: str, result: Any, kwargs: dict) -> Any:
        if tap != "layers.02.moe.route":
            return result
        ids = result[0].clone()
        ids[80] = torch.tensor([e for e in range(8) if e not in ids[80].tolist()][:2])
        return ids, result[1]

    first = failing(judge(tmp_path, fault=fault))[0]
    assert (first.tap, first.phase, first.position) == ("layers.02.moe.route", "decode", 80)


def test_missing_taps_are_not_judged(tmp_path):
    """Would catch a net that is green because a tap was never recorded."""
    tokens, keep = fake_tokens(24), []
    with torch.inference_mode():
        model().forward(tokens, torch.float32, candidate_call(keep))
    left = [k for k in keep if not (k[0] == "layers.01" and k[1] == "residual.add")]
    snapshot = write_snapshot(tmp_path, left, tokens, prompt=16)
    found = failing(compare_case(model().pair(), "bf16", fake_case(tokens, prompt=16), snapshot))
    assert [m.tap for m in found] == ["layers.01.residual.add.attention", "layers.01.residual.add.mlp"]
    assert all(m.not_judged for m in found)


def test_tokens_alone_are_judged_without_taps(tmp_path):
    """Would catch a black box whose answers are never looked at: one right answer, one that is far off."""
    tokens = fake_tokens(40)
    with torch.inference_mode():
        logits = model().forward(tokens, torch.float64, lambda place, op, f, *a, site="", **k: f(*a, **k))
    for answer, passes in ((int(logits[-1].argmax()), True), (int(logits[-1].argmin()), False)):
        sequence = [*tokens, answer]
        snapshot = write_snapshot(tmp_path / str(passes), [], sequence, prompt=40, generated=((40, 41),))
        (measure,) = compare_case(model().pair(), "bf16", fake_case(sequence, prompt=40), snapshot)
        assert (measure.tap, measure.kind, measure.passed) == ("sample.token", "choose", passes)
        assert passes or (measure.failing, measure.position) == ("margin", 39)


def test_no_outputs_is_an_input_error(tmp_path):
    """Would catch a comparison that invents a sequence for a candidate that died."""
    snapshot = write_snapshot(tmp_path, [], [1, 2], prompt=2)
    (tmp_path / "outputs.json").unlink()
    with pytest.raises(InputError, match="no outputs"):
        compare_case(model().pair(), "bf16", fake_case([1, 2], prompt=2), snapshot)


def test_passes_that_differ_or_fail_end_together():
    """Would catch a deadlock when one pass raises, and passes that meet at different calls."""

    def fails(meet: Any) -> None:
        raise ValueError("one pass fell")

    with pytest.raises(ValueError, match="one pass fell"):
        run_together([lambda meet: meet("x", 1), fails], lambda name, values: None)
    with pytest.raises(RuntimeError, match="same calls"):
        run_together([lambda meet: meet("x", 1), lambda meet: meet("y", 2)], lambda name, values: None)
    assert run_together([lambda m: m("x", 1), lambda m: m("x", 2)], lambda name, values: sum(values)) == [3, 3]
