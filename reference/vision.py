"""Vision: preprocessing, the tower's operators and the splice (model.md 2.9).

P patches (rows) of all images of a request, grids = ((t, h, w), ...) in patches, Dv tower width, H heads of d dims.
Sums and transcendental functions run in float64 for float64 input and in float32 otherwise; results have the input's
dtype.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from reference.image_grid import ImageGrid, grid_in_budget, grid_within, image_grid
from reference.norm import layer_norm
from reference.rounding import Round, exact, wide

__all__ = [
    "ImageGrid",
    "add_position",
    "attention",
    "image_grid",
    "merge_patches",
    "mlp",
    "preprocess",
    "project",
    "read_image",
    "rope_2d",
    "splice_merge",
    "splice_positions",
]

Grids = Sequence[tuple[int, int, int]]
SQUARE, WHITE, GRAY = 8, 255, 180  # the chessboard behind transparent pixels


def _wide(x: torch.Tensor) -> torch.Tensor:
    return wide(x)[0]


# -------------------------------------------------------------------------------------------------- preprocessing


def read_image(path: str | os.PathLike[str]) -> torch.Tensor:
    """The file as uint8 [height, width, channels]: 1 gray, 2 gray and alpha, 3 RGB, 4 RGB and alpha.

    Palettes and other modes become RGB, or RGBA when they hold transparency. Raises what PIL raises.
    """
    with Image.open(path) as image:
        if image.mode not in ("L", "LA", "RGB", "RGBA"):
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        array = np.array(image)
    return torch.from_numpy(array if array.ndim == 3 else array[:, :, None])


def preprocess(
    image: torch.Tensor,
    *,
    patch: int,
    merge: int,
    patch_limit: int,
    side_limit: int,
    mean: Sequence[float],
    std: Sequence[float],
    round: Round = exact,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches [P, 3*patch*patch] (float64, channel first) and grid [t, h, w] of one uint8 image [height, width, c].

    Bicubic by PIL on uint8 in the image's own mode, so alpha is premultiplied while resizing; then alpha over the
    chessboard, zero bytes to whole merge groups on the right and below, (x/255 - mean)/std.
    """
    picture = _picture(image)
    grid = grid_within(*picture.size, patch=patch, merge=merge, patch_limit=patch_limit, side_limit=side_limit)
    pixels = _over_chessboard(_resized(picture, grid))
    x = _patches(pixels, grid, patch=patch, mean=mean, std=std).to(image.device)
    return round("out", x), torch.tensor([1, grid.rows, grid.columns], device=image.device)


