"""Pools from a budget of bytes: what is promised is what is allocated."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.accelerated.budget import Sizes, partition, sizes_of, workspace_rows
from day0check.accelerated.cache import PAGED, STATES, Caches
from day0check.accelerated.host_tier import HostTier
from day0check.accelerated.records import Formats, record_bytes
from day0check.errors import UsageError
from reference.presets import preset

FP8 = Formats(kv="fp8", index="fp8", state="bfloat16")


def allocated(caches, kinds):
    return sum(pool.numel() * pool.element_size() for kind in kinds for pool in getattr(caches, kind).values())


@pytest.mark.parametrize("formats", [Formats(), FP8])
@pytest.mark.parametrize("name", ["tiny", "tiny-glm-5.3"])
def test_the_sizes_are_those_of_the_memory_itself(name, formats):
    """Catches a pool, a layer or a format that the budget forgot."""
    config = preset(name).config()
    sizes = sizes_of(config, page=16, dtype=torch.bfloat16, formats=formats)
    kept = {"cache_bytes": 1 << 20, "snapshot_blocks": 2, "host_bytes": 1 << 19, "prefix_tokens": 40}
    parts = partition(sizes, slots=3, longest=4, **kept)
    like = {"page": 16, "dtype": torch.bfloat16, "device": torch.device("cpu"), "formats": formats}
    like["prefix_tokens"] = parts.prefix_tokens
    caches = Caches(config, pages=parts.pages, slots=parts.slots, snapshots=parts.snapshots, **like)
    assert allocated(caches, PAGED + STATES) + caches.prefix.bytes == parts.device_bytes <= 1 << 20
    dense = "mla" in config.layers
    assert (caches.prefix.bytes > 0, parts.prefix_tokens) == (dense, 40 * dense)
    assert HostTier(caches, pages=parts.host_pages).bytes == parts.host_bytes <= 1 << 19


def test_a_workspace_has_a_row_for_each_request():
    """Catches a prefix workspace that a full step cannot use, and a default that eats a small budget."""
    sizes = Sizes(page=4096, state=100, prefix_row=96)
    with pytest.raises(UsageError, match="3 rows hold none for each of 4"):
        partition(sizes, slots=4, longest=2, prefix_tokens=3)
    assert workspace_rows(sizes, slots=4, positions=1 << 20) == 16384
    assert workspace_rows(sizes, slots=4, positions=1000) == 1000
    assert workspace_rows(sizes, slots=4, positions=1 << 20, asked=77) == 77
    small = workspace_rows(sizes, slots=4, positions=1 << 20, cache_bytes=1 << 18)
    assert 4 < small * 96 <= (1 << 18) // 16
    parts = partition(sizes, slots=4, longest=2, cache_bytes=1 << 18, prefix_tokens=small)
    assert f"a prefix workspace of {small} rows: {small * 96} bytes" in str(parts)
    assert parts.device_bytes <= 1 << 18 < parts.device_bytes + 4096 or parts.pages == 8


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 1 << 16),
    st.integers(0, 1 << 16),
    st.integers(1, 9),
    st.integers(1, 99),
    st.integers(1, 8),
    st.data(),
)
def test_a_budget_is_kept_and_used(page, state, slots, longest, blocks, data):
    """Catches a partition beyond its budget, and one that leaves a page out that would have fitted."""
    every = data.draw(st.sampled_from([None, blocks]))
    budget = data.draw(st.integers(1, 1 << 26))
    try:
        parts = partition(Sizes(page, state), slots=slots, longest=longest, cache_bytes=budget, snapshot_blocks=every)
    except UsageError as error:
        need = int(error.todo.split("at least ")[1].split(",")[0])
        assert need > budget
        enough = partition(Sizes(page, state), slots=slots, longest=longest, cache_bytes=need, snapshot_blocks=every)
        assert enough.device_bytes <= need
        return
    assert parts.device_bytes <= budget
    assert parts.pages >= longest
    more = parts.device_bytes + page + state
    assert more > budget or parts.pages == slots * longest


def test_what_is_said_to_be_enough_is_enough():
    """Catches a share of a state in binary fractions: 45 pages and 45 thirds of 335 bytes were a page short."""
    with pytest.raises(UsageError, match="at least 5405"):
        partition(Sizes(1, 335), slots=1, longest=45, cache_bytes=1, snapshot_blocks=3)
    assert partition(Sizes(1, 335), slots=1, longest=45, cache_bytes=5405, snapshot_blocks=3).pages == 45


def test_published_sizes_of_records():
    """Catches a record with padding, a scale too many, or a rope part in another type."""
    assert record_bytes(512, 64) == 656
    assert record_bytes(128, 0) == 132


def test_without_a_budget_everything_fits():
    """Catches a default that preempts."""
    parts = partition(Sizes(10, 5), slots=4, longest=7)
    assert (parts.pages, parts.snapshots, parts.host_pages) == (28, 0, 0)
    with pytest.raises(UsageError, match="--host-bytes"):
        partition(Sizes(10, 5), slots=4, longest=7, host_bytes=20)
