"""Our server as a process of its own: started, waited for, stopped; how long each of it took and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_LIMIT_S = 300.0
STOP_LIMIT_S = 40.0
POLL_S = 0.05
CALL_S = 20.0
SHOWN_LINES = 5


@dataclass(frozen=True)
class ServerPlan:
    """How our server is started. `log`: where its words go; `judged`: the file in which it keeps what a replay of its
    own answers by the reference says, None for none; `more`: further arguments of `day0check serve`."""

    model_dir: str
    name: str
    log: Path
    profile: str = "bf16"
    device: str = "cpu"
    ops: str | None = None
    scheduler: str | None = None
    judged: Path | None = None
    more: tuple[str, ...] = ()

    @property
    def failure(self) -> Path:
        """The file in which it keeps what ended it."""
        return self.log.with_name(f"{self.log.name}.failure.json")

    def command(self) -> list[str]:
        given = {
            "--model": self.model_dir,
            "--served-model-name": self.name,
            "--profile": self.profile,
            "--device": self.device,
            "--ops": self.ops,
            "--scheduler": self.scheduler,
            "--judge": self.judged,
            "--failure": self.failure,
        }
        options = [text for key, value in given.items() if value is not None for text in (key, str(value))]
        return [sys.executable, "-m", "day0check.cli", "serve", "--port", "0", *options, *self.more]


@dataclass
class Server:
    """A server from its start to its end. `why`: why it never became ready, "" when it did; `operator`: the one that
    ended its start, where it names one.

    `early`: it called itself ready and did not answer the first request. `steps`: seconds of each step of its start.
    `code`: its exit code after it was told to stop, None while it runs; `forced`: it had to be killed.
    """

    url: str = ""
    why: str = ""
    operator: str | None = None
    early: str = ""
    steps: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # "listening", "ready", "stopping"
    code: int | None = None
    forced: bool = False


@contextlib.contextmanager
def served(plan: ServerPlan) -> Iterator[Server]:
    """Starts the server and gives it when it is ready or has failed; stops it at the end. No process stays behind."""
    server, begin = Server(), time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    plan.log.parent.mkdir(parents=True, exist_ok=True)
    plan.failure.unlink(missing_ok=True)
    with plan.log.open("wb") as log:
        process = subprocess.Popen(
            plan.command(),
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    try:
        server.url = _first_line(process, begin + START_LIMIT_S)
        if server.url:
            server.seconds["listening"] = time.monotonic() - begin
            _wait_until_ready(process, server, plan.name, begin)
        if "ready" not in server.seconds:
            server.why = server.why or _why(process, plan.log)
            server.operator = _operator(plan.failure)
        yield server
    finally:
        _stop(process, server)
        process.stdout.close()


def _first_line(process: subprocess.Popen, end: float) -> str:
    """The address that the server prints, "" when it ends or says nothing in time."""
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while b"\n" not in data:
            if not selector.select(max(0.0, end - time.monotonic())):
                return ""
            more = os.read(process.stdout.fileno(), 4096)
            if not more:
                return ""
            data += more
    return data.split(b"\n", 1)[0].decode(errors="replace").strip()


def _wait_until_ready(process: subprocess.Popen, server: Server, name: str, begin: float) -> None:
    while True:
        status, body = call(server.url + "/health")
        if status == 200:
            server.seconds["ready"] = time.monotonic() - begin
            server.steps = {str(s["name"]): float(s["seconds"]) for s in body.get("steps", ())}
            first, said = call(server.url + "/v1/completions", {"model": name, "prompt": "x", "max_tokens": 1})
            server.early = "" if first == 200 else f"the first request is answered with {first}: {said}"
            return
        if process.poll() is not None:
            error = body.get("error")  # without it the log has its last words
            server.why = f"it ended with code {process.returncode} while it started: {error}" if error else ""
            return
        if time.monotonic() - begin > START_LIMIT_S:
            server.why = (
                f"it is not ready after {START_LIMIT_S:g} s; it says {body.get('doing') or body.get('status')!r}"
            )
            return
        time.sleep(POLL_S)


def call(url: str, asked: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """(status, JSON object) of a GET, or of a POST of `asked`; (0, {}) when nothing answers."""
    data = None if asked is None else json.dumps(asked).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=CALL_S) as response:
            status, data = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, data = error.code, error.read()
    except OSError:
        return 0, {}
    try:
        body = json.loads(data)
    except ValueError:
        return status, {}
    return status, body if isinstance(body, dict) else {}


def _why(process: subprocess.Popen, log: Path) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-SHOWN_LINES:]
    ended = "it says nothing" if process.poll() is None else f"it ended with code {process.returncode}"
    return f"{ended}: {' | '.join(line.strip() for line in lines)}" if lines else ended


def _operator(failure: Path) -> str | None:
    """The operator that a record of `serve --failure` names; None without a record, or where it names none."""
    try:
        told = json.loads(failure.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    named = told.get("operator") if isinstance(told, dict) else None
    return named if isinstance(named, str) else None


def _stop(process: subprocess.Popen, server: Server) -> None:
    """SIGTERM, then, when that does not end it, by force; with it all that it started."""
    begin = time.monotonic()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            server.forced = True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    server.seconds["stopping"] = time.monotonic() - begin
    server.code = process.returncode
