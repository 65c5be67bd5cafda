"""A decode step of one row, a function a sublayer: the operators' numbers, and only where it may stand for them."""

import dataclasses

import pytest
import torch

from day0check.accelerated import one_row
from day0check.accelerated.engine import Engine
from day0check.accelerated.one_row_step import OneRowStep, why_not
from day0check.accelerated.ops import TABLE
from day0check.accelerated.ops.experts import convert, decode, route
from day0check.backends.accelerated import Accelerated
from day0check.probe.recorder import Observer, Recorder
from day0check.probe.timing import TimingRecorder
from day0check.types import Request, Schedule, Turn
from reference.presets import preset_dir
from reference.weights import Checkpoint

NEAR = 2e-5  # of the logits' norm: float32 sums in another order


class Steps:
    """Runs one backend with and without the step, and counts how often the step was taken."""

    def __init__(self, model: str = "tiny", profile: str = "fp32") -> None:
        self.backend, self.taken, self.logits = Accelerated(), 0, []
        self.backend.load(str(preset_dir(model)), profile, "cpu", {})
        self.step = OneRowStep(self.backend._engine, TABLE)

    def run(self, *requests: Request, step: bool = True, recorder: Recorder | None = None, **schedule) -> list:
        """The logits of each decode step."""
        engine, self.taken, self.logits = self.backend._engine, 0, []

        def counted(*given):
            found = self.step(*given)
            self.taken += found is not None
            return found

        decode = Engine.decode

        def seen(*given):
            chosen = decode(engine, *given)
            self.logits.append(engine.wanted_logits)
            return chosen

        engine.one_row, engine.decode = counted if step else None, seen
        try:
            self.backend.run(requests, Schedule(**schedule), recorder or Recorder())
        finally:
            engine.one_row = None
            del engine.decode
        return self.logits


@pytest.fixture(scope="module")
def steps():
    return Steps()


def asked(count: int, *, name: str = "a", forced: int = 12, **given) -> Request:
    prompt = tuple(97 + (n * n * 7 + n) % 26 for n in range(count))
    answer = tuple(97 + (n * 5) % 26 for n in range(forced))
    return Request(name, (Turn(prompt),), max_new_tokens=forced, forced=(answer,), **given)


def test_the_step_gives_the_numbers_of_the_operators(steps):
    """Catches a formula that is not the operators', a block of the residual spine that opens late, a row that is
    written elsewhere, a state that stays as it was: with few keys, more than the index picks, and over a page's end,
    in any memory."""
    for request, memory in ((asked(3), ""), (asked(90), "shuffled"), (asked(58, forced=9), "strided")):
        due = steps.run(request, step=False, page=16)
        found = steps.run(request, page=16, memory=memory)
        assert steps.taken == len(found) == len(due)
        for mine, other in zip(found, due, strict=True):
            assert float((mine - other).norm() / other.norm()) < NEAR


def test_what_one_request_leaves_does_not_reach_the_next(steps):
    """Catches memory of the step that a request without finite values would hand on."""
    due = steps.run(asked(20, forced=3))
    steps.step.bank.fill_(float("nan"))
    steps.step.partial.fill_(float("nan"))
    for mine, other in zip(steps.run(asked(20, forced=3)), due, strict=True):
        assert torch.equal(mine, other)


def test_a_step_that_somebody_sees_goes_operator_by_operator(steps):
    """Catches a step that hides from an observer, or passes by an operator that somebody has put in another's place;
    the recorder of an unobserved repeat is none of these."""
    steps.run(asked(9, forced=3), recorder=Recorder([Observer()]))
    assert steps.taken == 0
    steps.run(asked(9, forced=3), recorder=TimingRecorder("cpu", work=lambda: 0.0))
    assert steps.taken > 0
    with steps.backend.operators().instead({"kda.gates": lambda *a, **k: TABLE["kda.gates"](*a, **k)}):
        steps.run(asked(9, forced=3))
    assert steps.taken == 0
    steps.run(asked(9, forced=3), asked(12, name="b", forced=3))
    assert steps.taken == 0


def test_other_models_are_told_why_not(steps):
    """Catches a step that is taken where its formulas do not hold."""
    engine = steps.backend._engine
    assert why_not(engine) == ""
    bf16 = Engine(Checkpoint(preset_dir("tiny")), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert "float32" in why_not(bf16)
    config = engine.config
    for other in (
        dataclasses.replace(config, residual=dataclasses.replace(config.residual, kind="plain")),
        dataclasses.replace(config, index=dataclasses.replace(config.index, pool=4)),
        dataclasses.replace(config, moe=dataclasses.replace(config.moe, experts=896)),
    ):
        engine.config = other
        try:
            assert why_not(engine)
        finally:
            engine.config = config


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (4, 1)])
def test_experts_are_chosen_as_the_operator_chooses(groups, kept):
    """Catches ties that go to the higher number, and a group that is kept though another is stronger."""
    draw = torch.Generator().manual_seed(groups)
    for _ in range(60):
        logits = torch.randint(-3, 4, (16,), generator=draw).float() / 2
        bias = torch.randint(0, 3, (16,), generator=draw).float() / 8
        settings = {"k": 3, "groups": groups, "kept_groups": kept, "renormalise": True, "scale": 2.5}
        ids, weights = route(torch.sigmoid(logits)[None], bias=bias, **settings)
        mine, own = one_row.routed(logits, bias, (3, groups, kept, True, 2.5, "sigmoid"))
        assert mine.tolist() == ids[0].tolist()
        torch.testing.assert_close(own, weights[0])
    broken, _ = one_row.routed(torch.full((16,), float("nan")), bias, (3, groups, kept, True, 2.5, "sigmoid"))
    assert all(0 <= expert < 16 for expert in broken.tolist())


def test_packed_experts_mean_what_their_fp8_form_means():
    """Catches a code or an exponent that is read wrongly: all codes, exponents as they lie close together."""
    draw = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (4, 16, 64), generator=draw, dtype=torch.uint8)
    scale = torch.randint(118, 124, (4, 16, 4), generator=draw, dtype=torch.uint8)
    ids, x = torch.tensor([2, 0]), torch.randn(2, 128, generator=draw)
    payload, block, lost = convert(codes, scale=scale, experts=ids)
    assert int(lost) == 0
    due = (decode(payload, block, torch.float32) * x.unsqueeze(1)).sum(-1)
    found = one_row.by_expert((codes, scale), ids, *one_row.halves(x))
    torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-5)
    plain = decode(payload, block, torch.float32)
    found = one_row.by_expert((plain, None), torch.tensor([0, 1]), *one_row.halves(x))
    torch.testing.assert_close(found, due, rtol=1e-5, atol=1e-5)
