"""Long contexts of the user's own model: what is found in a short context is found in a long one, at every depth."""

from __future__ import annotations

import math
from collections.abc import Iterator

from day0check.checks.endpoint.answer import answered, found
from day0check.checks.endpoint.compare import full_text
from day0check.checks.evidence import Answer
from day0check.load.needle import needles
from day0check.load.observed import Observed
from day0check.load.records import Exchange

QUESTION = "Is what the model finds in a short context found in a long one, whatever its depth?"
NAME = "endpoint.needle"
FEWEST = 4  # needles that must be found in a short context before a long one can say anything
MOST_LOST = 0.2  # share that may be lost: beyond it with the whole interval is a fault
Z95 = 1.959964  # of the normal distribution


def judge(observed: Observed) -> Answer:
    """A length and depth at which the lower bound of the 95 % interval of what is lost is beyond `MOST_LOST`."""
    short = {i: _has(observed, i, e) for i, e in observed.under("needle/short").items() if e.good}
    known = [i for i, right in short.items() if right]
    if "needle" not in observed.done:
        return answered(NAME, (), "", not_run=observed.stopped or "no needle was hidden")
    if len(known) < FEWEST:
        return answered(NAME, (), "", not_run=f"of {len(short)} needles {len(known)} are found in a short context")
    findings, shown, refused = [], [], []
    for length, depth, lost, asked, clear_no in cells(observed, known):
        if clear_no and not asked:
            refused.append(length)
            continue
        low, high = wilson(lost, asked)
        shown.append(f"{length} tokens at {depth}: {lost} of {asked} lost")
        if low > MOST_LOST:
            text = (
                f"in {length} tokens at depth {depth}, {lost} of {asked} needles that a short context gives are lost: "
                f"{lost / asked:.0%}, with 95 % certainty {low:.0%} to {high:.0%}"
            )
            label = f"needle/{length}/{depth}/{known[0]}"
            findings.append(found(NAME, "lost", text, label=label, value=lost / asked, limit=MOST_LOST))
    not_run = f"contexts of {', '.join(dict.fromkeys(refused))} tokens are refused" if refused else ""
    not_run = not_run or ("" if shown else "no long context was answered")
    return answered(NAME, findings, "; ".join(shown), not_run=not_run)


def cells(observed: Observed, known: list[str]) -> Iterator[tuple[str, str, int, int, bool]]:
    """(length, depth, lost, asked, whether one was refused) of every length and depth, of the needles in `known`."""
    table: dict[tuple[str, str], list[Exchange]] = {}
    for key, e in observed.under("needle").items():
        length, _, rest = key.partition("/")
        depth, _, number = rest.partition("/")
        if length.isdecimal() and number in known:
            table.setdefault((length, depth), []).append(e)
    for (length, depth), members in table.items():
        good = [e for e in members if e.good]
        lost = sum(not _has(observed, e.label.rpartition("/")[2], e) for e in good)
        yield length, depth, lost, len(good), any(e.refused for e in members)


def _has(observed: Observed, number: str, e: Exchange) -> bool:
    return needles(observed.seed)[int(number)].code in full_text(e.answer)


def wilson(hits: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    if not total:
        return 0.0, 1.0
    share, z2 = hits / total, Z95 * Z95
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total)) / (1 + z2 / total)
    return max(0.0, middle - half), min(1.0, middle + half)
