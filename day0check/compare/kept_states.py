"""KDA states that are kept in fewer bits between calls: where an implementation rounds them, and a pass that does so.

The reference goes over a whole sequence in one call, so a claim about what happens between calls needs the calls of
the candidate: a prompt in one or several chunks, then a token at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from day0check.contracts.profiles import Profile
from day0check.snapshot import Snapshot

OPERATOR, POINT = "kda.attention", "kept"


def claimed(profile: Profile) -> bool:
    """Whether the profile lets a KDA state be kept in fewer bits than it is computed with."""
    return POINT in profile.points_of(OPERATOR)


def ends_of_calls(snapshot: Snapshot, request: str) -> tuple[int, ...]:
    """Behind which rows of a request its states were kept, as the steps in which the candidate computed its rows show;
    () where nothing travelled that would show them."""
    for tap in snapshot.taps():
        ends = set()
        for entry in (e for e in snapshot.entries if e.tap == tap):
            own = [
                p for o, p in zip(entry.owner, entry.position, strict=True) if o >= 0 and entry.requests[o] == request
            ]
            ends |= {max(own) + 1, min(own)} if own else set()
        if ends:
            return tuple(sorted(ends - {0}))
    return ()


def in_calls(function: Callable[..., Any], ends: Sequence[int]) -> Callable[..., Any]:
    """`kda.attention` of one request in several calls, of the rows before each of `ends` (all of them where it is
    empty: a call for each row), then of the rest. A call of one row is recurrent. Same results in exact arithmetic."""

    def run(q: torch.Tensor, *, state: Any, offsets: torch.Tensor, chunk: int | None = None, **others: Any) -> Any:
        rows = {name: others.pop(name) for name in ("k", "v", "g", "beta")}
        count, parts, start = q.shape[0], [], 0
        for end in (*(e for e in (ends or range(1, count)) if e < count), count):
            own = {name: value[start:end] for name, value in rows.items()}
            here = offsets.new_tensor([0, end - start])
            size = chunk if end - start > 1 else None
            y, state = function(q[start:end], **own, state=state, offsets=here, chunk=size, **others)
            parts.append(y)
            start = end
        return torch.cat(parts), state

    return run
