"""Memory whose layout an operators file owns, and weights that it repacks: seen by the judge as if they were plain."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from day0check.accelerated.ops import TABLE, WEIGHTS
from day0check.backends.accelerated import Accelerated
from day0check.backends.loader import lay_over, read_operators
from day0check.backends.operators import run_operators
from day0check.backends.reference import Reference
from day0check.compare.local import Judge
from day0check.contracts import CONTRACTS
from day0check.contracts.profiles import PROFILES
from day0check.errors import UsageError
from day0check.probe.recorder import Recorder
from day0check.probe.registry import OwnedPool
from day0check.types import Request, Schedule, Turn
from reference.presets import preset_dir

FILES = Path(__file__).parent.parent / "faults" / "operators"
STEP_DATA = {"splice.merge", "moe.combine", "image.preprocess", "image.preprocess_in_budget", "weights.place"}
REQUEST = Request("a", (Turn(tuple(range(60, 150))),), max_new_tokens=4)


def given(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "ops.py"
    path.write_text(f"import day0check\nimport torch\n\n{source}")
    return path


def loaded(ops: Path, profile: str = "bf16", *, model: str = "tiny") -> Accelerated:
    backend = Accelerated()
    lay_over(backend.operators(), read_operators(str(ops)), path=str(ops), backend="accelerated")
    backend.load(str(preset_dir(model)), profile, "cpu", {})
    return backend


def judged(backend, request=REQUEST, **schedule):
    measures: list = []
    recorder = Recorder([Judge(PROFILES["bf16"], measures.append)])
    outputs = backend.run((request,), Schedule(page=16, **schedule), recorder)
    recorder.end_case()
    return outputs, {(m.tap, m.phase): m for m in measures}


@pytest.fixture(scope="module")
def plain():
    backend = Accelerated()
    backend.load(str(preset_dir("tiny")), "bf16", "cpu", {})
    return judged(backend)


def test_another_layout_changes_nothing_that_anybody_sees(plain):
    """Catches an engine or a judge that reaches into memory that is not its own: digests are those of plain pools."""
    backend = loaded(FILES / "blocked_layout.py")
    outputs, measures = judged(backend)
    assert outputs == plain[0]
    assert {key: m.digest for key, m in measures.items()} == {key: m.digest for key, m in plain[1].items()}
    assert all(m.passed for m in measures.values())
    for operator in ("kv.write", "kv.gather", "index.write", "index.gather", "state.load", "state.store"):
        seen = [m for m in measures.values() if m.operator == operator]
        assert sum(m.rows for m in seen), operator


def test_pools_of_another_layout_are_read_by_position():
    """Catches a reader of the caches that gives the memory's rows instead of the logical ones."""
    owned, own = loaded(FILES / "blocked_layout.py"), Accelerated()
    own.load(str(preset_dir("tiny")), "bf16", "cpu", {})
    for backend in (owned, own):
        backend.run((REQUEST,), Schedule(page=16), Recorder())
    for layer, kind in ((3, "kv"), (3, "index"), (0, "conv"), (0, "kda")):
        at = [0, 15, 16, 80]
        found = owned.pools().read(layer, kind, "a", at)
        assert torch.equal(found, own.pools().read(layer, kind, "a", at)), kind


def test_a_layout_owns_pooled_index_keys_and_what_waits_for_them():
    """Catches pools that are allocated for a key a token, and waiting keys that stay outside the layout."""
    owned, own = loaded(FILES / "blocked_layout.py", model="tiny-glm-5.3"), Accelerated()
    own.load(str(preset_dir("tiny-glm-5.3")), "bf16", "cpu", {})
    outputs, measures = judged(owned, chunk=30)
    plain_outputs, plain_measures = judged(own, chunk=30)
    assert outputs == plain_outputs
    assert {key: m.digest for key, m in measures.items()} == {key: m.digest for key, m in plain_measures.items()}
    assert all(m.passed for m in measures.values())
    caches = owned.pools()._caches
    assert all(isinstance(pool, OwnedPool) for pool in (*caches.index.values(), *caches.pool.values()))
    assert {"layers.03.state.load.pool", "layers.03.state.store.pool", "kv.slots.pool"} <= {tap for tap, _ in measures}
    for kind, at in (("index", [0, 3, 22]), ("pool", [])):
        found = owned.pools().read(3, kind, "a", at)
        assert torch.equal(found, own.pools().read(3, kind, "a", at)), kind
    assert owned.pools().read(3, "index", "a", [22]).shape == (1, 32)


