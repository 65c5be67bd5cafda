"""Sums over ranks: any order of float32 sums is one claim, a running sum in the activation type is another."""

import pytest
import torch

from day0check.accelerated.ops import TABLE
from day0check.backends.operators import run_operators
from day0check.compare.local import Judge
from day0check.contracts.profiles import profile_named
from day0check.probe.recorder import Recorder
from day0check.probe.registry import Operators

RUNNING = 'base = "bf16"\n[forms]\n"comm.all_reduce" = "running"\n'


def judged(function, profile):
    measures = {}  # the last of each tap counts
    claimed = profile_named(profile)
    recorder = Recorder([Judge(claimed, lambda m: measures.update({m.tap: m}))])
    run_operators(Operators({"comm.all_reduce": function}), recorder, claimed, ("comm.all_reduce",))
    assert len(measures) == 4
    return [m for m in measures.values() if not m.passed]


def backwards(parts):
    return parts.float().flip(1).sum(1).to(parts.dtype)


def in_pairs(parts):
    wide = parts.float()
    while wide.shape[1] > 1:
        odd = wide[:, -1:] if wide.shape[1] % 2 else wide[:, :0]
        wide = torch.cat((wide[:, 0:-1:2] + wide[:, 1::2], odd), 1)
    return wide[:, 0].to(parts.dtype)


def running(parts):
    total = parts[:, 0]
    for rank in range(1, parts.shape[1]):
        total = total + parts[:, rank]
    return total


@pytest.mark.parametrize("function", [TABLE["comm.all_reduce"], backwards, in_pairs])
def test_the_order_of_ranks_is_free(function):
    """Catches a false alarm on a ring, a tree or a one-shot sum: other orders of the same float32 sums."""
    assert judged(function, "bf16") == []
    assert judged(function, "fp32") == []


def test_a_running_sum_in_bfloat16_is_a_claim_of_its_own(tmp_path):
    """Catches a sum that rounds at every rank and passes for a float32 sum, and one that is not believed when named."""
    failed = judged(running, "bf16")
    assert failed
    assert any("consistent with the looser form 'running'" in m.message for m in failed)
    file = tmp_path / "running.toml"
    file.write_text(RUNNING)
    assert judged(running, str(file)) == []
    assert judged(running, "eager-bf16") == []


@pytest.mark.parametrize(
    "wrong",
    [
        lambda parts: TABLE["comm.all_reduce"](parts[:, :-1]) if parts.shape[1] > 1 else parts[:, 0] * 1.02,
        lambda parts: TABLE["comm.all_reduce"](torch.cat((parts, parts[:, :1]), 1)),
        lambda parts: parts.float().mean(1).to(parts.dtype) if parts.shape[1] > 1 else parts[:, 0] * 1.02,
    ],
    ids=["a-rank-left-out", "a-rank-twice", "mean"],
)
def test_a_wrong_sum_is_seen(wrong):
    """Catches a rank that is left out or counted twice, and a mean in place of a sum."""
    for profile in ("bf16", "eager-bf16"):
        assert judged(wrong, profile)
