"""Row maps: the request and position of each row of a tap, so that batch, chunk and shard orders never matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

PADDING = -1


@dataclass(frozen=True)
class RowMap:
    """`requests` names the requests of this step; row i belongs to request `requests[owner[i]]` at sequence position
    `position[i]`. Owner -1 marks a padding row. Plain Python integers: building one never waits for a device."""

    requests: Tuple[str, ...]
    owner: Tuple[int, ...]
    position: Tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.owner) != len(self.position):
            raise ValueError(f"{len(self.owner)} owners for {len(self.position)} positions")

    def __len__(self) -> int:
        return len(self.owner)

    def address(self, row: int) -> Tuple[Optional[str], Optional[int]]:
        """(request, position) of a row, (None, None) for padding."""
        if self.owner[row] == PADDING:
            return None, None
        return self.requests[self.owner[row]], self.position[row]

    def take(self, rows: Sequence[int]) -> "RowMap":
        """The map of the given rows, repeated or reordered as they come; index -1 makes a padding row."""
        return RowMap(
            self.requests,
            tuple(self.owner[r] if r >= 0 else PADDING for r in rows),
            tuple(self.position[r] if r >= 0 else PADDING for r in rows),
        )

    @staticmethod
    def concatenate(maps: Sequence["RowMap"]) -> "RowMap":
        """One map of all rows in order; requests keep their names."""
        names = tuple(dict.fromkeys(name for m in maps for name in m.requests))
        at = {name: i for i, name in enumerate(names)}
        owner = tuple(at[m.requests[o]] if o >= 0 else PADDING for m in maps for o in m.owner)
        return RowMap(names, owner, tuple(p for m in maps for p in m.position))