def test_a_layout_that_drops_rows_is_caught_at_the_write():
    """Catches a judge that reads the pool through the candidate's own eyes only: position 15 was never written."""
    _, measures = judged(loaded(FILES / "layout_drops_row.py"))
    failed = sorted((m for m in measures.values() if not m.passed), key=lambda m: m.order)
    assert (failed[0].operator, failed[0].layer, failed[0].position) == ("kv.write", 3, 15)
    assert {m.operator for m in failed} == {"kv.write"}


def test_a_gather_kernel_of_the_layout_is_judged_by_the_layout(tmp_path):
    """Catches a gather that is believed because it reads memory that nobody else understands."""
    source = (FILES / "blocked_layout.py").read_text() + (
        "\n\n@day0check.operator('kv.gather')\n"
        "def gather(pool, *, table, owner, indices):\n"
        "    page, at = pool.page, indices.long().clamp(min=0)\n"
        "    pages = table[owner.clamp(min=0)[:, None], at // page]\n"
        "    rows = pool.memory[:, pages, at % page].permute(1, 2, 0){wrong}\n"
        "    return rows.masked_fill((indices < 0)[..., None], 0)\n"
    )
    for wrong, operators in (("", set()), (".flip(1)", {"kv.gather"})):
        backend = loaded(given(tmp_path, source.replace("{wrong}", wrong)))
        _, measures = judged(backend)
        assert {m.operator for m in measures.values() if not m.passed} == operators


def test_a_fused_kernel_receives_the_pool_of_the_layout(tmp_path):
    """Catches a judge that cannot gather for a fused kernel when the memory is not its own."""
    source = (FILES / "blocked_layout.py").read_text() + (
        "\n\n@day0check.operator('dsa.attention', covers=('kv.gather', 'dsa.attention'))\n"
        "def fused(q, *, pool, table, owner, indices, value_width, scale):\n"
        "    at = indices.long().clamp(min=0)\n"
        "    keys = pool.memory[:, table[owner[:, None], at // pool.page], at % pool.page].permute(1, 2, 0).float()\n"
        "    s = torch.einsum('rhd,rkd->rhk', q.float(), keys) * scale\n"
        "    p = s.masked_fill((indices < 0)[:, None], float('-inf')).softmax(-1).to(q.dtype).float()\n"
        "    return torch.einsum('rhk,rkd->rhd', p, keys[..., :value_width]).to(q.dtype)\n"
    )
    _, measures = judged(loaded(given(tmp_path, source)))
    assert not [m for m in measures.values() if not m.passed]
    assert not [m for m in measures.values() if m.operator == "kv.gather" and m.layer == 3]
    assert measures["layers.03.dsa.attention", "decode"].rows == 3


def test_prepared_kernels_are_ready_and_see_each_place_once(tmp_path):
    """Catches a prepare that is not called, called again at every step, or whose result is not used."""
    backend = loaded(FILES / "prepared_weights.py")
    calls: list[str] = []
    preparers = backend.operators().preparers
    for name, function in list(preparers.items()):
        preparers[name] = lambda name=name, function=function, **weights: calls.append(name) or function(**weights)
    _, measures = judged(backend)
    assert not [m for m in measures.values() if not m.passed]
    places = {name: len({m.tap for m in measures.values() if m.operator == name}) for name in preparers}
    assert places == {"mla.query": 6, "mlp.dense": 1, "moe.experts": 7}
    assert {name: calls.count(name) for name in preparers} == places
    backend.run((REQUEST,), Schedule(), Recorder())
    assert len(calls) == sum(places.values())


