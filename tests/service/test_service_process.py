"""Guards the life of our server's process: how a start that fails is told, and that nothing stays behind."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import psutil
import pytest

from day0check.checks import service_start
from day0check.errors import ExitCode
from day0check.service import process
from day0check.service.process import ServerPlan, served
from reference.presets import preset_dir

SCRIPT = """
import http.server, json, signal, subprocess, sys, threading, time
how = {how!r}
if how == "dies":
    sys.exit("no such model")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = how != "never ready"
        body = {{"status": "ready" if ready else "starting", "doing": "load weights"}}
        body["steps"] = [{{"name": n, "seconds": 0.5}} for n in {steps!r}]
        self.say(200 if ready else 503, body)
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.say(503 if how == "early" else 200, {{"choices": []}})
    def say(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
code = 3 if how == "ends badly" else 0
def stop(*_):
    child.kill()
    child.wait()
    server.socket.close()
    import os
    os._exit(code)
signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "stays" else stop)
print(f"http://127.0.0.1:{{server.server_port}}", flush=True)
server.serve_forever()
"""


@dataclasses.dataclass(frozen=True)
class Scripted(ServerPlan):
    how: str = ""

    def command(self) -> list[str]:
        return [sys.executable, "-S", "-c", SCRIPT.format(how=self.how, steps=service_start.STEPS)]


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_LIMIT_S", 0.5)


@pytest.mark.parametrize(
    ("how", "pattern", "says"),
    [
        ("", None, ""),
        ("dies", "did not start", "no such model"),
        ("never ready", "did not start", "load weights"),
        ("early", "ready too early", "503"),
        ("ends badly", "exit code", "code 3"),
        ("stays", "did not end", "SIGTERM"),
    ],
)
def test_the_life_of_a_server_is_told(how: str, pattern: str | None, says: str, tmp_path: Path, monkeypatch) -> None:
    """Would catch a server that fails and passes, and a process that outlives its case."""
    monkeypatch.setattr(process, "START_LIMIT_S", 1.5 if how == "never ready" else 30.0)
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with served(Scripted("tiny", "tiny", tmp_path / "log", how=how)) as server:
        assert bool(server.why) == (pattern == "did not start")
        if not server.why:
            assert server.url.startswith("http://127.0.0.1:")
            assert server.seconds["ready"] >= server.seconds["listening"] > 0
    answer = service_start.judge(
        why=server.why, early=server.early, steps=server.steps, code=server.code, forced=server.forced
    )
    assert [f.evidence["pattern"] for f in answer.findings] == ([pattern] if pattern else [])
    assert all(says in f.message for f in answer.findings)
    assert answer.outcome.status == ("failed" if pattern else "passed")
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


def test_a_start_without_its_steps_is_told() -> None:
    """Would catch a server that calls itself ready without having verified its weights."""
    steps = dict.fromkeys(service_start.STEPS, 1.0)
    del steps["verify weights"]
    answer = service_start.judge(why="", early="", steps=steps, code=0, forced=False)
    assert "verify weights" in answer.outcome.summary
    assert answer.outcome.status == "failed"


OPERATOR_THAT_DIES = """
import day0check

@day0check.operator.wrap("dsa.select")
def select(inner, *arguments, **keywords):
    raise IndexError("out of pages")
"""


def test_no_operator_is_read_out_of_words(tmp_path: Path) -> None:
    """Would catch an operator that is accused because a message, or the record of an earlier start, names it."""
    plan = Scripted("tiny", "tiny", tmp_path / "log", how="dies")
    plan.failure.write_text('{"error": "", "operator": "dsa.select"}', encoding="utf-8")
    with served(plan) as server:
        pass
    assert (bool(server.why), server.operator) == (True, None)
    why = "operator dsa.select at layers.0, in the warm-up"
    answer = service_start.judge(why=why, early="", steps={}, code=2, forced=False)
    assert [f.operator for f in answer.findings] == [None]


def test_an_operator_that_ends_the_start_is_named(tmp_path: Path) -> None:
    """Would catch a server that dies in its warm-up and blames nobody, or us for an operator of the user's file."""
    ops = tmp_path / "ops.py"
    ops.write_text(OPERATOR_THAT_DIES, encoding="utf-8")
    plan = ServerPlan(str(preset_dir("tiny")), "tiny", tmp_path / "log", profile="fp32", ops=str(ops))
    with served(plan) as server:
        pass
    answer = service_start.judge(
        why=server.why, operator=server.operator, early="", steps={}, code=server.code, forced=server.forced
    )
    (finding,) = answer.findings
    assert (finding.operator, finding.evidence["pattern"]) == ("dsa.select", "did not start")
    assert "IndexError: out of pages" in finding.message
    assert server.code == ExitCode.USAGE
    assert "Traceback" in plan.log.read_text(encoding="utf-8")
