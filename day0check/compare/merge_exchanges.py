"""What ranks gave each other, laid side by side: bytes that were sent are those that came, and every pair of row and
expert is computed once and its result used at its place. The lines are those of `probe/exchanges.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from day0check.types import Measure

Line = dict[str, Any]
Pair = tuple[str, int, int]  # request, position, expert
MOVES = ("comm.all_gather", "comm.all_to_all")


def exchange_measures(ranks: Sequence[Sequence[Line]]) -> list[Measure]:
    """A measure for each (tap, phase) of a move between ranks: digests of sent rows against those of received ones."""
    calls: dict[tuple[str, str], dict[tuple[int, int], dict[int, Line]]] = defaultdict(lambda: defaultdict(dict))
    for rank, lines in enumerate(ranks):
        for line in lines:
            if line["operator"] in MOVES and "sent" in line:
                calls[line["tap"], line["phase"]][line["step"], line["nth"]][rank] = line
    return [_exchange(list(by_call.values())) for by_call in calls.values()]


def _exchange(calls: list[dict[int, Line]]) -> Measure:
    rows = 0
    for lines in calls:
        first = next(iter(lines.values()))
        absent = [rank for rank in range(first["size"]) if rank not in lines]
        if absent:
            text = f"rank {absent[0]} took no part in it"
            return _measure(
                first, first["operator"], rows, "absent_ranks", len(absent), "a rank is absent", text, absent[0]
            )
        for receiver, line in lines.items():
            for sender, theirs in lines.items():
                sent = theirs["sent"].get(str(sender if line["operator"] == MOVES[0] else receiver), [])
                received = line["received"].get(str(sender), [])
                rows += len(received)
                if sent == received:
                    continue
                wrong = [i for i, (a, b) in enumerate(zip(sent, received, strict=False)) if a != b]
                wrong = wrong or [min(len(sent), len(received))]
                text = (
                    f"what rank {sender} gave is not what rank {receiver} got: {len(wrong)} of {len(sent)} rows differ"
                )
                if len(sent) != len(received):
                    text = f"rank {sender} gave {len(sent)} rows and rank {receiver} got {len(received)}"
                where = _address(theirs, receiver, wrong[0])
                count = max(len(wrong), abs(len(sent) - len(received)))
                return _measure(
                    line, line["operator"], rows, "mismatched_rows", count, "other bytes", text, receiver, where
                )
    first = next(iter(calls[0].values()))
    return _measure(first, first["operator"], rows, "mismatched_rows", 0, "", "", None)


def _address(sender: Line, receiver: int, row: int) -> tuple[str | None, int | None]:
    """Request and position of row `row` of what was sent to `receiver`."""
    before = 0
    if sender["operator"] == MOVES[1]:
        before = sum(len(rows) for rank, rows in sender["sent"].items() if int(rank) < receiver)
    if before + row >= len(sender["where"]):
        return None, None
    owner, position = sender["where"][before + row]
    return (sender["requests"][owner], position) if owner >= 0 else (None, None)


# ------------------------------------------------------------------------------------------------- pairs of experts


def pair_measures(ranks: Sequence[Sequence[Line]], *, expert_parallel: bool) -> list[Measure]:
    """Two measures for each layer and phase with routed experts: every chosen (row, expert) is computed once, over all
    ranks with expert parallelism and on each rank without; and what is summed for a row are the results of its pairs.
    """
    steps: dict[tuple[str, str], dict[int, list[tuple[int, Line]]]] = defaultdict(lambda: defaultdict(list))
    for rank, lines in enumerate(ranks):
        for line in lines:
            place = line["tap"].partition(".moe.")[0]
            if line["operator"].startswith("moe.") and place.startswith("layers."):  # operators alone have no routing
                steps[place, line["phase"]][line["step"]].append((rank, line))
    found = []
    for (place, _), by_step in steps.items():
        groups = [_on_ranks(members, expert_parallel) for members in by_step.values()]
        flat = [group for several in groups for group in several]
        found.append(_once(place, flat))
        found.append(_at_their_place(place, flat))
    return found


def number_measures(ranks: Sequence[Sequence[Line]], held: Sequence[Sequence[int]]) -> list[Measure]:
    """A measure for each layer and phase whose experts lie on several ranks: those that a rank decodes out of its stack
    are those of the pairs that it computes. `held`: the experts in the stack of each rank, in its order."""
    found: dict[tuple[str, str], Measure] = {}
    for rank, lines in enumerate(ranks):
        for line in lines:
            place = line["tap"].partition(".moe.")[0]
            if line["operator"] != "moe.experts" or not line.get("converted") or not place.startswith("layers."):
                continue
            named = [held[rank][number] if number < len(held[rank]) else -1 for number in line["converted"]]
            wrong = [(due, got) for due, got in zip(line["active"], named, strict=False) if due != got]
            count = len(wrong) + abs(len(named) - len(line["active"]))
            known = found.get((place, line["phase"]))
            if known is not None and (not known.passed or not count):
                continue
            pattern = text = ""
            if count:
                pattern, first = "weights of another expert", wrong[0] if wrong else (line["active"], named)
                text = f"rank {rank} computes the pairs of expert {first[0]} with the weights of expert {first[1]}"
            where = (rank if count else None, (None, None))
            rows = len(line["active"])
            found[place, line["phase"]] = _moe(
                place, "moe.convert", "numbers", line, rows, count, pattern, text, *where
            )
    return list(found.values())


def _on_ranks(members: list[tuple[int, Line]], expert_parallel: bool) -> list[list[tuple[int, Line]]]:
    """The lines among which a pair must occur once: those of all ranks, or of each by itself."""
    if expert_parallel:
        return [members]
    return [[m for m in members if m[0] == rank] for rank in sorted({rank for rank, _ in members})]


def _chosen(members: Iterable[tuple[int, Line]]) -> dict[tuple[str, int], list[int]]:
    """The experts of each row, in the order of its choices."""
    found = {}
    for _, line in members:
        for owner, position, *experts in line.get("chosen", ()):
            if owner >= 0:
                found[line["requests"][owner], position] = experts
    return found


def _once(place: str, groups: list[list[tuple[int, Line]]]) -> Measure:
    rows = 0
    for members in groups:
        due = {(*row, e) for row, experts in _chosen(members).items() for e in experts if e >= 0}
        where: dict[Pair, list[int]] = defaultdict(list)
        for rank, line in members:
            if line["operator"] == "moe.experts":
                for owner, position, expert in line["pairs"]:
                    if owner >= 0:
                        where[line["requests"][owner], position, expert].append(rank)
        rows += len(due)
        twice = sorted(pair for pair, on in where.items() if len(on) > 1)
        never = sorted(due - set(where))
        uncalled = sorted(set(where) - due)
        wrong = twice or never or uncalled
        if wrong:
            pattern = "computed twice" if twice else "never computed" if never else "not chosen"
            request, position, expert = min(wrong, key=lambda p: (p[0], p[1]))
            on = where.get((request, position, expert), [])
            text = f"{len(wrong)} pairs of row and expert are {pattern}; the first is expert {expert}"
            text += f", on ranks {', '.join(map(str, on))}" if on else ""
            line = members[0][1]
            rank = on[-1] if on else None
            return _moe(place, "moe.dispatch", "once", line, rows, len(wrong), pattern, text, rank, (request, position))
    return _moe(place, "moe.dispatch", "once", groups[0][0][1], rows, 0, "", "", None, (None, None))


def _at_their_place(place: str, groups: list[list[tuple[int, Line]]]) -> Measure:
    rows, told = 0, groups[0][0][1]
    for members in groups:
        results: dict[Pair, set[int]] = defaultdict(set)
        for _, line in members:
            if line["operator"] == "moe.experts":
                for (owner, position, expert), digest in zip(line["pairs"], line["results"], strict=False):
                    if owner >= 0:
                        results[line["requests"][owner], position, expert].add(digest)
        chosen = _chosen(members)
        for rank, line in members:
            if line["operator"] != "moe.combine":
                continue
            told = line
            wrong = _misplaced(line, chosen, results)
            rows += len(line["pairs"])
            if wrong:
                request, position = wrong[0]
                text = f"{len(wrong)} of {len(line['pairs'])} summed results are not those of the row's own experts"
                at = (request, position)
                return _moe(
                    place, "moe.combine", "pairs", line, rows, len(wrong), "results of other pairs", text, rank, at
                )
    return _moe(place, "moe.combine", "pairs", told, rows, 0, "", "", None, (None, None))


def _misplaced(
    line: Line, chosen: dict[tuple[str, int], list[int]], results: dict[Pair, set[int]]
) -> list[tuple[str | None, int | None]]:
    """Addresses of the rows that get another result than that of their own pair."""
    wrong: list[tuple[str | None, int | None]] = []
    k = max((len(experts) for experts in chosen.values()), default=1)
    for pair, digest in zip(line["pairs"], line["results"], strict=False):
        row, choice = divmod(pair, k)
        if row >= len(line["where"]):
            wrong.append((None, None))
            continue
        owner, position = line["where"][row]
        if owner < 0:
            continue
        request = line["requests"][owner]
        experts = chosen.get((request, position), [])
        if choice >= len(experts) or digest not in results[request, position, experts[choice]]:
            wrong.append((request, position))
    if len(line["pairs"]) != len(set(line["pairs"])):
        wrong.append((None, None))
    return wrong


def _moe(
    place: str,
    operator: str,
    site: str,
    line: Line,
    rows: int,
    count: int,
    pattern: str,
    text: str,
    rank: int | None,
    where: tuple[str | None, int | None],
) -> Measure:
    line = {**line, "tap": f"{place}.{operator}.{site}"}
    return _measure(line, operator, rows, "wrong_pairs", count, pattern, text, rank, where)


def _measure(
    line: Line,
    operator: str,
    rows: int,
    statistic: str,
    count: int,
    pattern: str,
    text: str,
    rank: int | None,
    where: tuple[str | None, int | None] = (None, None),
) -> Measure:
    return Measure(
        tap=line["tap"],
        operator=operator,
        kind="move",
        phase=line["phase"],
        layer=line["layer"],
        order=line["order"],
        rows=rows,
        elements=rows,
        passed=not count,
        statistics={statistic: float(count)},
        limits={statistic: 0.0},
        failing=statistic if count else "",
        request=where[0],
        position=where[1],
        pattern=pattern,
        message=text,
        rank=rank,
    )