def preprocess_in_budget(
    image: torch.Tensor,
    *,
    patch: int,
    merge: int,
    min_tokens: int,
    max_tokens: int,
    mean: Sequence[float],
    std: Sequence[float],
    round: Round = exact,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `preprocess`, by GLM-5.3's rules: RGB first (alpha is dropped), then bicubic into a budget of tokens."""
    picture = _picture(image).convert("RGB")
    grid = grid_in_budget(*picture.size, patch=patch, merge=merge, min_tokens=min_tokens, max_tokens=max_tokens)
    x = _patches(np.asarray(_resized(picture, grid)), grid, patch=patch, mean=mean, std=std).to(image.device)
    return round("out", x), torch.tensor([1, grid.rows, grid.columns], device=image.device)


def _picture(image: torch.Tensor) -> Image.Image:
    array = image.cpu().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def _resized(picture: Image.Image, grid: ImageGrid) -> Image.Image:
    size = grid.width, grid.height
    return picture if picture.size == size else picture.resize(size, Image.Resampling.BICUBIC)


def _patches(
    content: np.ndarray, grid: ImageGrid, *, patch: int, mean: Sequence[float], std: Sequence[float]
) -> torch.Tensor:
    """RGB bytes on a canvas of zero bytes, normalised, cut into patches [P, 3*patch*patch], row-major, float64."""
    pixels = np.zeros((grid.rows * patch, grid.columns * patch, 3), np.uint8)
    pixels[: grid.height, : grid.width] = content
    shift, spread = (torch.tensor(v, dtype=torch.float64) for v in (mean, std))
    x = (torch.from_numpy(pixels).to(torch.float64) / 255 - shift) / spread
    x = x.reshape(grid.rows, patch, grid.columns, patch, 3).permute(0, 2, 4, 1, 3)
    return x.reshape(grid.rows * grid.columns, 3 * patch * patch)


def _over_chessboard(picture: Image.Image) -> np.ndarray:
    """RGB bytes; alpha composited over white and gray squares in float32, the result cut to bytes."""
    if picture.mode not in ("LA", "RGBA"):
        return np.asarray(picture.convert("RGB"))
    pixels = np.asarray(picture.convert("RGBA"))
    y, x = np.indices(pixels.shape[:2]) // SQUARE
    board = np.where((x + y) % 2 == 1, np.float32(GRAY), np.float32(WHITE))[:, :, None]
    alpha = pixels[:, :, 3:].astype(np.float32) / np.float32(255)
    return (alpha * pixels[:, :, :3].astype(np.float32) + (1 - alpha) * board).astype(np.uint8)


# ---------------------------------------------------------------------------------------------------------- tower


def add_position(
    x: torch.Tensor, *, table: torch.Tensor, grids: Grids, mode: str, round: Round = exact
) -> torch.Tensor:
    """x [P, Dv] plus the learned table [h, w, Dv], interpolated for another grid, plus the temporal part of clips."""
    parts = []
    for t, h, w in grids:
        position = _wide(table)
        if (h, w) != tuple(table.shape[:2]):
            rows = _interpolation(table.shape[0], h, mode).to(position)
            columns = _interpolation(table.shape[1], w, mode).to(position)
            position = torch.einsum("yh,xw,hwd->yxd", rows, columns, position)
        position = position.reshape(1, h * w, -1)
        if t > 1:
            position = position + _temporal(t, x.shape[1]).to(position)[:, None]
        parts.append(position.expand(t, h * w, -1).reshape(t * h * w, -1))
    position = round("position", torch.cat(parts))
    return round("out", _wide(x) + position).to(x.dtype)


def _interpolation(source: int, target: int, mode: str) -> torch.Tensor:
    """[target, source] weights of a 1-D resize with half-pixel centres, no antialiasing, clamped at the border.

    bilinear: two neighbours; bicubic: four, cubic convolution with a = -0.75 (Keys 1981, the value torch uses).
    """
    centre = (torch.arange(target, dtype=torch.float64) + 0.5) * (source / target) - 0.5
    if mode == "bilinear":
        centre = centre.clamp(min=0.0)
    first = centre.floor()
    taps = {"bilinear": (0, 1), "bicubic": (-1, 0, 1, 2)}[mode]
    weights = torch.zeros(target, source, dtype=torch.float64)
    for tap in taps:
        distance = (centre - (first + tap)).abs()
        weight = 1 - distance if mode == "bilinear" else _cubic(distance)
        index = (first + tap).long().clamp(0, source - 1)
        weights.scatter_add_(1, index[:, None], weight[:, None])
    return weights


def _cubic(distance: torch.Tensor, a: float = -0.75) -> torch.Tensor:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))


