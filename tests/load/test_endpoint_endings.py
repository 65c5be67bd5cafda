"""How a run of `day0check endpoint` ends early: addresses that are none, servers that die, full disks, signals: with a
clear message, and nothing that was recorded is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner, Result
from mock_endpoint import Endpoint, serving
from test_client import raw_server

from day0check.cli.app import INTERRUPTED, cli
from day0check.errors import ExitCode

WAIT_S = 60


def call(url: str, out: Path, *options: str) -> Result:
    result = CliRunner().invoke(cli, ["endpoint", "--url", url, "--out", str(out), "--budget", "60s", *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def nobody() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    yield f"127.0.0.1:{port}"


REDIRECT = b"HTTP/1.1 308 Permanent Redirect\r\nLocation: https://models.example/v1/models\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("scheme", "answer", "says"),
    [
        ("http", REDIRECT, "a redirect to https://models.example/v1/models (HTTP 308)"),
        ("https", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "nothing answers"),
        ("http", b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", "--api-key-env"),
    ],
)
def test_addresses_that_lead_nowhere(scheme: str, answer: bytes, says: str, tmp_path: Path) -> None:
    """Would catch "not ready" where the address is wrong, and a folder that cannot be given again."""
    with raw_server(answer) as url:
        result = call(url.replace("http", scheme), tmp_path / "run", "--stall", "1s")
    assert result.exit_code == ExitCode.USAGE, result.stderr
    assert says in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_name_that_does_not_resolve(tmp_path: Path) -> None:
    """Would catch a traceback for a typing error in the host."""
    result = call("http://no-such-host.invalid:8000", tmp_path / "run")
    assert result.exit_code == ExitCode.USAGE
    assert "no-such-host.invalid" in result.stderr


def test_a_gateway_without_a_server_behind_it(tmp_path: Path) -> None:
    """Would catch a 502 that is told as a model that is not listed."""
    with raw_server(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n") as url:
        result = call(url, tmp_path / "run", "--stall", "1s", "--json")
    assert result.exit_code == ExitCode.NOT_READY
    assert "/v1/models answers HTTP 502" in json.loads(result.stdout)["first_fault"]["message"]


class Dying(Endpoint):
    """Drops every connection after so many requests."""

    left_requests = 30

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.requests >= self.left_requests:
            request.transport.abort()
            await request.read()
        return await super().answer(request)


def test_a_server_that_dies_in_the_load(tmp_path: Path) -> None:
    """Would catch failed requests that vanish from the figures, and samples of the time before that are lost."""
    with serving(Dying(delay_s=0.001)) as url:
        result = call(url, tmp_path / "run", "--part", "speed", "--requests", "8", "--json")
    verdict = json.loads(result.stdout)
    assert (result.exit_code, verdict["status"]) == (ExitCode.NOT_READY, "not_ready")
    (finding,) = (f for f in verdict["findings"] if f["evidence"].get("pattern") == "failed requests")
    assert "the connection ended" in finding["message"]
    samples = rows(tmp_path / "run" / "samples.jsonl")
    assert {s["ok"] for s in samples} == {True, False}
    load = verdict["measured"]["endpoint"]["load"]
    assert sum(p["failed"] for p in load.values()) == sum(not s["ok"] for s in samples)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full, a disk without room")
def test_a_full_disk(tmp_path: Path) -> None:
    """Would catch a traceback, or a verdict without its samples."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "samples.jsonl").symlink_to("/dev/full")
    with serving(Endpoint(delay_s=0.001)) as url:
        result = call(url, tmp_path / "run", "--part", "speed", "--requests", "2", "--concurrency", "1")
    assert result.exit_code == ExitCode.HARNESS
    assert "samples.jsonl: cannot be written: No space left" in result.stderr
    assert "--out" in result.stderr
    assert {r["label"] for r in rows(tmp_path / "run" / "exchanges.jsonl")} >= {"models", "hello/chat"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_load_loses_nothing(number: int, tmp_path: Path) -> None:
    """Would catch an hour of samples that Ctrl-C throws away, or a file that ends in half a line."""
    command = [sys.executable, "-m", "day0check.cli", "endpoint", "--out", str(tmp_path / "run"), "--part", "speed"]
    command += ["--part", "wire", "--concurrency", "1,2", "--requests", "24"]
    with (
        serving(endpoint := Endpoint(delay_s=0.003)) as url,
        subprocess.Popen(
            [*command, "--url", url],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells turn it off in the background
        ) as process,
    ):
        samples, end = tmp_path / "run" / "samples.jsonl", time.monotonic() + WAIT_S
        while not (samples.exists() and "closed/1" in samples.read_text()):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        begun = endpoint.requests
        while endpoint.requests < begun + 5:  # two at once: some of the next phase have ended
            assert time.monotonic() < end
            time.sleep(0.001)
        process.send_signal(number)
        message = process.communicate(timeout=WAIT_S)[1]
    assert process.returncode == INTERRUPTED
    assert f"kept in {tmp_path / 'run'}" in message
    assert "Traceback" not in message
    assert {"models", "whole/0", "stream/0"} <= {r["label"] for r in rows(tmp_path / "run" / "exchanges.jsonl")}
    phases = [r["phase"] for r in rows(samples)]
    assert (phases.count("warmup"), phases.count("closed/1")) == (4, 24)
    assert 0 < phases.count("closed/2") < 24  # those that had ended
    assert not (tmp_path / "run" / "verdict.json").exists()


def test_a_server_that_never_gets_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a verdict on a server that says of itself that it is still loading, and a wait without end."""
    monkeypatch.setattr("day0check.load.scenario.START_S", 0.6)
    with raw_server(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n") as url:
        result = call(url, tmp_path / "run")
    assert result.exit_code == ExitCode.USAGE
    assert "not ready yet" in result.stderr
