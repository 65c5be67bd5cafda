"""The accelerated engine with operators that torch.compile makes (`run --compile`)."""

from __future__ import annotations

from typing import Any

import torch

from day0check.accelerated.compiled import check_compiler, compiled
from day0check.accelerated.ops import TABLE, WEIGHTS
from day0check.backends.accelerated import Accelerated, find_device
from day0check.probe.recorder import Recorder
from day0check.probe.registry import Operators
from day0check.types import Request, Schedule, Turn


class Compiled(Accelerated):
    """As `Accelerated`. Operators are compiled while the model is loaded, by runs over lengths on one page and
    on two, and two batches."""

    def __init__(self) -> None:
        super().__init__()
        self._operators = Operators(compiled(TABLE), weights=WEIGHTS, pools=("kv", "index", "state"))

    def load(self, model_dir: str, profile: str, device: str, layout: dict[str, Any]) -> None:
        """As `Accelerated.load`; raises Unavailable where there is no compiler, too."""
        check_compiler(find_device(device))
        super().load(model_dir, profile, device, layout)
        with torch.no_grad():
            for lengths in ((5,), (9,), (7, 12), (70,)):
                requests = tuple(Request(f"warm-up/{n}", (Turn(tuple(range(n))),), max_new_tokens=3) for n in lengths)
                self.run(requests, Schedule(), Recorder())
