"""Kimi K2.5 beside transformers: DeepSeek-V3 text, MoonViT with LayerNorms, biases and a norm before its projector."""

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

from reference.presets import preset_dir

FAMILY = "kimi-k2.5"


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_reads_what_upstream_saved(tmp_path, dtype):
    """Catches any part of the mathematics, the configuration or the tensor names that is read differently."""
    assert_reads_what_upstream_saved(FAMILY, tmp_path, dtype=dtype)


def test_upstream_reads_what_we_write():
    """Catches names, shapes or keys in our preset that the released family does not have."""
    assert_upstream_reads_what_we_write(FAMILY, preset_dir("tiny-kimi-k2.5"))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda v: replace(v, interpolation="bilinear"), id="bilinear table"),
        pytest.param(lambda v: replace(v, rope_theta=10000.0), id="theta"),
        pytest.param(lambda v: replace(v, eps=1e-2), id="eps"),
        pytest.param(lambda v: replace(v, projector_eps=1e-1), id="projector eps"),
        pytest.param(lambda v: replace(v, bias=False), id="biases"),
    ],
)
def test_the_other_reading_of_an_image_is_seen(tmp_path, change):
    """Catches an image comparison too weak to see the tower: each other reading must miss the bound by far."""
    pair = saved_by_upstream(FAMILY, tmp_path / "model", seed=0, dtype=torch.float64)
    assert error_of_other_reading(pair, lambda c: c, kind="image") <= 1e-10
    assert error_of_other_reading(pair, lambda c: replace(c, vision=change(c.vision)), kind="image") > 1e-5


def test_the_other_reading_of_yarn_is_seen(tmp_path):
    """Catches mscale squared left out of the softmax, which nothing but the scale shows."""
    pair = saved_by_upstream(FAMILY, tmp_path / "model", seed=0, dtype=torch.float64)

    def without_mscale(config):
        return replace(
            config, rope=replace(config.rope, yarn=replace(config.rope.yarn, mscale=0.0, mscale_all_dim=0.0))
        )

    assert error_of_other_reading(pair, without_mscale) > 1e-4
