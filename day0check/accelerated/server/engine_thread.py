"""The thread that owns the engine: starts it in measured steps, then steps the scheduler for whoever asks."""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from day0check.accelerated.budget import Partition, partition, sizes_of, workspace_rows
from day0check.accelerated.engine import Engine
from day0check.accelerated.prefix import PrefixCounters
from day0check.accelerated.records import Formats
from day0check.accelerated.server.answer import Answer
from day0check.accelerated.server.live import Live
from day0check.accelerated.server.metrics import Metrics
from day0check.accelerated.server.orders import Event, Order, Times
from day0check.accelerated.server.start_up import verify_weights, warm_up
from day0check.accelerated.server.vocabulary import Vocabulary, read_vocabulary
from day0check.errors import Day0Error, Unavailable
from day0check.probe.recorder import Caller
from day0check.probe.registry import Operators
from day0check.types import Schedule
from reference.config import ModelConfig
from reference.weights import Checkpoint

STALL_SECONDS = 60.0  # a step that takes longer is taken for a hang


@dataclass(frozen=True)
class EngineOptions:
    """`pages` None: what `cache_bytes` holds, or as many as `max_batch` requests of `max_model_len` positions fill.

    `mixed`, `prefix_cache` and `snapshot_blocks` as in `types.Schedule`; `host_bytes`: of the host tier, 0 for none;
    `prefix_workspace`: rows of the workspace for prefixes, None: as `budget.workspace_rows` says.
    """

    model_dir: Path
    dtype: torch.dtype
    device: torch.device
    page: int = 64
    max_batch: int = 8
    chunk: int | None = 512
    pages: int | None = None
    max_model_len: int | None = None  # None: all that the model has, within the pages
    max_waiting: int = 64
    stall_seconds: float = STALL_SECONDS
    mixed: bool = False
    prefix_cache: bool = False
    snapshot_blocks: int = 1
    cache_bytes: int | None = None
    host_bytes: int = 0
    formats: Formats | None = None
    prefix_workspace: int | None = None


@dataclass(frozen=True)
class StartStep:
    name: str
    seconds: float
    note: str = ""


@dataclass
class State:
    """`phase`: "starting", "ready", "failing" (the last step failed), "stopped" or "dead"."""

    phase: str = "starting"
    doing: str = ""
    steps: list[StartStep] = field(default_factory=list)
    error: BaseException | None = None
    step_began: float = 0.0  # monotonic; 0.0 between steps


class Full(Exception):
    """The queue is full: come back later."""


