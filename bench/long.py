"""A prompt of 128k tokens on `tiny`, and a decode step behind a million, with all choices judged.

    python -m bench.long [--tokens 131072] [--chunk 2048] [--context 1048576] [--profile bf16] [--device cpu]

Every selection of keys and of experts is judged on the candidate's own scores, on all rows. Every other operator is
judged by the oracle in float64: where a row has arguments of its own on `SAMPLED` rows of a call, the others whole in
the first, the middle and the last step. Scores are made tile by tile; of the tiles of a prompt every seventh is judged,
which comes to each place in a step in turn. Ends with 1 when a judgement fails, or memory or time are beyond what is
asked.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.models import directory_of, enlarged
from day0check.accelerated.batch import Part, make_batch
from day0check.accelerated.cache import Caches
from day0check.accelerated.engine import Engine
from day0check.accelerated.ops import TABLE, WEIGHTS
from day0check.compare.local import Judge
from day0check.contracts import CONTRACTS
from day0check.contracts.profiles import profile_named
from day0check.probe.recorder import Call, Caller, Observer, Recorder
from day0check.probe.registry import Operators
from day0check.types import Measure
from reference.weights import Checkpoint

SAMPLED = 4  # rows of a call that the oracle computes again
TILES = 7  # one in so many tiles of scores goes to the oracle; prime to the eight of a step of 2,048 rows
BY_ROW = frozenset({"dsa.score", "mla.attention", "dsa.attention", "kv.gather", "dsa.expand"})
PAGE = 64
GIB, MINUTES = 6.0, 15.0
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BLOCK_ELEMENTS = 1 << 22


def wrong_choices(scores: Tensor, picked: Tensor, *, k: int, visible: Tensor) -> int:
    """Rows of `picked` [rows, k] that are not the k best of the first `visible` scores under the tie rule.

    A row is right when it has as many indices as it can, all different and visible, and no score that it left out comes
    before its worst: the larger first, among equals the lower index. A NaN among the visible scores makes it wrong.
    """
    wrong, n = 0, scores.shape[1]
    column = torch.arange(n, device=scores.device)
    for start in range(0, len(scores), max(1, BLOCK_ELEMENTS // n)):
        rows = slice(start, start + max(1, BLOCK_ELEMENTS // n))
        chosen, seen = picked[rows].long(), visible[rows]
        own = scores[rows].masked_fill(column >= seen.unsqueeze(1), float("-inf"))
        real = chosen >= 0
        count = real.sum(1)
        ordered = torch.where(real, chosen, n + torch.arange(k, device=chosen.device)).sort(1).values
        fits = (count == seen.clamp(max=k)) & (ordered[:, 1:] > ordered[:, :-1]).all(1)
        fits &= (chosen < seen.unsqueeze(1)).all(1)
        values = own.gather(1, chosen.clamp(min=0))
        worst = torch.where(real, values, float("inf")).amin(1)
        alike = torch.stack([torch.count_nonzero(row >= least) for row, least in zip(own, worst, strict=True)])
        tied = fits & (alike > count) & (seen > k)
        fits &= ~own.amax(1).isnan()
        for row in tied.nonzero().flatten().tolist():
            last = chosen[row][real[row] & (values[row] == worst[row])].max()
            left = (own[row] == worst[row]).index_fill(0, chosen[row][real[row]], False).nonzero().flatten()
            above = int((own[row] > worst[row]).sum()) == int((values[row] > worst[row]).sum())
            fits[row] &= above and (not len(left) or bool(left[0] > last))
        wrong += int((~fits & (seen > 0)).sum())
    return wrong


class Sampled(Observer):
    """Judges all choices, sampled rows of what works by rows, and everything in `whole` steps."""

    def __init__(self, profile: str, whole: set[int]) -> None:
        self.measures: dict[tuple[str, str], Measure] = {}
        self.judge = Judge(profile_named(profile), self._take)
        self.whole, self.choices, self.wrong, self.rows = whole, 0, 0, 0
        self.tiles: Counter[str] = Counter()

    def _take(self, measure: Measure) -> None:
        self.measures[measure.tap, measure.phase] = measure

    def before(self, call: Call) -> Any:
        if call.operator == "dsa.select" or call.operator in BY_ROW:
            return None
        return self.judge.before(call) if call.step in self.whole or call.operator == "moe.route" else None

    def after(self, call: Call, token: Any, results: tuple[Any, ...]) -> None:
        if call.operator == "dsa.select":
            self.choices += len(results[0])
            self.wrong += wrong_choices(call.args[0], results[0], k=call.kwargs["k"], visible=call.kwargs["visible"])
        elif call.operator in BY_ROW and self._in_turn(call):
            part, kept = self._some_rows(call, results)
            self.judge.after(part, self.judge.before(part), kept)
        elif token is not None:
            self.judge.after(call, token, results)

    def _in_turn(self, call: Call) -> bool:
        """Whether it is the turn of this call: always, but for the tiles of a prompt's scores."""
        if call.operator != "dsa.score" or call.phase == "decode":
            return True
        self.tiles[call.tap] += 1
        return self.tiles[call.tap] % TILES == 1

    def _some_rows(self, call: Call, results: tuple[Any, ...]) -> tuple[Call, tuple[Any, ...]]:
        """The call on evenly spread rows, the last among them."""
        count = len(results[0])
        rows = sorted({count - 1 - i * count // SAMPLED for i in range(min(SAMPLED, count))})
        self.rows += len(rows)
        at = torch.tensor(rows, device=results[0].device)
        by_row = {a.name for a in CONTRACTS[call.operator].args if a.role in ("rows", "owner")}
        first = CONTRACTS[call.operator].args[0].name in by_row
        args = tuple(value[at] if i == 0 and first else value for i, value in enumerate(call.args))
        kwargs = {name: v[at] if name in by_row and v is not None else v for name, v in call.kwargs.items()}
        return replace(call, rows=call.rows.take(rows), args=args, kwargs=kwargs), tuple(r[at] for r in results)

    def end_case(self) -> None:
        self.judge.end_case()


def steps(tokens: Tensor, chunk: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    for start in range(0, len(tokens), chunk):
        yield start, tuple(tokens[start : start + chunk].tolist())


def peak_gib() -> float:
    """Most memory of the process so far, or of its device where that is more."""
    device = torch.cuda.max_memory_allocated() / (1 << 30) if torch.cuda.is_initialized() else 0.0
    return max(device, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20))


def prompt(engine: Engine, caller: Caller, caches: Caches, tokens: Tensor, chunk: int) -> None:
    """Computes a prompt in pieces, and then one decode step."""
    table = tuple(range(len(caches.pages)))
    begin = time.process_time()
    for number, (start, piece) in enumerate(steps(tokens, chunk)):
        last = start + len(piece) == len(tokens)
        part = Part("a", piece, start, table, 0, wants_logits=last)
        batch = make_batch("prefill", [part], page=PAGE, device=engine.device)
        with caller.recorder.step("prefill", batch.rows, number):
            chosen = engine.prefill(caller, caches, batch)
        if number % 8 == 0:
            spent = time.process_time() - begin
            print(f"    {start + len(piece):7} tokens, {spent:7.1f} s, {peak_gib():.2f} GiB", flush=True)
    batch = make_batch(
        "decode", [Part("a", (chosen[0],), len(tokens), table, 0, True)], page=PAGE, device=engine.device
    )
    with caller.recorder.step("decode", batch.rows, number + 1):
        engine.decode(caller, caches, batch)


def behind(context: int, engine: Engine, caller: Caller, step: int) -> float:
    """Seconds of a decode step behind `context` made-up positions, in caches of their own."""
    pages = context // PAGE + 1
    caches, draw = engine.caches(pages=pages, page=PAGE, slots=1), torch.Generator().manual_seed(5)
    for pool in (*caches.kv.values(), *caches.index.values(), *caches.conv.values(), *caches.kda.values()):
        for some in pool.view(-1, pool.shape[-1]).split(1 << 20):
            some.copy_(torch.randn(some.shape, generator=draw).mul_(0.3))
    part = Part("m", (65,), context, tuple(range(pages)), 0, wants_logits=True)
    batch = make_batch("decode", [part], page=PAGE, device=engine.device)
    begin = time.process_time()
    with caller.recorder.step("decode", batch.rows, step):
        engine.decode(caller, caches, batch)
    return time.process_time() - begin


def main(argv: list[str] | None = None) -> int:
    ask = argparse.ArgumentParser(prog="bench.long", description=__doc__.split("\n", 1)[0])
    ask.add_argument("--tokens", type=int, default=1 << 17)
    ask.add_argument("--chunk", type=int, default=2048)
    ask.add_argument("--context", type=int, default=1 << 20, help="positions behind which the last step decodes")
    ask.add_argument("--profile", choices=tuple(DTYPES), default="bf16")
    ask.add_argument("--threads", type=int, default=1, help="more of them burn time waiting where others work, too")
    ask.add_argument("--device", default="cpu")
    given = ask.parse_args(argv)
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    directory = directory_of(enlarged("long", layers=8, positions=(1 << 20) + PAGE))
    engine = Engine(Checkpoint(directory), dtype=DTYPES[given.profile], device=device)
    count = -(-given.tokens // given.chunk)
    sampled = Sampled(given.profile, {0, count // 2, count - 1, count, count + 1})
    caller = Caller(Operators(TABLE, weights=WEIGHTS, pools=("kv", "index", "state")), Recorder([sampled]))
    tokens = torch.randint(0, 256, (given.tokens,), generator=torch.Generator().manual_seed(7))
    begin, wall = time.process_time(), time.perf_counter()
    caches = engine.caches(pages=given.tokens // PAGE + 1, page=PAGE, slots=1)
    print(f"{given.tokens} tokens on tiny, chunks of {given.chunk}, {given.profile}, {device}, {given.threads} threads")
    prompt(engine, caller, caches, tokens, given.chunk)
    spent, elapsed, gib = time.process_time() - begin, time.perf_counter() - wall, peak_gib()
    step = behind(given.context, engine, caller, count + 1)
    caller.recorder.end_case()
    sampled.end_case()
    print(f"{spent:.0f} s of the processor, {elapsed:.0f} s of the wall clock, {gib:.2f} GiB at the most")
    print(f"a decode step behind {given.context} positions: {step:.2f} s, judging included; {peak_gib():.2f} GiB then")
    met = judged_well(sampled) and gib <= GIB and min(spent, elapsed) <= MINUTES * 60
    print("met" if met else "NOT MET")
    return 0 if met else 1


def judged_well(sampled: Sampled) -> bool:
    """Prints what was judged; whether there was something of each kind and nothing was wrong."""
    failed = [m for m in sampled.measures.values() if not m.passed]
    print(
        f"{sampled.choices} rows of chosen keys judged, {sampled.wrong} wrong; "
        f"{sampled.rows} rows of scores and attention and {len(sampled.measures)} taps judged, {len(failed)} failed"
    )
    for measure in failed[:10]:
        print(f"    {measure.tap} ({measure.phase}): {measure.failing} {measure.message or measure.not_judged}")
    return bool(sampled.choices and sampled.rows and sampled.measures) and not failed and not sampled.wrong


if __name__ == "__main__":
    sys.exit(main())
