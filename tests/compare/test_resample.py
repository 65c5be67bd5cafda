"""Pixels by other implementations of the claimed bicubic rule pass; another rule or other colours do not."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from day0check.compare.replay import Replay
from day0check.compare.resample import judge_resampled
from day0check.contracts import CONTRACTS
from reference.resample import axis_weights, resized
from reference.vision import preprocess

SETTINGS = {
    "patch": 4,
    "merge": 2,
    "patch_limit": 120,
    "side_limit": 1000,
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.4, 0.6),
}


def picture(height: int, width: int, seed: int, channels: int = 3) -> torch.Tensor:
    """A smooth picture with hard edges in black and white, whose resampling overshoots."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / 9.0
    levels = 127 + 90 * np.sin(x + generator.uniform(0, 6)) * np.cos(0.7 * y) + generator.normal(0, 6, (height, width))
    levels[height // 3 : height // 2, width // 4 : width // 2] = 255
    levels[height // 2 :, : width // 5] = 0
    colours = np.stack([np.roll(levels, 3 * c, 1) for c in range(channels)], -1)
    return torch.from_numpy(colours.clip(0, 255).astype(np.uint8))


def by_torch(image, width, height, mode="bicubic", antialias=True):
    x = image.permute(2, 0, 1)[None].float()
    y = torch.nn.functional.interpolate(x, size=(height, width), mode=mode, antialias=antialias)
    return y[0].permute(1, 2, 0)


def by_codes(image, width, height):
    """torch's own path for bytes, with weights of few bits."""
    x = image.permute(2, 0, 1)[None].contiguous(memory_format=torch.channels_last)
    return torch.nn.functional.interpolate(x, size=(height, width), mode="bicubic", antialias=True)[0].permute(1, 2, 0)


def by_pil(image, width, height):
    return torch.from_numpy(np.array(Image.fromarray(image.numpy()).resize((width, height), Image.Resampling.BICUBIC)))


LEGAL = {
    "pil": by_pil,
    "torch, rounded": lambda *a: by_torch(*a).round().clamp(0, 255),
    "torch, not rounded": lambda *a: by_torch(*a).clamp(0, 255),
    "torch, bytes": by_codes,
    "rows first": lambda i, w, h: resized(
        i, height=h, width=w, rows_first=True, cut=True, round=lambda _, x: (x + 0.5).floor()
    ),
}
WRONG = {
    "bilinear": lambda *a: by_torch(*a, mode="bilinear").round(),
    "no antialiasing": lambda *a: by_torch(*a, antialias=False).round().clamp(0, 255),
    "cut off": lambda *a: by_torch(*a).clamp(0, 255).floor(),
    "blue first": lambda *a: by_pil(*a).flip(-1),
    "one column on": lambda *a: by_pil(*a).roll(1, 1),
    "one bright pixel": lambda *a: by_pil(*a).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(9).byte()),
}


def judged(image, made, **changes):
    """The judgement of pixels that the reference makes of levels which already have their size."""
    grid = judge_grid(image)
    levels = made(image, grid[1], grid[0])
    canvas = torch.zeros(grid[2], grid[3], 3, dtype=torch.float64)
    canvas[: grid[0], : grid[1]] = levels
    at = {**SETTINGS, **changes}
    x = (canvas / 255 - torch.tensor(at["mean"])) / torch.tensor(at["std"])
    patch = at["patch"]
    rows, columns = grid[2] // patch, grid[3] // patch
    x = x.reshape(rows, patch, columns, patch, 3).permute(0, 2, 4, 1, 3).reshape(rows * columns, -1)
    replay = Replay(CONTRACTS["image.preprocess"], {"image": image, **SETTINGS})
    return judge_resampled(replay, (x.float(), torch.tensor([1, rows, columns])))


def judge_grid(image):
    from day0check.compare.resample import grid_of

    grid = grid_of("image.preprocess", image, SETTINGS)
    return grid.height, grid.width, grid.rows * SETTINGS["patch"], grid.columns * SETTINGS["patch"]


@pytest.mark.parametrize("size", [(80, 120), (97, 61), (53, 200)])
@pytest.mark.parametrize("made", LEGAL)
def test_any_implementation_of_the_rule_passes(made, size):
    """Catches a law that knows one library's bytes, one order of the axes, or no overshoot."""
    for seed in range(3):
        pixels, grid = judged(picture(*size, seed), LEGAL[made])
        assert pixels.passed, (pixels.message, pixels.statistics)
        assert grid.passed


@pytest.mark.parametrize("made", WRONG)
def test_what_is_another_rule_is_found(made):
    """Catches a claim that lets more through than the rule: it would hide a resampler that is wrong."""
    pixels, _ = judged(picture(97, 121, 1), WRONG[made])
    assert not pixels.passed, pixels.statistics
    assert pixels.message


def test_other_constants_are_found():
    """Catches normalisation by other constants that passes for resampling noise."""
    pixels, _ = judged(picture(97, 121, 1), LEGAL["pil"], mean=(0.48, 0.46, 0.41))
    assert not pixels.passed


def test_what_nobody_resamples_is_left_to_the_bytes():
    """Catches alpha, or an image that keeps its size, that is judged by a law which does not hold for it."""
    small = picture(16, 16, 0)
    assert judge_resampled(Replay(CONTRACTS["image.preprocess"], {"image": small, **SETTINGS}), ()) is None
    alpha = picture(97, 121, 0, channels=4)
    results = preprocess(alpha, **SETTINGS)
    assert judge_resampled(Replay(CONTRACTS["image.preprocess"], {"image": alpha, **SETTINGS}), results) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(0, 255))
def test_weights_keep_a_plain_picture(before, after, level):
    """Catches weights that do not sum to one at an edge, or where an axis hardly has places."""
    weights = axis_weights(before, after)
    assert weights.shape == (after, before)
    assert torch.allclose(weights.sum(1), torch.ones(after, dtype=torch.float64))
    assert torch.allclose(
        weights @ torch.full((before,), float(level), dtype=torch.float64), torch.tensor(float(level)).double()
    )