class EngineThread:
    """`submit` and `release` may be called from any thread; events arrive through each answer's `send`.

    A step that raises fails the requests in it; the next step or the probe that follows shows whether the engine still
    works, and `health` tells so.
    """

    def __init__(
        self, options: EngineOptions, operators: Operators, metrics: Metrics, *, live: type[Live] = Live
    ) -> None:
        self.options, self.operators, self.metrics, self._kind = options, operators, metrics, live
        self.state = State()
        self.config: ModelConfig | None = None
        self.vocabulary: Vocabulary | None = None
        self.max_model_len = 0
        self._live: Live | None = None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: dict[str, Answer] = {}
        self._lock = threading.Lock()
        self._counted = (0,) * len(metrics.counted())  # of `_counts`, what the metrics know of
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ------------------------------------------------------------------------------------- from other threads

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after its present step; open answers fail. False when it does not end in time."""
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def open_requests(self) -> int:
        with self._lock:
            return len(self._open)

    def submit(self, orders: list[Order], send: Callable[[int, Event], None]) -> None:
        """Queues all of `orders` or none; `send(number, event)` is called by the engine's thread and must not block.

        Raises Full when more would wait than may, Unavailable when the engine does not run.
        """
        if self.state.phase != "ready":
            raise Unavailable(f"the engine is {self.state.phase}", where="engine", todo="look at /health")
        answers = [
            Answer(order, operators=self.operators, pieces=self.vocabulary.pieces, send=lambda e, n=number: send(n, e))
            for number, order in enumerate(orders)
        ]
        now = time.monotonic()
        with self._lock:
            if self._open and len(self._open) + len(orders) > self.options.max_batch + self.options.max_waiting:
                raise Full
            self._open.update((answer.order.id, answer) for answer in answers)
        for answer in answers:
            self._commands.put(lambda a=answer: self._submit_now(a, now))

    def release(self, names: list[str], *, then: Callable[[], None]) -> None:
        """Ends those of `names` that are still open, then calls `then`: nothing of theirs is read any more."""

        def command() -> None:
            for name in names:
                self._live.abort(name)
            then()

        self._commands.put(command)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether requests are answered, and what a person wants to know about the start and the present."""
        state, phase = self.state, self.state.phase
        hung = state.step_began and time.monotonic() - state.step_began > self.options.stall_seconds
        if phase in ("ready", "failing") and not self._thread.is_alive():
            phase = "dead"
        elif phase == "ready" and hung:
            phase = "stalled"
        body: dict[str, Any] = {
            "status": phase,
            "steps": [{"name": s.name, "seconds": round(s.seconds, 6), "note": s.note} for s in state.steps],
        }
        if phase == "starting":
            body["doing"] = state.doing
        if state.error is not None:
            body["error"] = f"{type(state.error).__name__}: {state.error}"
        return phase == "ready", body

    # ---------------------------------------------------------------------------------- in the engine's thread

    def _run(self) -> None:
        try:
            self._start_up()
        except Exception as error:  # whoever started the server reads it from the state and ends
            if error.__cause__ is not None:
                traceback.print_exception(error.__cause__)
            self.state.error, self.state.phase = error, "dead"
            return
        self.state.phase = "ready"
        try:
            while self._obey(wait=not self._live.busy):
                self._step()
            self.state.phase = "stopped"
        except Exception as error:  # nothing of a request reaches here: the loop itself is broken
            traceback.print_exc()
            self.state.error, self.state.phase = error, "dead"
        finally:
            for answer in self._take_open():
                answer.fail("the server is shutting down", shutting_down=True)

    def _obey(self, *, wait: bool) -> bool:
        """Runs the commands that have arrived; False when one of them was to stop."""
        try:
            while True:
                command = self._commands.get(block=wait)
                if command is None:
                    return False
                command()
                wait = False
        except queue.Empty:
            self._book()
            return True

    def _step(self) -> None:
        if not self._live.busy:
            return
        self.state.step_began = time.monotonic()
        try:
            self._live.advance()
        except Exception as error:  # of the model: these requests fail, the rest is tried again
            traceback.print_exc()
            self.state.error, self.state.phase = error, "failing"  # before anyone hears of it: health is never stale
            self._live.fail_step(f"{type(error).__name__}: {error}")
            self._book()  # before the probe, whose own requests are forgotten with all that has ended
            self._probe()
        else:
            self.state.phase, self.state.error = "ready", None
        finally:
            self.state.step_began = 0.0
        self.metrics.steps.inc()
        self._book()

    def _probe(self) -> None:
        """After a failure: does the engine still answer? Without this, health would be green over a dead device."""
        if self._live.busy:
            return
        try:
            warm_up(self._live, self.config, images=False)
        except Exception as again:
            self.state.error, self.state.phase = again, "dead"
        else:
            self.state.error, self.state.phase = None, "ready"

    def _submit_now(self, answer: Answer, arrived: float) -> None:
        try:
            self._live.submit(answer.order, answer, Times(arrived))
        except Day0Error as error:
            self._take_open(answer.order.id)
            answer.fail(str(error))

    def _book(self) -> None:
        """Closes what has ended and shows the present in the metrics."""
        live, metrics = self._live, self.metrics
        for ticket, reason in live.finished:
            for answer in self._take_open(ticket.order.id):
                metrics.request_finished(
                    reason,
                    ticket.times,
                    prompt_tokens=len(ticket.order.prompt),
                    completion_tokens=len(answer.tokens),
                )
        live.finished.clear()
        metrics.running.set(len(live.active))
        metrics.waiting.set(len(live.queue))
        metrics.cache.set(1 - len(live.caches.pages) / live.pages)
        metrics.free_pages.set(len(live.caches.pages))
        metrics.free_slots.set(len(live.caches.slots))
        now, counters = _counts(live), metrics.counted()
        for counter, value, before in zip(counters, now, self._counted, strict=True):
            counter.inc(value - before)
        self._counted = now

    def _take_open(self, name: str | None = None) -> list[Answer]:
        """Removes the open answer of that name, or all of them."""
        with self._lock:
            names = list(self._open) if name is None else [name]
            return [self._open.pop(n) for n in names if n in self._open]

    # ---------------------------------------------------------------------------------------------- start-up

    def _start_up(self) -> None:
        o = self.options
        with self._measured("read headers") as note:
            checkpoint = Checkpoint(o.model_dir)
            self.config = checkpoint.config
            self.vocabulary = read_vocabulary(o.model_dir, self.config)
            note(f"{len(checkpoint.names())} tensors")
        with self._measured("load weights"):
            layouts = self.operators.layouts
            engine = Engine(checkpoint, dtype=o.dtype, device=o.device, layouts=layouts, formats=o.formats)
        with self._measured("verify weights") as note:
            note(verify_weights(checkpoint, engine))
        with self._measured("partition pools") as note:
            length = min(o.max_model_len or self.config.max_positions, self.config.max_positions)
            parts = self._partition(engine, -(-length // o.page))
            self.max_model_len = min(length, parts.pages * o.page)
            sizes = {"pages": parts.pages, "page": o.page, "slots": parts.slots, "snapshots": parts.snapshots}
            schedule = Schedule(
                chunk=o.chunk,
                page=o.page,
                max_batch=o.max_batch,
                mixed=o.mixed,
                prefix_cache=o.prefix_cache,
                snapshot_blocks=o.snapshot_blocks,
                host_pages=parts.host_pages,
                prefix_workspace=parts.prefix_tokens or None,
            )
            sizes["prefix_tokens"] = parts.prefix_tokens
            self._live = self._kind(engine, schedule, Caller(self.operators), caches=engine.caches(**sizes))
            note(f"{parts} ({o.page} positions a page)")
        with self._measured("warm up operators") as note:
            note(warm_up(self._live, self.config, images=True))
        self._counted = _counts(self._live)
        self._book()

    def _partition(self, engine: Engine, longest: int) -> Partition:
        o = self.options
        sizes = sizes_of(self.config, page=o.page, dtype=o.dtype, formats=engine.formats)
        positions = (o.pages or o.max_batch * longest) * o.page
        return partition(
            sizes,
            slots=o.max_batch,
            longest=longest,
            cache_bytes=o.cache_bytes,
            pages=o.pages,
            snapshot_blocks=o.snapshot_blocks if o.prefix_cache else None,
            host_bytes=o.host_bytes,
            prefix_tokens=workspace_rows(
                sizes, slots=o.max_batch, positions=positions, asked=o.prefix_workspace, cache_bytes=o.cache_bytes
            ),
        )

    @contextmanager
    def _measured(self, name: str) -> Any:
        notes: list[str] = []
        self.state.doing, begin = name, time.monotonic()
        yield notes.append
        step = StartStep(name, time.monotonic() - begin, "; ".join(notes))
        self.state.steps.append(step)
        self.metrics.start_up(name, step.seconds)


def _counts(live: Live) -> tuple[int, ...]:
    """What has happened since the start, in the order of `Metrics.counted`."""
    prefix = live.prefixes.counters if live.prefixes is not None else PrefixCounters()
    return (
        live.preemptions,
        live.prompt_tokens,
        live.generated_tokens,
        live.offloads,
        prefix.query_tokens,
        prefix.hit_tokens,
        prefix.hit_blocks,
        prefix.evicted_blocks,
    )
