"""The decoder of server-sent events: any cut of the bytes, any of the three line ends."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.load.sse import SseDecoder, SseEvent

_TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r\n"), max_size=12)


def decode(*pieces: bytes) -> list[SseEvent]:
    decoder = SseDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)]


@settings(max_examples=150, deadline=None)
@given(st.lists(_TEXT, max_size=6), st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_events_do_not_depend_on_where_the_bytes_are_cut(texts: list[str], end: str, data: st.DataObject) -> None:
    """Would catch a decoder that cuts characters, loses half a line end, or takes two chunks in one read for one."""
    raw = "".join(f": note{end}data: {text}{end}{end}" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    edges = [0, *cuts, len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(edges)]
    expected = [SseEvent(text) for text in texts]
    assert decode(*pieces) == expected
    assert decode(*(raw[i : i + 1] for i in range(len(raw)))) == expected


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_decoded_alike_in_one_piece_and_singly(raw: bytes) -> None:
    """Would catch a state that a cut leaves behind, on bytes that are no event stream at all."""
    assert decode(raw) == decode(*(raw[i : i + 1] for i in range(len(raw))))


def test_fields_of_an_event() -> None:
    """Would catch data lines that are not joined, a lost event name, and a first byte order mark taken as text."""
    raw = "\ufeffevent: error\ndata: a\ndata:b\nid: 7\nretry: 1\nunknown\n\n\n\ndata\n\n".encode()
    assert decode(raw) == [SseEvent("a\nb", "error"), SseEvent("")]


def test_an_event_without_its_blank_line_is_left_over() -> None:
    """Would catch a truncated stream that looks complete, and bytes of no character taken as text."""
    decoder = SseDecoder()
    assert decoder.feed(b"data: a\n\ndata: b\n") == [SseEvent("a")]
    assert decoder.leftover
    assert not decode(b"data: \xff\n\n")[0].intact


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["data: a\n\n", "data: é\n\n", "data: a\rb\n\n", "data: a\n", "\n", "event: x\n", "\r"]))
)
def test_an_event_to_a_read_is_decoded_like_its_bytes(pieces: list[str]) -> None:
    """Would catch the short way for a read of one whole event taken where an earlier line is still open."""
    raw = [piece.encode() for piece in pieces]
    whole = b"".join(raw)
    assert decode(b"", *raw) == decode(*(whole[i : i + 1] for i in range(len(whole))))
