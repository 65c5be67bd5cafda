"""Our load against `vllm bench serve` on one running vLLM, in turns, and what a streamed token costs each client.

    python -m bench.endpoint --start [--targets .targets] [--rounds 3] [--guidellm]
    python -m bench.endpoint --url http://127.0.0.1:8101      # one that runs already: vLLM of tiny qwen3

Figures are by the definitions of `vllm bench serve`: TTFT to the first chunk with choices, the role chunk too; TPOT
from there to the last such chunk over tokens - 1; tokens over the time from the first send to the last end. They agree
when the ratio of medians is within that tool's own spread from run to run. Cost: processor time of the whole client
process; its start-up is taken out by the difference of two loads. The third opinion is the server's: its own mean TTFT
over each load, and how much later each client's is. Prints one JSON object; exit code 1 on disagreement, and where that
spread is so large that nothing can be said (`agrees` is null).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from day0check.load import asks
from day0check.load.answers import read_answer
from day0check.load.client import Client, Limits, target_of
from day0check.load.metrics import quantile
from day0check.load.prompts import unique
from day0check.load.records import Reply
from day0check.load.stream_loop import run_streams
from day0check.load.traffic import Load, closed_loop

PROMPT_TOKENS, OUTPUT_TOKENS, CONCURRENCY, REQUESTS, WARMUP = 128, 32, 4, 80, 8
MORE_REQUESTS = {"ours": 3600, "vllm_bench": 3600, "guidellm": 1600}  # of the larger load that gives a token's cost
MOST_SPREAD = 2.0  # of that tool against itself: beyond it the machine is too busy to compare anything
SERVER_TTFT = "server_ttft_mean_ms"
NAMES = ("ttft_p50_ms", "tpot_p50_ms", "output_tokens_per_s")
Figures = dict[str, float]
Made = tuple[Figures, float]  # with the processor seconds of the run

# ------------------------------------------------------------------------------------------------------------ ours


async def ours(url: str, requests: int, seed: int) -> Load:
    """The load by our client: chat, unique prompts of the wanted length, answers of fixed length."""
    async with Client(
        target_of(url), Limits(requests=requests + 64, seconds=900, stall_s=120, request_s=300)
    ) as client:
        model = json.loads((await client.get("/v1/models")).body)["data"][0]["id"]
        dialect = asks.Dialect("chat", model)
        words = await _words(client, dialect, seed)

        async def send(number: int, due_ns: int | None) -> Reply:
            body = asks.ask(dialect, unique(number, seed=seed, words=words), max_tokens=OUTPUT_TOKENS, stream=True)
            return await client.post_in_load(dialect.path, body | {"ignore_eos": True}, scheduled_ns=due_ns)

        await closed_loop(lambda n, due: send(-1 - n, due), count=WARMUP, concurrency=CONCURRENCY)
        return await closed_loop(send, count=requests, concurrency=CONCURRENCY)


async def _words(client: Client, dialect: asks.Dialect, seed: int) -> int:
    """How many words make a prompt of the wanted length, by what the server counts.

    As there, the length is that of the words; the chat template comes on top.
    """

    async def counted(prompt: str) -> int:
        body = asks.ask(dialect, prompt, max_tokens=1)
        return (await client.ask("count", dialect.path, body)).answer.usage.prompt_tokens

    template = await counted("a") - 1
    few, many = [await counted(unique(-100 - words, seed=seed, words=words)) for words in (8, 40)]
    return max(1, round(8 + (PROMPT_TOKENS + template - few) * 32 / (many - few)))


def by_their_definitions(load: Load) -> Figures:
    """Raises ValueError when a request failed: then nothing can be compared."""
    ttft, tpot, tokens, ends = [], [], 0, []
    for reply in load.replies:
        answer = read_answer(reply)
        if reply.fault or not answer.pieces or answer.usage is None:
            raise ValueError(f"a request failed: {reply.fault or answer.error or 'an empty answer'}")
        first = min(answer.pieces[0].at_ns, answer.role_ns or answer.pieces[0].at_ns)
        count = answer.usage.completion_tokens
        ttft.append((first - reply.sent_ns) / 1e6)
        tpot.append((answer.last_ns - first) / 1e6 / (count - 1))
        tokens += count
        ends.append(answer.last_ns)
    seconds = (max(ends) - min(r.sent_ns for r in load.replies)) / 1e9
    return {
        "ttft_p50_ms": quantile(ttft, 50),
        "tpot_p50_ms": quantile(tpot, 50),
        "output_tokens_per_s": tokens / seconds,
        "tokens": float(tokens),
    }


def run_ours(targets: Path, url: str, requests: int, seed: int) -> Made:
    """(figures, processor seconds of the whole process)."""
    command = [sys.executable, "-m", "bench.endpoint", "--only-ours", "--url", url]
    text, cpu_s = _run([*command, "--requests", str(requests), "--seed", str(seed)])
    return json.loads(text), cpu_s


# ---------------------------------------------------------------------------------------------------------- theirs


def run_vllm(targets: Path, url: str, requests: int, seed: int) -> Made:
    """`vllm bench serve` with the same load."""
    programs = targets / "vllm" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(programs / "vllm"), "bench", "serve", "--backend", "openai-chat"),
            *("--endpoint", "/v1/chat/completions", "--base-url", url, "--model", "tiny"),
            *("--tokenizer", str(targets / "models" / "qwen3"), "--dataset-name", "random"),
            *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)),
            *("--num-prompts", str(requests), "--max-concurrency", str(CONCURRENCY), "--ignore-eos"),
            *("--seed", str(seed), "--num-warmups", str(WARMUP), "--temperature", "0"),
            *("--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50", "--save-result"),
            *("--result-dir", folder, "--result-filename", "result.json", "--disable-tqdm"),
        ]
        quiet = {"LD_PRELOAD": str(programs.parent / "lib" / "libiomp5.so"), "VLLM_NO_USAGE_STATS": "1"}
        _, cpu_s = _run(command, **quiet)
        found = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    return {
        "ttft_p50_ms": found["median_ttft_ms"],
        "tpot_p50_ms": found["median_tpot_ms"],
        "output_tokens_per_s": found["output_throughput"],
        "tokens": float(found["total_output_tokens"]),
    }, cpu_s


def run_guidellm(targets: Path, url: str, requests: int, seed: int) -> Made:
    """GuideLLM with the same load; only its cost is used, its definitions are others."""
    tokenizer = targets / "models" / "qwen3"
    command = [
        *(str(targets / "guidellm" / "bin" / "guidellm"), "run"),
        *("--backend", f"kind=openai_http,target={url},model=tiny"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--profile", f"kind=concurrent,streams={CONCURRENCY}"),
        *("--constraint", f"kind=max_requests,count={requests}", "--disable-console-interactive"),
    ]
    with tempfile.TemporaryDirectory() as folder:  # it writes benchmarks.json and .csv into the folder it is started in
        _, cpu_s = _run(command, folder=folder)
    return {"tokens": float(requests * OUTPUT_TOKENS)}, cpu_s


def _run(command: list[str], *, folder: str | None = None, **environment: str) -> tuple[str, float]:
    """(standard output, processor seconds of the process and its children), started in `folder`, None for ours.

    Raises CalledProcessError.
    """
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    before = os.times()
    made = subprocess.run(
        command,
        env={**os.environ, **quiet, **environment},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    after = os.times()
    return made.stdout, (after.children_user + after.children_system) - (before.children_user + before.children_system)


# ------------------------------------------------------------------------------------------------------ comparison


def compared(theirs: Sequence[Figures], mine: Sequence[Figures]) -> dict[str, Any]:
    """Of each figure: medians, their ratio, the tool's own spread (largest ratio of two of its runs), agreement."""
    table: dict[str, Any] = {}
    for name in NAMES:
        them, us = [f[name] for f in theirs], [f[name] for f in mine]
        # what takes no time at all (answers that came in one piece) has no ratio
        ratio = statistics.median(us) / statistics.median(them) if statistics.median(them) > 0 else math.inf
        spread = max(them) / min(them) if min(them) > 0 else math.inf
        table[name] = {
            "vllm_bench": [round(v, 3) for v in them],
            "ours": [round(v, 3) for v in us],
            "ratio": round(ratio, 4) if math.isfinite(ratio) else None,
            "own_spread": round(spread, 4) if math.isfinite(spread) else None,
            "agrees": 1 / spread <= ratio <= spread if spread <= MOST_SPREAD else None,
        }
    return table


