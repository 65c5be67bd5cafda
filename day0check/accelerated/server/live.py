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
    answers; in a `mixed` schedule they go together.
    """

    def __init__(self, engine: Engine, schedule: Schedule, caller: Caller, *, caches: Caches) -> None:
        super().__init__(engine, (), schedule, caller, caches=caches)
        self.slots = len(caches.slots)
        self.tickets: dict[str, Ticket] = {}
        self.prompt_tokens = self.generated_tokens = 0
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
        self._drop(running)
        self.tenancies.pop(running.request.id, None)

    def _admit_one(self, running: Running) -> None:
        super()._admit_one(running)
        times = self.tickets[running.request.id].times
        times.admitted = times.admitted or time.monotonic()

    def _may_share(self, running: Running) -> bool:
        """Not while log-probabilities of the prompt are wanted: those need its rows computed."""
        ticket = self.tickets[running.request.id]
        told = ticket.order.prompt_top is None or ticket.prompt_known >= len(ticket.order.prompt)
        return super()._may_share(running) and told

    def _one_step(self) -> None:
        if self.schedule.mixed:
            return super()._one_step()
        able = [r for r in self.active if r.ready_step <= self.step]
        ready = [r for r in able if r.answering and r.waiting == 1]
        prompts = [r for r in able if r not in ready]
        self._prompts_went = bool(prompts) and not (ready and self._prompts_went)
        if self._prompts_went:
            return self._compute("prefill", self._prompt_rows(prompts))
        return self._compute("decode", [(running, 1) for running in ready])

    def _compute_rows(self, phase: str, taking: list[tuple[Running, int]]) -> None:
        self._in_step = [running for running, _ in taking]
        super()._compute_rows(phase, taking)

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
