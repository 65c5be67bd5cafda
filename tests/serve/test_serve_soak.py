"""Many requests, a third of them given up at a random moment: in the end all is free and the answers are right."""

import asyncio
import random

import aiohttp
import pytest
from serve_client import until

AT_ONCE = 24


async def one(session, number, seed):
    """Asks and either reads the answer or leaves after a moment; the status, or 0 when it left."""
    draw = random.Random(seed * 100_003 + number)
    body = {"model": "tiny", "prompt": "x" * draw.randint(1, 60), "max_tokens": draw.randint(1, 8), "seed": number}
    body |= {"stream": draw.random() < 0.5, "logprobs": draw.choice([None, 0, 3])}
    leaves = draw.random() < 0.35
    try:
        async with asyncio.timeout(draw.expovariate(8) if leaves else None):
            async with session.post("/v1/completions", json=body) as response:
                data = await response.read()
                assert not body["stream"] or response.status != 200 or data.endswith(b"data: [DONE]\n\n")
                return response.status
    except TimeoutError:
        return 0


async def storm(address, count, seed):
    gate = asyncio.Semaphore(AT_ONCE)

    async def guarded(session, number):
        async with gate:
            return await one(session, number, seed)

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(f"http://{address}", timeout=timeout) as session:
        return await asyncio.gather(*(guarded(session, number) for number in range(count)))


@pytest.mark.parametrize("count", [120, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_nothing_is_left_after_a_storm(client, count):
    """Catches a page, slot, ticket or queue place that some order of ends and aborts leaves behind (S-66)."""
    golden = client.complete()["choices"]
    statuses = asyncio.run(storm(client.address, count, seed=1))
    assert set(statuses) <= {0, 200, 429}
    assert statuses.count(200) > count // 3
    assert statuses.count(0) > count // 20
    until(client.all_is_free, "pages and slots are free")
    assert client.complete()["choices"] == golden
    assert not list(client.service._folder.iterdir())
