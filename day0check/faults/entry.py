"""What an entry says about itself, written down before it is run. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from day0check.types import Finding, Phase

Kind = Literal[
    "index",
    "cache",
    "phases",
    "quantisation",
    "routing",
    "linear-attention",
    "attention",
    "residual",
    "rope",
    "vision",
    "experts",
    "output",
    "loading",
    "memory",
    "ranks",
    "serving",
]
KINDS: tuple[str, ...] = get_args(Kind)
PLACES = ("serve.abort",)  # what can be wrong and is no operator: the path of a request that ends before its time


@dataclass(frozen=True)
class Address:
    """Where a fault is: what `first_fault` of the verdict must say.

    `operator` is a contract's name or one of `PLACES`, `layer` None outside the decoder layers. `request` (the part of
    its id after the case) and `position` count only where they are given.
    """

    operator: str
    layer: int | None
    phase: Phase
    request: str | None = None
    position: int | None = None

    def names(self, found: Finding | None) -> bool:
        """Whether a finding has this address."""
        if found is None:
            return False
        same = (found.operator, found.layer, found.phase) == (self.operator, self.layer, self.phase)
        if self.request is not None:
            same = same and (found.request or "").rpartition("/")[2].partition("#")[0] == self.request
        return same and (self.position is None or found.position == self.position)

    def __str__(self) -> str:
        text = f"{self.operator} / {'-' if self.layer is None else self.layer} / {self.phase}"
        text += f" / request {self.request}" if self.request is not None else ""
        return text + (f" / position {self.position}" if self.position is not None else "")


@dataclass(frozen=True)
class Entry:
    """One fault, or one legal variant (`expected` is None: its verdict must be ready).

    `id`: "S-38" as in the catalogue of public faults, "F-…" for further ones, "B-…" for legal variants. `source`:
    where it was reported, "" for our own. `visible`: in which input it shows. `model` is a preset, `case` a file of
    `faults/cases` or the id of a packaged case. `differs`: how the mutation differs from the reported fault. `layout`:
    over how many ranks it runs, as `accelerated/parallel/layout.py` reads it; empty for one device.
    """

    id: str
    title: str
    kind: Kind
    visible: str
    expected: Address | None
    source: str = ""
    model: str = "tiny"
    case: str = "short"
    profile: str = "bf16"
    differs: str = ""
    layout: dict[str, Any] = field(default_factory=dict)

    @property
    def benign(self) -> bool:
        return self.expected is None
