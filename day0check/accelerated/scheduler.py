"""Lays requests over steps: admission, prompts in chunks, one token a decode step, memory given back at the end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from day0check.accelerated.batch import Part, make_batch
from day0check.accelerated.cache import Caches, Tenancy
from day0check.accelerated.engine import Engine
from day0check.errors import InputError
from day0check.probe.recorder import Caller
from day0check.types import Outputs, Request, Schedule


@dataclass
class Running:
    """A request on its way. `computed` positions lie in the caches; `tokens[computed:]` wait to be computed."""

    request: Request
    arrive_step: int
    tokens: list[int] = field(default_factory=list)
    turn: int = -1
    spans: list[tuple[int, int]] = field(default_factory=list)
    computed: int = 0
    tenancy: Tenancy | None = None
    features: list[Tensor] = field(default_factory=list)  # one tensor a turn with images, in order
    encoded_turns: int = 0  # turns whose images have been through the tower
    finish: str = ""
    answering: bool = False  # the present turn's prompt has had its first answer token

    @property
    def waiting(self) -> int:
        return len(self.tokens) - self.computed

    def next_turn(self) -> bool:
        """Appends the tokens of the next turn; False when there is none."""
        if self.turn + 1 >= len(self.request.turns):
            return False
        self.turn += 1
        self.answering = False
        self.tokens += self.request.turns[self.turn].tokens
        self.spans.append((len(self.tokens), len(self.tokens)))
        return True

    def accept(self, own: int) -> None:
        """Takes the candidate's choice after the last computed row, or the forced token in its place."""
        begin, end = self.spans[self.turn]
        forced = self.request.forced[self.turn] if self.turn < len(self.request.forced) else ()
        token = forced[end - begin] if end - begin < len(forced) else own
        self.tokens.append(token)
        self.spans[self.turn] = (begin, end + 1)
        self.answering = True
        stopped = token in self.request.stop_tokens
        if stopped or end + 1 - begin >= self.request.max_new_tokens:
            self.end_turn("stop" if stopped else "length")

    def end_turn(self, reason: str) -> None:
        if not self.next_turn():
            self.finish = reason


