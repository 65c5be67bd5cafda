"""Every switch of ModelConfig that the engine claims, on small seeded models beside the reference in float64."""

import dataclasses

import pytest
import torch

from day0check.accelerated.engine import Engine
from day0check.accelerated.ops import TABLE
from day0check.accelerated.scheduler import Scheduler
from day0check.compare.checkpoint_parameters import compare_parameters
from day0check.compare.parameters import ParametersRecorder
from day0check.errors import InputError
from day0check.probe.recorder import Caller, Observer, Recorder
from day0check.probe.registry import Operators
from day0check.types import Request, Schedule, Turn
from reference.config import Activation, Index, Kda, Mla, ModelConfig, Moe, Residual, Rope, Yarn
from reference.model import Model
from reference.presets import recipe_for, values
from reference.tensors import expected_tensors


def change(part, **fields):
    return dataclasses.replace(part, **fields)


MLA = Mla(heads=2, kv_lora=32, nope=8, rope=8, v=8, q_lora=24)
INDEX = Index(heads=16, dim=16, topk=20, rope=8)
BASE = ModelConfig(
    "small", 64, ("dsa", "mla", "kda"), 128, 4096, 96, mla=MLA, index=INDEX, kda=Kda(heads=2, dim=16, rank=8, chunk=32)
)
POOLED = change(INDEX, topk=20, pool=4, rope=0)
MOE = Moe(experts=8, topk=2, width=32, shared_width=32)


VARIANTS = {
    "plain residual, dense MLPs, softplus decay, no RoPE": BASE,
    "half RoPE with YaRN": change(BASE, rope=Rope("half", 1e4, Yarn(4.0, 32, mscale_all_dim=0.7))),
    "interleaved RoPE, interleaved index": change(
        BASE, rope=Rope("interleaved"), index=change(INDEX, rope_layout="interleaved")
    ),
    "queries without a latent, dense attention": change(BASE, layers=("mla", "kda"), mla=change(MLA, q_lora=None)),
    "shared selections": change(BASE, layers=("dsa", "dsa_shared", "kda", "dsa", "dsa_shared")),
    "threshold selection": change(BASE, index=change(INDEX, select="threshold", threshold=0.02)),
    "bounded decay, low-rank output gate, MLA gate": change(
        BASE, kda=change(BASE.kda, gate_lower_bound=-5.0, full_rank_gate=False), mla=change(MLA, gate=True)
    ),
    "plain experts, groups, clamped": change(
        BASE, moe=change(MOE, groups=4, kept_groups=2), activation=Activation("clamped", limit=0.5)
    ),
    "softmax router without renormalising, no shared expert, every second layer": change(
        BASE, moe=change(MOE, scoring="softmax", renormalise=False, shared_width=0, frequency=2)
    ),
    "packed experts without a latent": change(BASE, moe=change(MOE, packed="mxfp4", first_dense=1)),
    "pooled index keys, a shared selection": change(
        BASE, layers=("dsa", "dsa_shared", "kda", "dsa"), index=change(POOLED, rope=8)
    ),
    "pooled index keys without the tail": change(BASE, index=change(POOLED, pool=5, pool_tail=False)),
    "streams": change(BASE, residual=Residual("mhc", streams=3, sinkhorn=4), eps=1e-3),
    "attention residuals, tied head": change(BASE, residual=Residual("attention", 2), tied_head=True),
}


class Seeded:
    """A checkpoint that exists only as recipes."""

    directory = "seeded"

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._stored = expected_tensors(config)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        return values(name, stored, recipe_for(name, stored)).view(stored.shape)


