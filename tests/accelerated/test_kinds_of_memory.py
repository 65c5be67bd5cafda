"""The kinds of memory that a schedule may ask for are what their names say."""

from __future__ import annotations

import pytest
import torch

from day0check.accelerated.cache import Caches, Tenancy
from day0check.accelerated.ops import paging
from day0check.accelerated.pool_memory import KINDS, SPARE_PAGES, SPARE_SLOTS
from day0check.errors import InputError
from reference.config import Index, Kda, Mla, ModelConfig

CONFIG = ModelConfig(
    "small",
    hidden=8,
    layers=("kda", "dsa"),
    vocab=10,
    max_positions=99,
    mlp_width=5,
    mla=Mla(heads=2, kv_lora=4, nope=3, rope=2, v=2),
    index=Index(heads=4, dim=2, topk=3),
    kda=Kda(heads=2, dim=3, rank=2),
)


def caches(memory: str) -> Caches:
    return Caches(CONFIG, pages=6, page=4, slots=3, dtype=torch.bfloat16, device=torch.device("cpu"), memory=memory)


def given_out(made: Caches) -> tuple[list[int], int]:
    tenancy = Tenancy(made)
    tenancy.grow(6 * 4)
    return tenancy.table, tenancy.slot


def test_what_nobody_wrote_is_nan_or_garbage():
    """Would catch poison that is not there, so that a check for it proves nothing."""
    for memory in KINDS:
        made = caches(memory)
        for pool in (made.kv[1], made.index[1], made.conv[0], made.kda[0]):
            assert bool(torch.isfinite(pool).all() if memory == "garbage" else torch.isnan(pool).all())


def test_pages_and_slots_are_others_or_at_the_end():
    """Would catch kinds that give the same memory as ever."""
    pages, slot = given_out(caches(""))
    assert sorted(pages) == list(range(6))
    other, _ = given_out(caches("shuffled"))
    assert sorted(other) == list(range(6))
    assert other != pages
    last, last_slot = given_out(caches("end"))
    assert min(last) >= SPARE_PAGES
    assert last_slot >= SPARE_SLOTS > slot


def test_strided_pools_keep_what_is_written():
    """Would catch a write into a copy of a pool that is not contiguous (a stride taken from the shape)."""
    made = caches("strided")
    pool, states = made.kv[1], made.kda[0]
    assert not pool.is_contiguous()
    assert not states.is_contiguous()
    value = torch.arange(18.0).view(3, 6).to(torch.bfloat16)
    paging.write(pool, value=value, slots=torch.tensor([0, 9, 23]))
    table = torch.arange(6).view(1, 6)
    read = paging.gather(pool, table=table, owner=torch.tensor([0]), indices=torch.tensor([[0, 9, 23]]))
    assert torch.equal(read[0], value)
    state = torch.ones(1, 2, 3, 3)
    paging.state_store(states, value=state, slots=torch.tensor([2]))
    assert torch.equal(paging.state_load(states, slots=torch.tensor([2])), state)


def test_another_kind_is_refused():
    """Would catch a misspelt kind that silently means ordinary memory."""
    with pytest.raises(InputError, match="no kind of memory 'poison'"):
        caches("poison")
