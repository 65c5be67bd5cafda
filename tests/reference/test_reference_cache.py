"""Paged caches against a dictionary of (request, position), and what the read-back functions must notice."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import cache

DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.uint8]


def rows_of(count, width, dtype=torch.float64, seed=0):
    values = torch.randint(1, 100, (count, width), generator=torch.Generator().manual_seed(seed))
    return values.to(torch.uint8).view(dtype) if dtype == torch.float8_e4m3fn else values.to(dtype)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.data())
def test_slots_by_position(page, pages, batch, data):
    """Catches page and offset exchanged, another request's table, and a slot for padding or past the table."""
    table = torch.tensor([[data.draw(st.integers(-1, 50)) for _ in range(pages)] for _ in range(batch)])
    rows = data.draw(st.lists(st.tuples(st.integers(-1, batch - 1), st.integers(-1, page * pages + 1)), min_size=1))
    owner, positions = (torch.tensor([r[i] for r in rows]) for i in (0, 1))
    got = cache.slots(table, owner=owner, positions=positions, page=page).tolist()
    for (b, p), slot in zip(rows, got, strict=True):
        there = b >= 0 and 0 <= p < page * pages and int(table[b, p // page]) >= 0
        assert slot == (int(table[b, p // page]) * page + p % page if there else -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_written_at_a_position_is_gathered_there(dtype):
    """Catches a shuffled table read in order, rows of a neighbour, and -1 that gives the last row, in every dtype."""
    page, width = 4, 3
    table = torch.tensor([[5, 0, 3], [1, 4, -1]])
    owner = torch.tensor([0] * 9 + [1] * 6 + [-1])
    positions = torch.tensor([*range(9), *range(6), 0])
    value = rows_of(16, width, dtype)
    pool = rows_of(6 * page, width, dtype, seed=1).reshape(6, page, width)
    before = pool.clone().view(torch.uint8)
    at = cache.slots(table, owner=owner, positions=positions, page=page)
    assert cache.write(pool, value=value, slots=at) is None
    found, expected = cache.written(pool, value=value, slots=at)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert len(found) == 15
    untouched = [s for s in range(6 * page) if s not in at.tolist()]
    flat = pool.view(torch.uint8).reshape(6 * page, -1)
    assert torch.equal(flat[untouched], before.reshape(6 * page, -1)[untouched])
    indices = torch.tensor([[8, -1, 0], [2, 5, -1], [0, 1, 2]], dtype=torch.int32)
    y = cache.gather(pool, table=table, owner=torch.tensor([0, 1, -1]), indices=indices)
    assert y.dtype == dtype
    zero = torch.zeros(1, width, dtype=torch.uint8).to(dtype)[0]
    wanted = [[value[8], zero, value[0]], [value[9 + 2], value[9 + 5], zero], [zero] * 3]
    for r in range(3):
        for j in range(3):
            assert torch.equal(y[r, j].view(torch.uint8), wanted[r][j].view(torch.uint8))


def test_gather_past_the_table_gives_zeros_and_nan_does_not_spread():
    """Catches 0 x NaN for index -1 when the slot it is clamped to holds NaN."""
    pool = torch.full((2, 2, 3), torch.nan)
    y = cache.gather(pool, table=torch.tensor([[0, -1]]), owner=torch.tensor([0]), indices=torch.tensor([[-1, 2, 9]]))
    assert torch.equal(y, torch.zeros(1, 3, 3))


def test_read_back_notices_a_write_that_did_not_happen():
    """Catches a read-back that compares the value with itself."""
    pool, value, slots = torch.zeros(2, 2, 3), rows_of(2, 3).float(), torch.tensor([3, -1])
    assert not torch.equal(*cache.written(pool, value=value, slots=slots))
    cache.write(pool, value=value, slots=slots)
    assert torch.equal(*cache.written(pool, value=value, slots=slots))
    pool[1, 1, 2] += 1
    assert not torch.equal(*cache.written(pool, value=value, slots=slots))


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 3)])
def test_states_are_loaded_and_stored_by_slot(shape):
    """Catches a fresh state that is the last slot's, slots exchanged, and a transposed state."""
    pool = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([2, -1, 0])
    state = cache.state_load(pool, slots=slots)
    assert torch.equal(state[0], pool[2])
    assert torch.equal(state[2], pool[0])
    assert state[1].abs().sum() == 0
    before, value = pool.clone(), state + 1
    assert cache.state_store(pool, value=value, slots=slots) is None
    assert torch.equal(pool[2], value[0])
    assert torch.equal(pool[0], value[2])
    assert torch.equal(pool[[1, 3]], before[[1, 3]])
    assert torch.equal(*cache.state_stored(pool, value=value, slots=slots))
    pool[0] = before[0]
    assert not torch.equal(*cache.state_stored(pool, value=value, slots=slots))
