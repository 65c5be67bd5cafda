"""Kimi K2.5 beside transformers: DeepSeek-V3 text, MoonViT with LayerNorms, biases and a norm before its projector."""

from dataclasses import replace

import pytest
import torch
from crosscheck import (
    BOUNDS,
    assert_reads_what_upstream_saved,
    assert_upstream_reads_what_we_write,
    clip_features,
    error_of_other_reading,
    relative_error,
    saved_by_upstream,
)

from reference import vision
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


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_clips_of_several_frames(tmp_path, dtype):
    """Catches a temporal part that stills get too, that the first frame of a clip does not get or whose two halves are
    changed over, frames that do not see each other, and a merger that does not average them."""
    pair = saved_by_upstream(FAMILY, tmp_path / "model", seed=0, dtype=dtype)
    ours, theirs = clip_features(pair, seed=3)
    assert ours.shape == theirs.shape
    assert relative_error(ours, theirs) <= BOUNDS[dtype]


def test_the_other_reading_of_a_clip_is_seen(tmp_path, monkeypatch):
    """Catches a comparison of clips that would not see the temporal part: cosine before sine, and none at all."""
    pair = saved_by_upstream(FAMILY, tmp_path / "model", seed=0, dtype=torch.float64)
    temporal = vision._temporal
    for other in (
        lambda frames, width: temporal(frames, width).roll(width // 2, 1),
        lambda frames, width: 0 * temporal(frames, width),
    ):
        monkeypatch.setattr(vision, "_temporal", other)
        assert relative_error(*clip_features(pair, seed=3)) > 1e-4


def test_the_other_reading_of_yarn_is_seen(tmp_path):
    """Catches mscale squared left out of the softmax, which nothing but the scale shows."""
    pair = saved_by_upstream(FAMILY, tmp_path / "model", seed=0, dtype=torch.float64)

    def without_mscale(config):
        return replace(
            config, rope=replace(config.rope, yarn=replace(config.rope.yarn, mscale=0.0, mscale_all_dim=0.0))
        )

    assert error_of_other_reading(pair, without_mscale) > 1e-4
