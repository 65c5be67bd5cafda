"""Everything that was seen of an endpoint in one run: what the checks read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from day0check.load.records import Counters, Exchange
from day0check.types import Measure


@dataclass(frozen=True)
class Observed:
    """`parts`: asked for; `done`: those that ran to their end; `stopped`: why the others did not.

    `seed`: of the prompts. `context`: positions of a request as the endpoint names them, None where it does not.
    `soak`: how many requests of the soak had which outcome. `speed`: figures of each load phase by name. `profile`: the
    precision that the endpoint claims. `reference`: what the reference says about the answers, a row per sequence,
    or None when it was not asked; `reference_reason`: why it could not be asked; `doubted`: what it says about answers
    that changed beside others by little. `matched`: the
    parameter of the model in which the answers look wrong, if any; None where that was not asked.
    """

    model: str
    api: str
    parts: tuple[str, ...]
    done: tuple[str, ...] = ()
    stopped: str = ""
    exchanges: tuple[Exchange, ...] = ()
    counters: tuple[Counters, ...] = ()
    seed: int = 0
    context: int | None = None
    soak: Mapping[str, int] = field(default_factory=dict)
    speed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    slos: Mapping[str, float] = field(default_factory=dict)
    slo_share: float = 0.99
    profile: str = "bf16"
    reference: tuple[Any, ...] | None = None
    reference_reason: str = ""
    doubted: tuple[Any, ...] = ()
    matched: Measure | None = None

    def get(self, label: str) -> Exchange | None:
        """The exchange of that label."""
        return next((e for e in self.exchanges if e.label == label), None)

    def under(self, prefix: str) -> dict[str, Exchange]:
        """Exchanges whose label begins with `prefix` and a slash, by the rest of their label."""
        start = prefix + "/"
        return {e.label.removeprefix(start): e for e in self.exchanges if e.label.startswith(start)}

    def counter(self, label: str) -> dict[str, float]:
        """The latest counters of that label."""
        return next((c.values for c in reversed(self.counters) if c.label == label), {})
