"""Which rows of one candidate run are compared with which of another. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pairing:
    """Request `here` of the further run and request `there` of the other hold the same tokens below `until`.

    `until`: the first position that is not compared; None compares all. `shift`: an image whose pads begin at position
    p here has them at p + shift there.
    """

    here: str
    there: str
    until: int | None = None
    shift: int = 0
