"""GLM-5.3 beside transformers: k-pools with their tail, streams, bounded decay, clamps, shared selection, tower."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from crosscheck import (
    BOUNDS,
    assert_reads_what_upstream_saved,
    assert_upstream_reads_what_we_write,
    error_of_other_reading,
    glm_processor,
    saved_by_upstream,
)
from PIL import Image

from reference.config import Activation
from reference.families.glm5_next import CLIP_MEAN, CLIP_STD
from reference.presets import preset_dir
from reference.vision import preprocess_in_budget

FAMILY = "glm-5.3"


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_reads_what_upstream_saved(tmp_path, dtype):
    """Catches any part of the mathematics, the configuration or the tensor names that is read differently."""
    assert_reads_what_upstream_saved(FAMILY, tmp_path, dtype=dtype)


def test_upstream_reads_what_we_write():
    """Catches names, shapes or keys in our preset that the released family does not have."""
    assert_upstream_reads_what_we_write(FAMILY, preset_dir("tiny-glm-5.3"))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda c: replace(c, index=replace(c.index, pool_tail=False)), id="no tail"),
        pytest.param(lambda c: replace(c, index=replace(c.index, topk=12)), id="topk"),
        pytest.param(lambda c: replace(c, kda=replace(c.kda, gate_lower_bound=None)), id="softplus decay"),
        pytest.param(lambda c: replace(c, residual=replace(c.residual, sinkhorn=2)), id="sinkhorn"),
        pytest.param(lambda c: replace(c, residual=replace(c.residual, hc_eps=1e-2)), id="hc eps"),
        pytest.param(lambda c: replace(c, mla=replace(c.mla, latent_eps=1e-2)), id="latent eps"),
        pytest.param(lambda c: replace(c, activation=Activation("silu")), id="unclamped"),
    ],
)
def test_the_other_reading_is_seen(tmp_path, change):
    """Catches a comparison too weak to see the gotcha: each other reading must miss the bound by far."""
    pair = saved_by_upstream(FAMILY, tmp_path / "model", seed=0, dtype=torch.float64)
    assert error_of_other_reading(pair, lambda c: c) <= 1e-10
    assert error_of_other_reading(pair, change) > 1e-4


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda v: replace(v, limit=1e9), id="unclamped"),
        pytest.param(lambda v: replace(v, rope_theta=10000.0), id="theta"),
        pytest.param(lambda v: replace(v, eps=1e-2), id="eps"),
        pytest.param(lambda v: replace(v, image_mean=(0.5, 0.5, 0.5)), id="mean"),
    ],
)
def test_the_other_reading_of_an_image_is_seen(tmp_path, change):
    """Catches an image comparison too weak to see the tower: each other reading must miss the bound by far."""
    pair = saved_by_upstream(FAMILY, tmp_path / "model", seed=0, dtype=torch.float64)
    assert error_of_other_reading(pair, lambda c: c, kind="image") <= 1e-10
    assert error_of_other_reading(pair, lambda c: replace(c, vision=change(c.vision)), kind="image") > 1e-5


@pytest.mark.parametrize("size", [(1, 1), (13, 700), (28, 28), (29, 57), (300, 40), (333, 500), (64, 64), (111, 1000)])
@pytest.mark.parametrize("budget", [(2, 8), (16, 40)], ids=str)
def test_images_become_upstreams_pixels(size, budget):
    """Catches another size, another resampling, padding after normalisation, or another order inside a patch.

    Upstream lays patches out by merge group, twice for its two frames, and in float32."""
    height, width = size
    generator = np.random.default_rng(height * 1000 + width)
    image = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
    shape = {"patch": 14, "merge": 2, "mean": CLIP_MEAN, "std": CLIP_STD}
    ours, grid = preprocess_in_budget(torch.from_numpy(image), **shape, min_tokens=budget[0], max_tokens=budget[1])
    made = glm_processor(min_tokens=budget[0], max_tokens=budget[1])([Image.fromarray(image)], return_tensors="pt")
    assert grid.tolist() == made["image_grid_thw"][0].tolist()
    _, h, w = grid.tolist()
    theirs = made["pixel_values"].reshape(h // 2, w // 2, 2, 2, 3, 2, -1).transpose(1, 2).reshape(h * w, 3, 2, -1)
    for frame in (0, 1):
        assert torch.allclose(theirs[:, :, frame].flatten(1).double(), ours, atol=1e-6)