class Scheduler:
    """Runs `requests` under `schedule` on `engine`; steps of prompts go before steps of single tokens."""

    def __init__(
        self,
        engine: Engine,
        requests: tuple[Request, ...],
        schedule: Schedule,
        caller: Caller,
        *,
        caches: Caches | None = None,
    ) -> None:
        self.engine, self.schedule, self.caller = engine, schedule, caller
        check(requests, schedule, engine)
        self.order = [Running(request, request.arrive_step) for request in requests]
        self.queue = deque(sorted(self.order, key=lambda r: r.arrive_step))
        self.active: list[Running] = []
        self.caches = self._caches(requests) if caches is None else caches
        self.tenancies: dict[str, Tenancy] = {}
        self.step = 0

    def run(self) -> Outputs:
        """Steps until every request is finished."""
        while self.queue or self.active:
            self._events()
            self._admit()
            if self.active:
                self._one_step()
                self.step += 1
            elif self.queue:
                self.step = max(self.step + 1, self._next_arrival())
        return Outputs(
            sequences={r.request.id: tuple(r.tokens) for r in self.order},
            generated={r.request.id: tuple(r.spans) for r in self.order},
            finish={r.request.id: r.finish for r in self.order},
        )

    def _caches(self, requests: tuple[Request, ...]) -> Caches:
        """Enough memory for the `max_batch` longest requests at once."""
        page, batch = self.schedule.page, min(self.schedule.max_batch, len(requests))
        longest = sorted((-(-longest_sequence(request) // page) for request in requests), reverse=True)
        return self.engine.caches(pages=sum(longest[:batch]), page=page, slots=batch)

    def _next_arrival(self) -> int:
        """The step at which something happens while nothing runs."""
        arrivals = [r.arrive_step for r in self.queue]
        events = [e.at_step for e in self.schedule.events if e.at_step > self.step]
        return min(arrivals + events)

    def _events(self) -> None:
        for event in self.schedule.events:
            if event.at_step != self.step:
                continue
            running = next(r for r in self.order if r.request.id == event.request)
            if running.finish:
                continue
            if event.do == "abort":
                self._leave(running)
                if running in self.queue:
                    self.queue.remove(running)
                running.finish = "aborted"
            elif running in self.active:
                self._leave(running)
                running.computed, running.arrive_step = 0, self.step + 1
                self.queue.appendleft(running)

    def _admit(self) -> None:
        """Takes requests that have arrived, in order, while there is room."""
        for running in [r for r in self.queue if r.arrive_step <= self.step]:
            if len(self.active) >= self.schedule.max_batch:
                return
            self.queue.remove(running)
            self._admit_one(running)

    def _admit_one(self, running: Running) -> None:
        running.tenancy = self.tenancies[running.request.id] = Tenancy(self.caches)
        if running.turn < 0:
            running.next_turn()
        self.active.append(running)

    def _one_step(self) -> None:
        prompts = [r for r in self.active if not (r.answering and r.waiting == 1)]
        phase = "prefill" if prompts else "decode"
        budget = self.schedule.chunk
        taking: list[tuple[Running, int]] = []
        for running in prompts or self.active:
            count = running.waiting if budget is None or phase == "decode" else min(budget, running.waiting)
            if count:
                taking.append((running, count))
            if budget is not None and phase == "prefill":
                budget -= count
        self._compute(phase, taking)

    def _compute(self, phase: str, taking: list[tuple[Running, int]]) -> None:
        for running, count in taking:
            running.tenancy.grow(running.computed + count)
        parts = [self._part(running, count) for running, count in taking]
        batch = make_batch(phase, parts, page=self.caches.page, device=self.engine.device)
        with self.caller.recorder.step(phase, batch.rows, self.step):
            if phase == "prefill":
                for running, count in taking:
                    self._encode(running, running.computed + count)
                features = [torch.cat(r.features) if r.features else None for r, _ in taking]
                chosen = self.engine.prefill(self.caller, self.caches, batch, features)
            else:
                chosen = self.engine.decode(self.caller, self.caches, batch)
        self._take(taking, parts, chosen)

    def _take(self, taking: list[tuple[Running, int]], parts: list[Part], chosen: list[int]) -> None:
        """Gives each request the token chosen after its last row, and its memory back when it is finished."""
        answers = iter(chosen)
        for (running, count), part in zip(taking, parts, strict=True):
            running.computed += count
            if part.wants_logits:
                running.accept(next(answers))
            elif running.waiting == 0:
                running.end_turn("length")
            if running.finish:
                self._leave(running)

    def _part(self, running: Running, count: int) -> Part:
        start, request = running.computed, running.request
        pad = self.engine.config.tokens.media_pad
        last = start + count == len(running.tokens)
        return Part(
            request=request.id,
            tokens=tuple(running.tokens[start : start + count]),
            start=start,
            table=tuple(running.tenancy.table),
            slot=running.tenancy.slot,
            wants_logits=last and request.max_new_tokens > 0,
            temperature=request.temperature,
            seed=request.seed,
            pads_before=running.tokens[:start].count(pad) if any(t.images for t in request.turns) else 0,
        )

    def _encode(self, running: Running, end: int) -> None:
        """Puts the images of every turn that these rows reach through the tower, once."""
        pad = self.engine.config.tokens.media_pad
        while running.encoded_turns <= running.turn:
            turn = running.encoded_turns
            images = running.request.turns[turn].images
            stop, _ = running.spans[turn]
            start = stop - len(running.request.turns[turn].tokens)
            if images:
                pads = [p for p in range(start, stop) if running.tokens[p] == pad]
                if not pads or pads[0] >= end:
                    return
                running.features.append(self.engine.features(self.caller, list(images), running.request.id, pads))
            running.encoded_turns += 1

    def _leave(self, running: Running) -> None:
        """Gives the memory of a request back."""
        if running in self.active:
            self.active.remove(running)
            running.tenancy.release()


def longest_sequence(request: Request) -> int:
    """Tokens of a request when every turn is answered in full."""
    return sum(len(turn.tokens) + request.max_new_tokens for turn in request.turns)


def check(requests: tuple[Request, ...], schedule: Schedule, engine: Engine) -> None:
    """Raises InputError for requests and schedules that cannot be run as they are."""
    names = [request.id for request in requests]
    for name in names:
        if names.count(name) > 1:
            raise InputError("two requests have this id", where=name, todo="give every request its own id")
    for field_name in ("page", "max_batch", "chunk"):
        value = getattr(schedule, field_name)
        if value is not None and value < 1:
            raise InputError(f"must be at least 1, is {value}", where=f"schedule.{field_name}", todo="raise it")
    for event in schedule.events:
        if event.request not in names or event.do not in ("preempt", "abort"):
            raise InputError(
                f"no such event: {event.do} of {event.request}",
                where="schedule.events",
                todo="preempt or abort a request",
            )
    for request in requests:
        _check_request(request, engine)


def _check_request(request: Request, engine: Engine) -> None:
    config = engine.config
    if not request.turns or not all(turn.tokens for turn in request.turns):
        raise InputError("a turn without tokens", where=request.id, todo="give every turn at least one token")
    if longest_sequence(request) > config.max_positions:
        raise InputError(
            f"needs {longest_sequence(request)} positions, {config.name} has {config.max_positions}",
            where=request.id,
            todo="shorten the prompt or the answer",
        )
    for number, turn in enumerate(request.turns):
        where = f"{request.id}, turn {number}"
        if min(turn.tokens) < 0 or max(turn.tokens) >= config.vocab:
            raise InputError(f"a token outside 0..{config.vocab - 1}", where=where, todo="use the model's tokenizer")
        if any(t.images for t in request.turns) and not turn.images and config.tokens.media_pad in turn.tokens:
            raise InputError("media pads without an image", where=where, todo="give the turn its images")