class Logits(Observer):
    def __init__(self) -> None:
        self.rows = {}

    def after(self, call, token, results):
        if call.operator == "head.logits":
            for i, row in enumerate(results[0].double()):
                self.rows[call.rows.address(i)[1]] = row.clone()


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_the_reference(name):
    """Catches a switch that the engine ignores or reads differently, in prompts, chunks and decode."""
    checkpoint = Seeded(VARIANTS[name])
    engine = Engine(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    tokens = torch.randint(0, 128, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    request = Request("a", (Turn(tuple(tokens[:50])), Turn(tuple(tokens[50:]))), max_new_tokens=6)
    seen = Logits()
    caller = Caller(Operators(TABLE), Recorder([seen]))
    outputs = Scheduler(engine, (request,), Schedule(chunk=33, page=16), caller).run()
    oracle = Model(checkpoint).forward(list(outputs.sequences["a"]))
    wanted = sorted(seen.rows)
    assert wanted == [*range(49, 55), *range(75, 81)]
    got = torch.stack([seen.rows[p] for p in wanted])
    assert float((got - oracle[wanted]).abs().max() / oracle.abs().max()) < 2e-5


def parameters_of(engine):
    """What a run of one request on `engine` records of weights and settings."""
    found = []
    recorder = Recorder([ParametersRecorder(found.append)])
    request = Request("a", (Turn(tuple(range(30))),), max_new_tokens=2)
    Scheduler(engine, (request,), Schedule(page=16), Caller(Operators(TABLE), recorder)).run()
    recorder.end_case()
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_the_parameters_of_a_variant_are_those_of_the_reference(name):
    """Catches a false alarm of the check `parameters` on a composition that the presets do not have."""
    checkpoint = Seeded(VARIANTS[name])
    engine = Engine(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"))
    found = compare_parameters(checkpoint, "bf16", parameters_of(engine))
    assert [m for m in found if not m.passed] == []
    assert sum(m.elements for m in found) > 50


def test_a_softmax_scale_without_the_factor_of_yarn_is_named(monkeypatch):
    """Catches attention that is a little too flat in every layer, and rightly computed."""
    checkpoint = Seeded(VARIANTS["half RoPE with YaRN"])
    engine = Engine(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.setattr(ModelConfig, "softmax_scale", lambda self: (self.mla.nope + self.mla.rope) ** -0.5)
    mine = parameters_of(engine)
    monkeypatch.undo()
    wrong = [m for m in compare_parameters(checkpoint, "fp32", mine) if not m.passed]
    assert {(m.operator, m.layer, m.pattern) for m in wrong} == {
        ("dsa.attention", 0, "other setting: scale"),
        ("mla.attention", 1, "other setting: scale"),
    }


def test_plain_experts_in_another_order_are_named():
    """Catches experts of an unpacked model that were stacked in another order than the router counts them."""
    checkpoint = Seeded(VARIANTS["plain experts, groups, clamped"])
    engine = Engine(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu"))
    layer = engine.model.layers[1]
    w2 = change(layer.mlp.w2, weight=layer.mlp.w2.weight[[1, 0, 2, 3, 4, 5, 6, 7]])
    swapped = (engine.model.layers[0], change(layer, mlp=change(layer.mlp, w2=w2)), *engine.model.layers[2:])
    engine.model = change(engine.model, layers=swapped)
    wrong = [m for m in compare_parameters(checkpoint, "bf16", parameters_of(engine)) if not m.passed]
    assert [(m.tap, m.pattern) for m in wrong] == [("layers.01.moe.experts", "other weight: w2")]
    assert "expert 0, 1" in wrong[0].message


def test_a_scale_that_is_nan_is_refused_at_load():
    """Catches E8M0 byte 255, which would otherwise become a large number."""

    class Broken(Seeded):
        def tensor(self, name):
            stored = super().tensor(name).clone()
            if name == "layers.2.block_sparse_moe.experts.5.w3.weight_scale":
                stored[3, 1] = 255
            return stored

    checkpoint = Broken(change(BASE, moe=change(MOE, packed="mxfp4")))
    with pytest.raises(InputError, match="means NaN") as caught:
        Engine(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    assert "layers.2.block_sparse_moe.experts.5.w3.weight_scale" in caught.value.where
