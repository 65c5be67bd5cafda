"""Guards the replay of the serve operators inside a server."""

from __future__ import annotations

import json
import math

import pytest
import torch

from day0check.accelerated.ops import TABLE
from day0check.accelerated.server.operators import SERVING
from day0check.checks import service_operators
from day0check.compare.serving import ServingJudge
from day0check.probe.registry import Operators, Registration
from day0check.types import Measure, from_json

PIECES = tuple(bytes([byte]) for byte in range(256))
CALLS = "<tool_call>now</tool_call><tool_call>now</tool_call>"


def answer_with(operators: Operators) -> None:
    """One answer's worth of calls of every operator of the family."""
    tokens = list("é: ".encode())
    for sent in range(len(tokens)):
        operators.get("serve.detokenise", "serve")(tokens[: sent + 1], pieces=PIECES, sent=sent, final=False)
    operators.get("serve.stop", "serve")("ab", sent=1, strings=("bc",), token=7, ends=(7, 9), final=False)
    operators.get("serve.reasoning", "serve")("<think>a<tool_call>", sent=8, final=False)
    operators.get("serve.tool_call", "serve")(CALLS, sent=0, schemas={}, final=True)
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 1.0, 3.0]])
    operators.get("serve.logprobs", "serve")(logits, chosen=torch.tensor([1, 2]), top=(2, 1))


def judged(*wraps: Registration) -> dict[str, Measure]:
    operators, judge = Operators({**TABLE, **SERVING}), ServingJudge()
    operators.apply(wraps)
    judge.lay_over(operators)
    answer_with(operators)
    return {m.operator: m for m in judge.measures()}


def test_sound_operators_pass_in_every_call(tmp_path) -> None:
    """Would catch a replay that cries wolf, or one that does not look at an operator of the family."""
    found = judged()
    assert set(found) == set(SERVING)
    assert all(m.passed for m in found.values())
    assert found["serve.detokenise"].rows == 4
    operators, judge = Operators({**TABLE, **SERVING}), ServingJudge()
    judge.lay_over(operators)
    file = tmp_path / "operators.jsonl"
    judge.write(file)
    kept = [from_json(Measure, json.loads(line)) for line in file.read_text().splitlines()]
    assert {m.not_judged for m in kept} == {"it was not called"}
    assert service_operators.judge(tuple(kept)).outcome.status == "not_run"


def lost(inner, *args, **kwargs):
    content, calls = inner(*args, **kwargs)
    return content, calls[-1:]


def minus_infinity(inner, *args, **kwargs):
    own, *others = inner(*args, **kwargs)
    return own.masked_fill(torch.tensor([False, True]), -math.inf), *others


@pytest.mark.parametrize(
    ("operator", "wrap"),
    [
        ("serve.tool_call", lost),
        ("serve.logprobs", minus_infinity),
        ("serve.stop", lambda inner, *args, ends, **kwargs: inner(*args, ends=ends[1:], **kwargs)),
        ("serve.reasoning", lambda inner, text, **kwargs: (text, "")),
        ("serve.detokenise", lambda inner, tokens, **kwargs: "".join(chr(t) for t in tokens[kwargs["sent"] :])),
    ],
)
def test_a_wrong_operator_is_named_alone(operator: str, wrap) -> None:
    """Would catch a fault of one operator that is laid on another, or on none."""
    found = judged(Registration("wrap", operator, wrap))
    assert [name for name, m in found.items() if m.failing] == [operator]
    answer = service_operators.judge(tuple(found.values()))
    assert [(f.operator, f.phase) for f in answer.findings] == [(operator, "serve")]
    assert answer.outcome.status == "failed"


def test_without_a_replay_nothing_is_passed() -> None:
    """Would catch a server whose replay was lost and that counts as checked."""
    assert service_operators.judge((), reason="the server was killed").outcome.status == "not_run"
