"""A tighter form that fitted when a baseline was recorded is pinned."""

from dataclasses import replace
from pathlib import Path

import pytest
from baseline_runs import Knobs, scene, write_run

from day0check.baseline import Baseline, collect
from day0check.baseline_compare import FORMS, compare_run


@pytest.fixture
def entry(tmp_path: Path):
    return collect(write_run(tmp_path / "run", Knobs()), scene(Knobs(), ("text/a",)))["text/a"]


def answers(then, now):
    comparison = compare_run(Baseline("a", (then,)), {"text/a": now})
    return [o for o in comparison.outcomes if o.name == FORMS], [f for f in comparison.findings if f.check == FORMS]


def test_a_form_that_no_longer_fits_fails_and_names_the_operator(entry):
    """Catches a loss of precision that stays inside the claimed roundings."""
    then = replace(entry, fits={"norm.rms": {"fused": 6}})
    ((answer,), (finding,)) = answers(then, replace(entry, fits={"norm.rms": {"fused": 0}}))
    assert (answer.status, finding.operator, finding.severity) == ("failed", "norm.rms", "blocker")
    assert "form 'fused'" in finding.message
    ((answer,), findings) = answers(then, replace(entry, fits={"norm.rms": {"fused": 6}}))
    assert (answer.status, findings) == ("passed", [])


def test_a_pinned_form_that_was_not_tried_is_not_run(entry):
    """Catches a pin that passes because nobody looked."""
    ((answer,), findings) = answers(replace(entry, fits={"norm.rms": {"fused": 6}}), entry)
    assert (answer.status, findings) == ("not_run", [])


def test_forms_of_few_taps_are_not_pinned(entry):
    assert answers(replace(entry, fits={"norm.rms": {"fused": 2, "x": 0}}), entry) == ([], [])
