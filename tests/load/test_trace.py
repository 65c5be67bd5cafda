"""Arrivals from a trace file."""

from __future__ import annotations

import asyncio

import pytest
from mock_endpoint import Endpoint, serving

from day0check.errors import InputError
from day0check.load.asks import Dialect
from day0check.load.client import Client, Limits, target_of
from day0check.load.speed import SpeedPlan, run_speed
from day0check.load.trace import Due, read_trace


def test_both_spellings_of_time(tmp_path) -> None:
    """Would catch milliseconds taken for seconds, and an order that is that of the file."""
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 3000, "input_length": 7, "output_length": 2, "hash_ids": [1]}\n\n{"timestamp": 1000}\n'
    )
    assert read_trace(file) == (Due(0.0), Due(2.0, 7, 2))
    file.write_text('{"at_s": 3.5}\n{"at_s": 3.75, "output_length": 4}\n')
    assert read_trace(file) == (Due(0.0), Due(0.25, None, 4))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"at_s": 1, "timestamp": 1}',
        '{"at_s": -1}',
        '{"at_s": true}',
        '{"at_s": 1, "input_length": 0}',
        "",
    ],
)
def test_a_bad_line_is_named(tmp_path, line: str) -> None:
    """Would catch a trace that is read as something else than it says."""
    file = tmp_path / "trace.jsonl"
    file.write_text('{"at_s": 0}\n' * bool(line) + line)
    with pytest.raises(InputError) as caught:
        read_trace(file)
    assert not line or f"{file}:2" in str(caught.value)
    with pytest.raises(InputError):
        read_trace(tmp_path / "none")


def test_the_open_loop_follows_the_trace() -> None:
    """Would catch arrivals or lengths that are not those of the trace."""
    trace = (Due(0.0, 40, 3), Due(0.05, 400, 5), Due(0.1))
    plan = SpeedPlan(concurrencies=(1,), requests=2, warmup=2, words=8, output_tokens=4, arrivals="trace", trace=trace)

    async def run(url: str) -> list:
        async with Client(target_of(url), Limits(stall_s=5, request_s=5)) as client:
            return await run_speed(client, Dialect("chat", "mock"), plan)

    with serving(Endpoint()) as url:
        phases = asyncio.run(run(url))
    last = phases[-1]
    assert last.name == "open/trace"
    assert [s.output_tokens for s in last.samples] == [3, 5, 4]
    prompts = [s.prompt_tokens for s in last.samples]
    assert prompts[0] < 120 < 250 < prompts[1] < 600
    begin = last.load.replies[0].scheduled_ns
    assert [round((r.scheduled_ns - begin) / 1e9, 2) for r in last.load.replies] == [0.0, 0.05, 0.1]