def cost_us(small: Sequence[Made], large: Made) -> tuple[float, float]:
    """(processor microseconds of a streamed token, how far they may be off): from the difference of two loads, so that
    start-up is not in it. `small`: several runs of the smaller load; their spread is what is not known."""
    seconds = [cpu_s for _, cpu_s in small]
    tokens = large[0]["tokens"] - small[0][0]["tokens"]
    spread = (max(seconds) - min(seconds)) / 2 if len(seconds) > 1 else 0.0
    return (large[1] - statistics.median(seconds)) * 1e6 / tokens, spread * 1e6 / tokens


# ------------------------------------------------------------------------------------------------------------ runs


@dataclass
class Runs:
    """Runs of the three clients on one server; what `file` holds already is not made again."""

    targets: Path
    url: str
    file: Path | None = None
    _made: dict[str, Made] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file and self.file.is_file() else ()
        for row in map(json.loads, lines):
            if row["url"] == self.url:
                self._made[row["key"]] = (row["figures"], row["cpu_s"])

    def made(self, client: str, requests: int, seed: int) -> Made:
        """(figures, processor seconds) of one load."""
        key = f"{client} {requests} {seed}"
        if key not in self._made:
            run = {"ours": run_ours, "vllm_bench": run_vllm, "guidellm": run_guidellm}[client]
            before = ttft_of_server(self.url)
            figures, cpu_s = run(self.targets, self.url, requests, seed)
            (seconds, count), (seconds_before, count_before) = ttft_of_server(self.url), before
            if count > count_before:
                figures = figures | {SERVER_TTFT: 1e3 * (seconds - seconds_before) / (count - count_before)}
            self._made[key] = figures, cpu_s
            print(f"{key}: {figures}, {cpu_s:.2f} s of processor", file=sys.stderr, flush=True)
            if self.file is not None:
                row = {"url": self.url, "key": key, "figures": figures, "cpu_s": cpu_s}
                with self.file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")
        return self._made[key]


