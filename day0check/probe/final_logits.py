"""Keeps the logits of one run, so that an observed and an unobserved run can be held beside each other.

Standard library + torch >= 2.1, Python >= 3.9.
"""

from __future__ import annotations

from typing import Any, Dict, Tuple

import torch

from .recorder import Call, Observer
from .rows import PADDING, RowMap

LOGITS = "head.logits"
BYTE_CAP = 64 << 20


class FinalLogits(Observer):
    """`rows[request, position]`: the model's own logits [vocab] behind that position, the latest, on the host.

    What is beyond `byte_cap` is counted in `dropped` and not kept.
    """

    def __init__(self, byte_cap: int = BYTE_CAP) -> None:
        self.rows: Dict[Tuple[str, int], torch.Tensor] = {}
        self.byte_cap, self.bytes, self.dropped = byte_cap, 0, 0

    def after(self, call: Call, token: Any, results: Tuple[Any, ...]) -> None:
        if call.operator == LOGITS and not call.place and results:
            self.keep(call.rows, results[0])

    def keep(self, rows: RowMap, logits: Any) -> None:
        """Keeps `logits` [rows, vocab]; what is no such tensor is counted as dropped."""
        if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or logits.shape[0] != len(rows):
            self.dropped += len(rows)
            return
        size = logits.numel() * logits.element_size()
        if self.bytes + size > self.byte_cap:
            self.dropped += len(rows)
            return
        self.bytes += size
        copy = logits.detach().to("cpu", copy=True)
        for row, (owner, position) in enumerate(zip(rows.owner, rows.position)):
            if owner != PADDING:
                self.rows[rows.requests[owner], position] = copy[row]
