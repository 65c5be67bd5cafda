"""Guards the operators table: a weakly judged operator is listed as such, and what a judgement advises is told."""

from day0check.types import Measure
from day0check.verdict_rows import operator_rows


def measure(operator, power, *, passed=True, message=""):
    return Measure(
        tap=f"layers.00.{operator}",
        operator=operator,
        kind="compute",
        phase="prefill",
        layer=0,
        order=1,
        rows=4,
        elements=64,
        passed=passed,
        statistics={"whole": 0.4},
        limits={"whole": 1.1},
        message=message,
        power=power,
    )


def test_an_operator_that_is_blind_to_one_percent_is_listed_as_weakly_judged():
    """Catches a table in which a judgement that sees nothing looks like any other."""
    strong, weak = measure("norm.rms", 0.0004), measure("kda.output", 0.031)
    rows = {r["operator"]: r for r in operator_rows({"a": [strong, weak], "b": [measure("kda.output", 0.002)]})}
    assert (rows["norm.rms"]["weak"], rows["norm.rms"]["note"]) == (False, "")
    assert rows["kda.output"]["weak"]
    assert rows["kda.output"]["note"] == "weakly judged: blind below 3.1%"


def test_advice_of_a_passing_measure_is_told_and_a_failure_has_its_finding_elsewhere():
    """Catches advice to claim a tighter form that nobody sees, and a failure told twice."""
    advice = measure("mla.attention", 0.001, message="claim it")
    wrong = measure("mlp.dense", 0.001, passed=False, message="the error is large")
    rows = {r["operator"]: r["note"] for r in operator_rows({"a": [advice, wrong]})}
    assert rows == {"mla.attention": "claim it", "mlp.dense": ""}
