"""What the reads of one tap showed, and the measures that they become."""

from __future__ import annotations

from dataclasses import dataclass, field

from day0check.probe.recorder import Call
from day0check.types import Measure

SUFFIX = ".content"


@dataclass(frozen=True)
class Fault:
    """The first wrong row of a call: whose bytes they are and why they are not those that were due.

    `accused`: (tap, operator, layer) of the write whose bytes did not last; None accuses the reader.
    """

    pattern: str
    message: str
    rows: int
    request: str | None
    position: int | None
    accused: tuple[str, str, int | None] | None = None


@dataclass
class Reads:
    """All reads of one tap in one phase. `unknown` says why some rows could not be held against anything."""

    tap: str
    operator: str
    phase: str
    layer: int | None
    order: int
    rows: int = 0
    digested: int = 0
    unknown: str = ""
    faults: dict[tuple[str, str, int | None] | None, tuple[int, Fault]] = field(default_factory=dict)

    def add(self, fault: Fault, order: int) -> None:
        """Keeps the first fault of the reader and of each write."""
        self.faults.setdefault(fault.accused, (order, fault))

    def measures(self) -> list[Measure]:
        """One for the reader, and one for each write whose bytes did not last."""
        own = self.faults.get(None)
        found = [self._measure(None, *own) if own else self._without_fault()]
        found += [self._measure(key, *fault) for key, fault in self.faults.items() if key is not None]
        return found

    def _without_fault(self) -> Measure:
        return Measure(
            tap=f"{self.tap}{SUFFIX}",
            operator=self.operator,
            kind="move",
            phase=self.phase,
            layer=self.layer,
            order=self.order,
            rows=self.rows,
            elements=self.digested,
            passed=not self.unknown,
            statistics={"wrong_rows": 0.0},
            limits={"wrong_rows": 0.0},
            not_judged=self.unknown,
        )

    def _measure(self, accused: tuple[str, str, int | None] | None, order: int, fault: Fault) -> Measure:
        tap, operator, layer = accused or (self.tap, self.operator, self.layer)
        return Measure(
            tap=f"{tap}{SUFFIX}",
            operator=operator,
            kind="move",
            phase=self.phase,
            layer=layer,
            order=order,
            rows=self.rows,
            elements=self.digested,
            passed=False,
            statistics={"wrong_rows": float(fault.rows)},
            limits={"wrong_rows": 0.0},
            failing="wrong_rows",
            request=fault.request,
            position=fault.position,
            pattern=fault.pattern,
            message=fault.message,
        )


def reads_of(call: Call) -> Reads:
    return Reads(call.tap, call.operator, call.phase, call.layer, call.order)


def unread(call: Call) -> Measure:
    """The measure of a pool that was written, `call` being the first write, and never seen read."""
    reason = f"what {call.tap} writes was never seen read: who reads it does not show its pool and table"
    reads = reads_of(call)
    reads.unknown = reason
    return reads.measures()[0]
