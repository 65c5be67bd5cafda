"""Errors of one scale block are told as such, with the block; factors and single columns are not."""

import pytest
import torch

from day0check.compare.compute import judge_compute
from day0check.compare.exact import Decoded, judge_conversion
from day0check.compare.replay import Replay
from day0check.compare.scale_blocks import PATTERN, off_by_blocks
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import Draw
from day0check.contracts.profiles import PROFILES


def judged(change, *, rows=24, width=512, seed=3):
    """The judgement of a projection that was made with a changed weight."""
    d = Draw(seed, torch.bfloat16)
    x, weight = d.act(rows, width), d.act(384, width) / width**0.5
    wrong = weight.float().clone()
    change(wrong)
    y = (x.float() @ wrong.T).bfloat16()
    (j,) = judge_compute(Replay(CONTRACTS["mla.query"], {"x": x, "weight": weight}), (y,), PROFILES["bf16"], seed=1)
    return j


def scaled(rows, columns, factor):
    def change(weight):
        weight[rows, columns] *= factor

    return change


@pytest.mark.parametrize(
    ("rows", "columns", "words"),
    [
        (slice(7, 8), slice(64, 96), "row 7 x columns 64 to 95"),
        (slice(7, 8), slice(128, 256), "row 7 x columns 128 to 255"),
        (slice(128, 256), slice(256, 384), "rows 128 to 255 x columns 256 to 383"),
        (slice(None), slice(480, 512), "rows 0 to 383 x columns 480 to 511"),
    ],
)
@pytest.mark.parametrize("factor", [2.0, 0.5, 1.05])
def test_the_block_is_named(rows, columns, words, factor):
    """Catches a wrong scale that is told as noise in some columns, and a block that is told at another place."""
    j = judged(scaled(rows, columns, factor))
    assert j.pattern == PATTERN
    assert words in j.message
    assert float(j.message.rpartition("its part is ")[2].partition(" ")[0]) == pytest.approx(factor, rel=0.01)


@pytest.mark.parametrize(
    "change",
    [
        scaled(slice(None), slice(None), 1.02),
        scaled(slice(9, 10), slice(None), 1.05),
        scaled(slice(9, 10), slice(40, 41), 2.0),
        lambda weight: weight.copy_(weight.roll(1, 0)),
        lambda weight: weight[3].copy_(weight[4]),
    ],
)
def test_other_faults_are_no_scale_blocks(change):
    """Catches a word that is said of any error: a factor, one column, one weight, exchanged rows."""
    j = judged(change)
    assert j.failing
    assert j.pattern != PATTERN


def test_scale_blocks_of_a_conversion_are_counted():
    """Catches a wrong scale of MXFP4 blocks that is told as a wrong value, and a factor on all of them as blocks."""
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (3, 8, 64), dtype=torch.uint8, generator=generator)
    scale = torch.randint(120, 130, (3, 8, 4), dtype=torch.uint8, generator=generator)
    replay = Replay(CONTRACTS["moe.convert"], {"packed": packed, "scale": scale, "experts": torch.tensor([0, 2])})
    other = scale.clone()
    other[2, 5, 1] += 2
    (j,) = judge_conversion(replay, replay.changed(scale=other).run(), Decoded())
    assert j.pattern == PATTERN
    assert "1 of 64 scale blocks" in j.message
    assert "by up to 4" in j.message
    assert "expert 2" in j.message
    (whole,) = judge_conversion(replay, replay.changed(scale=scale + 1).run(), Decoded())
    assert whole.pattern == "wrong value"


def test_blocks_need_one_factor_each():
    """Catches blocks whose values are simply wrong."""
    expected = torch.arange(1.0, 129).reshape(2, 64).double()
    one = expected.clone()
    one[1, 32:] *= 3
    assert off_by_blocks(one, expected, 32) == (1, 3.0)
    one[1, 40] += 1
    assert off_by_blocks(one, expected, 32) is None
    assert off_by_blocks(expected, expected, 32) is None
