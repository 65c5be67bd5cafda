"""Guards the client of the load phases: framing undone at any split, faults named as the other client names them."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_endpoint import Endpoint, serving

from day0check.load.answers import read_answer
from day0check.load.client import Client, Limits, target_of
from day0check.load.raw_http import BadHttp, Head, read_head, unframed

PATH = "/v1/chat/completions"
BODY = {"model": "mock", "messages": [{"role": "user", "content": "x"}], "max_tokens": 12, "temperature": 0}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
CHUNKED = Head(200, "chunked", 0, True, True, 0)


@given(
    parts=st.lists(st.binary(min_size=1, max_size=20), max_size=6),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    cut_off=st.integers(0, 4),
)
@settings(max_examples=60, deadline=None)
def test_chunks_come_out_whole_wherever_the_reads_are_cut(parts, cuts, cut_off) -> None:
    """Would catch a size line or a line end that is split over reads and becomes part of an answer."""
    wire = b"".join(b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    wire = wire[: len(wire) - 5 * bool(cut_off)]
    edges = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in cuts)})
    reads = [(at, wire[a:b]) for at, (a, b) in enumerate(itertools.pairwise(edges))]
    body, complete = unframed(reads, CHUNKED)
    assert b"".join(data for _, data in body) == b"".join(parts)
    assert complete == (not cut_off)
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(body))


def test_heads_say_how_a_body_ends() -> None:
    """Would catch a body that is read to the wrong end."""
    assert read_head(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n") is None
    plain = read_head(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
    assert (plain.status, plain.ending, plain.length, plain.keeps) == (200, "length", 5, True)
    assert read_head(b"HTTP/1.0 200 OK\r\n\r\n").ending == "close"
    stream = read_head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n")
    assert (stream.ending, stream.streamed) == ("chunked", True)
    for bad in (b"<html>", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"):
        with pytest.raises(BadHttp):
            read_head(bad)
    with pytest.raises(BadHttp):
        unframed([(0, b"zz\r\nab\r\n")], CHUNKED)


async def ask(url: str, body: dict, count: int = 1) -> list:
    limits = Limits(stall_s=0.6, request_s=2.0)
    async with Client(target_of(url), limits) as client:
        one = [await client.post_in_load(PATH, body) for _ in range(count)]
        return [*one, await client.post(PATH, json.dumps(body).encode())]


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("flag", ["", "split", "keeps_open", "no_done", "html", "drop", "stall", "late", "accepts_bad"])
def test_it_reads_what_the_other_client_reads(flag: str, body: dict) -> None:
    """Would catch answers that differ by the client that asked, a reused connection with another's rest in it, and
    faults that go by."""
    with serving(Endpoint(*[flag] * bool(flag))) as url:
        first, second, other = asyncio.run(ask(url, body, 2))
    for reply in (first, second):
        assert (reply.status, reply.fault, reply.streamed) == (other.status, other.fault, other.streamed)
        if reply.fault in ("late", "stalled"):
            continue  # how far an answer had come by then is a matter of milliseconds
        mine, theirs = read_answer(reply), read_answer(other)
        assert (mine.text, mine.finish, mine.usage, mine.flaws) == (
            theirs.text,
            theirs.finish,
            theirs.usage,
            theirs.flaws,
        )
        assert reply.sent_ns <= reply.end_ns


def test_nobody_there_is_refused() -> None:
    """Would catch a connection that fails and ends the whole load."""
    replies = asyncio.run(ask("http://127.0.0.1:9", STREAM))
    assert {r.fault for r in replies} == {"refused"}


def test_the_bounds_hold_for_it_too() -> None:
    """Would catch a load that goes on behind the bounds of the run."""

    async def run(url: str) -> list:
        async with Client(target_of(url), Limits(requests=2)) as client:
            return [(await client.post_in_load(PATH, BODY)).fault for _ in range(3)]

    endpoint = Endpoint()
    with serving(endpoint) as url:
        assert asyncio.run(run(url)) == ["", "", "unsent"]
    assert endpoint.requests == 2
