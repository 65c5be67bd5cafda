"""Answers of a healthy engine are the reference's; wrong tokens, wrong log-probabilities and a wrong model are not."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from day0check.checks.endpoint.oracle import judge
from day0check.compare.rounding import Rounder
from day0check.compare.wire import WireAnswer, follow
from day0check.contracts.profiles import PROFILES
from day0check.load.observed import Observed
from day0check.load.records import Answer, Exchange, Reply, Token
from day0check.service.following import followable, prompts, token_ids
from day0check.types import Request, Turn
from reference.generate import generate
from reference.model import Model
from reference.presets import preset_dir
from reference.weights import Checkpoint

PRESET, TOKENS = "tiny-deepseek-v3.2", 7


@functools.cache
def checkpoint() -> Checkpoint:
    return Checkpoint(preset_dir(PRESET))


@functools.cache
def answers(profile: str, *, spoil: str = "") -> tuple[WireAnswer, ...]:
    """Greedy answers of an engine that rounds to nearest at the profile's points; `spoil`: an operator made wrong."""
    points, made = PROFILES[profile], []
    model = Model(checkpoint(), dtype=torch.float64 if profile == "fp32" else torch.float32)

    def call(place, operator, function, *args, site="", **kwargs):  # type: ignore[no-untyped-def]
        own = points.points_of(operator)
        result = function(*args, **(kwargs | {"round": Rounder(own, "nearest")} if own else kwargs))
        return result * 1.3 if operator == spoil else result

    for i, prompt in enumerate(prompts(checkpoint().config, seed=3)[:2]):
        request = Request("x", (Turn(prompt),), max_new_tokens=TOKENS)
        done = generate(model, request, call=call)
        tokens = done.tokens[len(prompt) :]
        said = done.logits.double().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        made.append(WireAnswer(f"follow/{i}", prompt, tuple(tokens), tuple(said.tolist())))
    return tuple(made)


def found(rows, reason: str = "") -> set[str]:  # type: ignore[no-untyped-def]
    observed = Observed("m", "chat", (), reference=rows, reference_reason=reason)
    return {f.evidence["pattern"] for f in judge(observed).findings}


@pytest.mark.parametrize("profile", ["bf16", "fp32"])
def test_a_healthy_engine_passes(profile: str) -> None:
    """Would catch limits below what the claimed precision does."""
    rows = follow(checkpoint(), profile, answers(profile))
    assert [r.tokens for r in rows] == [TOKENS] * 2
    assert found(rows) == set()


@pytest.mark.parametrize("profile", ["bf16", "fp32"])
def test_a_wrong_operator_is_seen(profile: str) -> None:
    """Would catch limits so wide that a layer's output times 1.3 fits in."""
    spoiled = answers(profile, spoil="mla.output")
    assert "logprob" in found(follow(checkpoint(), profile, spoiled))


def test_a_wrong_token_and_wrong_logprobs_are_seen_in_float32() -> None:
    """Would catch a comparison that does not look at tokens, or not at log-probabilities."""
    first, second = answers("fp32")
    other = replace(first, tokens=(*first.tokens[:4], (first.tokens[4] + 1) % 256, *first.tokens[5:]), logprobs=None)
    assert found(follow(checkpoint(), "fp32", (other, second))) == {"token"}
    off = replace(second, logprobs=tuple(p - 0.01 for p in second.logprobs))
    assert found(follow(checkpoint(), "fp32", (first, off))) == {"logprob"}
    nan = replace(second, logprobs=(float("nan"),) * TOKENS)
    assert found(follow(checkpoint(), "fp32", (first, nan))) == {"logprob"}
    outside = replace(second, tokens=(10**6, *second.tokens[1:]))
    assert "token" in found(follow(checkpoint(), "fp32", (first, outside)))


def exchange(label: str, answer: Answer, *, status: int = 200) -> Exchange:
    return Exchange(label, "/v1/completions", {"prompt": [1, 2, 3]}, Reply(status, 0, 0, 1), answer)


def test_token_ids_from_both_forms() -> None:
    """Would catch answers that are left out though the endpoint names their tokens."""
    assert token_ids(Answer(token_ids=(4, 5))) == (4, 5)
    assert token_ids(Answer(tokens=(Token("token_id:7", -1.0), Token("token_id:8", -2.0)))) == (7, 8)
    assert token_ids(Answer(tokens=(Token("token_id:7", -1.0), Token("a", -2.0)))) == ()
    assert token_ids(Answer(text="abc")) == ()


def test_what_cannot_be_followed_is_not_run() -> None:
    """Would catch a reference that was asked for, could not be used, and left no trace in the verdict."""
    good = Answer(choices=1, tokens=(Token("token_id:7", -1.0),))
    rows, reason = followable([exchange("follow/0", good), exchange("follow/1", Answer(text="a", choices=1))])
    assert [r.tokens for r in rows] == [(7,)]
    assert "token ids" in reason
    assert followable([])[1] == "no prompt for the reference was sent"
    assert "follow/0" in followable([exchange("follow/0", Answer(error="no"), status=400)])[1]
    row = SimpleNamespace(statistics={}, limits={}, tokens=1)
    assert judge(Observed("m", "chat", (), reference=(row,), reference_reason=reason)).outcome.status == "not_run"
    assert judge(Observed("m", "chat", ())).outcome.status == "not_run"
