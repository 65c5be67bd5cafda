"""Healthy operators on rows that no activation of a trained model looks like: constant, sparse, tiny, all of one sign.

Random inputs make every rounding independent of every other and every product a normal number; these do not.
"""

import pytest
import torch
from compare.benign_sweep import FP8_FORM, healthy, subjects

from day0check.compare.choices import judge_choice
from day0check.compare.compute import judge_compute
from day0check.compare.replay import Replay
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import generate


def every_second_tiny(x: torch.Tensor) -> torch.Tensor:
    factors = torch.where(torch.arange(len(x)) % 2 == 0, 1.0, 2.0**-9)
    return x * factors.reshape(-1, *[1] * (x.dim() - 1))


SHAPES = {
    "zeros": torch.zeros_like,
    "one row": lambda x: x[:1].expand_as(x),
    "one channel": lambda x: torch.where(torch.arange(x.shape[-1]) == 0, x, 0.0),
    "equal channels": lambda x: x[..., :1].expand_as(x),
    "ones": torch.ones_like,
    "signs": torch.sign,
    "powers of two": lambda x: torch.sign(x) * torch.exp2(torch.log2(x.abs().clamp(min=1e-30)).round()),
    "halves": lambda x: (2 * x).round() / 2,
    "tiny": lambda x: x * 2.0**-80,
    "large": lambda x: x * 2.0**12,
    "every second tiny": every_second_tiny,
}
PICTURES = ("image.preprocess", "image.preprocess_in_budget")  # levels of a picture, not rows


def shaped(arguments: dict, name: str, shape: str) -> dict:
    x = arguments[name]
    if not (isinstance(x, torch.Tensor) and x.is_floating_point() and x.element_size() > 1 and x.dim() > 1):
        return arguments
    return arguments | {name: SHAPES[shape](x.float()).to(x.dtype).contiguous()}


@pytest.mark.parametrize("shape", SHAPES)
def test_healthy_operators_raise_no_alarm(shape):
    """Catches floors that underflow (tiny rows), errors of equal weights or queries taken for independent (ones)."""
    alarms = []
    for subject in subjects():
        contract, profile = CONTRACTS[subject.operator], subject.profile()
        if subject.form == FP8_FORM or contract.name in PICTURES:
            continue
        hard = generate(contract, contract.hard_inputs[0], 0, getattr(torch, profile.act_dtype))
        first = contract.args[0].name
        arguments = shaped({first: hard.args[0], **hard.kwargs}, first, shape)
        results, replay = healthy(contract, arguments, profile, subject.kinds()[-1]), Replay(contract, arguments)
        if contract.kind == "choose":
            judged = judge_choice(replay, results, claims_tie_rule=True)
        else:
            judged = judge_compute(replay, results, profile, seed=0)
        alarms += [f"{subject.operator} {subject.form}: {j.message}" for j in judged if not j.passed]
    assert not alarms
