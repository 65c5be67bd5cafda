"""K-pool selection of GLM-5.3: tokens of the selected pools, the tail, and pools that grow row by row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.attention import expand_pools
from reference.image_grid import grid_in_budget


def test_a_row_that_ends_a_pool_has_no_tail():
    """Catches a tail that holds a whole pool, a pool counted from 1, and a row that always sees itself."""
    indices = torch.tensor([[1, 0], [1, -1], [-1, -1]], dtype=torch.int32)
    found = expand_pools(indices, visible=torch.tensor([9, 8, 2]), pool=4, tail=True)
    assert found.dtype == torch.int32
    assert found.tolist() == [
        [4, 5, 6, 7, 0, 1, 2, 3, 8, -1, -1],
        [4, 5, 6, 7, -1, -1, -1, -1, -1, -1, -1],
        [-1, -1, -1, -1, -1, -1, -1, -1, 0, 1, -1],
    ]
    assert expand_pools(indices, visible=torch.tensor([9, 8, 2]), pool=4, tail=False).shape == (3, 8)


@settings(max_examples=40, deadline=None)
@given(pool=st.integers(1, 5), visible=st.integers(1, 23), data=st.data())
def test_expanded_positions_are_those_of_the_definition(pool, visible, data):
    """Catches a position beyond the visible ones, one twice, and a tail that is not the visible tokens left over."""
    whole = visible // pool
    chosen = sorted(data.draw(st.sets(st.integers(0, whole - 1), max_size=3))) if whole else []
    indices = torch.tensor([chosen + [-1] * (3 - len(chosen))], dtype=torch.int32)
    found = expand_pools(indices, visible=torch.tensor([visible]), pool=pool, tail=True)[0].tolist()
    kept = [position for position in found if position >= 0]
    assert len(found) == 3 * pool + pool - 1
    assert sorted(kept) == sorted([p for p in range(visible) if p // pool in chosen or p >= whole * pool])


@settings(max_examples=80, deadline=None)
@given(width=st.integers(1, 3000), height=st.integers(1, 3000), low=st.integers(1, 16), more=st.integers(0, 64))
def test_images_lie_in_their_budget(width, height, low, more):
    """Catches content larger than its canvas, a canvas over the budget, and an image enlarged without need."""
    grid = grid_in_budget(width, height, patch=14, merge=2, min_tokens=low, max_tokens=low + more)
    assert 1 <= grid.tokens <= low + more
    assert grid.tokens * 4 == grid.rows * grid.columns
    assert 1 <= grid.width <= grid.columns * 14
    assert 1 <= grid.height <= grid.rows * 14
    if width * height >= low * 28 * 28:
        assert grid.width <= width
        assert grid.height <= height


@pytest.mark.parametrize(("width", "height", "budget"), [(0, 5, 4), (5, 0, 4), (5, 5, 0)])
def test_an_image_that_cannot_be_fitted_is_refused(width, height, budget):
    """Catches a division by zero instead of a message."""
    with pytest.raises(ValueError, match=r"empty|budget"):
        grid_in_budget(width, height, patch=14, merge=2, min_tokens=0, max_tokens=budget)
