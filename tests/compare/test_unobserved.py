"""Guards what is said of an observed and an unobserved run of one case."""

from __future__ import annotations

import pytest
import torch

from day0check.compare.unobserved import unobserved_figures, worst
from day0check.probe.final_logits import FinalLogits
from day0check.probe.recorder import Recorder
from day0check.probe.rows import RowMap
from day0check.probe.timing import TimingRecorder

TOKENS = {"a": (1, 2, 3, 4, 5)}


def run(recorder, logits: torch.Tensor, *, overwrite: bool = False) -> None:
    """Steps of two rows and of one row of request "a"; `overwrite`: the buffer of a step is used again by the next."""
    buffer = torch.empty(2, logits.shape[1], dtype=logits.dtype)
    for step, positions in enumerate(((0, 1), (2,))):
        rows = RowMap(("a",), (0,) * len(positions), positions)
        with recorder.step("prefill", rows, step):
            result = buffer[: len(positions)] if overwrite else torch.empty(len(positions), logits.shape[1])
            result.copy_(logits[list(positions)])
            recorder.call("", "head.logits", lambda x, result=result: result, (torch.zeros(1),), {})
            recorder.call("layers.02", "head.logits", lambda x: torch.zeros(1, 1), (torch.zeros(1),), {})
    recorder.end_case()


def both(before: torch.Tensor, after: torch.Tensor, sequences=TOKENS) -> dict[str, float]:
    observed, unobserved = FinalLogits(), FinalLogits()
    run(Recorder([observed]), before, overwrite=True)
    run(TimingRecorder(work=lambda: 0.0, final=unobserved), after, overwrite=True)
    return unobserved_figures(observed, unobserved, TOKENS, sequences)


def logits() -> torch.Tensor:
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(0))


def test_equal_logits_are_equal_in_every_row():
    """Catches rows that are not compared (a draft layer's in their place), and a copy that is made too late."""
    assert both(logits(), logits()) == {"rows": 3, "different": 0, "non_finite": 0, "relative_l2": 0}


@pytest.mark.parametrize("value", [1e-7, float("nan"), float("inf")])
def test_one_value_of_the_unobserved_run_is_found(value):
    """Catches a comparison by value that NaN passes, and one by a tolerance that a bit passes."""
    other = logits()
    other[1, 3] += value
    found = both(logits(), other)
    assert (found["rows"], found["different"]) == (3, 1)
    assert found["non_finite"] == (0 if value < 1 else 1)
    assert found["relative_l2"] < 1e-6


def test_rows_behind_another_token_are_not_compared():
    """Catches an alarm about logits that follow from other tokens."""
    other = logits()
    other[2] = 0
    assert both(logits(), other, {"a": (1, 2, 9, 4)})["rows"] == 2
    assert both(logits(), other, {"a": (9, 2, 3)}) == {}


def test_what_is_beyond_the_cap_is_not_kept_and_ranks_are_joined():
    """Catches memory that grows with the run, and a rank whose difference is lost among the others."""
    kept = FinalLogits(byte_cap=2 * 7 * 4)
    run(Recorder([kept]), logits())
    assert (set(kept.rows), kept.dropped) == ({("a", 0), ("a", 1)}, 1)
    assert worst([{"different": 1.0, "rows": 3.0}, {"different": 2.0, "rows": 3.0}]) == {"different": 2.0, "rows": 3.0}
    assert worst([{"different": 1.0}, {}]) == worst([]) == {}
