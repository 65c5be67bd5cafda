"""The weights and settings in use: those of the checkpoint in a healthy candidate, named to the place in a bad one."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.accelerated import layers
from day0check.accelerated.engine import Engine
from day0check.backends.accelerated import Accelerated
from day0check.backends.reference import Reference
from day0check.compare.checkpoint_parameters import CHOOSES, STRANGER, UNKNOWN, compare_parameters, same_setting
from day0check.compare.parameters import NOT_COMPARED, KnownWeights, ParametersRecorder, Recorded, settings_of
from day0check.compare.weight_digest import part_digests, value_digest
from day0check.contracts import CONTRACTS
from day0check.probe.recorder import Recorder
from day0check.probe.registry import Operators
from day0check.probe.rows import RowMap
from day0check.types import Request, Schedule, Turn, from_json, to_json
from reference.config import Yarn
from reference.presets import preset_dir
from reference.weights import Checkpoint

DIRECTORY = preset_dir("tiny")
REQUEST = Request("a", (Turn(tuple(range(60, 90))),), max_new_tokens=3)


def recorded(backend, known=None) -> list[Recorded]:
    found: list[Recorded] = []
    recorder = Recorder([ParametersRecorder(found.append, known)])
    with torch.no_grad():
        backend.run((REQUEST,), Schedule(), recorder)
    recorder.end_case()
    return [from_json(Recorded, json.loads(json.dumps(to_json(r), allow_nan=False))) for r in found]


def measures(backend, profile="bf16"):
    return compare_parameters(DIRECTORY, profile, recorded(backend))


def wrong(backend, profile="bf16"):
    """(operator, layer, pattern) of what differs, in order, without the repetition in decode."""
    found = [(m.operator, m.layer, m.pattern) for m in measures(backend, profile) if not m.passed]
    return list(dict.fromkeys(found))


def loaded(profile="bf16") -> Accelerated:
    backend = Accelerated()
    backend.load(str(DIRECTORY), profile, "cpu", {})
    return backend


def with_weights(backend, layer, **changes):
    """The engine with tensors of one layer exchanged: `attention__a_log`, `mlp__w1`, `input_norm`."""
    engine: Engine = backend._engine
    found = list(engine.model.layers)
    for path, value in changes.items():
        part, _, name = path.partition("__")
        inner = dataclasses.replace(getattr(found[layer], part), **{name: value}) if name else value
        found[layer] = dataclasses.replace(found[layer], **{part: inner})
    engine.model = dataclasses.replace(engine.model, layers=tuple(found))
    return backend


def with_config(backend, **changes):
    backend._engine.config = dataclasses.replace(backend._engine.config, **changes)
    return backend


@pytest.mark.parametrize("profile", ["bf16", "fp32"])
def test_healthy_candidates_agree_in_everything(profile):
    """Catches a false alarm, and a comparison that compares next to nothing."""
    for make, least in ((Accelerated, 2000), (Reference, 1000)):
        backend = make()
        backend.load(str(DIRECTORY), profile, "cpu", {})
        found = measures(backend, profile)
        assert [m for m in found if not m.passed] == []
        assert sum(m.elements for m in found) > least
        assert {"norm.rms", "rope.apply", "kda.gates", "moe.experts", "dsa.attention"} <= {m.operator for m in found}


def test_another_theta_is_named():
    """Catches a rotation with the base of another release, which each operator computes rightly."""
    backend = loaded()
    with_config(backend, rope=dataclasses.replace(backend._engine.config.rope, theta=1e6))
    found = measures(backend)
    assert wrong(backend) == [("rope.apply", n, "other setting: theta") for n in (3, 5, 7)]
    first = next(m for m in found if not m.passed)
    assert "theta is 1000000.0 where the checkpoint has 10000.0" in first.message


def test_an_operator_that_the_layer_does_not_have_is_named():
    """Catches an index of its own in a layer without one; another form on the layer's own weights is no stranger."""
    backend = loaded()
    found = recorded(backend)
    query = next(r for r in found if r.tap == "layers.03.dsa.index_query" and r.phase == "prefill")
    norm = next(r for r in found if r.tap == "layers.00.norm.rms.input" and r.phase == "prefill")
    foreign = dataclasses.replace(query, tap="layers.05.dsa.index_query", layer=5)
    (measure,) = compare_parameters(DIRECTORY, "bf16", [foreign])
    assert (measure.passed, measure.not_judged, measure.pattern) == (False, "", STRANGER)
    assert "layer 5 of the model has no dsa.index_query" in measure.message
    own = dataclasses.replace(norm, tap="layers.00.mla.latent", operator="mla.latent")
    (measure,) = compare_parameters(DIRECTORY, "bf16", [own])
    assert measure.not_judged == "the reference makes no call of this name"