def ttft_of_server(url: str) -> tuple[float, float]:
    """(seconds, requests) of the server's own time to first token so far: the sum and count of its histogram, over all
    it has answered. (0, 0) where it tells none."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return 0.0, 0.0
    name = "vllm:time_to_first_token_seconds"
    seconds, count = (sum(float(n.split()[-1]) for n in lines if n.startswith(f"{name}_{p}")) for p in ("sum", "count"))
    return seconds, count


def beyond_server(made: Sequence[Figures]) -> dict[str, float] | None:
    """Medians over loads: the server's own mean TTFT, and how much more a client's median is; None if it told none."""
    if not all(SERVER_TTFT in f for f in made):
        return None
    later = statistics.median(f["ttft_p50_ms"] - f[SERVER_TTFT] for f in made)
    return {"server_ms": round(statistics.median(f[SERVER_TTFT] for f in made), 3), "later_ms": round(later, 3)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="where vLLM runs; else --start")
    parser.add_argument("--start", action="store_true", help="start vLLM of tiny qwen3, and stop it")
    parser.add_argument("--targets", type=Path, default=Path(".targets"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument(
        "--state", type=Path, help="where runs are kept: a run that was stopped goes on with the same --url"
    )
    parser.add_argument("--guidellm", action="store_true", help="measure its cost, too")
    parser.add_argument("--only-ours", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.only_ours:
        print(json.dumps(by_their_definitions(run_streams(ours(given.url, given.requests, given.seed)))))
        return 0
    targets = given.targets.resolve()
    if given.start == (given.url is not None):
        parser.error("give --url, or --start")
    if given.start:
        with started(targets) as url:
            return compare(given, targets, url)
    return compare(given, targets, given.url)


@contextlib.contextmanager
def started(targets: Path) -> Iterator[str]:
    """vLLM of tiny qwen3 on a port of its own; gives its address. Raises RuntimeError when it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).resolve().parent.parent / "servers" / "targets.py"
    command = [sys.executable, str(script), "start", "vllm", "qwen3", "--port", str(port), "--at", str(targets)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = next((line.strip() for line in server.stdout if line.startswith("http://")), "")
            if not url:
                raise RuntimeError("vLLM did not start; its log is in the folder of the targets")
            yield url
        finally:
            server.terminate()


def compare(given: argparse.Namespace, targets: Path, url: str) -> int:
    """Both tools in turns, then what a token costs each; prints the table."""
    runs, kept = Runs(targets, url, given.state), {"vllm_bench": [], "ours": []}
    for number in range(given.rounds):
        turn = tuple(kept) if number % 2 == 0 else tuple(kept)[::-1]
        for place, client in enumerate(turn):
            kept[client].append(runs.made(client, given.requests, given.seed + 10 * number + place))
    figures = compared(*([made for made, _ in kept[client]] for client in kept))
    costs = {c: cost_us(kept[c], runs.made(c, MORE_REQUESTS[c], 100 + n)) for n, c in enumerate(kept)}
    if given.guidellm:
        small = [runs.made("guidellm", given.requests, seed) for seed in (200, 202)]
        costs["guidellm"] = cost_us(small, runs.made("guidellm", MORE_REQUESTS["guidellm"], 201))
    ours = costs["ours"][0]
    cheap = all(ours <= 0.5 * cost for name, (cost, _) in costs.items() if name != "ours")
    verdicts = [row["agrees"] for row in figures.values()]
    agrees = False if False in verdicts else None if None in verdicts else True
    table = {
        "figures": figures,
        "ttft_beyond_the_servers": {c: beyond_server([made for made, _ in kept[c]]) for c in kept},
        "cpu_us_per_token": {name: round(cost, 1) for name, (cost, _) in costs.items()},
        "cpu_us_not_known": {name: round(off, 1) for name, (_, off) in costs.items()},
        "load_average": round(os.getloadavg()[0], 1),
        "agrees": agrees,
        "at_most_half_the_cost": cheap,
    }
    print(json.dumps(table, indent=1))
    return 0 if agrees and cheap else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
