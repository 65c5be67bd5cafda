"""What strangers do to a server: generated requests, a byte a second, a gigabyte, thousands of connections."""

import contextlib
import json
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from serve_client import QUICK, make_engine, running, served, until

from day0check.accelerated.server.listening import ListenOptions

CONNECTIONS = 10_000
SLOW_BYTES = 7  # one a second


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_generated_request_is_a_fault_of_the_server(tmp_path):
    """Catches a body, header or method out of the server's own description for which it answers 5xx."""
    program = Path(sys.executable).parent / "schemathesis"
    if not program.is_file():
        pytest.skip("schemathesis is not installed: it comes with the extra `dev`")
    with running(make_engine(max_model_len=64)) as engine, served(engine) as client:
        command = [
            *(str(program), "run", f"http://{client.address}/openapi.json", "--checks", "not_a_server_error"),
            *("--max-examples", "80", "--seed", "1", "--request-timeout", "600", "--no-color"),
            *("--continue-on-failure", "--phases", "examples,coverage,fuzzing"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1700, check=False)
        assert done.returncode == 0, done.stdout[-4000:]
        cases = re.search(r"(\d[\d,]*) generated", done.stdout)
        assert cases, done.stdout[-2000:]
        assert int(cases[1].replace(",", "")) > 300, done.stdout[-2000:]
        until(client.all_is_free, "pages and slots are free")


class Witness:
    """Asks the same small question again and again; `answers` are (seconds, text)."""

    def __init__(self, client):
        self.client, self.answers, self.failed = client, [], []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while not self._stop.is_set():
            begin = time.monotonic()
            try:
                text = self.client.complete(max_tokens=3)["choices"][0]["text"]
            except (OSError, AssertionError, ValueError) as error:
                self.failed.append(repr(error))
                return
            self.answers.append((time.monotonic() - begin, text))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(120)


def a_byte_a_second(connection, data):
    for byte in data:
        connection.sendall(bytes([byte]))
        time.sleep(1)


def test_a_byte_a_second_and_a_gigabyte_hurt_nobody(client):
    """Catches a body that is waited for without end, or read without end, while others wait for it."""
    golden = client.complete(max_tokens=3)["choices"][0]["text"]
    data = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    huge = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with (
        socket.create_connection(client.address.split(":")) as drop,
        socket.create_connection(client.address.split(":")) as flood,
        socket.create_connection(client.address.split(":")) as endless,
        Witness(client) as witness,
    ):
        drop.sendall(head.encode() + b"\r\n")
        drip = threading.Thread(target=a_byte_a_second, args=(drop, data[:SLOW_BYTES]))
        drip.start()
        flood.sendall(f"{huge}Content-Length: {1 << 30}\r\n\r\n".encode())
        assert b" 413 " in flood.recv(4096).split(b"\r\n")[0]
        endless.sendall(f"{huge}Transfer-Encoding: chunked\r\n\r\n".encode())
        block, sent, refused = b"100000\r\n" + b" " * (1 << 20) + b"\r\n", 0, b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            endless.settimeout(30)
            while sent < 1 << 30:
                endless.sendall(block)
                sent += 1 << 20
        with contextlib.suppress(ConnectionError, TimeoutError):
            refused = endless.recv(4096)
        assert sent < 1 << 30, "the server read a whole gigabyte"  # it listens on for a tenth of a second
        assert refused == b"" or b" 413 " in refused.split(b"\r\n")[0]
        drip.join()
        drop.settimeout(0.1)
        with pytest.raises(TimeoutError):  # it is still waited for, and was all the time
            drop.recv(1)
    assert not witness.failed
    assert len(witness.answers) >= 20
    assert max(seconds for seconds, _ in witness.answers) < SLOW_BYTES / 2, "an answer waited for the slow body"
    assert {text for _, text in witness.answers} == {golden}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_connections_hurt_nobody():
    """Catches a server whose sockets or memory run out, and one that no longer answers those who were there before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + 1000  # the server closes its ends of those that are too many
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this machine allows {hard} open files, {wanted} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    listen = ListenOptions(port=0, connections=256, first_request_seconds=60.0)
    with running(make_engine(model=QUICK)) as engine, served(engine, listen) as client:
        golden = client.complete(max_tokens=3)["choices"][0]["text"]
        kept = client.connect()
        kept.connect()
        address = client.address.split(":")
        sockets = []
        try:
            for _ in range(CONNECTIONS):
                connection = socket.socket()
                connection.settimeout(20)
                connection.connect((address[0], int(address[1])))
                sockets.append(connection)
            body = json.dumps({"model": "tiny", "prompt": "The snow", "temperature": 0, "max_tokens": 3})
            kept.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = kept.getresponse()
            assert answer.status == 200
            assert json.loads(answer.read())["choices"][0]["text"] == golden
            told = sockets[-1].recv(4096)
            assert b" 503 " in told.split(b"\r\n")[0]
            assert b"Retry-After" in told
        finally:
            kept.close()
            for connection in sockets:
                connection.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        until(lambda: client.call("/health")[0] == 200, "a new client is let in again")
        assert client.complete(max_tokens=3)["choices"][0]["text"] == golden
        until(client.all_is_free, "pages and slots are free")