def test_a_choice_that_the_layer_does_not_make_takes_the_blame_for_what_feeds_it():
    """Catches blame on the projection that feeds a selection where the model has no selection at all, and blame taken
    from strange operators of another phase or layer."""
    made = {r.operator: r for r in recorded(loaded()) if r.tap.startswith("layers.03.dsa.") and r.phase == "prefill"}

    def moved(operator, *, layer, phase):
        tap = f"layers.{layer:02d}.{operator}"
        return dataclasses.replace(made[operator], tap=tap, layer=layer, phase=phase)

    chain = [moved(o, layer=5, phase="prefill") for o in ("dsa.index_query", "dsa.index_weights", "dsa.select")]
    apart = dataclasses.replace(moved("dsa.index_query", layer=5, phase="decode"), order=10**6)
    choice, decode = compare_parameters(DIRECTORY, "bf16", [*chain, apart])
    assert (choice.operator, choice.layer, choice.phase, choice.pattern) == ("dsa.select", 5, "prefill", CHOOSES)
    assert choice.order == chain[0].order < chain[-1].order
    assert choice.message.endswith("what feeds it: dsa.index_query, dsa.index_weights")
    assert choice.statistics["different"] == 3
    assert (decode.operator, decode.phase, decode.pattern) == ("dsa.index_query", "decode", STRANGER)


def test_an_operator_with_weights_that_were_never_loaded_answers_for_itself():
    """Catches a choice that takes the blame for a projection whose weights no file holds: what comes first in the order
    of execution is the call with those weights."""
    made = {r.operator: r for r in recorded(loaded()) if r.tap.startswith("layers.03.dsa.") and r.phase == "prefill"}
    chain = [
        dataclasses.replace(made[o], tap=f"layers.05.{o}", layer=5)
        for o in ("dsa.index_query", "dsa.index_weights", "dsa.select")
    ]
    noise = {n: dataclasses.replace(w, digest="f" * len(w.digest)) for n, w in chain[0].weights.items()}
    query, choice = compare_parameters(DIRECTORY, "bf16", [dataclasses.replace(chain[0], weights=noise), *chain[1:]])
    assert (query.operator, query.pattern, query.passed) == ("dsa.index_query", UNKNOWN, False)
    assert query.message.endswith("its weights are nowhere in the checkpoint")
    assert query.order < choice.order == chain[1].order
    assert choice.message.endswith("what feeds it: dsa.index_weights")


def test_another_eps_in_one_norm_is_named(monkeypatch):
    """Catches the eps of the latent norms in a block norm: 1e-6 for 1e-5 is below every other instrument."""
    real = layers.mla

    def mla(step, at, layer, x, p):
        if layer == 5:
            step = dataclasses.replace(step)
            step.config = dataclasses.replace(step.config, mla=dataclasses.replace(step.config.mla, latent_eps=1e-5))
        return real(step, at, layer, x, p)

    monkeypatch.setattr(layers, "mla", mla)
    assert wrong(loaded()) == [("norm.rms", 5, "other setting: eps")]


