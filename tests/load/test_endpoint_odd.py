"""Servers that are no endpoint at all: a finding or "not run", never a traceback and never green."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_client import raw_server

from day0check.cli.app import cli
from day0check.errors import ExitCode

_WHOLE = b'{"data":[{"id":"m"}],"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}'
ODD = {
    "an answer to everything": (b"application/json", _WHOLE),
    "types that are wrong": (
        b"application/json",
        b'{"data":[{"id":"m"}],"choices":[null,{"index":"z","message":[],"logprobs":{"content":[{"token":1}]}}]}',
    ),
    "a list": (b"application/json", b"[]"),
    "bytes": (b"application/octet-stream", b"\xff\xfe" * 50),
    "a stream to everything": (
        b"text/event-stream",
        b'data: {"choices":[{"delta":{"content":7}}]}\n\ndata: [DONE]\n\n',
    ),
    "half a page": (b"text/html; charset=\xff", b"<html>"),
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_no_endpoint_is_not_ready(what: str, tmp_path: Path) -> None:
    """Would catch unexpected types and bytes that end in a traceback, and a server that agrees with everything."""
    kind, body = ODD[what]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (kind, len(body) + (what[0] == "h"))
    options = ("--model", "m", "--budget", "3s", "--stall", "0.3s", "--time-limit", "1s", "--requests", "2", "--json")
    with raw_server(head + body) as url:
        result = CliRunner().invoke(cli, ["endpoint", "--url", url, "--out", str(tmp_path / "run"), *options])
    assert result.exit_code == ExitCode.NOT_READY, result.stderr
    assert json.loads(result.stdout)["first_fault"]["check"].startswith("endpoint.")
    assert (tmp_path / "run" / "exchanges.jsonl").read_text()
