"""The reference as a candidate: the same answers as the reference's own generation, rounded where the profile says."""

import functools

import numpy as np
import pytest
import torch
from PIL import Image

from day0check.backends.base import Backend
from day0check.backends.reference import Reference, rounded
from day0check.contracts import CONTRACTS
from day0check.errors import UsageError
from day0check.probe.recorder import Call, Observer, Recorder
from day0check.probe.registry import Registration
from day0check.types import Request, Schedule, Turn
from reference.generate import generate
from reference.model import Model
from reference.presets import preset_dir
from reference.tokenizer import chat_turn
from reference.weights import Checkpoint

pytestmark = pytest.mark.timeout(120)
BF16 = torch.bfloat16


class Calls(Observer):
    def __init__(self):
        self.calls: list[Call] = []
        self.results: list[tuple] = []

    def after(self, call, token, results):
        self.calls.append(call)
        self.results.append(results)


@functools.cache
def loaded(profile: str) -> Reference:
    backend = Reference()
    backend.load(str(preset_dir("tiny")), profile, "cpu", {})
    return backend


def request(*turns: Turn, **rest) -> Request:
    return Request("t/a#1", turns, **{"max_new_tokens": 3, **rest})


def test_it_is_a_backend():
    assert isinstance(Reference(), Backend)
    assert set(Reference().operators().names()) == set(CONTRACTS)


def test_answers_are_those_of_the_references_own_generation():
    """Catches a turn fed twice, a token left out between turns, and positions that are off."""
    ask = request(Turn((5, 80, 90, 100)), Turn((7, 8)), seed=3, temperature=0.7)
    outputs = loaded("fp32").run((ask,), Schedule(), Recorder())
    own = generate(Model(Checkpoint(preset_dir("tiny")), dtype=torch.float32), ask, form="plain")
    assert outputs.sequences == {"t/a#1": own.tokens}
    assert outputs.generated == {"t/a#1": own.spans}
    assert outputs.finish == {"t/a#1": own.finish}


def test_stop_tokens_and_forced_tokens():
    """Catches a request that runs on after its stop token, and forced tokens that are not taken."""
    free = loaded("fp32").run((request(Turn((5, 80))),), Schedule(), Recorder()).sequences["t/a#1"]
    stopped = loaded("fp32").run((request(Turn((5, 80)), stop_tokens=(free[2],)),), Schedule(), Recorder())
    assert stopped.sequences["t/a#1"] == free[:3]
    assert stopped.finish["t/a#1"] == "stop"
    forced = loaded("fp32").run((request(Turn((5, 80)), forced=((1, 2, 3, 4),)),), Schedule(), Recorder())
    assert forced.sequences["t/a#1"] == (5, 80, 1, 2, 3, 4)


def test_rows_phases_and_dtypes_of_an_image_request(tmp_path):
    """Catches row maps of patches, pairs and expanded keys that do not fit, and results of the wrong precision."""
    path = tmp_path / "x.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8)).save(path)
    backend = loaded("bf16")
    config = Checkpoint(preset_dir("tiny")).config
    tokens = tuple(chat_turn(config, "What?", [(90, 60)], True))
    seen = Calls()
    backend.run((request(Turn(tokens, (str(path),)), max_new_tokens=2),), Schedule(), Recorder([seen]))
    assert {call.phase for call in seen.calls} == {"prefill", "decode"}
    assert [call.order for call in seen.calls] == list(range(len(seen.calls)))
    pads = [i for i, t in enumerate(tokens) if t == config.tokens.media_pad]
    for call, results in zip(seen.calls, seen.results, strict=True):
        contract = CONTRACTS[call.operator]
        for spec, result in zip(contract.results, results, strict=True):
            if spec.dtype == "act":
                assert result.dtype == BF16, call.tap
            elif spec.dtype == "float32":
                assert result.dtype == torch.float32, call.tap
        if call.place.startswith("vision"):
            assert set(call.rows.position) <= set(pads), call.tap
    project = next(call for call in seen.calls if call.operator == "vision.project")
    assert project.rows.position == tuple(pads)
    pairs = next(call for call in seen.calls if call.operator == "moe.experts")
    assert len(pairs.rows) == len(tokens) * config.moe.topk
    sampled = [call.rows.position for call in seen.calls if call.operator == "sample.token"]
    assert sampled == [(len(tokens) - 1,), (len(tokens),)]


def test_bf16_operators_compute_wide_and_round_once():
    """Catches low-precision sums, which a profile never claims, and float32 results that were rounded."""
    x, weight = torch.randn(3, 64, dtype=BF16), torch.randn(5, 64, dtype=BF16)
    y = rounded(CONTRACTS["kda.project"], x, weight=weight)
    assert torch.equal(y, (x.float() @ weight.float().T).to(BF16))
    scores = rounded(CONTRACTS["moe.scores"], x, weight=weight, scoring="sigmoid")
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, scores.to(BF16).float())
    assert rounded(CONTRACTS["kda.project"], x.float(), weight=weight.float()).dtype == torch.float32
    bank = torch.zeros(2, 3, 64, dtype=BF16)
    assert rounded(CONTRACTS["residual.store"], bank, value=x, slot=1) is None
    assert torch.equal(bank[1], x)


def test_an_operators_file_is_used():
    """Catches operators that are looked up where no operators file can reach them, the sampler too."""
    backend = Reference()
    backend.load(str(preset_dir("tiny")), "fp32", "cpu", {})
    backend.operators().apply(
        (Registration("replace", "sample.token", lambda logits, **_: torch.tensor([9]), phase="decode"),)
    )
    ask = request(Turn((5, 80)), max_new_tokens=3)
    assert backend.run((ask,), Schedule(), Recorder()).sequences["t/a#1"][-2:] == (9, 9)


def test_what_it_does_not_have():
    with pytest.raises(UsageError, match="profile"):
        Reference().load(str(preset_dir("tiny")), "fp4", "cpu", {})
    with pytest.raises(UsageError, match="cannot be used"):
        Reference().load(str(preset_dir("tiny")), "bf16", "gpu7", {})
    with pytest.raises(UsageError, match="no model is loaded"):
        Reference().run((), Schedule(), Recorder())
