"""The accelerated engine with operators that torch.compile makes (`run --compile`)."""

from __future__ import annotations

from typing import Any

import torch

from day0check.accelerated.compiled import GROUPS, check_compiler, compiled, one_graph
from day0check.accelerated.one_row_step import OneRowStep
from day0check.accelerated.ops import TABLE, WEIGHTS
from day0check.backends.accelerated import Accelerated, find_device
from day0check.probe.recorder import Recorder
from day0check.probe.registry import Operators
from day0check.types import Request, Schedule, Turn


class Compiled(Accelerated):
    """As `Accelerated`. Operators are compiled while the model is loaded, by runs over lengths on one page and
    on two, and two batches; then the step of one row whose sublayers are graphs, where the model has it."""

    def __init__(self) -> None:
        super().__init__()
        self._fused: dict[str, int] = {}
        self._table = compiled(TABLE, self._fused)
        self._operators = Operators(self._table, weights=WEIGHTS, pools=("kv", "index", "state"), fused=self._fused)

    def load(self, model_dir: str, profile: str, device: str, layout: dict[str, Any]) -> None:
        """As `Accelerated.load`; raises Unavailable where there is no compiler, too."""
        check_compiler(find_device(device))
        super().load(model_dir, profile, device, layout)
        self._warm_up((5,), (9,), (7, 12), (70,))
        step = OneRowStep(self._engine, self._table, one_graph)
        if step.possible:
            self._engine.one_row = step
            self._warm_up((5,), (70,))
        self._fused |= dict.fromkeys(GROUPS, 0)

    def _warm_up(self, *batches: tuple[int, ...]) -> None:
        """Runs prompts of these lengths, each batch together."""
        with torch.no_grad():
            for lengths in batches:
                requests = tuple(Request(f"warm-up/{n}", (Turn(tuple(range(n))),), max_new_tokens=3) for n in lengths)
                self.run(requests, Schedule(), Recorder())