def test_one_scale_byte_of_one_expert_is_found_whether_it_is_used_or_not():
    """Catches an audit that looks at the active experts only."""
    backend = loaded()
    stack = backend._engine.model.layers[4].mlp.w2
    spoiled = stack.scale.clone()
    spoiled[13, 5, 1] ^= 1
    with_weights(backend, 4, mlp__w2=dataclasses.replace(stack, scale=spoiled))
    found = [m for m in measures(backend) if not m.passed]
    assert {(m.tap, m.pattern) for m in found} == {("layers.04.moe.convert.w2", "other weight: scale")}
    assert "scale of 1 of 16 experts is not that of the checkpoint: expert 13" in found[0].message


def test_decay_of_other_heads_is_named():
    """Catches A_log cut at the wrong end of a padded tensor, or sharded by the wrong rank."""
    backend = loaded()
    a_log = backend._engine.model.layers[2].attention.a_log
    with_weights(backend, 2, attention__a_log=a_log.roll(1))
    assert wrong(backend) == [("kda.gates", 2, "other weight: a_log")]


def test_weights_of_the_neighbour_layer_and_left_out_ones_are_named():
    """Catches an off-by-one of layers in the loader, and a bias that the loader dropped."""
    backend = loaded()
    model = backend._engine.model
    with_weights(backend, 1, input_norm=model.layers[2].input_norm, mlp__bias=None)
    assert wrong(backend) == [("norm.rms", 1, "other weight: weight"), ("moe.route", 1, "other weight: bias")]


def test_a_float32_weight_that_was_rounded_is_named():
    """Catches decay parameters kept in bfloat16, which every call then uses consistently."""
    backend = loaded()
    conv = backend._engine.model.layers[0].attention.conv
    with_weights(backend, 0, attention__conv=conv.bfloat16().float())
    found = [m for m in measures(backend) if not m.passed]
    assert {(m.operator, m.layer) for m in found} == {("kda.conv", 0)}
    assert "rounded to bfloat16" in found[0].message


def test_a_weight_that_changes_during_the_run_is_seen_when_it_changes():
    """Catches a record of the first call alone: memory that decode writes over, and a decode path of its own."""
    backend = loaded()
    head = backend._engine.model.head
    found: list[Recorded] = []

    class Spoils(ParametersRecorder):
        def end_step(self, step):
            if step == 1:
                head[7, 7] += 1

    recorder = Recorder([Spoils(found.append)])
    with torch.no_grad():
        backend.run((REQUEST,), Schedule(), recorder)
    (changed,) = [m for m in compare_parameters(DIRECTORY, "bf16", found) if not m.passed]
    assert (changed.tap, changed.phase, changed.pattern) == ("head.logits", "decode", "other weight: weight")
    assert "it was right when the phase began" in changed.message


def test_plain_experts_are_compared_by_their_number():
    """Catches experts in another order where the model is not packed: each row of weights has the right numbers."""
    for order, failing in ((None, False), (torch.tensor([1, 0]), True)):
        backend = Reference()
        backend.load(str(DIRECTORY), "fp32", "cpu", {})
        table: Operators = backend.operators()
        if order is not None:
            weights = backend._model.weights
            real = weights.experts
            weights.experts = lambda prefix, w, *, active, real=real: real(
                prefix, w, active=(*active[:2][::-1], *active[2:])
            )
        assert table.names()
        found = {m.operator for m in measures(backend, "fp32") if not m.passed}
        assert found == ({"moe.experts"} if failing else set())


def test_a_tap_that_the_reference_does_not_have_is_not_judged():
    """Catches an unknown norm that passes because nothing is known about it."""
    mine = Recorded("layers.03.norm.rms.extra", "norm.rms", "prefill", 3, 9, {"eps": 1e-5})
    (found,) = compare_parameters(DIRECTORY, "bf16", [mine])
    assert (found.passed, found.failing, bool(found.not_judged)) == (False, "", True)


