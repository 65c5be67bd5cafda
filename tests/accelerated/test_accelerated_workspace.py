"""The FP8 workspace: one memory for all layers, whole for prompts, a ring of tiles for decode, exact or counted."""

import pytest
import torch

from day0check.accelerated import workspace as workspace_module
from day0check.accelerated.engine import Engine
from day0check.accelerated.weights import Moe
from day0check.backends.accelerated import Accelerated
from day0check.probe.recorder import Observer, Recorder
from day0check.types import Request, Schedule, Turn
from reference.presets import preset_dir
from reference.weights import Checkpoint

REQUESTS = tuple(
    Request(name, (Turn(tuple(range(10 * n, 10 * n + 25 + n))),), max_new_tokens=4) for n, name in enumerate("abc", 1)
)


class Experts(Observer):
    """Keeps which experts were decoded where, and what the experts gave."""

    def __init__(self) -> None:
        self.decoded, self.memory, self.results, self.calls = [], set(), {}, []

    def after(self, call, token, results):
        if call.operator == "moe.convert":
            self.decoded.append((call.phase, call.tap, call.step, call.kwargs["experts"].tolist()))
            self.memory.add(call.kwargs["payload_out"].untyped_storage().data_ptr())
        if call.operator == "moe.experts":
            self.calls.append((call.phase, len(results[0])))
            for row, value in enumerate(results[0].clone()):
                self.results.setdefault((call.tap, call.step, *call.rows.address(row)), []).append(value)


def run(ring_bytes: int, monkeypatch) -> tuple[Experts, Accelerated]:
    monkeypatch.setattr(workspace_module.Workspace.__init__, "__kwdefaults__", {"ring_bytes": ring_bytes})
    backend, experts = Accelerated(), Experts()
    backend.load(str(preset_dir("tiny")), "fp32", "cpu", {})
    backend.run(REQUESTS, Schedule(), Recorder([experts]))
    return experts, backend


def test_a_ring_gives_what_the_whole_workspace_gives(monkeypatch):
    """Catches a half that is written while it is still read, and pairs that meet another group's experts."""
    whole, _ = run(1 << 30, monkeypatch)
    ring, _ = run(1, monkeypatch)
    assert whole.results.keys() == ring.results.keys()
    for key, values in whole.results.items():
        torch.testing.assert_close(torch.stack(ring.results[key]), torch.stack(values), rtol=1e-6, atol=1e-7)
    decoding = [count for phase, count in ring.calls if phase == "decode"]
    assert len(decoding) > 2 * sum(phase == "decode" for phase, _ in whole.calls)


@pytest.mark.parametrize("ring_bytes", [1, 1 << 30])
def test_only_experts_in_use_are_decoded_and_each_once(ring_bytes, monkeypatch):
    """Catches a step that decodes every expert, or one of them twice."""
    experts, backend = run(ring_bytes, monkeypatch)
    by_step: dict[tuple, list[int]] = {}
    for phase, tap, step, numbers in experts.decoded:
        by_step.setdefault((phase, tap, step), []).extend(numbers)
    assert all(len(numbers) == len(set(numbers)) for numbers in by_step.values())
    decoded = [len(numbers) for (phase, *_), numbers in by_step.items() if phase == "decode"]
    assert max(decoded) <= 12  # three rows of four experts
    assert min(decoded) < 16
    assert len(experts.memory) == 1, "one allocation serves all layers"
    assert int(backend._engine.workspace.inexact) == 0


def test_codes_that_fp8_cannot_hold_are_counted():
    """Catches a fallback that nobody hears of."""
    engine = Engine(Checkpoint(preset_dir("tiny")), dtype=torch.float32, device=torch.device("cpu"))
    moe = next(layer.mlp for layer in engine.model.layers if isinstance(layer.mlp, Moe))
    moe.w1.scale[:, :, 0] = 60  # far below its neighbour in the same block of 128 columns
    from day0check.accelerated.ops.experts import convert

    *_, inexact = convert(moe.w1.weight, scale=moe.w1.scale, experts=torch.tensor([0]))
    assert int(inexact) > 0
    backend = Accelerated()
    backend._engine = engine
    backend.run(REQUESTS, Schedule(), Recorder())
    assert int(engine.workspace.inexact) >= int(inexact)
