"""Guards byte comparison, the legality of the MXFP4 conversion, and what a write must leave behind."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.compare.exact import Decoded, compare_bytes, judge_conversion, judge_exact, judge_write
from day0check.compare.judgement import COUNTS, Judgement, merge
from day0check.compare.replay import Replay
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import generate

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.float8_e4m3fn]


def hard(operator, name, seed=0):
    contract = CONTRACTS[operator]
    h = generate(contract, name, seed, torch.bfloat16)
    return Replay(contract, {contract.args[0].name: h.args[0], **h.kwargs})


@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 5),
    width=st.integers(1, 4),
    data=st.data(),
    bit=st.integers(0, 7),
)
@settings(max_examples=60, deadline=None)
def test_any_flipped_bit_is_found_in_its_row(dtype, rows, width, data, bit):
    """Catches a comparison by value, which misses NaN payloads and signs of zero."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.tensor(
        data.draw(st.lists(st.integers(0, 255), min_size=rows * width * size, max_size=rows * width * size))
    )
    expected = raw.to(torch.uint8).reshape(rows, -1)
    found = expected.clone()
    row, byte = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, width * size - 1))
    assert compare_bytes(found.view(dtype), expected.view(dtype)).passed
    found[row, byte] ^= 1 << bit
    j = compare_bytes(found.view(dtype), expected.view(dtype))
    assert (j.failing, j.row, j.statistics["mismatched_bytes"]) == ("mismatched_bytes", row, 1.0)


def test_shape_and_dtype_count():
    x = torch.zeros(3, 2)
    assert compare_bytes(x, x.bfloat16()).failing == "dtype"
    assert compare_bytes(x, x[:2]).failing == "shape"
    assert compare_bytes(x[:0], x[:0]).passed


@pytest.mark.parametrize("name", CONTRACTS["residual.add"].hard_inputs)
def test_an_addition_is_rounded_once(name):
    """Catches a sum that is truncated, or rounded to something else than nearest."""
    replay = hard("residual.add", name)
    x, y = replay.arguments["x"], replay.arguments["y"]
    assert judge_exact(replay, (x + y,))[0].passed
    exact = x.float() + y.float()
    truncated = (exact.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()
    if not torch.equal(truncated, x + y):
        assert not judge_exact(replay, (truncated,))[0].passed


@pytest.mark.parametrize("operator", ["kv.write", "state.store", "residual.store"])
def test_a_stale_slot_is_found(operator):
    """Catches a write that never happened, and one that lacks a single row."""
    replay = hard(operator, CONTRACTS[operator].hard_inputs[0])
    assert not judge_write(replay)[0].passed  # nothing was written yet
    replay.run()
    assert judge_write(replay)[0].passed
    pool = replay.arguments[CONTRACTS[operator].mutates[0]]
    if operator == "kv.write":
        slot = int(replay.arguments["slots"][5])
        pool[slot // pool.shape[1], slot % pool.shape[1]] = 7
        (j,) = judge_write(replay)
        assert (j.row, j.pattern) == (5, "not written")


def test_rows_of_a_write_count_those_that_write_nothing():
    """Catches an address that counts only written rows."""
    replay = hard("kv.write", "padding_slot")
    replay.run()
    slot = int(replay.arguments["slots"][7])
    replay.arguments["pool"][slot // 16, slot % 16] = 7
    assert judge_write(replay)[0].row == 7


# --------------------------------------------------------------------------------------------------------- conversion


def convert(replay):
    return [r.clone() for r in replay.run()]


def judged(replay, results) -> Judgement:
    (j,) = judge_conversion(replay, tuple(results), Decoded())
    return j


@pytest.mark.parametrize("name", CONTRACTS["moe.convert"].hard_inputs)
def test_the_conversion_passes_and_another_layout_of_scales_does_too(name):
    """Catches a demand for one particular scale."""
    replay = hard("moe.convert", name)
    payload, scale, inexact = convert(replay)
    assert judged(replay, (payload, scale, inexact)).passed
    assert (int(inexact) > 0) == (name == "spread_15")
    halved = payload.float() / 2
    if torch.equal(halved.to(torch.float8_e4m3fn).float(), halved):
        assert judged(replay, (halved.to(torch.float8_e4m3fn), scale * 2, inexact)).passed


def test_faults_of_the_conversion_are_named():
    """Catches swapped nibbles, a wrong scale, an uncounted loss, an overcount and a needless loss."""
    replay = hard("moe.convert", "every_code")
    payload, scale, inexact = convert(replay)
    swapped = payload.view(torch.uint8).unflatten(-1, (-1, 2)).flip(-1).flatten(-2).view(torch.float8_e4m3fn)
    assert judged(replay, (swapped, scale, inexact)).pattern == "nibbles swapped"
    assert judged(replay, (payload, scale * 2, inexact)).pattern == "wrong value"
    assert judged(replay, (payload, scale, inexact + 1)).pattern == "miscounted"
    replay = hard("moe.convert", "spread_15")
    payload, scale, inexact = convert(replay)
    assert judged(replay, (payload, scale, inexact * 0)).pattern == "miscounted"
    replay = hard("moe.convert", "spread_14")
    payload, scale, _ = convert(replay)
    coarse = (payload.float() / 4).to(torch.float8_e4m3fn)
    lost = (coarse.float() * 4 != payload.float()).sum()
    assert lost > 0
    assert judged(replay, (coarse, scale * 4, lost.reshape(1))).pattern == "needless loss"


def test_decoded_weights_follow_a_change_of_the_bytes():
    """Catches a stale decoding kept by address alone."""
    replay = hard("moe.convert", "every_code")
    decoded = Decoded()
    packed, scale, experts = (replay.arguments[n] for n in ("packed", "scale", "experts"))
    before = decoded.experts(packed, scale, experts)
    packed.bitwise_xor_(0x88)
    assert torch.equal(decoded.experts(packed, scale, experts), -before)


# ------------------------------------------------------------------------------------------------------------ merging


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.5, 2)), min_size=2, max_size=6))
@settings(max_examples=50, deadline=None)
def test_merged_judgements_fail_when_one_fails_and_keep_the_worst(pairs):
    """Catches a merge that lets a later healthy judgement cover an earlier failure."""
    parts = [
        Judgement(1, 2, {"z": v}, {"z": limit}, "z" if v > limit else "", i, message=str(i))
        for i, (v, limit) in enumerate(pairs)
    ]
    whole = parts[0]
    for part in parts[1:]:
        whole = merge(whole, part)
    assert whole.passed == all(p.passed for p in parts)
    assert whole.statistics["z"] / whole.limits["z"] == max(v / limit for v, limit in pairs)
    assert (whole.rows, whole.elements) == (len(parts), 2 * len(parts))
    if not whole.passed:
        assert whole.message == next(p.message for p in parts if not p.passed)