def test_vision_is_compared_where_it_was_seen():
    """Catches a tower that nobody looks at."""
    config = Checkpoint(DIRECTORY).config.vision
    right = {"theta": 10000.0}
    taps = [
        Recorded(f"vision.blocks.01.vision.rope.{s}", "vision.rope", "prefill", None, 3, right)
        for s in ("query", "key")
    ]
    taps.append(Recorded("vision.image.preprocess", "image.preprocess", "prefill", None, 1, {"patch": config.patch}))
    found = {m.tap: m for m in compare_parameters(DIRECTORY, "bf16", taps)}
    assert [m.passed for m in found.values()] == [False, True, True]
    assert found["vision.image.preprocess"].pattern == "other setting: merge"


def test_known_weights_are_digested_again_when_they_were_written():
    """Catches a digest that outlives the values, and one that is made anew for every case."""
    known, weight = KnownWeights(), torch.ones(4, 4)
    first = known.of("norm.rms", "weight", weight)
    assert known.of("norm.rms", "weight", weight) is first
    weight[0, 0] = 2
    assert known.of("norm.rms", "weight", weight).digest != first.digest


def test_weights_that_are_cast_for_every_call_are_not_recorded_for_every_call():
    """Catches a record that grows with the steps, and the cost of digesting a model at each of them."""
    found: list[Recorded] = []
    recorder = Recorder([ParametersRecorder(found.append)])
    kept = []
    for step in range(20):
        with recorder.step("decode", RowMap(("a",), (0,), (step,)), step):
            kept.append(torch.full((8,), 2.0))
            recorder.call("", "norm.rms", lambda x, **_: x, (torch.ones(1, 8),), {"weight": kept[-1], "eps": 1e-5})
    assert len(found) == 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_changed_byte_changes_the_digest_and_storage_does_not(data):
    """Catches a digest that misses a byte, a place, or that sees dtype, strides and shape."""
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 41))
    stack = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(columns))
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    changed = stack.clone()
    changed[row, column] ^= data.draw(st.integers(1, 255))
    before, after = part_digests(stack), part_digests(changed)
    assert [i for i in range(rows) if before[i] != after[i]] == [row]
    assert part_digests(stack[row : row + 1]) == (before[row],)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16()
    same = value_digest(weight)
    assert (
        same == value_digest(weight.double()) == value_digest(weight.T.contiguous().T) == value_digest(weight.flatten())
    )
    weight[row, column] = 3.0 if weight[row, column] != 3.0 else 4.0
    assert value_digest(weight) != same


def test_settings_of_one_meaning_are_one_setting():
    """Catches false alarms: float32 numbers, what is left out or without effect, and somebody else's record types."""
    assert same_setting(float(torch.tensor(1e-5)), 1e-5)
    assert not same_setting(1e-6, 1e-5)
    assert same_setting(10000, 10000.0)
    assert not same_setting(None, 0.0)
    situ = settings_of(CONTRACTS["mlp.dense"], {"activation": "silu", "beta": 4.0, "limit": 7.0})
    assert situ == {"activation": "silu"}
    route = {"k": 2, "renormalise": True, "scale": 1.0}
    one, eight = (settings_of(CONTRACTS["moe.route"], {**route, "groups": g, "kept_groups": g}) for g in (1, 8))
    assert one == eight
    yarn = Yarn(40.0, 4096)
    rope = {"theta": 1e4, "layout": "half"}
    ours = settings_of(CONTRACTS["rope.apply"], {**rope, "yarn": yarn})
    theirs = settings_of(CONTRACTS["rope.apply"], {**rope, "yarn": dataclasses.asdict(yarn)})
    assert same_setting(ours, theirs)
    assert not same_setting(ours, theirs | {"yarn": {**theirs["yarn"], "factor": 32.0}})


def test_what_is_not_compared_is_an_argument():
    """Catches a table that a renamed argument has left behind, so that a free choice becomes a fault."""
    for operator, apart in NOT_COMPARED.items():
        assert set(apart) <= {a.name for a in CONTRACTS[operator].args}, operator
