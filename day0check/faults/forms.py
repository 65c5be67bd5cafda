"""An operator in another legal form: the reference rounded where a profile says that chains of operations round."""

from __future__ import annotations

from typing import Any

import torch

from day0check.compare.replay import Replay
from day0check.compare.rounding import Rounder
from day0check.contracts import CONTRACTS
from day0check.contracts.profiles import PROFILES


def in_form_of(profile: str, name: str, first: torch.Tensor, **kwargs: Any) -> Any:
    """The results of operator `name` on its arguments, float32 between the rounding points of `profile`, which it
    rounds to nearest; activations come back in bfloat16."""
    contract = CONTRACTS[name]
    wide = Replay(contract, {contract.args[0].name: first, **kwargs}).wide(torch.float32)
    results = wide.run(Rounder(PROFILES[profile].points_of(name)))
    low = [y.to(torch.bfloat16) if r.dtype == "act" else y for y, r in zip(results, contract.results, strict=True)]
    return low[0] if len(low) == 1 else tuple(low)