def test_counts_add_up_and_the_smallest_power_stays():
    first = Judgement(1, 1, {"illegal": 2.0}, {"illegal": 0.0}, "illegal", power=0.1)
    whole = merge(first, Judgement(1, 1, {"illegal": 3.0}, {"illegal": 0.0}, "illegal", power=0.01))
    assert whole.statistics["illegal"] == 5
    assert whole.power == 0.01
    assert "illegal" in COUNTS


def test_a_sum_with_a_float32_argument_may_be_met_in_float32():
    """Catches a false alarm on a fused projection and addition, whose float32 sum is rounded a second time; a result
    that neither way gives is still found, and so is the second rounding where both arguments are bfloat16."""
    x = torch.full((3, 8), 1.0, dtype=torch.bfloat16)
    tie = torch.full((3, 8), 2.0**-8 + 2.0**-30)  # above a tie of bfloat16; float32 gives the tie, and that goes down
    replay = Replay(CONTRACTS["residual.add"], {"x": x, "y": tie})
    once, twice = torch.full_like(x, 1 + 2.0**-7), torch.full_like(x, 1.0)
    assert torch.equal((x.float() + tie).bfloat16(), twice)
    for legal in (once, twice):
        assert judge_exact(replay, (legal,))[0].passed
    mixed = torch.where(torch.arange(8) % 2 == 0, once, twice)
    assert judge_exact(replay, (mixed,))[0].passed
    mixed[1, 3] = 1 + 2.0**-6
    (wrong,) = judge_exact(replay, (mixed,))
    assert (wrong.passed, wrong.row) == (False, 1)
    plain = Replay(CONTRACTS["residual.add"], {"x": x, "y": torch.full_like(x, 0.5)})
    assert not judge_exact(plain, (torch.full_like(x, 1.5) + 2.0**-7,))[0].passed
