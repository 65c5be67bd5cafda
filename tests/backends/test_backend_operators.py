"""Guards the run of all operators on their hard inputs: complete, healthy for the reference, and not blind."""

from day0check.backends.operators import run_operators
from day0check.compare.local import Judge
from day0check.contracts import CONTRACTS
from day0check.contracts.profiles import PROFILES
from day0check.probe.recorder import Recorder
from day0check.probe.registry import Operators


def reference_table():
    return {name: contract.function() for name, contract in CONTRACTS.items() if contract.hard_inputs}


def judged(table, names=None, seed=0, profile="bf16"):
    measures = []
    recorder = Recorder([Judge(PROFILES[profile], measures.append)])
    run = run_operators(Operators(table), recorder, PROFILES[profile], names, seed=seed)
    return run, {m.tap: m for m in measures}


def test_the_reference_itself_passes_every_hard_input():
    """Catches false alarms on hard inputs, and inputs that never reach the judge."""
    for seed in (0, 1):
        run, measures = judged(reference_table(), seed=seed)
        assert run.missing == run.raised == ()
        assert len(measures) == run.calls == sum(len(c.hard_inputs) for c in CONTRACTS.values())
        failed = [m for m in measures.values() if not m.passed]
        assert not failed, failed


def test_every_operator_fails_when_its_results_are_slightly_wrong():
    """Catches an operator whose judgement cannot fail: results moved by 2% (by one, or by a code) must be seen."""

    def moved_result(r):
        if not r.is_floating_point():
            return r + 1
        return (r.double() * (1.02 if r.element_size() > 1 else 1.25)).to(r.dtype)

    def spoiled(function):
        def wrong(first, **kwargs):
            results = function(first, **kwargs)
            many = results if isinstance(results, tuple) else (results,)
            moved = tuple(moved_result(r) for r in many if r is not None)
            return moved if isinstance(results, tuple) else moved[0] if moved else None

        return wrong

    table = {name: spoiled(f) for name, f in reference_table().items() if CONTRACTS[name].results}
    for name in CONTRACTS:
        if CONTRACTS[name].mutates:
            table[name] = lambda first, **_: None
    _, measures = judged(table)
    blind = {m.operator for m in measures.values()} - {m.operator for m in measures.values() if not m.passed}
    assert not blind
    assert len({m.operator for m in measures.values()}) == len(table)


def test_missing_operators_and_those_that_raise_are_reported():
    """Catches an absent operator that nobody names, and one failure that ends the run."""

    def breaks(x, **_):
        raise RuntimeError("no kernel for this shape")

    table = {"norm.rms": breaks, "residual.add": CONTRACTS["residual.add"].function()}
    run, measures = judged(table, names=["norm.rms", "residual.add", "kda.gates"])
    assert run.missing == ("kda.gates",)
    assert [tap for tap, _ in run.raised] == [f"operators.norm.rms.{n}" for n in CONTRACTS["norm.rms"].hard_inputs]
    assert "no kernel" in run.raised[0][1]
    assert measures["operators.norm.rms.plain"].failing == "raised"
    assert measures["operators.residual.add.plain"].passed


def test_rows_have_the_request_of_their_input():
    def wrong(x, *, y):
        s = x + y
        s[4] += 1
        return s

    _, measures = judged({"residual.add": wrong}, names=["residual.add"])
    m = measures["operators.residual.add.plain"]
    assert (m.request, m.position, m.phase) == ("operators/residual.add#plain", 4, "prefill")
    assert isinstance(m.statistics["mismatched_bytes"], float)
