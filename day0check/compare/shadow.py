"""Shadow memory: what is read from a cache must be what was written there, for the request and the tokens that read it.

Each write and each read may be right by itself: between them a page can be overwritten, given to another request, come
back from before a preemption, or be shared by one whose tokens are others. The shadow keeps of every slot the identity
of its content (`contents.py`), a digest of the bytes as the write left them, and when that was; every read is held
against it. A rewrite is legal, and so are a hit of the prefix cache, the way through the host tier and the copy of a
page: the same bytes for the same content. Calls are those of `contracts/cache.py` and `contracts/batch.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from day0check.compare.contents import Contents
from day0check.compare.shadow_table import NEVER, ShadowTable, Written, page_size, row_digests_of, slot_digests
from day0check.compare.shadow_verdict import Fault, Reads, reads_of, unread
from day0check.probe.recorder import Call, Observer
from day0check.probe.rows import PADDING
from day0check.types import Measure, Request

WRITES = {"kv.write": "kv", "index.write": "index"}
READS = {"kv.gather": "kv", "prefix.gather": "kv", "index.gather": "index"}
STORES, LOADS = ("state.store", "prefix.store"), ("state.load", "prefix.restore")
TIERS = ("kv.offload", "kv.reload")
COPY, REWRITE = "kv.copy", "kv.rewrite"
PAGED = ("kv", "index")
ROWS_A_READ = 16384  # rows of a read whose bytes are digested; of a longer one a part in turns
_COPIES_TRIED = 1024  # wrong rows of a call that are looked up among what was ever written

OVERWRITTEN = "overwritten after it was written"
OTHER = "content of another sequence"
EMPTY = "read before it was written"
OLDER = "an older generation"
LOST = "state lost on the way"


class Shadow(Observer):
    """Gives `sink` a measure for each tap and phase that reads a cache, tap "<reader's tap>.content", and one for each
    write whose bytes did not last until they were read, tap "<writer's tap>.content". `requests`: those of the run.

    Not judged: reads of rows whose tokens nobody showed, of pools whose writes nobody showed, and pools that were
    written and never seen read.
    """

    def __init__(self, sink: Callable[[Measure], None], requests: Iterable[Request] = ()) -> None:
        self.sink, self.contents = sink, Contents(requests)
        self._tables: dict[tuple[str, ...], ShadowTable] = {}
        self._reads: dict[tuple[str, str], Reads] = {}
        self._written: dict[tuple[str, str], Call] = {}  # paged pools with their first write
        self._seen: set[tuple[str, str]] = set()  # pools that were read
        self._embedded = False
        self._every = 1  # tokens of which the index keeps one key
        self._begun: dict[str, int] = {}  # where the rows of each request begin in the open step
        self._lives: list[str] = []  # request of each life
        self._living: dict[str, int] = {}
        # [pages] the call that took the last holder, NEVER without; by the place whose pages have numbers of their own
        self._freed: dict[str, torch.Tensor] = {}
        self._taps: list[tuple[str, str, int | None]] = []  # (tap, operator, layer) of writes

    # ------------------------------------------------------------------------------------------------ the recorder

    def before(self, call: Call) -> None:
        if call.operator in LOADS:
            self._follow(self._load, call)
        elif call.operator in TIERS:
            self._follow(self._leave_tier, call)
        elif call.operator in READS or (call.operator not in WRITES and _shows_a_gather(call)):
            self._follow(self._gather, call)

    def after(self, call: Call, token: Any, results: tuple[Any, ...]) -> None:
        follow = {
            "embed.tokens": self._embed,
            "splice.positions": self._splice,
            "kv.slots": self._learn_pool,
            **dict.fromkeys(WRITES, self._write),
            **dict.fromkeys(STORES, self._store),
            **dict.fromkeys(TIERS, self._enter_tier),
            "pool.release": self._release,
            COPY: self._copied,
            REWRITE: self._rewritten,
        }.get(call.operator)
        if call.operator == "prefix.match":
            self._follow(self._match, call, results)
        elif follow is not None:
            self._follow(follow, call)

    def _follow(self, step: Callable[..., None], call: Call, *more: Any) -> None:
        try:
            step(call, *more)
        except Exception as error:  # whatever is wrong with a call is a result of the check, never our own fault
            self._of(call).unknown = f"the call could not be followed: {type(error).__name__}: {error}"

    def end_step(self, step: int) -> None:
        self._begun.clear()

    def end_case(self) -> None:
        for key, call in self._written.items():
            if key not in self._seen:
                self.sink(unread(call))
        for reads in sorted(self._reads.values(), key=lambda r: r.order):
            for measure in reads.measures():
                self.sink(measure)
        self._reads.clear()
        self._written.clear()

    # ----------------------------------------------------------------------------------------------- what is known

    def _embed(self, call: Call) -> None:
        ids = call.args[0]
        if len(ids) != len(call.rows):
            return
        self.contents.embed(call.place, call.rows, ids.tolist())
        self._embedded = True
        if call.place:
            return
        for owner, position in zip(call.rows.owner, call.rows.position, strict=True):
            if owner != PADDING:
                name = call.rows.requests[owner]
                self._begun[name] = min(position, self._begun.get(name, position))

    def _match(self, call: Call, results: tuple[Any, ...]) -> None:
        if call.rows.requests:
            self.contents.begin(call.rows.requests[0], call.args[0].tolist())
        pages = results[0].cpu().long() if results else torch.empty(0, dtype=torch.int64)
        freed = self._freed_at(call.place)
        freed[pages[pages < len(freed)]] = NEVER  # held again, and looked for by the tokens of the content

    def _release(self, call: Call) -> None:
        """The memory of a request is given back: its states are those of an earlier life from now on, and a page that
        nobody holds any more is free. A layer whose pages have numbers of their own says so at its own place."""
        for name in call.rows.requests:
            self._living.pop(name, None)
        counts, pages = call.args[0].cpu(), call.kwargs["pages"].cpu()
        freed = self._freed.setdefault(call.place, torch.empty(0, dtype=torch.int64))
        if len(counts) > len(freed):
            more = torch.full((len(counts) - len(freed),), NEVER, dtype=torch.int64)
            freed = self._freed[call.place] = torch.cat((freed, more))
        freed[pages[counts[pages] <= 0]] = call.order

    def _freed_at(self, place: str) -> torch.Tensor:
        """When pages at a place were given back: by its own numbers where it has some, else by those of all."""
        return self._freed.get(place, self._freed.get("", torch.empty(0, dtype=torch.int64)))

    def _splice(self, call: Call) -> None:
        self.contents.pads(int(call.kwargs["media_pad"]))

    def _learn_pool(self, call: Call) -> None:
        """A row of the index stands for as many tokens as lie between the numbers and the last tokens of its pools."""
        if call.site != "pool":
            return
        for position, number in zip(call.rows.position, call.kwargs["positions"].tolist(), strict=False):
            self._every = max(1, (position + 1) // (number + 1))
            return

    def _life(self, request: str) -> int:
        if request not in self._living:
            self._living[request] = len(self._lives)
            self._lives.append(request)
        return self._living[request]

    def _table(self, *key: str) -> ShadowTable:
        return self._tables.setdefault(key, ShadowTable())

    def _tap(self, call: Call) -> int:
        self._taps.append((call.tap, call.operator, call.layer))
        return len(self._taps) - 1

    # ---------------------------------------------------------------------------------------------------- writes

    def _write(self, call: Call) -> None:
        pool, slots = call.args[0], call.kwargs["slots"].cpu()
        if len(slots) == len(call.rows):
            key = (call.place, WRITES[call.operator])
            self._put(call, self._table(*key), slots, slot_digests(pool, slots.clamp(min=0), paged=True))
            if key not in self._written:
                self._written[key] = _without_tensors(call)

    def _store(self, call: Call) -> None:
        pool, slots = call.args[0], call.kwargs["slots"].cpu()
        if len(slots) == len(call.rows):
            digests = slot_digests(pool, slots.clamp(min=0), paged=False)
            self._put(call, self._table(call.place, call.site), slots, digests)

    def _put(self, call: Call, table: ShadowTable, slots: torch.Tensor, digests: torch.Tensor) -> None:
        """Remembers `digests` [rows], of the bytes that lie in `slots` [rows] now, as those of the call's rows."""
        owner, position = (torch.tensor(n, dtype=torch.int64) for n in (call.rows.owner, call.rows.position))
        real = ((slots >= 0) & (owner != PADDING)).nonzero().flatten()
        owner, position = owner[real], position[real]
        lives = torch.tensor([self._life(name) for name in call.rows.requests], dtype=torch.int64)
        identity, _ = self._identities(call, owner, position)
        order, tap = torch.full_like(real, call.order), torch.full_like(real, self._tap(call))
        table.put(slots[real], Written(digests[real], identity, lives[owner], position, order, order, tap))

    def _identities(self, call: Call, owner: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(identity [n], whether it is known [n]) of positions of the requests numbered `owner` in the call's map."""
        identity, known = torch.zeros_like(owner), torch.zeros_like(owner, dtype=torch.bool)
        for number in owner.unique().tolist():
            chain = self.contents.of(call.place, call.rows.requests[number])
            mine = ((owner == number) & (position >= 0) & (position < len(chain))).nonzero().flatten()
            known[mine], identity[mine] = True, chain[position[mine]]
        return identity, known

    # ------------------------------------------------------------------------------- pages copied and written anew

    def _copied(self, call: Call) -> None:
        """What is known of the pages goes with their bytes to the pages that they are copied to."""
        self._settled(call, call.kwargs["pages"], call.kwargs["into"])

    def _rewritten(self, call: Call) -> None:
        """The pages hold what they held, in other bytes."""
        self._settled(call, call.kwargs["pages"], call.kwargs["pages"])

    def _settled(self, call: Call, pages: torch.Tensor, into: torch.Tensor) -> None:
        """What was known of `pages` is what lies on the pages `into` from now on, with the bytes that lie there."""
        pool, table = call.args[0], self._table(call.place, call.site)
        places = torch.arange(page_size(pool))
        slots, there = ((n.cpu().unsqueeze(1) * len(places) + places).flatten() for n in (pages, into))
        known = table.get(slots)
        at = (known.order > NEVER).nonzero().flatten()
        if len(at):
            order, tap = torch.full_like(at, call.order), torch.full_like(at, self._tap(call))
            digests = slot_digests(pool, there[at], paged=True)
            kept = (known.identity[at], known.life[at], known.position[at])
            table.put(there[at], Written(digests, *kept, order, order, tap))

    # --------------------------------------------------------------------------------------------- the host tier

    def _leave_tier(self, call: Call) -> None:
        """What goes to the host or comes back is still what was put where it comes from."""
        table, slots, rows = self._source(call)
        owner, position = self._positions(call, len(slots))
        expected, known = self._identities(call, owner, position)
        due = known & (table.get(slots).identity == expected)  # what else lies on a page is nobody's
        at = due.nonzero().flatten()
        if len(at):
            read = _Read(call, table, slots[at], owner[at], position[at], expected[at], known[at])
            self._judge(read, lambda some: rows(slots[at][some]))

    def _enter_tier(self, call: Call) -> None:
        """The way of the contents: what is known of each place goes with its bytes."""
        table, slots, source = self._source(call)
        after, there, rows = self._target(call)
        known = table.get(slots)
        at = (known.order > NEVER).nonzero().flatten()
        if not len(at):
            return
        order, tap = torch.full_like(at, call.order), torch.full_like(at, self._tap(call))
        source(
            slots[at[:1]]
        )  # copies to the host are queued behind it: the device has carried them out when it is here
        life = known.life[at]
        if call.operator == "kv.reload" and call.rows.requests:
            life = torch.full_like(life, self._life(call.rows.requests[0]))
        moved = Written(rows(there[at]), known.identity[at], life, known.position[at], order, order, tap)
        after.put(there[at], moved)

    def _source(self, call: Call) -> tuple[ShadowTable, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        return self._side(call, host=call.operator == "kv.reload")

    def _target(self, call: Call) -> tuple[ShadowTable, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        return self._side(call, host=call.operator == "kv.offload")

    def _side(
        self, call: Call, *, host: bool
    ) -> tuple[ShadowTable, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """(shadow, flat slots [n], digests of slots) of the device's or the host's side of a copy."""
        pool, paged = call.args[0], call.site in PAGED
        page = page_size(pool) if paged else 1
        numbers = call.kwargs["places" if host else "pages"].cpu()
        slots = (numbers.unsqueeze(1) * page + torch.arange(page)).flatten()
        if not host:
            return self._table(call.place, call.site), slots, lambda at: slot_digests(pool, at, paged=paged)
        memory = call.kwargs["host"]
        flat = memory.reshape(memory.shape[0] * page, -1)
        return self._table(call.place, call.site, "host"), slots, lambda at: row_digests_of(flat, at)

    def _positions(self, call: Call, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(number of the request, position) of every slot of the pages of a copy, in order."""
        first = torch.tensor(call.rows.position, dtype=torch.int64)
        page = count // max(1, len(first))
        owner = torch.tensor(call.rows.owner, dtype=torch.int64).clamp(min=0).repeat_interleave(page)
        if call.site != "index" or self._every == 1:
            return owner, (first.unsqueeze(1) + torch.arange(page)).flatten()
        number = first.div(self._every, rounding_mode="floor").unsqueeze(1) + torch.arange(page)
        return owner, (number.flatten() + 1) * self._every - 1

    # ----------------------------------------------------------------------------------------------------- reads

    def _gather(self, call: Call) -> None:
        pool = call.kwargs["pool"] if "pool" in call.kwargs else call.args[0]
        kind, table = READS.get(call.operator, "kv"), call.kwargs["table"].cpu()
        self._seen.add((call.place, kind))
        if len(call.rows.requests) != len(table):
            self._of(call).unknown = f"{len(table)} page tables for {len(call.rows.requests)} requests"
            return
        page = page_size(pool)
        owner, number = _read_numbers(call, table, page)
        pages = table[owner, number // page]
        real = (pages >= 0).nonzero().flatten()
        owner, number, pages = owner[real], number[real], pages[real]
        every = self._every if kind == "index" else 1
        position = number if every == 1 else (number + 1) * every - 1
        expected, known = self._identities(call, owner, position)
        read = _Read(
            call, self._table(call.place, kind), pages * page + number % page, owner, position, expected, known
        )
        given_back = self._freed_at(call.place)
        freed, inside = torch.full_like(pages, NEVER), pages < len(given_back)
        freed[inside] = given_back[pages[inside]]
        self._judge(read, lambda some: slot_digests(pool, read.slots[some], paged=True), freed=freed)

    def _load(self, call: Call) -> None:
        """A state is that behind the last position before the rows of the step, and between steps that of its row."""
        pool, slots = call.args[0], call.kwargs["slots"].tolist()
        if len(slots) != len(call.rows):
            return
        taken = []
        for slot, owner, position in zip(slots, call.rows.owner, call.rows.position, strict=True):
            if owner == PADDING:
                continue
            name = call.rows.requests[owner]
            if self._begun and call.operator == "state.load":
                if name not in self._begun:
                    self._of(call).unknown = f"request {name} has no row in the step in which its state is loaded"
                    continue
                position = self._begun[name] - 1
            if slot >= 0 and position >= 0:
                taken.append((slot, owner, position))
            elif slot >= 0 or position >= 0:
                self._of(call).add(self._misplaced(call, name, slot, position), call.order)
            else:
                self._of(call).rows += 1  # a fresh state for a request that begins
        if not taken:
            return
        at, owner, position = torch.tensor(taken, dtype=torch.int64).unbind(1)
        expected, known = self._identities(call, owner, position)
        read = _Read(call, self._table(call.place, call.site), at, owner, position, expected, known)
        own = call.operator == "state.load"
        self._judge(read, lambda some: slot_digests(pool, at[some], paged=False), own_life=own)

    def _misplaced(self, call: Call, name: str, slot: int, position: int) -> Fault:
        if slot < 0:
            text = f"request {name} goes on behind position {position} from a fresh state"
            return Fault(LOST, text, 1, name, position + 1)
        old = self._table(call.place, call.site).get(torch.tensor([slot]))
        whose = self._whose(old, 0) if int(old.order) > NEVER else "nobody"
        text = f"request {name} begins at its first position from the state in slot {slot}, which is of {whose}"
        return Fault(OLDER if self._name(old, 0) == name else OTHER, text, 1, name, 0)

    def _of(self, call: Call) -> Reads:
        return self._reads.setdefault((call.tap, call.phase), reads_of(call))

    def _judge(
        self,
        read: _Read,
        digests: Callable[[torch.Tensor], torch.Tensor],
        *,
        freed: torch.Tensor | None = None,
        own_life: bool = False,
    ) -> None:
        """Holds the rows of a read against the shadow. `digests` gives those of some of its rows [k] as they are now;
        `freed` [n]: the call that took the last holder of each row's page; `own_life`: only what the request wrote
        since its memory was given to it."""
        call, table, reads = read.call, read.table, self._of(read.call)
        reads.rows += len(read.slots)
        if not len(read.slots):
            return
        if not self._embedded or not bool(read.known.all()):
            reads.unknown = "the tokens of the rows that it reads are not known: nobody showed embed.tokens for them"
            return
        if not table.writes:
            reads.unknown = "nobody showed the writes into its pool"
            return
        then = table.get(read.slots)
        never, other = then.order == NEVER, then.identity != read.expected
        stale = torch.zeros_like(never) if freed is None else ~never & (freed > then.order)
        lives = torch.tensor([self._life(name) for name in call.rows.requests], dtype=torch.int64)[read.owner]
        if own_life:
            stale |= ~never & ~other & (then.life != lives)
        some = _sample(len(read.slots), call.order, never | other)
        reads.digested += len(some)
        now = torch.full_like(read.slots, NEVER)
        now[some] = digests(some)
        changed = torch.zeros_like(never)
        changed[some] = ~never[some] & ~other[some] & (now[some] != then.digest[some])
        strange = never | other | changed
        for row in (strange & ~stale).nonzero().flatten()[:_COPIES_TRIED].tolist():
            if table.is_copy(int(read.expected[row]), int(now[row]), int(lives[row])):
                strange[row] = never[row] = other[row] = changed[row] = False
        right = some[~strange[some]]
        table.right(read.slots[right], call.order)
        if bool((strange | stale).any()):
            self._tell(read, then, never, other, stale, changed)

    def _tell(
        self,
        read: _Read,
        then: Written,
        never: torch.Tensor,
        other: torch.Tensor,
        stale: torch.Tensor,
        changed: torch.Tensor,
    ) -> None:
        reads, order = self._of(read.call), read.call.order
        for mask, pattern in ((stale, OLDER), (never, EMPTY), (other & ~never & ~stale, OTHER)):
            at = mask.nonzero().flatten()
            if len(at):
                reads.add(self._fault(read, then, int(at[0]), pattern, len(at)), order)
        for tap in then.tap[changed & ~stale].unique().tolist():
            at = (changed & ~stale & (then.tap == tap)).nonzero().flatten()
            fault = self._fault(read, then, int(at[0]), OVERWRITTEN, len(at))
            reads.add(replace(fault, accused=self._taps[tap]), order)

    def _fault(self, read: _Read, then: Written, row: int, pattern: str, count: int) -> Fault:
        call, name, position = read.call, read.call.rows.requests[int(read.owner[row])], int(read.position[row])
        slot, written = int(read.slots[row]), int(then.order[row])
        where = f"slot {slot}, which {call.tap} reads as position {position} of request {name},"
        text = {
            EMPTY: f"{where} was never written",
            OTHER: f"{where} holds {self._whose(then, row)}",
            OLDER: f"{where} holds {self._whose(then, row)}; its memory was given back since, and not written again",
            OVERWRITTEN: f"{where} no longer holds what was written there by call {written}: it was right at call "
            f"{int(then.seen[row])} for the last time, and wrong at call {call.order}",
        }[pattern]
        return Fault(pattern, text + (f" ({count} rows)" if count > 1 else ""), count, name, position)

    def _name(self, then: Written, row: int) -> str:
        life = int(then.life[row])
        return self._lives[life] if 0 <= life < len(self._lives) else "nobody"

    def _whose(self, then: Written, row: int) -> str:
        return (
            f"what request {self._name(then, row)} wrote for its position {int(then.position[row])} "
            f"in call {int(then.order[row])}"
        )


@dataclass(frozen=True)
class _Read:
    """Rows [n] of one call: where they lie, of which request of the call's map and which position they are, and the
    identity that is due there, where it is `known`."""

    call: Call
    table: ShadowTable
    slots: torch.Tensor
    owner: torch.Tensor
    position: torch.Tensor
    expected: torch.Tensor
    known: torch.Tensor


def _shows_a_gather(call: Call) -> bool:
    """Whether a fused kernel says from which pages it reads."""
    return {"pool", "table", "owner"} <= set(call.kwargs) and bool({"indices", "visible"} & set(call.kwargs))


def _read_numbers(call: Call, table: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(request [n], row of it [n]), each once, that a gather reads: those of `indices`, or what its rows may see."""
    owner, reach = call.kwargs["owner"].cpu(), table.shape[1] * page
    if "indices" in call.kwargs:
        indices = call.kwargs["indices"].cpu().long()
        real = (indices >= 0) & (indices < reach) & (owner >= 0).unsqueeze(1)
        wanted = torch.zeros(len(table), max(1, reach), dtype=torch.bool)
        wanted.view(-1)[(owner.unsqueeze(1) * reach + indices)[real]] = True
    else:
        visible, real = call.kwargs["visible"].cpu().long(), owner >= 0
        lengths = torch.zeros(len(table), dtype=torch.int64)
        lengths.scatter_reduce_(0, owner[real], visible[real], "amax")
        wanted = torch.arange(reach) < lengths.unsqueeze(1)
    owner, number = wanted.nonzero().unbind(1)
    return owner, number


def _sample(count: int, turn: int, also: torch.Tensor) -> torch.Tensor:
    """Rows of a read whose bytes are digested: all, or of many another part at each `turn`, and those of `also`."""
    parts = -(-count // ROWS_A_READ)
    if parts <= 1:
        return torch.arange(count)
    chosen = also.clone()
    chosen[turn % parts :: parts] = True
    return chosen.nonzero().flatten()


def _without_tensors(call: Call) -> Call:
    return Call(call.place, call.operator, call.site, call.phase, call.step, call.order, call.rows, (), {})
