"""What the matched filter says of a black box reaches the verdict: a finding with its figures, or what stays hidden."""

from dataclasses import replace

from day0check.checks import logits
from day0check.checks.endpoint import oracle
from day0check.checks.evidence import Evidence
from day0check.compare.wire import Followed
from day0check.load.observed import Observed
from day0check.types import Measure, RunCase

ROW = Followed("follow/0", 24, {"given_up": 0.0}, {"given_up": 1.0}, 0)
TOLD = Measure(
    tap="layers.02.mla.attention",
    operator="mla.attention",
    kind="compute",
    phase="prefill",
    layer=2,
    order=0,
    rows=0,
    elements=144,
    passed=False,
    statistics={"matched": 9.0, "amplitude": 0.1, "amplitude_low": 0.08, "amplitude_high": 0.12, "prompts": 6.0},
    limits={"matched": 6.0},
    failing="matched",
    pattern="wrong softmax scale",
    message="the error looks like softmax scale of mla.attention 10% too large",
)


def test_what_answers_show_together_fails_where_each_passes():
    """Catches a parameter that was found and stays in what was measured, or loses its layer and figures on the way."""
    seen = Observed("m", "completions", ("wire",), reference=(ROW,))
    assert oracle.judge(seen).outcome.status == "passed"
    assert oracle.judge(replace(seen, matched=replace(TOLD, passed=True))).outcome.status == "passed"
    answer = oracle.judge(replace(seen, matched=TOLD))
    assert answer.outcome.status == "failed"
    (finding,) = answer.findings
    assert (finding.operator, finding.layer, finding.phase) == ("mla.attention", 2, "serve")
    assert (finding.value, finding.limit) == (9.0, 6.0)
    assert finding.evidence["statistics"]["amplitude_low"] == 0.08
    assert "10% too large" in finding.message


def test_what_logits_do_not_show_is_said_where_they_pass():
    """Catches a black box that is called right without a word on what its prompts could not have shown."""
    told = replace(
        TOLD, tap="head.logits.matched", operator="head.logits", passed=True, message="no parameter explains it"
    )
    evidence = Evidence(RunCase("text/x", ()), None, "bf16", {"status": "finished"}, net=(told,))
    assert logits.judge(evidence).outcome.summary.endswith("no parameter explains it")
    assert "explains" not in logits.judge(replace(evidence, net=(replace(told, tap="head.logits"),))).outcome.summary
