"""Images of a request: data URIs to files that were decoded once, within limits, before anything is queued."""

from __future__ import annotations

import base64
import binascii
import io
import re
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from day0check.accelerated.vision import grid_in_patches
from reference.config import Vision

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)


@dataclass(frozen=True)
class ImageLimits:
    images: int = 8  # a request
    image_bytes: int = 20 << 20  # of the encoded file
    image_pixels: int = 64 << 20


class BadImage(ValueError):
    """The client's fault, in a sentence for the client."""


def store_image(url: str, path: Path, *, limits: ImageLimits) -> tuple[int, int]:
    """Writes the image of a data URI to `path`; (width, height) in pixels. Nothing is fetched from anywhere.

    Raises BadImage for another kind of URL, an image beyond the limits, and one that cannot be decoded to its end.
    """
    head = _DATA.match(url)
    if head is None:
        raise BadImage("must be a data URI, data:image/png;base64,...: the server fetches no addresses")
    if (len(url) - head.end()) * 3 // 4 > limits.image_bytes + 3:
        raise BadImage(f"is larger than {limits.image_bytes} bytes")
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadImage(f"is no base64: {error}") from error
    size = _check(data, limits)
    path.write_bytes(data)
    return size


def _check(data: bytes, limits: ImageLimits) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > limits.image_pixels:
                raise BadImage(f"has {width}x{height} pixels, more than {limits.image_pixels}")
            if getattr(picture, "n_frames", 1) > 1:
                raise BadImage("has several frames")
            picture.load()
    except BadImage:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImage(f"has more than {limits.image_pixels} pixels") from error
    except UnidentifiedImageError as error:
        raise BadImage(f"is in none of the formats {', '.join(FORMATS)}") from error
    except Exception as error:  # decoders raise whatever broken bytes lead them to
        raise BadImage(f"cannot be decoded: {type(error).__name__}: {error}") from error
    return width, height


def image_tokens(size: tuple[int, int], vision: Vision) -> int:
    """Tokens that an image of (width, height) pixels becomes, as `accelerated.vision.place` counts them."""
    _, rows, columns = grid_in_patches(*size, vision)
    return rows * columns // vision.merge**2
