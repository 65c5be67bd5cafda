"""The exception of this room: the same three parts as the harness's own errors, without importing them."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A model directory that cannot be read as what it should be: `what` is wrong, `where`, and what `todo`."""

    def __init__(self, what: str, *, where: str = "", todo: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.todo = what, where, todo

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n  {self.todo}" if self.todo else head
