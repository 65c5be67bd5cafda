"""How answers end early: clients that leave, operators that fail, signals. Nothing stays, nobody else is hurt."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from serve_client import QUICK, Client, make_engine, running, served, until

from day0check.accelerated.server.orders import Piece
from day0check.probe.registry import Registration

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
MARK = 300  # a token that nothing else holds and the model hardly ever picks


def begin(client, path=COMPLETIONS, **body):
    """A connection on which a request has been sent."""
    data = json.dumps({"model": "tiny", **body}).encode()
    connection = socket.create_connection(client.address.split(":"))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_everything(client, stream):
    """Catches pages, slots or a place in the queue that an abandoned request keeps (S-66), and a server that hangs."""
    golden = client.complete()["choices"]
    steps = client.metric("day0check:steps_total")
    left = [begin(client, stream=stream, **LONG) for _ in range(3)]
    with begin(client, stream=stream, **{**LONG, "prompt": ["y"] * 8}):
        until(lambda: client.metric("vllm:num_requests_running") == 8, "the batch is full")
        until(lambda: client.metric("vllm:num_requests_waiting") == 3, "others wait")
        for connection in left:
            connection.close()
    until(client.all_is_free, "pages and slots are free")
    assert client.metric("day0check:steps_total") - steps < LONG["max_tokens"]
    assert client.complete()["choices"] == golden


class Flood:
    """An engine that answers with more than any socket takes at once."""

    def __init__(self, engine):
        self.metrics, self.operators, self.released = engine.metrics, engine.operators, []
        self.config, self.vocabulary, self.max_model_len = engine.config, engine.vocabulary, engine.max_model_len
        self.health = engine.health

    def submit(self, orders, send):
        for _ in range(64):
            send(0, Piece("x" * (1 << 20), (120,)))

    def release(self, names, *, then):
        self.released += names


def test_a_client_that_does_not_read_is_left(engine):
    """Catches an answer that waits without end for a client that never reads."""
    flood = Flood(engine)
    with served(flood, write_seconds=0.3) as client, begin(client, prompt="x", stream=True):
        until(lambda: flood.released, "the request is given up")


class Broken(Exception):
    pass


def test_what_fails_in_one_request_fails_only_there():
    """Catches an operator's error that ends the engine or other answers, and health that is green over a dead one."""
    dead = threading.Event()

    def detokenise(inner, tokens, **kwargs):
        if tokens[:1] == [MARK]:
            raise Broken("in the text")
        return inner(tokens, **kwargs)

    def embed(inner, ids, **kwargs):
        if dead.is_set() or bool((ids == MARK).any()):
            raise Broken("in the model")
        return inner(ids, **kwargs)

    wraps = (Registration("wrap", "serve.detokenise", detokenise), Registration("wrap", "embed.tokens", embed))
    with running(make_engine(*wraps)) as engine, served(engine) as client:
        alone = client.complete(max_tokens=12)
        broken = {"prompt": "x", "forced_token_ids": [MARK], "max_tokens": 3}
        good = lambda: client.complete(max_tokens=12)  # noqa: E731
        found = client.together([good, lambda: client.ask(COMPLETIONS, **broken), good])
        assert found[0]["choices"] == found[2]["choices"] == alone["choices"]
        assert found[1][0] == 500
        assert "in the text" in found[1][1]["error"]["message"]
        status, answer = client.ask(COMPLETIONS, prompt=[MARK])
        assert (status, "in the model" in answer["error"]["message"]) == (500, True)
        until(lambda: client.call("/health")[0] == 200, "the probe has shown that the engine works")
        until(client.all_is_free, "nothing of the request that failed has a place in the queue")
        assert client.complete(max_tokens=12)["choices"] == alone["choices"]
        events = begin(client, prompt="x", forced_token_ids=[65, MARK], max_tokens=3, stream=True)
        with events:
            answer = read_all(events)
        assert b'"error"' in answer
        assert b"[DONE]" not in answer
        until(lambda: client.call("/health")[0] == 200, "the probe has shown it again")
        dead.set()
        assert client.ask(COMPLETIONS, prompt="x")[0] == 500
        until(lambda: json.loads(client.call("/health")[2])["status"] == "dead", "health tells it")
        assert client.ask(COMPLETIONS, prompt="x")[0] == 503
        until(lambda: client.metric("day0check:state_slots_free") == 8, "slots are free")


def read_all(connection):
    connection.settimeout(60)
    data = b""
    while b"0\r\n\r\n" not in data and (more := connection.recv(1 << 16)):
        data += more
    return data


def test_sigterm_lets_open_answers_end(tmp_path):
    """Catches a shutdown that cuts answers off, takes new ones, or does not end; and an address that is not told."""
    command = [
        sys.executable,
        "-m",
        "day0check.cli",
        "serve",
        "--port",
        "0",
        "--model",
        QUICK,
        "--served-model-name",
        "tiny",
        "--profile",
        "fp32",
        "--max-model-len",
        "256",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment) as process,
    ):
        try:
            client = Client(process.stdout.readline().decode().strip(), None)
            until(lambda: client.call("/health")[0] == 200, "the server is ready")
            body = {"prompt": "x", "forced_token_ids": [97] * 30, "stream": True}
            with begin(client, **body) as connection:
                first = connection.recv(1 << 16)
                process.send_signal(signal.SIGTERM)
                until(lambda: client.call("/health")[0] == 503, "it drains")
                assert client.ask(COMPLETIONS, prompt="x")[0] == 503
                answer = first + read_all(connection)
            assert answer.count(b'"text":"a"') == 30
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert b"ready in" in (tmp_path / "log").read_bytes()
