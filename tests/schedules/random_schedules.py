"""Random schedules of the engine against the reference: whatever a schedule does, the numbers are those of the oracle.

    PYTHONPATH=tests python tests/schedules/random_schedules.py --runs 1000 --state reports/schedules.jsonl [--jobs 2]

runs hypothesis in portions; a portion that has passed is kept in the state file and not run again, so that the sweep
can be stopped and goes on. A mismatch is shrunk by hypothesis and ends the sweep with its smallest schedule.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from small_model import small_model

from day0check.backends.accelerated import Accelerated
from day0check.case_format import packaged_root
from day0check.probe.recorder import Observer, Recorder
from day0check.types import Request, Schedule, ScheduleEvent, Turn
from reference.model import Model
from reference.weights import Checkpoint

PORTION = 25  # schedules of one entry in the state file
LIMIT = 1e-4  # of a row's error against the mean norm of its tap: float32 against float64 stays a hundred times below
LOGITS = "head.logits"
PAD = 259


# ------------------------------------------------------------------------------------------------------ conversations


def words(number: int, count: int) -> tuple[int, ...]:
    return tuple(97 + (number * 31 + n * n * 7 + n * 3) % 26 for n in range(count))


def picture(name: str) -> str:
    return str(packaged_root() / "data" / name)


SHARED = words(1, 18)  # what several conversations begin with: more than a block of the prefix cache
IMAGE = (PAD,) * 12  # 84 x 112 pixels: 6 x 8 patches, 12 groups
CONVERSATIONS: tuple[tuple[Turn, ...], ...] = (
    (Turn((*SHARED, *words(2, 9))),),
    (Turn((*SHARED, *words(3, 21))),),
    (Turn((*SHARED[:11], *words(4, 3))), Turn(words(5, 7))),
    (Turn(words(6, 3)),),
    (Turn((*words(7, 4), *IMAGE, *words(8, 5)), (picture("waves.png"),)),),
    (Turn((*words(7, 4), *IMAGE, *words(8, 5)), (picture("rings.png"),)),),
    (Turn((*words(9, 2), *IMAGE, 98, *IMAGE, 99), (picture("rings.png"), picture("waves.png"))), Turn(words(10, 4))),
)
ANSWERS = (words(11, 6), words(12, 3))  # prescribed, of the first and the second turn


@dataclass(frozen=True)
class Asked:
    """One request of an example: which conversation, how many answer tokens a turn, when it comes."""

    conversation: int
    new: int
    arrive: int

    def request(self, name: str) -> Request:
        turns = CONVERSATIONS[self.conversation]
        forced = tuple(answer[: self.new] for answer, _ in zip(ANSWERS, turns, strict=False))
        return Request(name, turns, self.new, arrive_step=self.arrive, forced=forced)


def sequence(request: Request) -> tuple[int, ...]:
    return tuple(t for turn, answer in zip(request.turns, request.forced, strict=True) for t in (*turn.tokens, *answer))


@st.composite
def examples(draw: st.DrawFn) -> tuple[tuple[Request, ...], Schedule]:
    """Requests and a schedule that makes sense for them."""
    some = st.builds(
        Asked, st.sampled_from(range(len(CONVERSATIONS))), st.sampled_from([6, 4, 3, 1]), st.sampled_from([0, 2, 5, 9])
    )
    new_of = [len(answer) for answer in ANSWERS]
    asked = draw(st.lists(some, min_size=draw(st.sampled_from([1, 2, 3])), max_size=4))
    requests = tuple(
        Asked(a.conversation, min(a.new, min(new_of[: len(CONVERSATIONS[a.conversation])])), a.arrive).request(f"r{n}")
        for n, a in enumerate(asked)
    )
    page = draw(st.sampled_from([4, 8, 8, 16]))
    host = draw(st.sampled_from([True, False]))
    does = ["offload", "offload", "preempt", "abort", "reload"] if host else ["preempt", "preempt", "abort"]
    names = st.sampled_from([r.id for r in requests])
    event = st.builds(ScheduleEvent, st.sampled_from(range(1, 12)), st.sampled_from(does), names)
    events = draw(st.lists(event, min_size=draw(st.sampled_from([0, 1, 3])), max_size=4))
    need = [-(-len(sequence(r)) // page) for r in requests]
    schedule = Schedule(
        chunk=draw(st.sampled_from([None, 3, 7, 8, 9, 13, 16, 33])),
        page=page,
        max_batch=draw(st.sampled_from([1, 2, 3, 4])),
        events=tuple(events),
        mixed=draw(st.booleans()),
        prefix_cache=draw(st.booleans()),
        snapshot_blocks=draw(st.integers(1, 2)),
        pages=draw(st.one_of(st.none(), st.integers(max(need), sum(need) + 1))),
        host_pages=sum(need) if host else 0,
        memory=draw(st.sampled_from(["", "garbage", "shuffled", "end", "strided"])),
        fixed_rows=draw(st.sampled_from([0, 0, 3, 6])),
        prefix_workspace=draw(st.sampled_from([None, 8, 13, 40])),
        copies=draw(st.sampled_from(["", "late"])),
    )
    return requests, schedule


# ---------------------------------------------------------------------------------------------------------- judging


HAPPENED = ("hits", "reloads", "recomputed", "padded", "merged")


class LogitRows(Observer):
    """Every row of logits, by request and position, and what happened on the way to them."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], torch.Tensor] = {}
        self.happened: Counter[str] = Counter()
        self._computed: set[tuple[str | None, int | None]] = set()

    def after(self, call, token, results) -> None:
        if call.operator == "prefix.match":
            self.happened["hits"] += results[0].numel() > 0
        elif call.tap == "layers.02.kv.reload.kv":
            self.happened["reloads"] += 1
        elif call.operator == "mla.merge":
            self.happened["merged"] += 1
        elif call.tap == "embed.tokens":
            addresses = [call.rows.address(i) for i in range(len(call.rows))]
            self.happened["padded"] += (None, None) in addresses
            self.happened["recomputed"] += any(a in self._computed for a in addresses if a[0] is not None)
            self._computed.update(addresses)
        if call.tap == LOGITS:
            for i, row in enumerate(results[0].double().cpu()):
                self.rows[call.rows.address(i)] = row


