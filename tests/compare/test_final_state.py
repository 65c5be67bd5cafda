"""The capture's own check: a shown state that does not give the logits, and what is said of it."""

import pytest
import torch

from day0check import gate
from day0check.accelerated.engine import Engine
from day0check.accelerated.ops import TABLE
from day0check.accelerated.scheduler import Scheduler
from day0check.checks.capture import judge
from day0check.checks.evidence import Evidence
from day0check.compare.final_state import LIMIT, compare_final_state, last_tap
from day0check.probe.recorder import Caller, Observer, Recorder
from day0check.probe.registry import Operators
from day0check.snapshot import Rows
from day0check.types import Measure, Request, RunCase, Schedule, Turn
from reference.config import Kda, Mla, ModelConfig, Residual
from reference.presets import recipe_for, values
from reference.tensors import expected_tensors

RESIDUALS = {
    "plain": Residual(),
    "attention": Residual("attention", 2),
    "mhc": Residual("mhc", streams=3, sinkhorn=4),
}
MLA, KDA = Mla(heads=2, kv_lora=32, nope=8, rope=8, v=8), Kda(heads=2, dim=16, rank=8, chunk=32)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CASE = RunCase("c", (Request("c/a#1", (Turn(tuple(range(3, 40))),), max_new_tokens=6),))


class Seeded:
    """A checkpoint that exists only as recipes."""

    directory = "seeded"

    def __init__(self, config):
        self.config, self._stored = config, expected_tensors(config)

    def __contains__(self, name):
        return name in self._stored

    def tensor(self, name):
        stored = self._stored[name]
        return values(name, stored, recipe_for(name, stored)).view(stored.shape)


class Shown(Observer):
    """Stands for a snapshot: the rows of two taps, as a capture would read them back."""

    def __init__(self, taps):
        self.rows = {tap: {} for tap in taps}

    def after(self, call, token, results):
        if call.tap in self.rows:
            for i, row in enumerate(results[0].clone()):
                self.rows[call.tap][call.rows.address(i)] = (call.phase, call.order, row)

    def recorded(self, tap, request):
        mine = sorted((p, *rest) for (r, p), rest in self.rows[tap].items() if r == request)
        if not mine:
            return Rows((), (), (), torch.empty(0))
        positions, phases, orders, values = zip(*mine, strict=True)
        return Rows(positions, phases, orders, torch.stack(values))


def shown(residual, profile):
    kinds = ("mla", "kda", "mla")
    config = ModelConfig("small", 64, kinds, 128, 4096, 96, mla=MLA, kda=KDA, residual=RESIDUALS[residual])
    checkpoint = Seeded(config)
    engine = Engine(checkpoint, dtype=DTYPES[profile], device=torch.device("cpu"))
    seen = Shown((last_tap(config), "head.logits"))
    Scheduler(engine, CASE.requests, Schedule(chunk=20), Caller(Operators(TABLE), Recorder([seen]))).run()
    return checkpoint, seen


@pytest.mark.parametrize("profile", DTYPES)
@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_state_that_was_used_gives_the_logits_and_another_does_not(residual, profile):
    """Catches a false alarm of the capture's check, a final tap of the wrong name, and a check that believes anything:
    a state as it was a layer earlier, one row of another position."""
    checkpoint, seen = shown(residual, profile)
    healthy = compare_final_state(checkpoint, profile, CASE, seen)
    assert [(m.phase, m.rows, m.passed) for m in healthy] == [("prefill", 1, True), ("decode", 5, True)]
    assert max(m.statistics["row"] for m in healthy) < LIMIT / 3
    rows = seen.rows[last_tap(checkpoint.config)]
    phase, order, row = rows["c/a#1", 38]
    rows["c/a#1", 38] = (phase, order, rows["c/a#1", 39][2])
    prefill, decode = compare_final_state(checkpoint, profile, CASE, seen)
    assert prefill.passed
    assert (decode.passed, decode.request, decode.position) == (False, "c/a#1", 38)
    rows["c/a#1", 38] = (phase, order, row)
    rows["c/a#1", 36] = ("prefill", 1, 1.1 * rows["c/a#1", 36][2] + row * 0.1)
    assert not compare_final_state(checkpoint, profile, CASE, seen)[0].passed


def test_nothing_shown_is_nothing_judged():
    """Catches a judgement made of no rows."""
    checkpoint, seen = shown("plain", "fp32")
    seen.rows["head.logits"].clear()
    assert compare_final_state(checkpoint, "fp32", CASE, seen) == []


def measure(tap, passed, order=5):
    operator = {"norm.rms.final": "norm.rms"}.get(tap, tap)
    failing = "" if passed else "row"
    return Measure(
        tap, operator, "compute", "prefill", None, order, 1, 8, passed, {"row": 50.0}, {"row": LIMIT}, failing
    )


RIGHT = (measure("head.logits", True),)


def answered(capture, *, local=(), net=RIGHT):
    case = RunCase("c", ())
    measures = (measure("norm.rms.final", True), *local)
    return judge(
        Evidence(case, None, "bf16", {"status": "finished"}, measures=measures, net=net, capture=tuple(capture))
    )


def test_the_capture_is_accused_only_where_nothing_else_explains_it():
    """Catches a recorder's fault that is laid on a layer, and a candidate's fault that is excused as the recorder's."""
    wrong = measure("capture.tap", False)
    found = answered([wrong])
    assert (found.outcome.status, found.findings[0].operator) == ("failed", "capture.tap")
    verdict = gate.decide([found.outcome], found.findings, gate.Scene({}, "bf16", ("c",)))
    assert (verdict.status, verdict.first_fault.operator) == ("error", "capture.tap")
    for others in (
        {"local": (measure("norm.rms.final", False),)},
        {"local": (measure("head.logits", False),)},
        {"net": (measure("head.logits", False),)},
    ):
        told = answered([wrong], **others)
        assert (told.outcome.status, told.findings) == ("not_run", ())
    assert answered([measure("capture.tap", True)]).outcome.status == "passed"
    assert answered([]).outcome.status == "passed"
    assert answered([wrong], net=None).outcome.status == "not_run"
