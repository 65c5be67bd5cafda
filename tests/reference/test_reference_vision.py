"""Vision operators against loops from their definitions, preprocessing against hand-made images, the splice."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from reference import vision
from reference.config import Vision
from reference.image_grid import image_grid

K3 = Vision(hidden=1024, layers=27, heads=12, head_dim=128, mlp=4096)
LIMITS = dict(patch=14, merge=2, patch_limit=144, side_limit=16, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------- sizes and pixels


@pytest.mark.parametrize(
    ("size", "resized", "patches", "tokens"),
    [
        ((28, 28), (28, 28), (2, 2), 1),
        ((1, 1), (1, 1), (2, 2), 1),
        ((29, 57), (29, 57), (6, 4), 6),
        ((3584, 3584), (3584, 3584), (256, 256), 16384),  # 65,536 patches, exactly the limit
        ((7169, 14), (7168, 13), (2, 512), 256),  # the side limit, and each axis cut to whole pixels
        ((1889, 7153), (1849, 7004), (502, 134), 16817),
    ],
)
def test_image_grid_by_hand(size, resized, patches, tokens):
    """Catches a swap of width and height, enlarging, padding to patches and not to groups, or the limit after
    padding: the last image has fewer patches than the limit before padding and more than the limit after it."""
    grid = image_grid(*size, K3)
    assert ((grid.width, grid.height), (grid.rows, grid.columns), grid.tokens) == (resized, patches, tokens)


@settings(max_examples=200, deadline=None)
@given(width=st.integers(1, 20000), height=st.integers(1, 20000))
def test_image_grid_properties(width, height):
    """Catches an image that grows, escapes the side limit or loses its whole merge groups at some odd size."""
    grid = image_grid(width, height, K3)
    assert 1 <= grid.width <= min(width, 7168)
    assert 1 <= grid.height <= min(height, 7168)
    assert grid.rows % 2 == grid.columns % 2 == 0
    assert 0 <= grid.rows * 14 - grid.height < 28
    assert 0 <= grid.columns * 14 - grid.width < 28
    assert grid.tokens * 4 == grid.rows * grid.columns
    # the scale counts whole patches only, so 3423 x 6165 keeps 65,704 of them
    slack = (1 + 1 / max(1, width // 14)) * (1 + 1 / max(1, height // 14))
    assert (grid.width // 14) * (grid.height // 14) <= 65536 * slack


def test_empty_images_are_refused():
    """Catches a division by zero."""
    with pytest.raises(ValueError, match="0x5"):
        image_grid(0, 5, K3)


def test_pixels_patch_by_patch():
    """Catches a transposed image, channels last inside a patch, padding that is gray (0.0) and not black (-1.0), and
    patches in another order than rows of patches."""
    image = torch.randint(0, 256, (30, 20, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    pixels, grid = vision.preprocess(image, **LIMITS)
    assert grid.tolist() == [1, 4, 2]
    for row in range(4):
        for column in range(2):
            patch = pixels[row * 2 + column].reshape(3, 14, 14)
            for channel, y, x in np.ndindex(3, 14, 14):
                at = (row * 14 + y, column * 14 + x)
                inside = at[0] < 30 and at[1] < 20
                byte = int(image[at][channel]) if inside else 0
                assert patch[channel, y, x].item() == pytest.approx(byte / 127.5 - 1, abs=1e-12)


def test_large_images_are_resized_by_pil():
    """Catches another filter, a resize without antialiasing, or one that does not round to bytes."""
    noise = torch.randint(0, 256, (500, 300, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    grid = vision.grid_within(300, 500, patch=14, merge=2, patch_limit=144, side_limit=16)
    expected = np.asarray(Image.fromarray(noise.numpy()).resize((grid.width, grid.height), Image.Resampling.BICUBIC))
    pixels, thw = vision.preprocess(noise, **LIMITS)
    picture = pixels.reshape(grid.rows, grid.columns, 3, 14, 14).permute(0, 3, 1, 4, 2)
    picture = picture.reshape(grid.rows * 14, grid.columns * 14, 3)[: grid.height, : grid.width]
    assert thw.tolist() == [1, grid.rows, grid.columns]
    assert np.array_equal(((picture + 1) * 127.5).round().to(torch.uint8).numpy(), expected)


def test_gray_is_three_equal_channels():
    """Catches a gray image read as one channel of red."""
    gray = torch.arange(28 * 28, dtype=torch.int64).remainder(256).to(torch.uint8).reshape(28, 28, 1)
    pixels, _ = vision.preprocess(gray, **LIMITS)
    channels = pixels.reshape(-1, 3, 14, 14)
    assert torch.equal(channels[:, 0], channels[:, 1])
    assert torch.equal(channels[:, 0], channels[:, 2])
    assert channels[0, 0, 0, 5] == 5 / 127.5 - 1


def test_alpha_lies_over_a_chessboard():
    """Catches alpha that is dropped (black where nothing is), a board of other squares or shades, or one that starts
    with gray, and rounding where the result is cut."""
    image = torch.zeros(28, 28, 4, dtype=torch.uint8)
    image[:, 14:] = torch.tensor([200, 100, 50, 255])
    image[20, 3] = torch.tensor([201, 0, 0, 128])
    pixels, _ = vision.preprocess(image, **LIMITS)
    bytes_ = ((pixels.reshape(2, 2, 3, 14, 14).permute(0, 3, 1, 4, 2).reshape(28, 28, 3) + 1) * 127.5).round()
    assert bytes_[0, 0].tolist() == [255, 255, 255]
    assert bytes_[0, 8].tolist() == [180, 180, 180]
    assert bytes_[8, 0].tolist() == [180, 180, 180]
    assert bytes_[9, 9].tolist() == [255, 255, 255]
    assert bytes_[5, 20].tolist() == [200, 100, 50]
    # over white, (20 // 8 + 3 // 8) is even; 255 (1 - 128/255) is 126.99999 in float32 and is cut to 126
    assert bytes_[20, 3].tolist() == [227, 126, 126]


def test_files_of_every_mode(tmp_path):
    """Catches a mode that crashes, and a palette with transparency that loses it."""
    for mode, channels in (("L", 1), ("LA", 2), ("RGB", 3), ("RGBA", 4), ("1", 3), ("I;16", 3)):
        Image.new(mode, (5, 7)).save(tmp_path / f"{channels}{len(mode)}.png")
        assert vision.read_image(tmp_path / f"{channels}{len(mode)}.png").shape == (7, 5, channels)
    Image.new("CMYK", (5, 7)).save(tmp_path / "c.jpg")
    assert vision.read_image(tmp_path / "c.jpg").shape == (7, 5, 3)
    palette = Image.new("P", (5, 7))
    palette.save(tmp_path / "p.png")
    assert vision.read_image(tmp_path / "p.png").shape == (7, 5, 3)
    palette.save(tmp_path / "t.png", transparency=0)
    assert vision.read_image(tmp_path / "t.png").shape == (7, 5, 4)


# ------------------------------------------------------------------------------------------------------- the tower


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("grid", [(8, 8), (4, 12), (2, 2), (9, 7), (30, 1)])
def test_position_table_is_interpolated_as_torch_does(mode, grid):
    """Catches aligned corners, antialiasing, swapped axes, and an interpolation of a grid that fits."""
    table, x = normal(8, 8, 6, seed=1), normal(grid[0] * grid[1], 6, seed=2)
    y = vision.add_position(x, table=table, grids=((1, *grid),), mode=mode)
    upstream = F.interpolate(table.permute(2, 0, 1)[None], size=grid, mode=mode, align_corners=False)
    assert torch.allclose(y - x, upstream[0].permute(1, 2, 0).reshape(-1, 6), atol=1e-12)


def test_positions_of_clips_and_several_images():
    """Catches a temporal part on stills, none on frame 0 of a clip (cos 0 = 1), and grids that run into each other."""
    table = normal(4, 4, 6)
    grids = ((1, 4, 4), (2, 2, 4))
    y = vision.add_position(torch.zeros(32, 6, dtype=torch.float64), table=table, grids=grids, mode="bilinear")
    assert torch.equal(y[:16], table.reshape(16, 6))
    frames = y[16:].reshape(2, 8, 6)
    still = vision.add_position(
        torch.zeros(8, 6, dtype=torch.float64), table=table, grids=((1, 2, 4),), mode="bilinear"
    )
    for frame in (0, 1):
        angles = [frame * 10000 ** (-i / 3) for i in range(3)]
        part = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)
        assert torch.allclose(frames[frame], still + part, atol=1e-12)


def test_rope_2d_pair_by_pair():
    """Catches row and column swapped, half layout, positions that run on over images or frames."""
    grids, d = ((1, 2, 3), (2, 2, 2)), 16
    x = normal(14, 2, d)
    y = vision.rope_2d(x, grids=grids, theta=10000.0)
    places = [(r, c) for t, h, w in grids for _ in range(t) for r in range(h) for c in range(w)]
    for patch, (row, column) in enumerate(places):
        for pair in range(d // 2):
            frequency = 10000.0 ** (-4 * (pair // 2) / d)
            angle = (row if pair % 2 else column) * frequency
            a, b = x[patch, :, 2 * pair], x[patch, :, 2 * pair + 1]
            turned = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
            assert torch.allclose(y[patch, :, 2 * pair], turned[0], atol=1e-6)
            assert torch.allclose(y[patch, :, 2 * pair + 1], turned[1], atol=1e-6)
    assert torch.equal(y[0], x[0])


def test_attention_stays_inside_an_image():
    """Catches causal masks, attention across images, a scale of another width."""
    q, k, v = normal(7, 2, 4, seed=1), normal(7, 2, 4, seed=2), normal(7, 2, 4, seed=3)
    y = vision.attention(q, k=k, v=v, offsets=torch.tensor([0, 3, 7]), scale=0.5)
    for patch in range(7):
        own = range(3) if patch < 3 else range(3, 7)
        for head in range(2):
            weight = [math.exp(0.5 * float(q[patch, head] @ k[other, head])) for other in own]
            mean = sum(w * v[other, head] for w, other in zip(weight, own, strict=True)) / sum(weight)
            assert torch.allclose(y[patch, head], mean, atol=1e-12)


def test_mlp_and_project_use_their_own_gelu():
    """Catches the tanh form where erf belongs and the reverse, and a projector that forgets its norm."""
    x, fc0, fc1 = normal(3, 4, seed=1) * 2, normal(8, 4, seed=2), normal(4, 8, seed=3)
    hidden = x @ fc0.T
    tanh = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
    assert torch.allclose(vision.mlp(x, fc0=fc0, fc1=fc1), tanh @ fc1.T, atol=1e-12)
    erf = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
    y = erf @ fc1.T
    weight = normal(4, seed=4)
    expected = y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert torch.allclose(vision.project(x, w0=fc0, w1=fc1, norm_weight=weight, eps=1e-5), expected, atol=1e-12)
    biased = vision.mlp(x, fc0=fc0, fc1=fc1, bias0=torch.zeros(8), bias1=torch.ones(4))
    assert torch.allclose(biased, tanh @ fc1.T + 1, atol=1e-12)


def test_merge_order_by_hand():
    """Catches groups column-major, (kw, kh) inside a group, or frames that are summed and not averaged."""
    x = torch.arange(24.0)[:, None]
    y = vision.merge_patches(x, grids=((1, 4, 2), (2, 2, 4)), merge=2)
    assert y[:2].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    first, second = torch.arange(8.0, 16), torch.arange(16.0, 24)
    mean = ((first + second) / 2).reshape(2, 4)
    assert y[2].tolist() == [mean[0, 0], mean[0, 1], mean[1, 0], mean[1, 1]]
    assert y[3].tolist() == [mean[0, 2], mean[0, 3], mean[1, 2], mean[1, 3]]


def test_rounding_points_are_those_of_the_contracts():
    """Catches a point that is missing, renamed or called out of order: comparisons round there and nowhere else."""
    from day0check.contracts import CONTRACTS

    seen = []

    def spy(point, value):
        seen.append(point)
        return value

    x, square = normal(4, 8), normal(8, 8)
    grid = ((1, 2, 2),)
    heads = x.reshape(4, 2, 4)
    calls = {
        "image.preprocess": lambda: vision.preprocess(torch.zeros(28, 28, 3, dtype=torch.uint8), **LIMITS, round=spy),
        "vision.position": lambda: vision.add_position(
            x, table=normal(2, 2, 8), grids=grid, mode="bilinear", round=spy
        ),
        "vision.rope": lambda: vision.rope_2d(heads, grids=grid, theta=10000.0, round=spy),
        "vision.attention": lambda: vision.attention(
            heads, k=heads, v=heads, offsets=torch.tensor([0, 4]), scale=1.0, round=spy
        ),
        "vision.mlp": lambda: vision.mlp(x, fc0=square, fc1=square, round=spy),
        "vision.project": lambda: vision.project(x, w0=square, w1=square, norm_weight=x[0], eps=1e-5, round=spy),
    }
    for name, call in calls.items():
        seen.clear()
        call()
        assert tuple(seen) == CONTRACTS[name].points, name


# ---------------------------------------------------------------------------------------------------------- splice


def test_splice_over_chunks():
    """Catches features that start over in the second chunk of an image, or that are counted by row."""
    ids = torch.tensor([5, 9, 9, 7, 9, 3])
    at, feature = vision.splice_positions(ids, media_pad=9, first=4)
    assert (at.tolist(), feature.tolist()) == ([1, 2, 4], [4, 5, 6])
    x, features = torch.zeros(6, 2), torch.arange(6.0).reshape(3, 2)
    y = vision.splice_merge(x, features=features, at=at)
    assert torch.equal(y[[1, 2, 4]], features)
    assert y[[0, 3, 5]].abs().sum() == 0
    assert x.abs().sum() == 0
    none, _ = vision.splice_positions(torch.tensor([1, 2]), media_pad=9, first=0)
    assert torch.equal(vision.splice_merge(x[:2], features=features[:0], at=none), x[:2])
