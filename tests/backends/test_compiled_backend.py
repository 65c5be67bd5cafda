"""Operators by torch.compile: the same answers, no graph after warm-up, a missing compiler said in words."""

import pytest
import torch

from day0check.accelerated import compiled as compiled_module
from day0check.accelerated.ops import TABLE
from day0check.backends.accelerated import Accelerated
from day0check.backends.compiled import Compiled
from day0check.cli.run import compiled_backend
from day0check.errors import Unavailable, UsageError
from day0check.probe.recorder import Recorder
from day0check.probe.timing import compiled_graphs
from day0check.types import Request, Schedule, Turn
from reference.presets import preset_dir


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_formulas_that_are_compiled_are_those_of_the_operators(dtype):
    """Catches a plain form that is not what the operator computes, before anything is compiled."""
    draw = torch.Generator().manual_seed(4)

    def values(*shape):
        return torch.randn(shape, generator=draw).to(dtype)

    x, weight, eps = values(7, 24), values(24), 1e-5
    mlp = {"gate": values(16, 24), "up": values(16, 24), "down": values(24, 16), "activation": "situ", "beta": 4.0}
    calls = {
        "norm.rms": (x, {"weight": weight, "eps": eps}),
        "residual.mix": (values(7, 3, 24), {"norm_weight": weight, "proj": values(24), "eps": eps}),
        "mlp.dense": (x, mlp),
        "moe.shared": (x, mlp),
    }
    assert calls.keys() == compiled_module.PLAIN.keys()
    tight = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    for name, (first, keywords) in calls.items():
        found, due = compiled_module.PLAIN[name](first, **keywords), TABLE[name](first, **keywords)
        torch.testing.assert_close(found, due, **tight)


def test_a_missing_compiler_is_said_in_words(monkeypatch):
    """Catches a traceback from the depths of the compiler's driver."""
    monkeypatch.setattr(compiled_module.shutil, "which", lambda name: None)
    with pytest.raises(Unavailable, match="no C\\+\\+ compiler"):
        Compiled().load(str(preset_dir("tiny")), "fp32", "cpu", {})


def test_compile_asks_for_the_embedded_engine():
    """Catches a flag that silently does nothing for another backend."""
    assert compiled_backend("accelerated") == "compiled"
    with pytest.raises(UsageError):
        compiled_backend("my_engine.py:Engine")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_lengths_are_swept_without_another_graph():
    """Catches a shape that makes the compiler start anew, and an operator that changes when it is compiled."""
    plain, made = Accelerated(), Compiled()
    for backend in (plain, made):
        backend.load(str(preset_dir("tiny")), "fp32", "cpu", {})
    warm = compiled_graphs()
    assert warm > 0
    for length in (3, 17, 64, 65, 130):
        tokens = tuple((7 * i) % 250 for i in range(length))
        requests = (Request(f"n{length}", (Turn(tokens),), max_new_tokens=3),)
        due = plain.run(requests, Schedule(), Recorder())
        assert made.run(requests, Schedule(), Recorder()) == due
    assert compiled_graphs() == warm
