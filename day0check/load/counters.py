"""The endpoint's own counters: the few lines of a Prometheus text that prove what a scenario really exercised."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from day0check.load.client import Client

# our name -> names in the wild; of several series with one name the sum counts
NAMES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "aborted": ("vllm:request_aborted_total",),
    "prompt_tokens": ("vllm:prompt_tokens_total", "vllm:prompt_tokens", "sglang:prompt_tokens_total"),
}
FIRST_LOOK_S, LATER_LOOKS_S = 0.02, 0.5
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)")


def parse(text: str) -> dict[str, float]:
    """Our counters found in a Prometheus text; lines that are none are passed over."""
    wanted = {name: ours for ours, names in NAMES.items() for name in names}
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and match[1] in wanted:
            try:
                value = float(match[2])
            except ValueError:
                continue
            found[wanted[match[1]]] = found.get(wanted[match[1]], 0.0) + value
    return found


async def read_counters(client: Client) -> dict[str, float]:
    """The counters now; empty when there is no /metrics."""
    reply = await client.get("/metrics")
    if reply.status != 200 or reply.fault:
        return {}
    return parse(reply.body.decode(errors="replace"))


async def watch_counters(client: Client, peaks: dict[str, float]) -> None:
    """Reads the counters again and again, at once and then less often, and keeps the largest value of each in `peaks`.
    Ends when there are none."""
    wait_s = FIRST_LOOK_S
    while True:
        values = await read_counters(client)
        if not values:
            return
        for name, value in values.items():
            peaks[name] = max(value, peaks.get(name, value))
        await asyncio.sleep(wait_s)
        wait_s = min(LATER_LOOKS_S, wait_s * 1.3)
