"""Rows of two keys under a profile of several inner roundings: no number of replicates shows what they may do."""

import pytest
import torch

from day0check.accelerated.ops import TABLE
from day0check.compare.compute import judge_compute
from day0check.compare.replay import Replay
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import Draw
from day0check.contracts.profiles import PROFILES


def two_keys(seed: int, rows: int = 48, heads: int = 4, width: int = 32) -> dict:
    """Attention of rows that each see two keys of their own."""
    d = Draw(seed, torch.bfloat16)
    q, keys = d.act(rows, heads, width), d.act(rows, 2, width)
    valid = torch.ones(rows, 2, dtype=torch.bool)
    return {"q": q, "keys": keys, "valid": valid, "value_width": width, "scale": 0.25}


def judged(arguments: dict, y: torch.Tensor, seed: int):
    return judge_compute(Replay(CONTRACTS["dsa.attention"], arguments), (y,), PROFILES["eager-bf16"], seed=seed)[0]


@pytest.mark.parametrize("seed", range(12))
def test_a_healthy_row_of_two_keys_raises_no_alarm(seed):
    """Catches a noise map fitted to replicates alone: where all of them round alike a healthy element was 40 times its
    noise (text/ragged_batch on tiny-glm-5.3 under eager-bf16)."""
    arguments = two_keys(seed)
    first, rest = arguments["q"], {k: v for k, v in arguments.items() if k != "q"}
    j = judged(arguments, TABLE["dsa.attention"](first, **rest), seed)
    assert j.passed, j


def test_a_wrong_row_of_two_keys_is_still_found():
    """Catches a least noise so large that such rows are judged no more: one head's second key is half as heavy."""
    arguments = two_keys(3)
    first, rest = arguments["q"], {k: v for k, v in arguments.items() if k != "q"}
    y = TABLE["dsa.attention"](first, **rest)
    lighter = arguments["keys"].clone()
    lighter[:, 1] *= 0.9
    y[7] = TABLE["dsa.attention"](first, **(rest | {"keys": lighter}))[7]
    j = judged(arguments, y, 3)
    assert (j.passed, j.row) == (False, 7)