class Trial:
    """The engine in float32 and the oracle in float64 on one model directory."""

    def __init__(self, model: Path) -> None:
        self.backend = Accelerated()
        self.backend.load(str(model), "fp32", "cpu", {})
        self._oracle = Model(Checkpoint(model))
        self._known: dict[tuple, torch.Tensor] = {}

    def oracle(self, request: Request) -> torch.Tensor:
        """Logits [tokens, vocab] of the whole sequence; conversations repeat, and so each is computed once."""
        tokens, images = sequence(request), tuple(i for turn in request.turns for i in turn.images)
        if (tokens, images) not in self._known:
            with torch.no_grad():
                self._known[tokens, images] = self._oracle.forward(list(tokens), images=list(images))
        return self._known[tokens, images]

    def check(self, requests: tuple[Request, ...], schedule: Schedule) -> tuple[int, Counter[str]]:
        """Runs a schedule and compares; how many rows of logits there were, and what happened. Raises AssertionError at
        a mismatch."""
        seen = LogitRows()
        with torch.no_grad():
            outputs = self.backend.run(requests, schedule, Recorder([seen]))
        for request in requests:
            whole = sequence(request)
            given = outputs.sequences[request.id]
            aborted = outputs.finish[request.id] == "aborted"
            assert given == whole[: len(given)], f"{request.id} strayed"
            assert aborted or given == whole, f"{request.id} was not finished"
            assert not aborted or any(e.do == "abort" and e.request == request.id for e in schedule.events)
            oracle = self.oracle(request)
            norm = oracle.norm(dim=-1).mean()
            mine = {p: row for (name, p), row in seen.rows.items() if name == request.id}
            due = {p - 1 for a, b in outputs.generated[request.id] for p in range(a, b)}
            assert due <= set(mine), f"{request.id} has no logits at {sorted(due - set(mine))}"
            for position, row in sorted(mine.items()):
                error = float((row - oracle[position]).norm() / norm)
                assert error < LIMIT, f"{request.id} differs at position {position} by {error:.3g}"
        self._check_memory()
        return len(seen.rows), seen.happened

    def _check_memory(self) -> None:
        """Everything has been given back."""
        caches = self.backend.pools()._caches
        assert int(caches.pages.counts.sum()) == 0, "pages are still held"
        assert len(caches.slots) == len(set(caches.slots._free)), "a slot is free twice"


@functools.lru_cache(maxsize=2)
def trial(*, dense: bool = False) -> Trial:
    """`dense`: on the model whose last layer attends to every latent, and so through the prefix workspace."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="day0check-schedules-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Trial(small_model(folder / "model", dense=dense))


def run_portion(number: int, *, examples_of: int = PORTION) -> dict[str, float]:
    """Runs one portion of schedules, every other portion on the dense model. Raises AssertionError with the smallest
    schedule that fails."""
    counted = {"schedules": 0, "requests": 0, "rows": 0, **dict.fromkeys(HAPPENED, 0)}

    @seed(number)
    @settings(
        max_examples=examples_of,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(examples())
    def each(example: tuple[tuple[Request, ...], Schedule]) -> None:
        rows, happened = trial(dense=number % 2 == 0).check(*example)
        for name, count in (("schedules", 1), ("requests", len(example[0])), ("rows", rows)):
            counted[name] += count
        for name in HAPPENED:
            counted[name] += happened[name]

    begin = time.process_time()
    each()
    return {"portion": number, **counted, "cpu_seconds": round(time.process_time() - begin, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--state", type=Path, default=Path("reports/schedules.jsonl"))
    parser.add_argument("--jobs", type=int, default=1)
    wish = parser.parse_args()
    wish.state.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in wish.state.read_text().splitlines()] if wish.state.is_file() else []
    known = {entry["portion"] for entry in done}
    left = [n for n in range(-(-wish.runs // PORTION)) if n not in known]
    done = [entry for entry in done if entry["portion"] < -(-wish.runs // PORTION)]
    begin = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(wish.jobs) as pool, wish.state.open("a") as state:
        try:
            for entry in pool.imap_unordered(run_portion, left):
                state.write(json.dumps(entry) + "\n")
                state.flush()
                done.append(entry)
                print(f"portion {entry['portion']}: {entry['schedules']} schedules", file=sys.stderr, flush=True)
        except AssertionError as mismatch:
            print(f"mismatch: {mismatch}\n" + "\n".join(getattr(mismatch, "__notes__", ())))
            return 1
    names = ("schedules", "requests", "rows", "cpu_seconds", *HAPPENED)
    total = {name: sum(entry.get(name, 0) for entry in done) for name in names}
    print(", ".join(f"{total[name]} {name}" for name in HAPPENED))
    print(
        f"{total['schedules']} schedules with {total['requests']} requests and {total['rows']} rows of logits against "
        f"the reference, 0 mismatches; {total['cpu_seconds']:.0f} s of processor, {time.monotonic() - begin:.0f} s now"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
