"""Pooled index keys on the fast path: which pools a step closes, what waits, and that no schedule changes anything."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.accelerated.batch import Part, make_batch
from day0check.accelerated.engine import Engine
from day0check.accelerated.ops import TABLE
from day0check.accelerated.pools import plan_pools
from day0check.accelerated.scheduler import Scheduler
from day0check.probe.recorder import Caller, Observer, Recorder
from day0check.probe.registry import Operators
from day0check.types import Request, Schedule, ScheduleEvent, Turn
from reference.config import Index, Kda, Mla, ModelConfig, Residual
from reference.model import Model
from reference.presets import recipe_for, values
from reference.tensors import expected_tensors

CPU = torch.device("cpu")
POOL = 4
CONFIG = ModelConfig(
    "pooled",
    64,
    ("kda", "dsa", "dsa_shared", "dsa"),
    128,
    4096,
    96,
    mla=Mla(heads=2, kv_lora=32, nope=8, rope=0, v=8, q_lora=24),
    index=Index(heads=16, dim=16, topk=3 * POOL, pool=POOL),
    kda=Kda(heads=2, dim=16, rank=8, chunk=32),
    residual=Residual("mhc", streams=3, sinkhorn=4),
)


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


# --------------------------------------------------------------------------------------------------------- the plan


@settings(max_examples=60, deadline=None)
@given(
    pool=st.integers(2, 5),
    page=st.integers(1, 9),
    begun=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    counts=st.lists(st.integers(1, 23), min_size=3, max_size=3),
)
def test_a_plan_joins_what_waited_with_what_comes(pool, page, begun, counts):
    """Catches a token in the wrong pool or the wrong place of it, a pool closed early, twice or never, and a token
    that is lost between two steps: every row carries its own position, and pools must hold theirs in order."""
    parts = [
        Part(f"r{b}", (0,) * count, start, tuple(range(-(-(start + count) // (page * pool)))), b, False)
        for b, (start, count) in enumerate(zip(begun, counts, strict=False))
    ]
    plan = plan_pools(make_batch("prefill", parts, page=page * pool, device=CPU), pool=pool, page=page)
    waited = [part.start // pool * pool + j for part in parts for j in range(pool - 1)]
    both = torch.tensor([*waited, *(p for part in parts for p in range(part.start, part.start + len(part.tokens)))])
    whose = torch.tensor(
        [b for b in range(len(parts)) for _ in range(pool - 1)]
        + [b for b, part in enumerate(parts) for _ in part.tokens]
    )
    due = [(b, n) for b, p in enumerate(parts) for n in range(p.start // pool, (p.start + len(p.tokens)) // pool)]
    assert list(zip(plan.owner.tolist(), plan.number.tolist(), strict=True)) == due
    assert plan.members.shape == (len(due), pool)
    for row, (b, n) in enumerate(due):
        assert both[plan.members[row]].tolist() == [n * pool + j for j in range(pool)]
        assert whose[plan.members[row]].tolist() == [b] * pool
        assert plan.closed.address(row) == (f"r{b}", n * pool + pool - 1)
    for b, part in enumerate(parts):
        end = part.start + len(part.tokens)
        left = [row for row in plan.waiting[b].tolist() if row >= 0]
        assert both[left].tolist() == list(range(end // pool * pool, end))
        assert plan.waiting[b, len(left) :].eq(-1).all()
        assert whose[left].tolist() == [b] * len(left)
        seen = plan.history[b]
        assert seen[seen >= 0].tolist() == list(range(end // pool))
    ends = [p + 1 for part in parts for p in range(part.start, part.start + len(part.tokens))]
    assert plan.visible.tolist() == [end // pool for end in ends]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), pool=st.integers(2, 6), k=st.integers(1, 5), tail=st.booleans())
def test_expand_gives_the_tokens_of_the_pools_and_the_tail(seed, pool, k, tail):
    """Catches a pool expanded to its neighbour's tokens, a tail that is too long or shows the future, a -1 that
    becomes tokens."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.randint(0, 40, (9,), generator=generator)
    chosen = torch.full((9, k), -1, dtype=torch.int32)
    for row, seen in enumerate(visible.tolist()):
        picked = torch.randperm(seen // pool, generator=generator)[:k]
        places = torch.randperm(k, generator=generator)[: len(picked)]  # -1 may stand anywhere
        chosen[row, places] = picked.to(torch.int32)
    found = TABLE["dsa.expand"](chosen, visible=visible, pool=pool, tail=tail)
    assert found.dtype == torch.int32
    assert found.shape == (9, k * pool + (pool - 1 if tail else 0))
    for row, seen in enumerate(visible.tolist()):
        due = [p * pool + j for p in chosen[row].tolist() if p >= 0 for j in range(pool)]
        due += range(seen // pool * pool, seen) if tail else []
        assert [t for t in found[row].tolist() if t >= 0] == due


# ------------------------------------------------------------------------------------------------------- the engine


class Rows(Observer):
    """Each row of one tap by (request, position)."""

    def __init__(self, tap: str) -> None:
        self.tap, self.rows = tap, {}

    def after(self, call, token, results):
        if call.tap == self.tap:
            for i, row in enumerate(results[0].clone()):
                self.rows[call.rows.address(i)] = row

    def of(self, request: str) -> torch.Tensor:
        mine = sorted((position, row) for (name, position), row in self.rows.items() if name == request)
        assert [position for position, _ in mine] == list(range(len(mine)))
        return torch.stack([row for _, row in mine])


@pytest.fixture(scope="module")
def engine():
    return Engine(Seeded(CONFIG), dtype=torch.float32, device=CPU)


def text(seed: int, count: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def run(engine, *requests, tap="layers.03.residual.update.mlp", **schedule):
    rows = Rows(tap)
    caller = Caller(Operators(TABLE), Recorder([rows]))
    scheduler = Scheduler(engine, tuple(requests), Schedule(**schedule), caller)
    return scheduler.run(), rows, scheduler


def close(a, b, limit=2e-5):
    assert a.shape == b.shape
    assert bool(a.isfinite().all())
    assert float((a - b).abs().max() / b.abs().max()) < limit


@pytest.mark.parametrize("page", [16, 6])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 15, 16, 17, 31])
def test_chunks_that_cut_pools_and_pages_change_nothing(engine, chunk, page):
    """Catches a key or a gate lost at a chunk's edge, and a pool on the wrong page, also where a page holds no whole
    number of pools."""
    request = Request("a", (Turn(text(1, 62)),))
    _, once, _ = run(engine, request)
    _, pieces, _ = run(engine, request, chunk=chunk, page=page)
    close(pieces.of("a"), once.of("a"))


def test_decode_is_prefill_and_the_reference_at_every_position(engine):
    """Catches a pool closed one token early or late in decode, a tail forgotten, coefficients of the wrong streams."""
    request = Request("a", (Turn(text(2, 21)), Turn(text(3, 6))), max_new_tokens=25)
    outputs, decoded, _ = run(engine, request, page=8)
    sequence = outputs.sequences["a"]
    _, once, _ = run(engine, Request("a", (Turn(sequence[:-1]),)))
    close(decoded.of("a"), once.of("a"))
    _, logits, _ = run(engine, request, page=8, chunk=7, tap="head.logits")
    oracle = Model(Seeded(CONFIG)).forward(list(sequence))
    at = sorted(position for _, position in logits.rows)
    assert len(at) == 50
    close(torch.stack([logits.rows["a", p] for p in at]).double(), oracle[at])


def test_requests_do_not_see_each_others_pools(engine):
    """Catches waiting keys of a slot that the last request left, rows of one request pooled with another's, and a
    preempted request that goes on from what waited."""
    requests = [Request(n, (Turn(text(i, 13 + 9 * i)),), 9, arrive_step=2 * i) for i, n in enumerate("abcd")]
    schedule = {"max_batch": 2, "page": 8, "chunk": 11, "events": (ScheduleEvent(4, "preempt", "b"),)}
    outputs, mixed, _ = run(engine, *requests, **schedule)
    for request in requests:
        alone, own, _ = run(engine, request)
        assert outputs.sequences[request.id] == alone.sequences[request.id]
        close(mixed.of(request.id), own.of(request.id))


def test_the_memory_of_pools_is_what_it_says(engine):
    """Catches an index that keeps a key a token, and waiting keys that are not those of the last tokens."""
    request = Request("a", (Turn(text(5, 18)),), max_new_tokens=2)
    _, keys, _ = run(engine, request, page=8, tap="layers.03.dsa.index_key")
    _, written, scheduler = run(engine, request, page=8, tap="layers.03.dsa.pool_key")
    caches, tenancy = scheduler.caches, scheduler.tenancies["a"]
    assert caches.index[3].shape == (3, 2, 16)
    assert caches.pool[3].shape == (1, 2, POOL - 1, 16)
    assert sorted(position for _, position in written.rows) == [3, 7, 11, 15]
    waiting = caches.pool[3][tenancy.slot, 0]
    assert torch.equal(waiting, torch.stack([keys.rows["a", p] for p in (16, 17, 18)]))


def test_index_keys_of_another_pool_change_the_choice():
    """Catches a model whose selection does not depend on pools at all, in which the tests above would prove little."""
    plain = dataclasses.replace(CONFIG, index=dataclasses.replace(CONFIG.index, topk=10 * POOL))
    request = Request("a", (Turn(text(1, 62)),))
    few = run(Engine(Seeded(CONFIG), dtype=torch.float32, device=CPU), request)[1].of("a")
    many = run(Engine(Seeded(plain), dtype=torch.float32, device=CPU), request)[1].of("a")
    close(few[: 3 * POOL + POOL - 1], many[: 3 * POOL + POOL - 1])
    assert float((few[40:] - many[40:]).abs().max() / many.abs().max()) > 1e-3
