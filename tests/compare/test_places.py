"""Guards the words that say where wrong rows lie, and their silence where there is nothing to say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.compare.judgement import Judgement
from day0check.compare.local import Judge
from day0check.compare.places import Places, begins_of, growth
from day0check.compare.pooling import Seen
from day0check.contracts import CONTRACTS
from day0check.contracts.profiles import profile_named
from day0check.probe.recorder import Recorder
from day0check.probe.rows import RowMap
from reference.norm import rms_norm

PAGE = 16


def words(calls, *, page=PAGE, sizes=None) -> str:
    """`calls`: (positions of a call, those of them that are wrong)."""
    places = Places()
    for positions, wrong in calls:
        positions = list(positions)
        rows = RowMap(("a",), (0,) * len(positions), tuple(positions))
        bad = tuple(row for row, position in enumerate(positions) if position in set(wrong))
        own = tuple(sizes[positions[row]] for row in bad) if sizes else ()
        failing = {"failing": "element", "bad": bad, "sizes": own} if bad else {}
        seen = Seen(CONTRACTS["norm.rms"], {}, (), rows, 0, 0)
        places.see([seen], [Judgement(len(positions), 1, **failing)], begins_of)
    return places.in_words(page)


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([(range(64), range(32, 64))], "every row from position 32 on, where page 2 of the request begins"),
        ([(range(64), range(50, 64))], "every row from position 50 on"),
        ([(range(64), range(16))], "the rows of page 0 of the request alone (positions 0 to 15)"),
        ([(range(64), range(20))], "every row up to position 19"),
        ([(range(64), range(16, 32))], "the rows of page 1 of the request alone (positions 16 to 31)"),
        ([(range(64), [15, 31, 47, 63])], "the last row of pages alone"),
        ([(range(64), [16, 48])], "the first row of pages alone"),
        ([(range(20), []), (range(20, 40), [20]), (range(40, 50), [40])], "the first row of each chunk"),
        ([(range(20), []), (range(20, 40), range(20, 40))], "every row of the chunks from position 20 on"),
        ([([9], [9]), ([10], []), ([11], []), ([12], [])], "in its first call only, of 4"),
        ([(range(64), range(64))], ""),
        ([(range(64), [7])], ""),
        ([(range(64), [3, 17, 40])], ""),
        ([([9], []), ([10], [10]), ([11], []), ([12], [])], ""),
    ],
)
def test_where_wrong_rows_lie_is_told(calls, told):
    """Catches words that are wrong, missing, or said of rows that have nothing in common."""
    assert words(calls) == told


def test_growth_with_the_position_is_told_and_noise_is_not():
    """Catches growth that is read out of a few rows or out of errors that go up and down."""
    growing = {p: 1.1**p for p in range(60)}
    assert growth(growing).startswith("growing with the position: ")
    assert growth({p: float(1 + p % 7) for p in range(60)}) == ""
    assert growth({p: 1.1**p for p in range(6)}) == ""
    assert "growing with the position" in words([(range(64), range(30))], sizes={p: 1.2**p for p in range(64)})


def test_a_failure_that_names_no_rows_says_nothing():
    """Catches "its first call only" where the rows of the other failures are not known."""
    places, rows = Places(), RowMap(("a",), (0,), (3,))
    for bad in ((0,), ()):
        judgement = Judgement(1, 1, failing="whole", bad=bad)
        places.see([Seen(CONTRACTS["norm.rms"], {}, (), rows, 0, 0)], [judgement], begins_of)
    for _ in range(3):
        places.see([Seen(CONTRACTS["norm.rms"], {}, (), rows, 0, 0)], [Judgement(1, 1)], begins_of)
    assert places.in_words(PAGE) == ""


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, 63), min_size=1), st.integers(1, 40), st.sampled_from([None, 1, 16]))
def test_words_are_true_of_any_rows(wrong, chunk, page):
    """Catches a statement about rows that the wrong ones do not bear out."""
    calls = [(range(a, min(a + chunk, 64)), wrong) for a in range(0, 64, chunk)]
    text = words(calls, page=page)
    if text.startswith("every row from position "):
        first = int(text.split()[4].rstrip(","))
        assert min(wrong) == first
        assert max(wrong) in {max(p for p in positions) for positions, _ in calls}
    if "page" in text:
        assert page
    if text == "the first row of each chunk":
        assert {p for p in wrong if p} == set(range(chunk, 64, chunk))


@pytest.mark.parametrize(("rows", "told"), [(range(16, 48), "where page 1 of the request begins"), ([5], None)])
def test_the_judge_adds_them_to_its_message(rows, told):
    """Catches words that never reach the finding, and a pattern (part of a finding's id) that changed with them."""
    found = []
    recorder = Recorder([Judge(profile_named("bf16"), found.append)])
    row_map = RowMap(("a",), (0,) * 48, tuple(range(48)))
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def norm(x, **kwargs):
        y = rms_norm(x.float(), **kwargs).bfloat16()
        y[list(rows)] *= 1.5
        return y

    with recorder.step("prefill", row_map, 0):
        slots = {"owner": torch.zeros(1, dtype=torch.int64), "positions": torch.zeros(1, dtype=torch.int64), "page": 16}
        one = RowMap(("a",), (0,), (0,))
        table = torch.zeros(1, 1, dtype=torch.int64)
        recorder.call("", "kv.slots", lambda table, **_: torch.zeros(1, dtype=torch.int64), (table,), slots, "", one)
        weight = torch.ones(64, dtype=torch.bfloat16)
        recorder.call("layers.00", "norm.rms", norm, (x,), {"weight": weight, "eps": 1e-5}, "input", row_map)
    recorder.end_case()
    (wrong,) = [m for m in found if not m.passed][-1:]
    assert wrong.operator == "norm.rms"
    assert not any(character.isdigit() for character in wrong.pattern)
    assert wrong.message.endswith(told) if told else "position" not in wrong.message
