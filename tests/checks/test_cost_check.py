"""The cost check on evidence: what it answers when there is none, and what it accuses."""

import pytest

from day0check.checks import cost
from day0check.checks.evidence import Evidence
from day0check.compare.cost import CostLine, Costs
from day0check.types import Measure, Request, RunCase, Turn

CASE = RunCase("cost/sweep", (Request("cost/sweep/a#0", (Turn((1, 2, 3)),), 4),), checks=("cost",))


def lines(kept: float = 0.0) -> tuple[CostLine, ...]:
    head = ("layers.03.dsa.score", "dsa.score", 3, "prefill", "length")
    return tuple(CostLine(*head, n, 5, 1, 0.0, 1e6 * n, 0.0, 3e6 * n, 0.0, kept * n, 1e-3) for n in (32, 64, 128, 256))


def evidence(costs: Costs | None, measures: tuple[Measure, ...] = (), status: str = "finished") -> Evidence:
    return Evidence(CASE, None, "bf16", {"status": status}, measures=measures, costs=costs)


def written(operator: str, rows: int) -> Measure:
    return Measure(f"layers.03.{operator}", operator, "move", "decode", 3, 9, rows, rows, True)


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (None, "was not made"),
        (Costs(missing="when its sweep was run: ValueError: too long"), "too long"),
        (Costs((), 1e10), "no operator"),
    ],
)
def test_without_a_sweep_the_check_did_not_run(costs, words):
    """Catches a check that passes although nothing was measured."""
    answer = cost.judge(evidence(costs))
    assert answer.outcome.status == "not_run"
    assert words in answer.outcome.summary


def test_a_healthy_sweep_passes():
    """Catches an alarm without a cause."""
    assert cost.judge(evidence(Costs(lines(), 1e10))).outcome.status == "passed"


def test_memory_that_stays_is_a_finding_with_its_place():
    """Catches a measure that fails and accuses nobody."""
    answer = cost.judge(evidence(Costs(lines(kept=1e6), 1e10)))
    assert answer.outcome.status == "failed"
    (finding,) = answer.findings
    assert (finding.operator, finding.layer, finding.phase) == ("dsa.score", 3, "prefill")


def test_graphs_compiled_after_warm_up_are_a_finding():
    """Catches recompilations that nobody hears of."""
    answer = cost.judge(evidence(Costs(lines(), 1e10, recompiled=(("length", 181, 3),))))
    assert answer.outcome.status == "failed"
    assert answer.findings[0].stack_layer == "compiler"
    assert "length 181" in answer.findings[0].message


def test_an_index_that_is_written_anew_in_decode_is_a_finding():
    """Catches a decode step that writes the keys of the whole context: each of them is right, and most are needless."""
    good = (written("index.write", 12), written("dsa.select", 12))
    assert cost.judge(evidence(Costs(lines(), 1e10), good)).outcome.status == "passed"
    bad = (written("index.write", 900), written("dsa.select", 12))
    answer = cost.judge(evidence(Costs(lines(), 1e10), bad))
    assert answer.outcome.status == "failed"
    assert answer.findings[0].operator == "index.write"
