"""Where a result may be rounded, and in which precision the reference computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Round = Callable[[str, Tensor], Tensor]


def exact(point: str, value: Tensor) -> Tensor:
    """The default `round=` of every operator: no rounding at any named point."""
    return value


def wide(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors in one common dtype: float64 if any of them is float64, float32 otherwise; None stays None.

    This is what the papers' "fp32 inside" means here. Low-precision values widen exactly.
    """
    dtype = torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32
    return tuple(None if t is None else t.to(dtype) for t in tensors)