def test_unwatched_prepared_experts_are_the_same_experts():
    """Catches a timed run that computes something else than the judged one."""
    backend = loaded(FILES / "prepared_weights.py")
    watched, _ = judged(backend)
    assert backend.run((REQUEST,), Schedule(page=16), Recorder()) == watched


@pytest.mark.parametrize(
    ("name", "site", "spoil"),
    [("mla.query", "down", "weight_t"), ("mlp.dense", "", "both"), ("moe.experts", "", "second")],
)
def test_a_prepare_that_spoils_one_value_is_caught(name, site, spoil):
    """Catches a judge that repeats a call with the weights that the candidate repacked."""
    backend = loaded(FILES / "prepared_weights.py")
    right = backend.operators().preparers[name]

    def wrong(**weights):
        made = right(**weights)
        first = made[spoil].flatten(0, -2)[0]
        first[first.abs().argmax()] *= -1
        if name == "moe.experts":  # of every expert: which of them a text reaches is not the question here
            made[spoil][:, 0, 0] += 1
        return made

    backend.operators().preparers[name] = wrong
    _, measures = judged(backend)
    failed = sorted((m for m in measures.values() if not m.passed), key=lambda m: m.order)
    assert {m.operator for m in failed} == {name}
    assert failed[0].tap.endswith(f"{name}.{site}" if site else name)


def test_an_operator_of_another_phase_keeps_the_originals(tmp_path):
    """Catches our own kernel that is given somebody's repacked weights."""
    source = (
        "@day0check.prepare('mlp.dense')\ndef join(**weights): return {'packed': list(weights.values())}\n\n"
        "@day0check.operator('mlp.dense', phase='decode')\n"
        "def mlp(x, *, packed, **rest):\n"
        "    from day0check.accelerated.ops.spine import mlp\n"
        "    return mlp(x, gate=packed[0], up=packed[1], down=packed[2], **rest)\n"
    )
    _, measures = judged(loaded(given(tmp_path, source)))
    assert not [m for m in measures.values() if not m.passed]


def test_hard_inputs_reach_owned_memory_and_prepared_weights():
    """Catches `run operators` that hands a kernel arguments which it never gets in a model."""
    for file, names in (
        ("blocked_layout.py", ["kv.write", "kv.gather", "index.gather", "state.load", "state.store"]),
        ("prepared_weights.py", ["mla.query"]),
    ):
        backend, measures = Accelerated(), []
        lay_over(backend.operators(), read_operators(str(FILES / file)), path=file, backend="accelerated")
        recorder = Recorder([Judge(PROFILES["bf16"], measures.append)])
        run = run_operators(backend.operators(), recorder, PROFILES["bf16"], names)
        assert run.raised == ()
        assert {m.operator for m in measures} == set(names)
        assert not [m for m in measures if not m.passed]


