"""One fault that an audit found in a checkpoint. Standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

from day0check.types import Severity


@dataclass(frozen=True)
class Fault:
    """`tensor`: the stored name (or the key or file that is wrong); `files`: where; `what`: the sentence.

    Faults of one `pattern` and one kind of tensor become one finding. `group` None: the kind is the name of the tensor
    with every number left open.
    """

    pattern: str
    tensor: str
    what: str
    files: tuple[str, ...] = ()
    severity: Severity = "blocker"
    group: str | None = None

    @property
    def kind(self) -> str:
        return re.sub(r"\d+", "*", self.tensor) if self.group is None else self.group


def told(flag: object) -> str:
    """A flag of a configuration as a sentence says it."""
    return "absent" if flag is None else str(flag).lower()
