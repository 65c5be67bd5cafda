"""The scheduler of a service: requests come and go while it runs, and memory that runs short is taken back in turn."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from day0check.accelerated.batch import Part
from day0check.accelerated.cache import Caches
from day0check.accelerated.engine import Engine
from day0check.accelerated.scheduler import Running, Scheduler, check, longest_sequence
from day0check.accelerated.server.orders import Order, Times, TokenLogprob
from day0check.errors import Day0Error, InputError
from day0check.probe.recorder import Caller
from day0check.types import Schedule

PROMPT_ROWS = 256  # whose log-probabilities are made at once: float64 over the vocabulary is large


class Sink(Protocol):
    """Where the tokens of a request go."""

    def take(self, token: int, logprob: TokenLogprob | None) -> bool: ...

    def prompt(self, logprobs: list[TokenLogprob]) -> None: ...

    def finish(self, reason: str) -> None: ...

    def fail(self, message: str) -> None: ...


@dataclass
class Ticket:
    """What the scheduler knows of an order beyond its request."""

    order: Order
    sink: Sink
    times: Times
    prompt_known: int = 1  # prompt tokens whose log-probabilities are known; nothing precedes the first
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_done: bool = False


class Live(Scheduler):
    """Steps over whoever is there: `submit` and `abort` between two steps, from the thread that steps.

    Steps of prompts and of single tokens take turns while there are both, so that a long prompt does not stop running
    answers. When pages run out, the request admitted last gives its own back and is computed again later.
    """

    def __init__(self, engine: Engine, schedule: Schedule, caller: Caller, *, caches: Caches) -> None:
        super().__init__(engine, (), schedule, caller, caches=caches)
        self.pages, self.slots = len(caches.pages), len(caches.slots)
        self.tickets: dict[str, Ticket] = {}
        self.preemptions = self.prompt_tokens = self.generated_tokens = 0
        self.finished: list[tuple[Ticket, str]] = []  # since the caller last cleared it
        self._in_step: list[Running] = []
        self._prompts_went = False

    @property
    def busy(self) -> bool:
        return bool(self.queue or self.active)

    def submit(self, order: Order, sink: Sink, times: Times) -> None:
        """Queues an order. Raises InputError for one that can never run here."""
        request = order.request()
        check((request,), self.schedule, self.engine)
        need, room = -(-longest_sequence(request) // self.caches.page), self.pages
        if need > room:
            raise InputError(f"needs {need} pages of {room}", where=order.id, todo="shorten the prompt or the answer")
        if order.id in self.tickets:
            raise InputError("two requests have this id", where=order.id, todo="give every request its own id")
        self.tickets[order.id] = Ticket(order, sink, times)
        self.queue.append(Running(request, arrive_step=0))

    def abort(self, name: str) -> None:
        """Ends a request, in any state, and frees its memory; nothing happens when it is not here any more."""
        for running in [r for r in (*self.active, *self.queue) if r.request.id == name]:
            self._forget(running)
            self.finished.append((self.tickets.pop(name), "abort"))

    def advance(self) -> None:
        """Admits who fits and makes one step. What goes wrong in it is raised; see `fail_step`."""
        self._in_step = []
        self._admit()
        if self.active:
            self._one_step()
            self.step += 1

    def fail_step(self, message: str) -> None:
        """After `advance` raised: the requests of that step fail, the others stay."""
        for running in self._in_step or list(self.active):
            name = running.request.id
            if name in self.tickets:
                self._forget(running)
                ticket = self.tickets.pop(name)
                self.finished.append((ticket, "error"))
                ticket.sink.fail(message)

    def _forget(self, running: Running) -> None:
        self._leave(running)
        if running in self.queue:
            self.queue.remove(running)
        self.tenancies.pop(running.request.id, None)

    def _admit(self) -> None:
        """Takes requests in order while there is a slot, and pages for the whole prompt of each."""
        while self.queue and len(self.active) < self.schedule.max_batch:
            running = self.queue[0]
            prompt = len(running.tokens) or len(running.request.turns[0].tokens)
            due = sum(-(-len(r.tokens) // self.caches.page) - len(r.tenancy.table) for r in self.active)
            if self.active and len(self.caches.pages) - due < -(-(prompt + 1) // self.caches.page):
                return
            self.queue.popleft()
            self._admit_one(running)
            times = self.tickets[running.request.id].times
            times.admitted = times.admitted or time.monotonic()

    def _one_step(self) -> None:
        ready = [r for r in self.active if r.answering and r.waiting == 1]
        prompts = [r for r in self.active if r not in ready]
        self._prompts_went = bool(prompts) and not (ready and self._prompts_went)
        if not self._prompts_went:
            self._compute("decode", [(running, 1) for running in ready])
            return
        budget, taking = self.schedule.chunk, []
        for running in prompts:
            count = running.waiting if budget is None else min(budget, running.waiting)
            if count:
                taking.append((running, count))
            budget = None if budget is None else budget - count
        self._compute("prefill", taking)

    def _compute(self, phase: str, taking: list[tuple[Running, int]]) -> None:
        self._make_room(taking)
        taking = [(running, count) for running, count in taking if running in self.active]
        self._in_step = [running for running, _ in taking]
        if taking:
            super()._compute(phase, taking)

    def _make_room(self, taking: list[tuple[Running, int]]) -> None:
        """Preempts from the last admitted on until the pages suffice; a request alone always fits (`submit`)."""
        while True:
            due = sum(self._missing(r, count) for r, count in taking if r in self.active)
            if due <= len(self.caches.pages):
                return
            running = self.active[-1]
            self._leave(running)
            running.computed = 0
            self.queue.appendleft(running)
            self.preemptions += 1

    def _missing(self, running: Running, count: int) -> int:
        return max(0, -(-(running.computed + count) // self.caches.page) - len(running.tenancy.table))

    def _part(self, running: Running, count: int) -> Part:
        part, ticket = super()._part(running, count), self.tickets[running.request.id]
        wants = ticket.order.prompt_top is not None and ticket.prompt_known < len(ticket.order.prompt)
        return replace(part, every_logits=wants)

    def _take(self, taking: list[tuple[Running, int]], parts: list[Part], chosen: list[int]) -> None:
        logits, now = self.engine.wanted_logits, time.monotonic()
        self._prompt_logprobs(parts, logits)
        super()._take(taking, parts, chosen)
        told = self._logprobs([(r, part) for (r, _), part in zip(taking, parts, strict=True)], logits)
        for (running, _), part in zip(taking, parts, strict=True):
            ticket = self.tickets[running.request.id]
            try:
                self._hand_over(running, ticket, told.get(part.request), part.wants_logits, now)
            except Exception as error:  # of an operator of the serve family: the others in this step go on
                self._forget(running)
                self.finished.append((self.tickets.pop(part.request), "error"))
                ticket.sink.fail(f"{type(error).__name__}: {error}")

    def _hand_over(
        self, running: Running, ticket: Ticket, logprob: TokenLogprob | None, answered: bool, now: float
    ) -> None:
        times = ticket.times
        if ticket.prompt_logprobs and ticket.prompt_known == len(ticket.order.prompt):
            ticket.sink.prompt(ticket.prompt_logprobs)
            ticket.prompt_logprobs = []
        if not ticket.prompt_done and running.computed >= len(ticket.order.prompt):
            ticket.prompt_done = True
            self.prompt_tokens += len(ticket.order.prompt)
        if answered:
            self.generated_tokens += 1
            if times.first_token:
                times.gaps.append(now - times.latest_token)
            times.first_token, times.latest_token = times.first_token or now, now
            if ticket.sink.take(running.tokens[-1], logprob):
                self._leave(running)
                running.finish = "stop"
        if running.finish:
            self._forget(running)
            ticket.sink.finish(running.finish)
            self.finished.append((self.tickets.pop(running.request.id), running.finish))

    def _logprobs(self, taking: list[tuple[Running, Part]], logits: Tensor | None) -> dict[str, TokenLogprob]:
        """Of the tokens just taken, for those who ask: one call for all of them."""
        asking, rows, row = [], [], -1
        for running, part in taking:
            row += len(part.tokens) if part.every_logits else int(part.wants_logits)
            top = self.tickets[part.request].order.top
            if part.wants_logits and top is not None:
                asking.append((part.request, running.tokens[-1], top))
                rows.append(row)
        if not asking:
            return {}
        found = self._told(logits[rows], [token for _, token, _ in asking], [top for *_, top in asking])
        return {name: logprob for (name, *_), logprob in zip(asking, found, strict=True)}

    def _prompt_logprobs(self, parts: list[Part], logits: Tensor | None) -> None:
        """Of prompt tokens whose row before is in this step: row i tells of token start + i + 1."""
        first = 0
        for part in parts:
            ticket, begin = self.tickets[part.request], first
            first += len(part.tokens) if part.every_logits else int(part.wants_logits)
            if not part.every_logits:
                continue
            prompt = ticket.order.prompt
            end = min(part.start + len(part.tokens) + 1, len(prompt))
            for low in range(ticket.prompt_known, end, PROMPT_ROWS):
                tokens = prompt[low : min(low + PROMPT_ROWS, end)]
                rows = logits[begin + low - 1 - part.start :][: len(tokens)]
                ticket.prompt_logprobs += self._told(rows, list(tokens), [ticket.order.prompt_top] * len(tokens))
            ticket.prompt_known = max(ticket.prompt_known, end)

    def _told(self, logits: Tensor, tokens: list[int], tops: list[int]) -> list[TokenLogprob]:
        """TokenLogprob of each row. Raises Day0Error where the logits are not numbers."""
        chosen = torch.tensor(tokens, device=logits.device)
        operator = self.caller.operators.get("serve.logprobs", "serve")
        own, ranks, ids, values = (t.tolist() for t in operator(logits, chosen=chosen, top=tuple(tops)))
        if any(math.isnan(value) for value in own):
            raise Day0Error("log-probabilities are NaN", where="head.logits", todo="the model's numbers are broken")
        return [
            TokenLogprob(token, value, rank, tuple(zip(best[:top], theirs[:top], strict=True)))
            for token, value, rank, best, theirs, top in zip(tokens, own, ranks, ids, values, tops, strict=True)
        ]
