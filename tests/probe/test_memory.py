"""Counted memory: what is new, what lives, what was there before."""

import torch

from day0check.probe.memory import Allocations


def test_a_new_tensor_is_counted_once_and_its_views_are_not():
    """Catches views and in-place results that count as memory."""
    with Allocations() as taken:
        x = torch.zeros(1000)
        y = x.view(10, 100)[2:].add_(1.0)
    assert taken.made == 1
    assert taken.live_bytes == taken.peak_bytes == 4000
    del x, y


def test_what_was_there_before_counts_nothing():
    """Catches an argument that is taken for a result."""
    x = torch.zeros(1000)
    with Allocations() as taken:
        x.mul_(2.0)
        x.view(-1)
    assert (taken.made, taken.peak_bytes) == (0, 0)


def test_memory_that_was_given_back_is_in_the_peak_alone():
    """Catches a peak that is only what lives at the end, and bytes that are never given back."""
    with Allocations() as taken:
        x = torch.zeros(1000)
        y = x + 1.0
        del x
        z = torch.zeros(10)
    assert taken.live_bytes == 4040
    assert taken.peak_bytes == 8000
    del y, z
    assert taken.live_bytes == 0


def test_the_same_address_after_a_release_is_new_memory():
    """Catches an identity that outlives its storage."""
    with Allocations() as taken:
        for _ in range(5):
            torch.zeros(1000)
    assert taken.made == 5
    assert taken.peak_bytes == 4000
    assert taken.sizes == {4000: 5}


def test_work_is_what_is_read_and_written_and_multiplied():
    """Catches views that count as traffic, and products whose inner size is taken from the wrong operand."""
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    with Allocations() as taken:
        y = a @ b
        y.view(-1)
    assert taken.operations == 2 * 3 * 5 * 7
    assert taken.moved_bytes == 4 * (15 + 35 + 21)
    with Allocations() as taken:
        torch.addmm(torch.ones(7), a, b)
        torch.bmm(a.unsqueeze(0), b.unsqueeze(0))
        y.add_(1.0)
    assert taken.operations == 2 * (2 * 3 * 5 * 7)


def test_a_row_of_a_pool_moves_a_row():
    """Catches a whole pool that counts where one row of it is written or read."""
    pool, at = torch.zeros(1000, 4), torch.tensor([3])
    with Allocations() as taken:
        pool[at] = torch.ones(1, 4)
        pool[at]
    assert taken.moved_bytes <= 4 * (4 + 4) * 3 + 64


def test_what_is_written_in_place_of_a_new_tensor_costs_the_same():
    """Catches an output that counts as read, and memory that counts as work when it is only taken."""
    x = torch.ones(100)
    with Allocations() as taken:
        torch.mul(x, 2.0)
    new = taken.moved_bytes
    with Allocations() as taken:
        torch.mul(x, 2.0, out=torch.empty_like(x))
    assert taken.moved_bytes == new == 800
