"""Vision tower of the fast path. Patches of all images are rows; `grids` gives (t, h, w) of each image in patches."""

from __future__ import annotations

import bisect
import functools
import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from day0check.accelerated.ops.arithmetic import linear, product, row_blocks, wide
from day0check.accelerated.ops.spine import rms_norm

Grids = tuple[tuple[int, int, int], ...]
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
SQUARE = 8  # pixels of a square of the board behind transparent images


def shrunk_size(width: int, height: int, patch: int, patch_limit: int, side_limit: int) -> tuple[int, int]:
    """Width and height in pixels after shrinking to the limits (model.md 2.9); never larger than they were."""
    patches = max(1, width // patch) * max(1, height // patch)
    fits = [1.0, math.sqrt(patch_limit / patches), side_limit * patch / width, side_limit * patch / height]
    sides = (min(max(1, int(side * min(fits))), side_limit * patch) for side in (width, height))
    return tuple(sides)


def grid_of(width: int, height: int, *, patch: int, merge: int, limits: tuple[int, int]) -> tuple[int, int, int]:
    """(1, rows, columns) in patches of an image padded to whole merge groups; `limits` = (patches, patches a side)."""
    across, down = (-(-side // (patch * merge)) * merge for side in shrunk_size(width, height, patch, *limits))
    return 1, down, across


def budget_size(
    width: int, height: int, *, patch: int, merge: int, min_tokens: int, max_tokens: int
) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """(width, height) in pixels of an image that must become min_tokens to max_tokens tokens, and the grid (1, rows,
    columns) in patches of its canvas (GLM-5.3).

    The canvas is that of the image as it is, or enlarged to the area of min_tokens, or of the largest height at which
    max_tokens suffice. The image keeps its proportions on it and grows only when it is smaller than min_tokens.
    """
    side, least = patch * merge, min_tokens * (patch * merge) ** 2

    def groups(across: int, down: int) -> tuple[int, int]:
        return math.ceil(across / side), math.ceil(down / side)

    def at_height(down: int) -> tuple[int, int]:
        return groups(max(1, width * down // height), down)

    canvas = groups(width, height)
    if math.prod(canvas) < min_tokens:
        enlarged = math.sqrt(least / (width * height))
        canvas = groups(math.ceil(width * enlarged), math.ceil(height * enlarged))
    if math.prod(canvas) > max_tokens:
        heights = range(1, height + 1)
        fitting = bisect.bisect_right(heights, max_tokens, key=lambda down: math.prod(at_height(down)))
        canvas = at_height(fitting) if fitting else (1, 1)
    room = [count * side for count in canvas]
    fit = min(room[0] / width, room[1] / height)
    fit = fit if width * height < least else min(1.0, fit)
    size = tuple(max(1, min(most, math.floor(n * fit))) for n, most in zip((width, height), room, strict=True))
    return size, (1, canvas[1] * merge, canvas[0] * merge)


def preprocess(
    image: Tensor,
    *,
    patch: int,
    merge: int,
    patch_limit: int,
    side_limit: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> tuple[Tensor, Tensor]:
    """Patches of `image` uint8 [height, width, channels] (1 gray, 2 gray and alpha, 3, 4 with alpha): shrunk to the
    limits, bicubic on bytes; alpha over a board; padded with zero bytes to whole merge groups; (x/255 - mean) / std.

    Returns pixels float32 [patches, 3*patch*patch], row-major, and the grid (1, h, w) int64.
    """
    limits = (patch_limit, side_limit)
    target = shrunk_size(image.shape[1], image.shape[0], patch, *limits)
    grid = grid_of(image.shape[1], image.shape[0], patch=patch, merge=merge, limits=limits)
    pixels = on_canvas(picture_of(image), target, grid, patch, mean, std)
    return pixels.to(image.device), torch.tensor(grid, device=image.device)


def picture_of(image: Tensor) -> Image.Image:
    """uint8 [height, width, channels] as a picture of the mode that has so many channels."""
    pixels = image.cpu().numpy()
    return Image.fromarray(pixels[..., 0] if image.shape[2] == 1 else pixels, MODES[image.shape[2]])


def on_canvas(
    picture: Image.Image,
    size: tuple[int, int],
    grid: tuple[int, int, int],
    patch: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Tensor:
    """Patches float32 [patches, 3*patch*patch] of `picture` resized to `size` = (width, height) on zero bytes."""
    shrunk = picture if picture.size == size else picture.resize(size, Image.Resampling.BICUBIC)
    rgb = _on_board(shrunk) if "A" in shrunk.mode else np.asarray(shrunk.convert("RGB"))
    _, down, across = grid
    padded = np.zeros((down * patch, across * patch, 3), np.uint8)
    padded[: rgb.shape[0], : rgb.shape[1]] = rgb
    levels = (np.arange(256)[None] / 255 - np.asarray(mean)[:, None]) / np.asarray(std)[:, None]
    values = np.stack([levels[c].astype(np.float32)[padded[..., c]] for c in range(3)])  # every byte rounded once
    rows = values.reshape(3, down, patch, across, patch).transpose(1, 3, 0, 2, 4).reshape(down * across, -1)
    return torch.from_numpy(np.ascontiguousarray(rows))


def _on_board(picture: Image.Image) -> np.ndarray:
    """RGB bytes of a transparent picture over white and gray squares, in float32 and cut to bytes as upstream does."""
    rgba = np.asarray(picture.convert("RGBA")).astype(np.float32)
    down, across = (np.arange(n) // SQUARE for n in rgba.shape[:2])
    board = np.where((down[:, None] + across[None]) % 2 == 1, np.float32(180), np.float32(255))[..., None]
    opacity = rgba[..., 3:] / np.float32(255)
    return (rgba[..., :3] * opacity + board * (1 - opacity)).astype(np.uint8)


def patch_embed(x: Tensor, *, weight: Tensor, bias: Tensor | None = None, x_scale: Tensor | None = None) -> Tensor:
    """Linear over flattened patches: `x` [patches, 3*patch*patch] or its E4M3 codes with `x_scale`, `weight`
    [Dv, 3*patch*patch]. A weight that is wider than `x`, a sum over frames, is multiplied as it is."""
    if x_scale is not None or weight.dtype == x.dtype:
        return linear(x, weight=weight, bias=bias, x_scale=x_scale)
    return linear(x.to(weight.dtype), weight=weight, bias=bias).to(x.dtype)


def position(x: Tensor, *, table: Tensor, grids: Grids, mode: str) -> Tensor:
    """Adds the learned `table` [h, w, Dv], interpolated where an image's grid differs (half-pixel centres, no
    antialias), and the temporal sinusoid of each frame where t > 1, to `x` [patches, Dv]; one rounding."""
    pieces = []
    for t, h, w in grids:
        learned = wide(table)
        if (h, w) != tuple(table.shape[:2]):
            learned = F.interpolate(learned.permute(2, 0, 1)[None], (h, w), mode=mode, align_corners=False)[0].permute(
                1, 2, 0
            )
        frames = learned.reshape(1, h * w, -1).expand(t, -1, -1)
        if t > 1:
            frames = frames + _temporal(t, table.shape[2], x.device).to(frames.dtype).unsqueeze(1)
        pieces.append(frames.reshape(t * h * w, -1))
    return (wide(x) + torch.cat(pieces).to(wide(x).dtype)).to(x.dtype)


def _temporal(frames: int, width: int, device: torch.device) -> Tensor:
    half = width // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    angle = torch.arange(frames, dtype=torch.float64, device=device).unsqueeze(1) * rate
    return torch.cat((torch.sin(angle), torch.cos(angle)), -1)


@functools.lru_cache(maxsize=16)
def _angles(grids: Grids, dim: int, theta: float) -> Tensor:
    """Angle of every pair of every patch, float32 [patches, dim / 2]: even pairs by column, odd pairs by row."""
    rate = torch.tensor([theta ** (-4.0 * i / dim) for i in range(dim // 4)], dtype=torch.float32)
    pieces = []
    for t, h, w in grids:
        row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        place = torch.stack((column, row), -1).reshape(h * w, 1, 2).float()
        pieces.append((place * rate[:, None]).flatten(1).repeat(t, 1))
    return torch.cat(pieces)


def rope(x: Tensor, *, grids: Grids, theta: float) -> Tensor:
    """2-D rotary embedding of `x` [patches, H, d], interleaved pairs, restarting in every image; angles float32."""
    a = wide(x)
    angle = _angles(tuple(tuple(g) for g in grids), x.shape[-1], theta).to(x.device)
    cos, sin = angle.cos().to(a.dtype).unsqueeze(1), angle.sin().to(a.dtype).unsqueeze(1)
    even, odd = a[..., 0::2], a[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def attention(q: Tensor, *, k: Tensor, v: Tensor, offsets: Tensor, scale: float) -> Tensor:
    """Full attention among the patches of one image: `q`, `k`, `v` [patches, H, d], `offsets` [images+1]; P rounded."""
    out = torch.empty_like(q)
    bounds = offsets.tolist()
    for start, stop in itertools.pairwise(bounds):
        keys, values = (wide(t[start:stop]).transpose(0, 1) for t in (k, v))
        for block in row_blocks(stop - start, q.shape[1] * (stop - start)):
            rows = slice(start + block.start, start + block.stop)
            s = torch.bmm(wide(q[rows]).transpose(0, 1), keys.transpose(1, 2)) * scale
            p = torch.exp(s - s.amax(-1, keepdim=True))
            y = torch.bmm(wide(p.to(q.dtype)), values) / p.sum(-1, keepdim=True)
            out[rows] = y.transpose(0, 1).to(q.dtype)
    return out


def mlp(x: Tensor, *, fc0: Tensor, fc1: Tensor, bias0: Tensor | None = None, bias1: Tensor | None = None) -> Tensor:
    """fc1 gelu_tanh(fc0 x): `x` [patches, Dv], `fc0` [I, Dv], `fc1` [Dv, I]; h and the result are rounded."""
    h = product(x, fc0)
    h = F.gelu(h if bias0 is None else h + wide(bias0), approximate="tanh").to(x.dtype)
    return linear(h, weight=fc1, bias=bias1)


def merge(x: Tensor, *, grids: Grids, merge: int) -> Tensor:
    """merge x merge neighbouring patches of `x` [patches, Dv] joined, groups row-major, inside a group row by row; the
    mean over frames first. Result [tokens, Dv*merge*merge]."""
    pieces, start = [], 0
    for t, h, w in grids:
        frames = x[start : start + t * h * w].view(t, h // merge, merge, w // merge, merge, -1)
        still = frames[0] if t == 1 else wide(frames).mean(0).to(x.dtype)
        pieces.append(still.transpose(1, 2).reshape(h * w // merge**2, -1))
        start += t * h * w
    return torch.cat(pieces)


def project(x: Tensor, *, w0: Tensor, w1: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """RMSNorm(gelu(x W0^T) W1^T): `x` [tokens, in], `w0` [in, in], `w1` [D, in]; h and the projection are rounded."""
    h = F.gelu(product(x, w0)).to(x.dtype)
    return rms_norm(linear(h, weight=w1), weight=norm_weight, eps=eps)
