"""The operators of the vision towers of GLM-5.3 and Kimi K2.5 against their definitions, patch by patch in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from day0check.accelerated.ops import TABLE
from day0check.accelerated.ops.vision import budget_size
from day0check.accelerated.vision import place
from day0check.errors import InputError
from reference.config import Vision
from reference.image_grid import grid_in_budget

GRIDS = ((1, 4, 6), (2, 2, 4))
BUDGET = {"patch": 14, "merge": 2, "min_tokens": 4, "max_tokens": 36}


def draw(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def same(found: torch.Tensor, due: torch.Tensor, limit: float = 2e-6) -> None:
    assert found.shape == due.shape
    assert float((found.double() - due).abs().max() / due.abs().max()) < limit


def test_axial_rotation_is_its_definition():
    """Catches rows and columns exchanged, pairs taken as neighbours, positions that run on into the next image."""
    q, d = draw(1, 24 + 16, 3, 8), 8
    places = [(r, c) for t, h, w in GRIDS for _ in range(t) for r in range(h) for c in range(w)]
    due = q.double().clone()
    for patch, place_ in enumerate(places):
        for pair in range(d // 2):
            axis, i = divmod(pair, d // 4)
            angle = place_[axis] * 10000.0 ** (-4 * i / d)
            a, b = q[patch, :, pair].double(), q[patch, :, pair + d // 2].double()
            due[patch, :, pair] = a * math.cos(angle) - b * math.sin(angle)
            due[patch, :, pair + d // 2] = b * math.cos(angle) + a * math.sin(angle)
    same(TABLE["vision.rope_axial"](q, grids=GRIDS, theta=10000.0), due)


def layer_norm(x, weight, bias, eps):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(((x - mean) ** 2).mean(-1, keepdim=True) + eps) * weight + bias


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def test_norm_and_gelu_are_their_definitions():
    """Catches the unbiased variance, an eps outside the root, and the tanh form of gelu."""
    x, weight, bias = draw(2, 5, 6, scale=0.1), draw(3, 6), draw(4, 6)
    due = layer_norm(x.double(), weight.double(), bias.double(), 1e-2)
    same(TABLE["norm.layer"](x, weight=weight, bias=bias, eps=1e-2), due)
    same(TABLE["vision.normed_gelu"](x, weight=weight, bias=bias, eps=1e-2), gelu(due))


def test_gated_mlp_and_plain_projector_are_their_definitions():
    """Catches a clamp on the wrong side, a limit after the activation, a bias left out or added twice."""
    x, limit = draw(5, 7, 6, scale=3.0), 1.5
    w = {part: draw(6 + n, 9, 6) for n, part in enumerate(("gate", "up"))} | {"down": draw(8, 6, 9)}
    b = {f"{part}_bias": draw(9 + n, len(w[part])) for n, part in enumerate(w)}
    g, u = (x.double() @ w[part].double().T + b[f"{part}_bias"] for part in ("gate", "up"))
    g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    due = (g * torch.sigmoid(g) * u) @ w["down"].double().T
    same(TABLE["vision.gated_mlp"](x, **w, **b, limit=limit), due + b["down_bias"])
    g, u = ((x.double() @ w[part].double().T) for part in ("gate", "up"))
    g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    same(TABLE["vision.gated_mlp"](x, **w, limit=limit), (g * torch.sigmoid(g) * u) @ w["down"].double().T)
    w0, w1, b0, b1 = draw(12, 6, 6), draw(13, 4, 6), draw(14, 6), draw(15, 4)
    due = gelu(x.double() @ w0.double().T + b0) @ w1.double().T + b1
    same(TABLE["vision.project_plain"](x, w0=w0, w1=w1, bias0=b0, bias1=b1), due)


def test_a_patch_kernel_summed_over_frames_is_not_rounded():
    """Catches a sum over frames that is cut to the activation type: two equal frames are one product each."""
    x, kernel = draw(16, 3, 12).bfloat16(), draw(17, 5, 2, 12).bfloat16()
    bias = draw(18, 5).bfloat16()
    due = (torch.cat((x, x), 1).double() @ kernel.flatten(1).double().T + bias.double()).bfloat16()
    assert torch.equal(TABLE["vision.patch"](x, weight=kernel.float().sum(1), bias=bias), due)


# ------------------------------------------------------------------------------------------------- images in a budget


@settings(max_examples=300, deadline=None)
@given(width=st.integers(1, 3000), height=st.integers(1, 3000), low=st.integers(0, 9), more=st.integers(0, 60))
def test_sizes_in_a_budget(width, height, low, more):
    """Catches a size that another derivation of the same rules does not give, one beyond the budget, a content that
    does not fit its canvas."""
    high = max(1, low + more)
    settings_ = {"patch": 14, "merge": 2, "min_tokens": low, "max_tokens": high}
    size, (frames, rows, columns) = budget_size(width, height, **settings_)
    due = grid_in_budget(width, height, **settings_)
    assert (frames, *size, rows, columns) == (1, due.width, due.height, due.rows, due.columns)
    assert rows * columns // 4 <= high
    assert size[0] <= columns * 14
    assert size[1] <= rows * 14


def test_pixels_in_a_budget_are_those_of_the_picture():
    """Catches alpha laid over a board instead of dropped, patches in another order, padding that is not zero bytes."""
    down, across = np.indices((48, 70))
    rgba = np.stack((down * 5 % 256, across * 3 % 256, (down + across) % 256, down * 6 % 256), -1).astype(np.uint8)
    mean, std = (0.5, 0.4, 0.3), (0.5, 0.6, 0.7)
    pixels, grid = TABLE["image.preprocess_in_budget"](torch.from_numpy(rgba), **BUDGET, mean=mean, std=std)
    assert grid.tolist() == [1, 4, 6]
    canvas = np.zeros((56, 84, 3))
    canvas[:48, :70] = rgba[..., :3]
    due = [
        [
            (canvas[r * 14 + y, c * 14 + x, n] / 255 - mean[n]) / std[n]
            for n in range(3)
            for y in range(14)
            for x in range(14)
        ]
        for r in range(4)
        for c in range(6)
    ]
    same(pixels, torch.tensor(due))
    small, grid = TABLE["image.preprocess_in_budget"](torch.from_numpy(rgba[:9, :11]), **BUDGET, mean=mean, std=std)
    assert grid.tolist() == [1, 4, 6]  # enlarged to at least four tokens
    enlarged = Image.fromarray(rgba[:9, :11, :3]).resize(budget_size(11, 9, **BUDGET)[0], Image.Resampling.BICUBIC)
    corner = np.asarray(enlarged)[:14, :14].astype(np.float64) / 255
    same(small[0].view(3, 14, 14), torch.from_numpy((corner - mean) / std).permute(2, 0, 1))


def test_pads_are_counted_by_the_rules_of_the_tower():
    """Catches a turn of GLM-5.3 whose pads are counted as MoonViT would."""
    config = Vision(32, 1, 2, 16, 64, kind="glm", min_tokens=4, max_tokens=6, patch_limit=100, side_limit=50)
    image = torch.zeros(140, 140, 3, dtype=torch.uint8)
    pictures = place([image], config, "r", list(range(10, 14)))
    assert pictures.grids == ((1, 4, 4),)
    assert pictures.tokens.position == (10, 11, 12, 13)
    assert pictures.patches[0].position == (10, 10, 11, 11, 10, 10, 11, 11, 12, 12, 13, 13, 12, 12, 13, 13)
    with pytest.raises(InputError, match="fill 4 media pads"):
        place([image], config, "r", list(range(9)))
