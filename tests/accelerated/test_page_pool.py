"""Pages with holders, without a model: who may take what, and when."""

import pytest
import torch

from day0check.accelerated.cache import PagePool
from day0check.accelerated.ops import prefix
from day0check.errors import Unavailable


def let_go(pool, pages):
    numbers = torch.tensor(pages)
    prefix.release(pool.counts, pages=numbers, held=pool.counts[numbers])
    pool.give(pages)


def test_a_page_that_somebody_reads_is_never_taken():
    """Catches a hit that leaves its pages among those that may be given up."""
    pool, forgotten = PagePool(3), []
    known = {}
    pool.known, pool.forget = known.__contains__, lambda page: forgotten.append(known.pop(page))
    table = [pool.take(), pool.take()]
    known.update({page: page for page in table})
    let_go(pool, table)
    assert len(pool) == 3
    pool.hold(table[:1])
    taken = [pool.take(), pool.take()]
    assert table[0] not in taken
    assert forgotten == [table[1]]
    with pytest.raises(Unavailable):
        pool.take()


def test_a_page_is_free_when_its_last_holder_lets_go():
    """Catches a shared page that the first of two requests to end gives away."""
    pool = PagePool(2)
    known = set()
    pool.known, pool.forget = known.__contains__, known.discard
    page = pool.take()
    known.add(page)
    pool.hold([page])
    let_go(pool, [page])
    assert len(pool) == 1
    let_go(pool, [page])
    assert len(pool) == 2


def test_the_end_of_a_sequence_goes_before_its_beginning_and_the_oldest_before_the_latest():
    """Catches an order of giving up that makes every later block of a prefix useless first."""
    pool, gone = PagePool(4), []
    known = set()
    pool.known, pool.forget = known.__contains__, lambda page: (gone.append(page), known.discard(page))
    old, new = [pool.take(), pool.take()], [pool.take(), pool.take()]
    known.update(old + new)
    let_go(pool, old)
    let_go(pool, new)
    for _ in range(4):
        pool.take()
    assert gone == [*reversed(old), *reversed(new)]


def test_unknown_content_is_given_up_first():
    """Catches a cache that forgets prefixes while pages lie free."""
    pool, known = PagePool(3), set()
    pool.known, pool.forget = known.__contains__, lambda page: pytest.fail("a free page was there")
    first, second = pool.take(), pool.take()
    known.add(first)
    let_go(pool, [first])
    let_go(pool, [second])
    assert first not in (pool.take(), pool.take())
