"""A sharded run is believed only where what its ranks share was looked at."""

import dataclasses

import pytest

from day0check.checks import judge_run
from day0check.checks.evidence import Evidence
from day0check.checks.ranks import judge_run as judge
from day0check.types import Measure, Request, RunCase, Turn


def seen(tap, operator, *, passed=True):
    fields = {"kind": "move", "phase": "prefill", "layer": 1, "order": 3, "rows": 4, "elements": 4}
    return Measure(tap, operator, passed=passed, message="" if passed else "other bytes", **fields)


ALL = (
    seen("layers.01.comm.all_gather.mlp", "comm.all_gather"),
    seen("layers.01.residual.add.mlp.ranks", "residual.add"),
    seen("layers.01.moe.experts", "moe.experts"),
    seen("layers.01.moe.dispatch.once", "moe.dispatch"),
)


def evidence(measures=ALL, *, ranks=2, status="finished", case="text/x"):
    run = {"status": status, "ranks": ranks}
    asked = RunCase(case, (Request(f"{case}/a#1", (Turn((1,)),), 1),))
    return Evidence(case=asked, config=None, profile="bf16", run=run, measures=measures)


def test_ranks_whose_exchanges_were_judged_pass():
    """Catches a check that nobody asks, and one that speaks of a run on one device."""
    assert judge([evidence()]).outcome.status == "passed"
    assert "3 of 3" in judge([evidence()]).outcome.summary
    assert judge([evidence(ranks=1)]) is None
    assert judge([evidence(case="operators/contracts")]) is None
    assert "ranks" in {a.outcome.name for a in judge_run([evidence()])}


@pytest.mark.parametrize(
    ("without", "words"),
    [("all_gather", "no exchange"), (".ranks", "no result that ranks share"), (".once", "pairs of row and expert")],
)
def test_what_nobody_looked_at_is_not_run(without, words):
    """Catches a sharded run that is green although its exchanges, its shared results or its pairs were never judged."""
    measures = tuple(m for m in ALL if without not in m.tap)
    answer = judge([evidence(measures)])
    assert (answer.outcome.status, words in answer.outcome.summary) == ("not_run", True)
    assert "text/x" in answer.outcome.summary


def test_what_is_wrong_and_what_did_not_finish():
    """Catches a wrong exchange that passes, and a case that ended early and counts as looked at."""
    wrong = (*ALL[:1], dataclasses.replace(ALL[1], passed=False, message="rank 1 differs"), *ALL[2:])
    assert judge([evidence(), evidence(wrong)]).outcome.status == "failed"
    assert judge([evidence(), evidence((), status="aborted", case="text/y")]).outcome.status == "not_run"
