"""Images that are broken, huge, or no images at all: each a clear 400 that names the part, and nobody else is hurt."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import pytest
from PIL import Image
from serve_client import make_engine, running, served, until

CHAT = "/v1/chat/completions"
HEAD = b"\x89PNG\r\n\x1a\n"


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


def encoded(picture: Image.Image, form: str = "PNG", **more) -> bytes:  # type: ignore[no-untyped-def]
    stream = io.BytesIO()
    picture.save(stream, form, **more)
    return stream.getvalue()


def plain(width: int, height: int, mode: str = "RGB") -> bytes:
    return encoded(Image.new(mode, (width, height)))


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(width: int, height: int) -> bytes:
    """A few bytes of PNG that say they are width x height pixels."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return HEAD + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(width // 8 + 1))) + chunk(b"IEND", b"")


def moving(form: str) -> bytes:
    return encoded(Image.new("RGB", (20, 20)), form, save_all=True, append_images=[Image.new("RGB", (20, 20), "red")])


def damaged(data: bytes) -> bytes:
    """A byte of the compressed pixels flipped: the checksum of the chunk is wrong."""
    at = data.index(b"IDAT") + 12
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


NOISE = Image.effect_noise((64, 64), 90).convert("RGB")
BAD = {
    "truncated": (uri(encoded(NOISE)[:-200]), "decoded"),
    "truncated JPEG": (uri(encoded(NOISE, "JPEG")[:-400], "jpeg"), "decoded"),
    "damaged": (uri(damaged(encoded(NOISE))), "decoded"),
    "nothing behind the header": (uri(encoded(NOISE)[:33]), "formats"),
    "a bomb of 3,600 megapixels": (uri(bomb(60_000, 60_000)), "pixels"),
    "a bomb of 100 megapixels": (uri(bomb(10_000, 10_000)), "pixels"),
    "a bomb of 81 megapixels": (uri(bomb(9_000, 9_000)), "pixels"),
    "letters outside base64": ("data:image/png;base64,!!!!", "base64"),
    "half of base64": ("data:image/png;base64,abc", "base64"),
    "nothing": (uri(b""), "formats"),
    "animated GIF": (uri(moving("GIF"), "gif"), "frames"),
    "animated PNG": (uri(moving("PNG")), "frames"),
    "a text that says it is an image": (uri(b"hello, I am a picture"), "formats"),
    "SVG": (uri(b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "svg+xml"), "formats"),
    "TIFF": (uri(encoded(NOISE, "TIFF"), "tiff"), "formats"),
    "another kind of URL": ("https://example.org/a.png", "data URI"),
    "a text URI": ("data:text/plain;base64,aGVsbG8=", "data URI"),
}
ODD = {
    "one pixel": plain(1, 1),
    "23,000 pixels wide": plain(23_000, 1),
    "23,000 pixels wide and some high": plain(23_000, 200),
    "23,000 pixels high": plain(1, 23_000),
    "sixteen bits": plain(20, 20, "I;16"),
    "a palette": plain(20, 20, "P"),
    "grey with alpha": plain(20, 20, "LA"),
    "CMYK": encoded(Image.new("CMYK", (20, 20)), "JPEG"),
}


def about(url: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


@pytest.fixture(scope="module", params=["tiny", "tiny-glm-5.3"])
def seeing(request, full):  # type: ignore[no-untyped-def]
    """Servers of the two kinds of towers."""
    if request.param == "tiny":
        yield full
        return
    with running(make_engine(model=request.param)) as engine, served(engine) as client:
        yield client


@pytest.mark.parametrize("what", BAD)
def test_a_broken_image_is_a_clear_400(full, what: str) -> None:  # type: ignore[no-untyped-def]
    """Catches a 500, a message that nobody understands, and an image that is taken for what it is not."""
    url, says = BAD[what]
    status, answer = full.ask(CHAT, messages=about(url), max_tokens=1)
    assert status == 400, answer
    error = answer["error"]
    assert (error["code"], error["param"]) == ("bad_image", "messages.0.content.0.image_url.url")
    assert says in error["message"]
    assert "object at 0x" not in error["message"]
    assert not list(full.service._folder.iterdir())


def test_broken_images_beside_sound_requests(full) -> None:  # type: ignore[no-untyped-def]
    """Catches a decoder that stops the others' answers or changes them, and memory that stays held."""
    sound = lambda: full.complete(max_tokens=12)["choices"]  # noqa: E731
    alone = sound()
    bad = [lambda u=url: full.ask(CHAT, messages=about(u), max_tokens=1)[0] for url, _ in BAD.values()]
    found = full.together([sound, *bad, sound, sound])
    assert found[0] == found[-1] == found[-2] == alone
    assert set(found[1:-2]) == {400}
    until(full.all_is_free, "pages and slots are free")


@pytest.mark.parametrize("what", ODD)
def test_an_odd_image_is_answered_or_refused(seeing, what: str) -> None:  # type: ignore[no-untyped-def]
    """Catches sizes and kinds of pixels that are let in and break the engine."""
    status, answer = seeing.ask(CHAT, messages=about(uri(ODD[what])), max_tokens=2, temperature=0)
    assert status == 200 or (status == 400 and answer["error"]["param"]), answer
    assert seeing.call("/health")[0] == 200
    until(seeing.all_is_free, "pages and slots are free")
