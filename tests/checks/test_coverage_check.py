"""Hard inputs that did not occur are a check that was not run."""

from dataclasses import replace

from day0check.checks import coverage
from day0check.checks.evidence import Evidence
from day0check.contracts import CONTRACTS
from day0check.types import Measure, RunCase
from reference.presets import preset

OPERATORS, TEXT = RunCase("operators/contracts", ()), RunCase("text/x", ())


def measure(tap: str, operator: str, **changes) -> Measure:
    return Measure(tap, operator, CONTRACTS[operator].kind, "prefill", None, 1, 4, 8, not changes, **changes)


def tried(operator: str, *, but: str = "", unjudged: str = "") -> list[Measure]:
    taps = [name for name in CONTRACTS[operator].hard_inputs if name != but]
    reason = {"not_judged": "the replay raised"}
    return [measure(f"operators.{operator}.{n}", operator, **(reason if n == unjudged else {})) for n in taps]


def evidence(case: RunCase, measures, **run) -> Evidence:
    return Evidence(case, None, "bf16", {"status": "finished", **run}, tuple(measures))


def test_every_class_that_occurred_is_counted():
    both = [*tried("norm.rms"), *tried("dsa.select")]
    outcome = coverage.judge_run([evidence(OPERATORS, both)]).outcome
    count = sum(len(CONTRACTS[o].hard_inputs) for o in ("norm.rms", "dsa.select"))
    assert (outcome.status, f"{count} of {count} classes" in outcome.summary) == ("passed", True)
    assert coverage.left_out([evidence(OPERATORS, both)]) == ()


def test_a_class_that_did_not_occur_or_was_not_judged_is_not_run_and_named():
    """Catches an eps that was never tried on a row of small norm, and a replay that raised on it."""
    for gap in ({"but": "small_norm_row"}, {"unjudged": "small_norm_row"}):
        outcome = coverage.judge_run([evidence(OPERATORS, tried("norm.rms", **gap))]).outcome
        assert (outcome.status, "norm.rms on small_norm_row" in outcome.summary) == ("not_run", True)


def test_an_operator_that_only_a_model_called_is_missed_among_the_hard_inputs():
    """Catches an operator of the model that the case of operators does not have."""
    runs = [evidence(OPERATORS, tried("norm.rms")), evidence(TEXT, [measure("layers.00.mlp.dense", "mlp.dense")])]
    outcome = coverage.judge_run(runs).outcome
    assert (outcome.status, "mlp.dense on plain" in outcome.summary) == ("not_run", True)


def test_a_run_without_the_case_of_operators_says_so_and_no_check_answers():
    """Catches silence about inputs that nobody tried, and a check that passes without having looked."""
    runs = [evidence(TEXT, [measure("layers.00.norm.rms.input", "norm.rms")])]
    assert coverage.judge_run(runs) is None
    (note,) = coverage.left_out(runs)
    assert (note.severity, note.check) == ("note", "coverage")
    assert coverage.left_out([]) == ()


def test_a_draft_layer_that_nobody_ran_is_said():
    """Catches a model whose draft layer is passed over in silence, and a note where it was judged or is not there."""
    config = preset("tiny-glm-5").config()
    run = replace(evidence(TEXT, [replace(measure("layers.04.norm.rms.input", "norm.rms"), layer=4)]), config=config)
    drafted = replace(run, measures=(replace(measure("layers.05.draft.project", "draft.project"), layer=5),))
    with_inputs = [evidence(OPERATORS, tried("norm.rms"))]
    (note,) = coverage.left_out([run, *with_inputs])
    assert (note.severity, "layer 5 drafts" in note.message) == ("note", True)
    assert coverage.left_out([run, drafted, *with_inputs]) == ()
    assert coverage.left_out([replace(run, config=replace(config, draft=None)), *with_inputs]) == ()
