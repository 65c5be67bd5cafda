"""Many streams at a fixed pace: is a chunk lost, how late is the client itself, what does a token cost it?

    python -m bench.streams [--streams 256] [--tokens-per-s 20] [--tokens 200] [--most-lag-ms 5]

Prints one JSON object. Exit code 1 when a chunk is lost or the client's own lag is beyond the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

from day0check.load.answers import read_answer
from day0check.load.asks import CHAT
from day0check.load.client import Client, Limits, target_of
from day0check.load.metrics import quantile
from day0check.load.records import Reply
from day0check.load.stream_loop import run_streams
from day0check.load.traffic import Load, open_loop


async def load(url: str, streams: int, tokens: int, pace: float) -> Load:
    """One stream after the other begins within one pace, so that they do not tick together."""
    body = {"model": "paced", "messages": [{"role": "user", "content": "x"}], "max_tokens": tokens, "stream": True}
    async with Client(target_of(url), Limits(requests=2 * streams, seconds=600, request_s=600)) as client:

        async def send(number: int, due_ns: int | None) -> Reply:
            return await client.post_in_load(CHAT, body, scheduled_ns=due_ns)

        return await open_loop(send, [2.0 * n / streams for n in range(streams)])


def figures(made: Load, tokens: int, pace: float, parse_s: float) -> dict[str, Any]:
    """Lost chunks, lags and cost. A chunk is late against the best schedule that its own stream allows."""
    lost, late = 0, []
    for reply in made.replies:
        answer = read_answer(reply)
        lost += answer.text != "".join(f" {n}" for n in range(tokens))
        begins = [piece.at_ns - n * pace * 1e9 for n, piece in enumerate(answer.pieces)]
        first = min(begins, default=0.0)
        late += [(begin - first) / 1e6 for begin in begins]
    lags = made.own.loop_lag_ms
    total = len(made.replies) * tokens
    return {
        "streams": len(made.replies),
        "streams_with_lost_chunks": lost,
        "faults": sorted({r.fault for r in made.replies} - {""}),
        "own_lag_ms": {f"p{p}": round(quantile(lags, p), 3) for p in (50, 90, 99)},
        "chunk_late_ms": {f"p{p}": round(quantile(late, p), 3) for p in (50, 90, 99)} if late else {},
        "dispatch_lag_ms_p99": round(quantile(made.own.dispatch_lag_ms, 99), 3),
        "cpu_share": round(made.own.cpu_share, 4),
        "cpu_us_per_token": round(made.own.cpu_seconds * 1e6 / total, 2),
        "parse_us_per_token": round(parse_s * 1e6 / total, 2),
        "load_average": round(os.getloadavg()[0], 1),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens-per-s", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--most-lag-ms", type=float, default=5.0)
    given = parser.parse_args(arguments)
    command = [sys.executable, "-m", "bench.paced_server", "--tokens-per-s", str(given.tokens_per_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().strip()
            made = run_streams(load(url, given.streams, given.tokens, 1 / given.tokens_per_s))
        finally:
            server.kill()
    begin = time.process_time()
    for reply in made.replies:
        read_answer(reply)
    row = figures(made, given.tokens, 1 / given.tokens_per_s, time.process_time() - begin)
    print(json.dumps(row))
    good = not row["streams_with_lost_chunks"] and row["own_lag_ms"]["p99"] <= given.most_lag_ms
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
