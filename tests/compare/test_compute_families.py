"""Guards the judgement of what only some families have: the fast path passes on every hard input, faults do not."""

import pytest
import torch

from day0check.accelerated.ops import TABLE
from day0check.compare.compute import judge_compute
from day0check.compare.replay import Replay
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import generate
from day0check.contracts.profiles import PROFILES

OPERATORS = (
    "norm.layer",
    "vision.rope_axial",
    "vision.gated_mlp",
    "vision.normed_gelu",
    "vision.project_plain",
    "image.preprocess_in_budget",
    "dsa.pool_gate",
    "dsa.pool_key",
    "residual.coefficients",
    "residual.collapse",
    "residual.update",
)
NAMES = [(operator, name) for operator in OPERATORS for name in CONTRACTS[operator].hard_inputs]


def arguments(operator, name, seed, dtype):
    hard = generate(CONTRACTS[operator], name, seed, dtype)
    return {CONTRACTS[operator].args[0].name: hard.args[0], **hard.kwargs}


def results_of(operator, given):
    first, *_ = (a.name for a in CONTRACTS[operator].args)
    results = TABLE[operator](given[first], **{k: v for k, v in given.items() if k != first})
    return results if isinstance(results, tuple) else (results,)


def judged(operator, given, results, profile):
    return judge_compute(Replay(CONTRACTS[operator], given), results, PROFILES[profile], seed=3)


@pytest.mark.parametrize("profile", ["bf16", "fp32"])
@pytest.mark.parametrize(("operator", "name"), NAMES, ids=lambda v: v)
def test_the_fast_path_passes(operator, name, profile):
    """Catches a bound of a new operator that cries wolf."""
    for seed in range(6):
        given = arguments(operator, name, seed, torch.bfloat16 if profile == "bf16" else torch.float32)
        for j in judged(operator, given, results_of(operator, given), profile):
            assert j.passed, (seed, j)


FAULTS = {
    "vision.gated_mlp": ("large_gate", {"limit": 2.2}),
    "norm.layer": ("small_norm_row", {"eps": 1e-6}),
    "vision.normed_gelu": ("plain", {"eps": 0.02}),
    "vision.rope_axial": ("two_images", {"theta": 9000.0}),
    "image.preprocess_in_budget": ("odd_size", {"std": (0.5, 0.5, 0.502)}),
    "residual.coefficients": ("plain", {"iterations": 1}),
}


@pytest.mark.parametrize("operator", FAULTS)
def test_another_setting_is_found(operator):
    """Catches a bound under which a wrong setting of an operator could hide."""
    name, changed = FAULTS[operator]
    for seed in range(3):
        given = arguments(operator, name, seed, torch.bfloat16)
        assert any(j.failing for j in judged(operator, given, results_of(operator, given | changed), "bf16")), seed


@pytest.mark.parametrize("operator", ["vision.gated_mlp", "vision.project_plain"])
def test_a_rounding_that_nobody_may_make_is_found(operator):
    """Catches an inner noise so wide that a second rounding fits into it: the variance of the one rounding is exact."""
    last = {"vision.gated_mlp": "down", "vision.project_plain": "w1"}[operator]
    for seed in range(3):
        given = arguments(operator, "plain", seed, torch.bfloat16)
        narrow = given | {last: given[last].to(torch.float8_e4m3fn).to(torch.bfloat16)}
        assert any(j.failing for j in judged(operator, given, results_of(operator, narrow), "bf16")), seed