@pytest.mark.parametrize(
    ("backend", "source", "words"),
    [
        (Accelerated, "@day0check.layout('kv')\nclass L:\n    def allocate(self): pass", "no method 'write'"),
        (Accelerated, "@day0check.layout('kw')\nclass L: pass", "known: index, kv, state"),
        (Accelerated, "@day0check.prepare('mla.query')\ndef p(**_): return {}", "nothing receives"),
        (Accelerated, "@day0check.prepare('dsa.select')\ndef p(**_): return {}", "no operator with weights"),
        (Reference, "@day0check.layout('kv')\nclass L: pass", "no layout 'kv'"),
        (Reference, "@day0check.prepare('mla.query')\ndef p(**_): return {}", "no operator with weights"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path, backend, source, words):
    """Catches a declaration that is silently ignored."""
    path = given(tmp_path, source)
    with pytest.raises(UsageError) as caught:
        lay_over(backend().operators(), read_operators(str(path)), path=str(path), backend="x")
    assert words in str(caught.value)


def test_the_table_of_weights_is_that_of_the_contracts():
    """Catches a weight that `prepare` never gets because the table of the fast path forgot it."""
    due = {
        c.name: tuple(a.name for a in c.args if a.role == "shared" and a.name != "experts")
        for c in CONTRACTS.values()
        if c.name not in STEP_DATA and c.name in TABLE
    }
    assert {name: set(names) for name, names in WEIGHTS.items()} == {n: set(w) for n, w in due.items() if w}


def test_a_dense_fused_kernel_receives_pool_and_pages(tmp_path):
    """Catches an engine that gathers for a dense kernel which covers the gather, and one whose replay is another."""
    source = (
        "@day0check.operator('mla.attention', covers=('kv.gather', 'mla.attention'))\n"
        "def fused(q, *, pool, table, value_width, owner, visible, scale):\n"
        "    keys = pool[table[owner]].flatten(1, 2).float()\n"
        "    future = torch.arange(keys.shape[1]) >= visible[:, None]\n"
        "    keys = keys.masked_fill(future[..., None], 0)\n"
        "    s = torch.einsum('rhd,rkd->rhk', q.float(), keys) * scale\n"
        "    p = s.masked_fill(future[:, None], float('-inf')).softmax(-1).to(q.dtype).float()\n"
        "    return torch.einsum('rhk,rkd->rhd', p, keys[..., :value_width]).to(q.dtype)\n"
    )
    _, measures = judged(loaded(given(tmp_path, source)))
    assert not [m for m in measures.values() if not m.passed]
    dense = [m for m in measures.values() if m.operator == "mla.attention"]
    assert {m.phase for m in dense} == {"prefill", "decode"}
    assert not [m for m in measures.values() if m.operator == "kv.gather" and m.layer in {m.layer for m in dense}]


def test_a_grouped_fused_kernel_receives_pool_and_pages(tmp_path):
    """Catches an engine that gathers for a kernel of grouped queries which covers the gather, a replay of other keys,
    and one under which a wrong page passes: the kernel that reads its last key twice is accused."""
    source = (
        "@day0check.operator('gqa.attention', covers=('kv.gather', 'gqa.attention'))\n"
        "def fused(q, *, pool, table, value_width, owner, visible, scale):\n"
        "    rows = pool[table[owner]].flatten(1, 2).unflatten(-1, (-1, 2 * value_width)).float()\n"
        "    keys, values = rows.split(value_width, -1)\n"
        "    {fault}\n"
        "    future = (torch.arange(keys.shape[1]) >= visible[:, None])[:, None]\n"
        "    keys, values = (t.masked_fill(future[:, 0, :, None, None], 0) for t in (keys, values))\n"
        "    n = q.shape[1] // keys.shape[2]\n"
        "    keys, values = keys.repeat_interleave(n, 2), values.repeat_interleave(n, 2)\n"
        "    s = torch.einsum('rhd,rkhd->rhk', q.float(), keys) * scale\n"
        "    p = s.masked_fill(future, float('-inf')).softmax(-1).to(q.dtype).float()\n"
        "    return torch.einsum('rhk,rkhd->rhd', p, values).to(q.dtype)\n"
    )
    for fault in ("pass", "values = values.roll(1, 1)"):
        _, measures = judged(loaded(given(tmp_path, source.replace("{fault}", fault)), model="fault-gqa"))
        grouped = [m for m in measures.values() if m.operator == "gqa.attention"]
        assert {m.phase for m in grouped} == {"prefill", "decode"}
        assert not any(m.not_judged for m in grouped)
        assert all(m.passed for m in grouped) == (fault == "pass")
        assert not [m for m in measures.values() if m.operator == "kv.gather" and m.layer in {m.layer for m in grouped}]
