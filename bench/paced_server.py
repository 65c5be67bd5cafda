"""A scripted endpoint that streams at a fixed pace: what a client sees of it late is the client's own lateness.

    python -m bench.paced_server --tokens-per-s 20 [--port 0]

Prints its address. Token n of an answer is ` n`, so that a lost, doubled or reordered chunk shows. Standard library.
"""

from __future__ import annotations

import argparse
import asyncio
import json

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = {"object": "list", "data": [{"id": "paced", "object": "model"}]}


def event(data: str) -> bytes:
    line = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(line), line)


class Paced(asyncio.Protocol):
    """One connection; one request at a time. Token n is due n / rate seconds after the request came."""

    rate = 20.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.data, self.timer = transport, b"", None

    def connection_lost(self, error: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, end, body = self.data.partition(b"\r\n\r\n")
        if not end:
            return
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if len(body) < int(fields.get(b"content-length", 0)):
            return
        self.data = b""
        if head.startswith(b"GET"):
            text = json.dumps(MODELS).encode()
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
            return
        asked = json.loads(body)
        self.count, self.sent = int(asked.get("max_tokens", 16)), 0
        self.begin = asyncio.get_running_loop().time()
        self.transport.write(HEAD)
        self.next()

    def next(self) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() >= self.begin + self.sent / self.rate and self.sent < self.count:
            delta = {"content": f" {self.sent}"}
            self.transport.write(event(json.dumps({"choices": [{"index": 0, "delta": delta}]})))
            self.sent += 1
        if self.sent < self.count:
            self.timer = loop.call_at(self.begin + self.sent / self.rate, self.next)
            return
        usage = {"prompt_tokens": 1, "completion_tokens": self.count, "total_tokens": self.count + 1}
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        done = event(json.dumps(last)) + event(json.dumps({"choices": [], "usage": usage})) + event("[DONE]")
        self.transport.write(done + b"0\r\n\r\n")


async def serve(rate: float, port: int) -> None:
    Paced.rate = rate
    server = await asyncio.get_running_loop().create_server(Paced, "127.0.0.1", port, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens-per-s", type=float, default=20.0)
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    asyncio.run(serve(given.tokens_per_s, given.port))