def _temporal(frames: int, width: int) -> torch.Tensor:
    """[frames, width] = [sin | cos] of frame * 10000^(-i / (width/2)); frame 0 is [0 | 1], not nothing."""
    half = width // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(frames, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def rope_2d(x: torch.Tensor, *, grids: Grids, theta: float, round: Round = exact) -> torch.Tensor:
    """x [P, H, d] with interleaved pairs rotated: pair 2i by column * f_i, pair 2i+1 by row * f_i, f_i = theta^(-4i/d).

    Positions restart in every image and repeat in every frame. The angle is a float32 product even for float64 input.
    """
    d = x.shape[-1]
    angles = []
    for t, h, w in grids:
        row, column = _angles(h, w, d, theta, x.device)
        angles.append(torch.stack([column, row], dim=-1).reshape(h * w, d // 2).repeat(t, 1))
    wide = _wide(x)
    angle = torch.cat(angles).to(wide.dtype)[:, None]
    even, odd = wide[..., 0::2], wide[..., 1::2]
    turned = torch.stack([even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()], dim=-1)
    return round("out", turned.flatten(-2)).to(x.dtype)


def rope_axial(x: torch.Tensor, *, grids: Grids, theta: float, round: Round = exact) -> torch.Tensor:
    """x [P, H, d] with pairs (i, i + d/2) rotated: i < d/4 by row * f_i, the others by column * f_(i - d/4), with
    f_i = theta^(-4i/d) (GLM-5.3). Positions and precision of the angle as in `rope_2d`."""
    d = x.shape[-1]
    angles = []
    for t, h, w in grids:
        row, column = _angles(h, w, d, theta, x.device)
        angles.append(torch.cat([row, column], dim=-1).repeat(t, 1))
    wide = _wide(x)
    angle = torch.cat(angles).to(wide.dtype)[:, None]
    a, b = wide[..., : d // 2], wide[..., d // 2 :]
    turned = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)
    return round("out", turned).to(x.dtype)


def _angles(h: int, w: int, d: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 angles [h*w, d/4] of each patch by its row and by its column."""
    frequency = (1.0 / theta ** (torch.arange(0, d, 4, dtype=torch.float32) / d)).to(device)
    row = torch.arange(h, device=device).repeat_interleave(w).float()
    column = torch.arange(w, device=device).repeat(h).float()
    return row[:, None] * frequency, column[:, None] * frequency


def attention(
    q: torch.Tensor, *, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, scale: float, round: Round = exact
) -> torch.Tensor:
    """Full attention of q, k, v [P, H, d] among the patches offsets[i]:offsets[i+1] of one image or clip."""
    parts = []
    ends = offsets.tolist()
    for begin, end in itertools.pairwise(ends):
        queries, keys, values = (_wide(z[begin:end]).transpose(0, 1) for z in (q, k, v))
        s = round("s", queries @ keys.transpose(1, 2) * scale)
        p = round("p", s.softmax(-1))
        parts.append((p @ values).transpose(0, 1))
    return round("out", torch.cat(parts)).to(q.dtype)


def mlp(
    x: torch.Tensor,
    *,
    fc0: torch.Tensor,
    fc1: torch.Tensor,
    bias0: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    round: Round = exact,
) -> torch.Tensor:
    """fc1(gelu_tanh(fc0 x)) of x [P, Dv], fc0 [I, Dv], fc1 [Dv, I]."""
    hidden = round("fc0", _linear(_wide(x), fc0, bias0))
    hidden = round("h", F.gelu(hidden, approximate="tanh"))
    return round("out", _linear(hidden, fc1, bias1)).to(x.dtype)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def merge_patches(x: torch.Tensor, *, grids: Grids, merge: int) -> torch.Tensor:
    """x [P, Dv] to [tokens, merge*merge*Dv]: mean over frames, then groups row-major, inside a group (kh, kw)."""
    parts, begin = [], 0
    for t, h, w in grids:
        frames = x[begin : begin + t * h * w].reshape(t, h, w, -1)
        begin += t * h * w
        still = frames[0] if t == 1 else _wide(frames).mean(0).to(x.dtype)
        groups = still.reshape(h // merge, merge, w // merge, merge, -1).permute(0, 2, 1, 3, 4)
        parts.append(groups.reshape(h // merge * (w // merge), -1))
    return torch.cat(parts)


def project(
    x: torch.Tensor,
    *,
    w0: torch.Tensor,
    w1: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    round: Round = exact,
) -> torch.Tensor:
    """RMSNorm(gelu(x w0^T) w1^T), the erf form of gelu: x [tokens, M], w0 [M, M], w1 [D, M]."""
    hidden = round("h", F.gelu(_linear(_wide(x), w0)))
    projected = round("projected", _linear(hidden, w1))
    rms = (projected * projected).mean(-1, keepdim=True).add(eps).sqrt()
    return round("out", projected / rms * norm_weight.to(projected.dtype)).to(x.dtype)


def project_plain(
    x: torch.Tensor,
    *,
    w0: torch.Tensor,
    w1: torch.Tensor,
    bias0: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    round: Round = exact,
) -> torch.Tensor:
    """gelu(x w0^T + b0) w1^T + b1, the erf form of gelu: a projector without a norm behind it (Kimi K2.5)."""
    hidden = round("h", F.gelu(_linear(_wide(x), w0, bias0)))
    return round("out", _linear(hidden, w1, bias1)).to(x.dtype)


def gated_mlp(
    x: torch.Tensor,
    *,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    limit: float,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    round: Round = exact,
) -> torch.Tensor:
    """silu(min(g, limit)) clamp(u, -limit, limit) through down, with biases: x [P, Dv] -> [P, Dv] (GLM-5.3)."""
    wide_x = _wide(x)
    g, u = round("gate", _linear(wide_x, gate, gate_bias)), round("up", _linear(wide_x, up, up_bias))
    hidden = round("h", F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit))
    return round("out", _linear(hidden, down, down_bias)).to(x.dtype)


def normed_gelu(
    x: torch.Tensor, *, weight: torch.Tensor, bias: torch.Tensor, eps: float, round: Round = exact
) -> torch.Tensor:
    """gelu(LayerNorm(x)), the erf form of gelu: x [tokens, M] -> [tokens, M] (GLM-5.3's merger)."""
    return round("out", F.gelu(layer_norm(_wide(x), weight=weight, bias=bias, eps=eps))).to(x.dtype)


# --------------------------------------------------------------------------------------------------------- splice


def splice_positions(ids: torch.Tensor, *, media_pad: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of `ids` that are media pads, and the image feature of each; `first` pads came before these rows."""
    at = (ids == media_pad).nonzero().flatten()
    return at, torch.arange(first, first + at.numel(), device=ids.device)


def splice_merge(x: torch.Tensor, *, features: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """A copy of x [rows, D] with the rows `at` replaced by `features` [m, D]."""
    y = x.clone()
    y[at] = features.to(x.dtype)
    return y
