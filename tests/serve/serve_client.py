"""A server in a thread of its own loop, on a loopback socket, and a client made of the standard library."""

import asyncio
import contextlib
import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import torch

from day0check.accelerated.ops import TABLE, WEIGHTS
from day0check.accelerated.server.engine_thread import EngineOptions, EngineThread
from day0check.accelerated.server.http import HttpOptions, Service
from day0check.accelerated.server.listening import ListenOptions, listening
from day0check.accelerated.server.live import Live
from day0check.accelerated.server.metrics import Metrics
from day0check.probe.registry import Operators
from reference.presets import preset_dir

WAIT_SECONDS = 60


QUICK = "tiny-deepseek-v3.2"  # a third of the time of `tiny`, which has states and a vision tower too


def make_engine(*registrations, model=QUICK, live=Live, **options):
    operators = Operators(TABLE, weights=WEIGHTS, pools=("kv", "index", "state"))
    operators.apply(registrations)
    given = {"page": 16, "max_batch": 8, "chunk": 48, "max_model_len": 448, "max_waiting": 32} | options
    options = EngineOptions(preset_dir(model), torch.float32, torch.device("cpu"), **given)
    return EngineThread(options, operators, Metrics("tiny"), live=live)


def until(condition, what):
    """Waits for something that is about to happen."""
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)


class Client:
    """Asks one server; every call has a connection of its own."""

    def __init__(self, url, service):
        self.address, self.service = urlsplit(url).netloc, service

    def connect(self):
        return http.client.HTTPConnection(self.address, timeout=WAIT_SECONDS)

    def call(self, path, body=None, **headers):
        """(status, headers, bytes)."""
        with contextlib.closing(self.connect()) as connection:
            data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
            method = "GET" if body is None else "POST"
            connection.request(method, path, data, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            return response.status, dict(response.headers), response.read()

    def ask(self, path, **body):
        """(status, JSON) of a body for model tiny."""
        status, _, data = self.call(path, {"model": "tiny", **body})
        return status, json.loads(data)

    def complete(self, prompt="The snow", **body):
        status, answer = self.ask("/v1/completions", **{"prompt": prompt, "temperature": 0, "max_tokens": 6, **body})
        assert status == 200, answer
        return answer

    def chat(self, *messages, **body):
        status, answer = self.ask(
            "/v1/chat/completions", **{"messages": list(messages), "temperature": 0, "max_tokens": 6, **body}
        )
        assert status == 200, answer
        return answer

    def stream(self, path, **body):
        """The data of every event, [DONE] checked and left out."""
        usage = {"include_usage": True}
        body = {"model": "tiny", "temperature": 0, "max_tokens": 6, "stream": True, "stream_options": usage, **body}
        status, headers, data = self.call(path, body)
        assert status == 200, data
        assert headers["Content-Type"].startswith("text/event-stream")
        events = data.decode("utf-8").split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def together(self, calls):
        with ThreadPoolExecutor(len(calls)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]

    def metric(self, name):
        _, _, text = self.call("/metrics")
        lines = [line for line in text.decode().splitlines() if line.startswith(name + "{")]
        assert lines, f"{name} is not in /metrics"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def all_is_free(self):
        live = self.service.engine._live
        return (
            self.metric("vllm:num_requests_running") == self.metric("vllm:num_requests_waiting") == 0
            and self.metric("day0check:kv_pages_free") == live.pages
            and self.metric("day0check:state_slots_free") == live.slots
            and self.service.engine.open_requests() == 0
            and not live.tickets
            and not live.tenancies
        )


@contextlib.contextmanager
def served(engine, listen=None, **options):
    """A Client of `engine` behind HTTP; the engine is started and stopped by whoever made it."""
    service = Service(engine, HttpOptions("tiny", **options))
    loop, up, down = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    url = []

    async def main():
        async with listening(service, listen or ListenOptions(port=0)) as address:
            url.append(address)
            up.set()
            await down.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    try:
        assert up.wait(WAIT_SECONDS)
        yield Client(url[0], service)
    finally:
        loop.call_soon_threadsafe(down.set)
        thread.join(WAIT_SECONDS)
        loop.close()


@contextlib.contextmanager
def running(engine):
    engine.start()
    until(lambda: engine.state.phase != "starting", "the engine starts")
    assert engine.state.phase == "ready", engine.state.error
    try:
        yield engine
    finally:
        assert engine.stop(WAIT_SECONDS)
