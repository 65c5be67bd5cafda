"""Operators by torch.compile: the same answers, no graph after warm-up, a missing compiler said in words."""

import pytest
import torch

from day0check.accelerated import compiled as compiled_module
from day0check.accelerated.ops import TABLE
from day0check.backends.accelerated import Accelerated
from day0check.backends.compiled import Compiled
from day0check.cli.run import compiled_backend
from day0check.errors import Unavailable, UsageError
from day0check.probe.recorder import Observer, Recorder
from day0check.probe.timing import compiled_graphs
from day0check.types import Request, Schedule, Turn
from reference.presets import preset_dir

COMPILER = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of the compiler itself


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
        "residual.add": (x, {"y": values(7, 24)}),
        "mlp.dense": (x, mlp),
        "moe.shared": (x, mlp),
    }
    assert set(compiled_module.PLAIN) == {*calls, "norm.rms behind a residual", "dsa.score of a request"}
    tight = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-7}
    for name, (first, keywords) in calls.items():
        found, due = compiled_module.PLAIN[name](first, **keywords), TABLE[name](first, **keywords)
        torch.testing.assert_close(found[0] if isinstance(found, tuple) else found, due, **tight)


@pytest.fixture
def uncompiled(monkeypatch):
    """The table of operators with groups, as plain functions: what the compiler is given, without the compiler."""
    monkeypatch.setattr(compiled_module.torch, "compile", lambda function, **_: function)
    return compiled_module.compiled(TABLE, {})


def test_each_group_counts_what_runs_as_one(monkeypatch):
    """Catches a group that is named where its operators run apart, and a kernel that does not count as fused."""
    monkeypatch.setattr(compiled_module.torch, "compile", lambda function, **_: function)
    calls: dict[str, int] = {}
    table = compiled_module.compiled(TABLE, calls)
    x, w = torch.ones(3, 32), torch.ones(32)
    table["norm.rms"](x, weight=w, eps=1e-5)
    table["dsa.select"](torch.ones(3, 64), k=2, visible=torch.full((3,), 64))
    assert calls == {"residual + norm": 0, "gate + activation": 0, "index score + block maxima": 0}
    table["norm.rms"](table["residual.add"](x, y=x), weight=w, eps=1e-5)
    table["moe.shared"](x, gate=torch.ones(8, 32), up=torch.ones(8, 32), down=torch.ones(32, 8), activation="silu")
    assert calls == {"residual + norm": 1, "gate + activation": 1, "index score + block maxima": 0}


def test_a_norm_behind_a_residual_is_the_norm_of_what_is_there_now(uncompiled):
    """Catches mean squares that are used for another tensor, or for one that was written to since."""
    draw = torch.Generator().manual_seed(5)
    x, y, w = torch.randn(6, 32, generator=draw), torch.randn(6, 32, generator=draw), torch.rand(32, generator=draw)
    for total in (
        uncompiled["residual.add"](x, y=y),
        uncompiled["residual.mix"](torch.stack((x, y), 1), norm_weight=w, proj=w, eps=1e-5),
    ):
        for seen in (total, total * 3, total.clone()):
            found = uncompiled["norm.rms"](seen, weight=w, eps=1e-5)
            torch.testing.assert_close(found, TABLE["norm.rms"](seen, weight=w, eps=1e-5))
    total.mul_(2)
    torch.testing.assert_close(
        uncompiled["norm.rms"](total, weight=w, eps=1e-3), TABLE["norm.rms"](total, weight=w, eps=1e-3)
    )


def test_scores_hand_their_maxima_to_the_choice(uncompiled, monkeypatch):
    """Catches maxima that are never used, or used for other scores, and a choice that they change."""
    draw = torch.Generator().manual_seed(6)
    q, keys = torch.randn(20, 4, 8, generator=draw), torch.randn(2, 96, 8, generator=draw)
    owner, visible = torch.tensor([0] * 9 + [1] * 10 + [-1]), torch.arange(70, 90)
    given = {"weights": torch.randn(20, 4, generator=draw), "keys": keys, "owner": owner, "scale": 0.3}
    used = []
    knowing = compiled_module.index.select_knowing
    monkeypatch.setattr(
        compiled_module.index,
        "select_knowing",
        lambda scores, maxima, **k: used.append(maxima is not None) or knowing(scores, maxima, **k),
    )
    scores = uncompiled["dsa.score"](q, **given)
    torch.testing.assert_close(scores, TABLE["dsa.score"](q, **given), rtol=1e-5, atol=1e-5)
    found = uncompiled["dsa.select"](scores, k=5, visible=visible)
    assert used == [True]
    others = uncompiled["dsa.select"](scores.flip(0), k=5, visible=visible)
    assert used == [True, False]
    for chosen, of in ((found, scores), (others, scores.flip(0))):
        due = TABLE["dsa.select"](of, k=5, visible=visible)
        assert chosen.sort(-1).values.tolist() == due.sort(-1).values.tolist()


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


@COMPILER
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_norm_reads_what_the_residual_wrote():
    """Catches a compiler that leaves out the rounding between two operators of one graph."""
    table, draw = compiled_module.compiled(TABLE, {}), torch.Generator().manual_seed(7)
    x, y, w = (torch.randn(33, 128, generator=draw).bfloat16() for _ in range(3))
    total = table["residual.add"](x, y=y)
    found, due = (ops["norm.rms"](total, weight=w, eps=1e-5) for ops in (table, TABLE))
    assert (found != due).float().mean() < 0.001
    assert torch.equal(table["norm.rms"](total.clone(), weight=w, eps=1e-5), found)


@COMPILER
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_lengths_are_swept_without_another_graph():
    """Catches a shape that makes the compiler start anew, and an operator that changes when it is compiled: step by
    step with an observer, and where nobody observes a sublayer a graph."""
    plain, made = Accelerated(), Compiled()
    for backend in (plain, made):
        backend.load(str(preset_dir("tiny")), "fp32", "cpu", {})
    warm = compiled_graphs()
    assert warm > 0
    assert made._engine.one_row is not None
    for length in (3, 17, 64, 65, 130):
        tokens = tuple((7 * i) % 250 for i in range(length))
        requests = (Request(f"n{length}", (Turn(tokens),), max_new_tokens=3),)
        due = plain.run(requests, Schedule(), Recorder())
        for recorder in (Recorder(), Recorder([Observer()])):
            assert made.run(requests, Schedule(), recorder) == due
    assert compiled_graphs() == warm
