"""Lays requests over steps: admission, prompts in chunks, one token a decode step, memory given back at the end.

Prompts go before single tokens, or together with them (`mixed`). Memory that runs short is taken back from the request
admitted last, which is computed again later, or comes back from the host tier where there is room for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from day0check.accelerated.batch import Part, make_batch
from day0check.accelerated.cache import Caches, Tenancy
from day0check.accelerated.engine import Engine
from day0check.accelerated.host_tier import HostTier, Parked
from day0check.accelerated.prefix import Chain, PrefixCache
from day0check.accelerated.prefix_chunks import default_tokens
from day0check.accelerated.staging import FixedRows, copies, staged
from day0check.errors import InputError
from day0check.probe.recorder import Caller
from day0check.probe.rows import RowMap
from day0check.types import Outputs, Request, Schedule, ScheduleEvent

HOST = torch.device("cpu")
EVENTS = ("preempt", "abort", "offload", "reload")


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
    encoded_turns: int = 0  # turns whose images have been through the tower, or need not go
    unseen_pads: int = 0  # media pads of the latter: a prefix of the cache holds what became of them
    chain: Chain = field(default_factory=Chain)  # what the prefix cache knows of it
    parked: Parked | None = None  # where its memory lies in the host tier
    ready_step: int = 0  # its memory is on the way back until then
    landing: Any = None  # where the device has streams: the event that tells when it is there
    finish: str = ""
    answering: bool = False  # the present turn's prompt has had its first answer token

    @property
    def waiting(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def phase(self) -> str:
        """Of what the host side does for it between two steps."""
        return "decode" if self.answering else "prefill"

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

    def land(self) -> None:
        """Lets what the device is told from now on wait for memory that is on its way back."""
        if self.landing is not None:
            self.landing.wait()
            self.landing = None

    def begin_again(self) -> None:
        """Nothing is computed any more; images whose features were not needed may be needed now."""
        self.computed, self.chain = 0, Chain(salts=self.chain.salts)
        if self.unseen_pads:
            self.features, self.encoded_turns, self.unseen_pads = [], 0, 0


class Scheduler:
    """Runs `requests` under `schedule` on `engine`.

    `preemptions` counts requests that gave their memory back to go on later, `offloads` those of them that went to the
    host tier. `prefixes` is None without a prefix cache, `host` without a host tier.
    """

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
        self.step = self.preemptions = self.offloads = 0
        self.pages = len(self.caches.pages)
        self.prefixes: PrefixCache | None = None
        if schedule.prefix_cache:
            space = f"{engine.config.name}/{engine.dtype}"
            self.prefixes = PrefixCache(self.caches, engine.config, every=schedule.snapshot_blocks, space=space)
        self.fixed = FixedRows(schedule.fixed_rows) if schedule.fixed_rows else None
        self.host = None
        if schedule.host_pages:
            self.host = HostTier(self.caches, pages=schedule.host_pages, moment=schedule.copies)

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
        """`schedule.pages`, or enough memory for the `max_batch` longest requests at once; with a prefix cache for all
        requests one after the other, so that what is known stays known."""
        schedule, page = self.schedule, self.schedule.page
        batch = min(schedule.max_batch, len(requests))
        need = sorted((-(-longest_sequence(request) // page) for request in requests), reverse=True)
        together = sum(need) if schedule.prefix_cache else sum(need[:batch])
        pages = together if schedule.pages is None else schedule.pages
        snapshots = pages // schedule.snapshot_blocks if schedule.prefix_cache else 0
        if need and need[0] > pages:
            raise InputError(
                f"the longest request needs {need[0]} pages, there are {pages}", where="schedule.pages", todo="raise it"
            )
        tokens = schedule.prefix_workspace or min(default_tokens(schedule.chunk), pages * page)
        caches = self.engine.caches(
            pages=pages, page=page, slots=batch, snapshots=snapshots, memory=schedule.memory, prefix_tokens=tokens
        )
        caches.prefix.prescribed = schedule.prefix_workspace is not None
        return caches

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
                self._drop(running)
                running.finish = "aborted"
            elif event.do == "reload":
                running.arrive_step = min(running.arrive_step, self.step)
            elif running in self.active:
                self._give_way(running, park=event.do == "offload", back=self._back(event))

    def _back(self, event: ScheduleEvent) -> int:
        """The step in which an interrupted request comes back: that of its next reload, or the next one."""
        reloads = (e.at_step for e in self.schedule.events if (e.do, e.request) == ("reload", event.request))
        return min((step for step in reloads if step > self.step), default=self.step + 1)

    def _drop(self, running: Running) -> None:
        """Takes a request out of every queue and frees its memory."""
        self._leave(running)
        if running in self.queue:
            self.queue.remove(running)
        if running.parked is not None:
            self.host.drop(running.parked)
            running.parked = None

    def _give_way(self, running: Running, *, park: bool, back: int) -> None:
        """Takes the memory of an active request back, for the time being; it is the first to return from step `back`.

        With `park` its bytes go to the host tier, if they fit there; otherwise it is computed again.
        """
        self.preemptions += 1
        if park and self.host is not None and self.host.room(running.tenancy):
            running.parked = self.host.park(self.caller, running, step=self.step)
            self.offloads += 1
        else:
            running.begin_again()
        self._leave(running)
        running.arrive_step = back
        self.queue.appendleft(running)

    def _admit(self) -> None:
        """Takes requests that have arrived, in order, while there is a slot, and pages for all tokens of each."""
        for running in [r for r in self.queue if r.arrive_step <= self.step]:
            if len(self.active) >= self.schedule.max_batch or not self._fits(running):
                return
            self.queue.remove(running)
            self._admit_one(running)

    def _fits(self, running: Running) -> bool:
        """Whether there are pages for its tokens beside those that active requests will need; alone it always fits."""
        page = self.caches.page
        tokens = len(running.tokens) or len(running.request.turns[0].tokens)
        due = sum(-(-len(r.tokens) // page) - len(r.tenancy.table) for r in self.active)
        return not self.active or len(self.caches.pages) - due >= -(-(tokens + 1) // page)

    def _admit_one(self, running: Running) -> None:
        running.tenancy = self.tenancies[running.request.id] = Tenancy(self.caches)
        if running.turn < 0:
            running.next_turn()
        self.active.append(running)
        if running.parked is not None:
            running.tenancy.grow(running.computed)
            self.host.fetch(self.caller, running, step=self.step)
            running.parked, running.ready_step = None, self.step + 1  # the copy runs beside a step of the others
        elif self.prefixes is not None and self._may_share(running):
            self._settle()
            self.prefixes.find(self.caller, running, step=self.step)

    def _may_share(self, running: Running) -> bool:
        """Whether a request may begin behind a prefix that others have computed."""
        return running.computed == 0

    def _one_step(self) -> None:
        ready = [r for r in self.active if r.ready_step <= self.step]
        single = [r for r in ready if r.answering and r.waiting == 1]
        prompts = [r for r in ready if r not in single]
        if not prompts:
            self._compute("decode", [(running, 1) for running in single])
            return
        riding = [(running, 1) for running in single] if self.schedule.mixed else []
        self._compute("prefill", riding + self._prompt_rows(prompts, beside=len(riding)))

    def _prompt_rows(self, prompts: list[Running], *, beside: int = 0) -> list[tuple[Running, int]]:
        """How many rows of each prompt the step takes: the chunk less what goes `beside` them, first come first
        served; a step ends where the prefix cache wants to keep states."""
        budget, taking = self.schedule.chunk, []
        left = None if budget is None else max(1, budget - beside)
        for running in prompts:
            count = running.waiting if left is None else min(left, running.waiting)
            end = self.prefixes.next_end(running.computed) if self.prefixes is not None else None
            if end is not None:
                count = min(count, end - running.computed)
            if count:
                taking.append((running, count))
            left = None if left is None else left - count
        return taking

    def _compute(self, phase: str, taking: list[tuple[Running, int]]) -> None:
        self._make_room(taking)
        taking = [(running, count) for running, count in taking if running in self.active]
        if taking:
            self._compute_rows(phase, taking)

    def _make_room(self, taking: list[tuple[Running, int]]) -> None:
        """Takes memory back from the last admitted on until the pages suffice; a request alone always fits, unless
        pages were lost, and then it is told that the cache is full."""
        while len(self.active) > 1:
            due = sum(self._missing(r, count) for r, count in taking if r in self.active)
            if due <= len(self.caches.pages):
                return
            self._give_way(self.active[-1], park=True, back=self.step)

    def _missing(self, running: Running, count: int) -> int:
        return max(0, -(-(running.computed + count) // self.caches.page) - len(running.tenancy.table))

    def _settle(self) -> None:
        """To be called before the device is told anything that may touch memory which went to the host tier."""
        if self.host is not None:
            self.host.settle()

    def _compute_rows(self, phase: str, taking: list[tuple[Running, int]]) -> None:
        self._settle()
        for running, _ in taking:
            running.land()
        for running, count in taking:
            running.tenancy.grow(running.computed + count)
        parts = [self._part(running, count) for running, count in taking]
        batch = make_batch(phase, parts, page=self.caches.page, device=HOST)
        if self.fixed is not None:
            batch = self.fixed.pad(batch)
        with self.caller.recorder.step(phase, batch.rows, self.step):
            with copies(self.schedule.copies):
                batch = staged(self.caller, batch, self.engine.device)
            if phase == "prefill":
                for running, count in taking:
                    self._encode(running, running.computed + count)
                features = [torch.cat(r.features) if r.features else None for r, _ in taking]
                chosen = self.engine.prefill(self.caller, self.caches, batch, features)
            else:
                chosen = self.engine.decode(self.caller, self.caches, batch)
        for running, count in taking:
            running.computed += count
            if self.prefixes is not None:
                self.prefixes.enter(self.caller, running, phase=phase, step=self.step)
        self._take(taking, parts, chosen)

    def _take(self, taking: list[tuple[Running, int]], parts: list[Part], chosen: list[int]) -> None:
        """Gives each request the token chosen after its last row, and its memory back when it is finished."""
        answers = iter(chosen)
        for (running, _), part in zip(taking, parts, strict=True):
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
        images = any(turn.images for turn in request.turns)
        return Part(
            request=request.id,
            tokens=tuple(running.tokens[start : start + count]),
            start=start,
            table=tuple(running.tenancy.table),
            slot=running.tenancy.slot,
            wants_logits=last and request.max_new_tokens > 0,
            temperature=request.temperature,
            seed=request.seed,
            pads_before=running.tokens[:start].count(pad) - running.unseen_pads if images else 0,
            before=() if self.engine.config.rope.sections is None else tuple(running.tokens[:start]),
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
                if pads[-1] < running.computed:
                    running.unseen_pads += len(pads)
                    running.encoded_turns += 1
                    continue
                running.features.append(self.engine.features(self.caller, list(images), running.request.id, pads))
            running.encoded_turns += 1

    def _leave(self, running: Running) -> None:
        """Gives the memory of a request back."""
        if running not in self.active:
            return
        self.active.remove(running)
        running.land()
        pages, counts = running.tenancy.table, self.caches.pages.counts
        first = tuple(range(0, len(pages) * self.caches.page, self.caches.page))
        rows = RowMap((running.request.id,), (0,) * len(pages), first)
        with self.caller.recorder.between(running.phase, rows, self.step):
            numbers = torch.tensor(pages, dtype=torch.int64)
            self.caller.at("")("pool.release", counts, pages=numbers, held=counts[numbers])
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
    for field_name in ("page", "max_batch", "chunk", "pages", "snapshot_blocks", "prefix_workspace"):
        value = getattr(schedule, field_name)
        if value is not None and value < 1:
            raise InputError(f"must be at least 1, is {value}", where=f"schedule.{field_name}", todo="raise it")
    workspace, together = schedule.prefix_workspace, min(schedule.max_batch, len(requests))
    if workspace is not None and workspace < together:
        raise InputError(
            f"{workspace} rows hold none for each of {together} requests",
            where="schedule.prefix_workspace",
            todo="raise it",
        )
    for event in schedule.events:
        if event.request not in names or event.do not in EVENTS:
            raise InputError(
                f"no such event: {event.do} of {event.request}",
                where="schedule.events",
                todo=f"{', '.join(EVENTS)} a request",
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
