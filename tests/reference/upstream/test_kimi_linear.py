"""Kimi Linear beside transformers: softplus decay, low-rank gates, lists that count from 1, no query latent."""

from dataclasses import replace

import pytest
import torch
from crosscheck import (
    BOUNDS,
    assert_reads_what_upstream_saved,
    assert_upstream_reads_what_we_write,
    error_of_other_reading,
    saved_by_upstream,
)

from reference.config import Rope
from reference.presets import preset_dir

FAMILY = "kimi-linear"


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_reads_what_upstream_saved(tmp_path, dtype):
    """Catches any part of the mathematics, the configuration or the tensor names that is read differently."""
    assert_reads_what_upstream_saved(FAMILY, tmp_path, dtype=dtype)


def test_upstream_reads_what_we_write():
    """Catches names, shapes or keys in our preset that the released family does not have."""
    assert_upstream_reads_what_we_write(FAMILY, preset_dir("tiny-kimi-linear"))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda c: replace(c, kda=replace(c.kda, gate_lower_bound=-5.0)), id="bounded decay"),
        pytest.param(lambda c: replace(c, rope=Rope("interleaved", theta=256.0)), id="rotated"),
        pytest.param(lambda c: replace(c, mla=replace(c.mla, latent_eps=1e-2)), id="latent eps"),
        pytest.param(lambda c: replace(c, moe=replace(c.moe, groups=1, kept_groups=1)), id="groups"),
        pytest.param(lambda c: replace(c, moe=replace(c.moe, scale=1.0)), id="routed scale"),
    ],
)
def test_the_other_reading_is_seen(tmp_path, change):
    """Catches a comparison too weak to see the gotcha: each other reading must miss the bound by far."""
    pair = saved_by_upstream(FAMILY, tmp_path / "model", seed=0, dtype=torch.float64)
    assert error_of_other_reading(pair, lambda c: c) <= 1e-10
    assert error_of_other_reading(pair, change) > 1e-4
