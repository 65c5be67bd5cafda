"""The capture's own check: the final state that a candidate shows must give the logits that it answered with.

A hook that shows a state at another place than the model uses it makes a right model look wrong, or a wrong one right.
The state that was captured last before the head goes through the final norm and the head of the reference in float64;
the candidate's logits may differ from that by the roundings of those two operators alone.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from day0check.compare.net_measures import LOGITS
from day0check.compare.net_noise import row_errors
from day0check.compare.propagated import rounded
from day0check.contracts.profiles import Profile, profile_named
from day0check.snapshot import Snapshot
from day0check.types import Measure, RunCase
from reference.config import ModelConfig
from reference.linear import linear_float32
from reference.norm import rms_norm
from reference.residual import collapse_streams
from reference.weights import Checkpoint

OPERATOR = "capture.tap"
REPLICATES = 4
LIMIT = 8.0  # noises of a row's logits: healthy ones stay near 1, since nothing but one norm and one sum lies between


def last_tap(config: ModelConfig) -> str:
    """The tap of the residual spine whose rows the final norm reads, or of the streams that are collapsed for it."""
    if config.residual.kind == "attention":
        return "residual.mix.output"
    operator = "residual.update" if config.residual.kind == "mhc" else "residual.add"
    return f"layers.{len(config.layers) - 1:02d}.{operator}.mlp"


def compare_final_state(
    model: Any, profile: Profile | str, case: RunCase, snapshot: Snapshot, *, seed: int = 0
) -> list[Measure]:
    """A measure of `capture.tap` for each phase in which the candidate showed both its final state and its logits.

    `model`: a checkpoint directory, or a `reference.weights.Checkpoint`. The statistic "row" is the error of the worst
    row in units of the noise that random rounding of the norm and of the head makes. Raises what reading the checkpoint
    and the snapshot raises.
    """
    is_directory = isinstance(model, (str, Path))
    config, weights = _read_head(str(model), _stamps(Path(model))) if is_directory else _head_of(model)
    profile = profile_named(profile) if isinstance(profile, str) else profile
    tap, found = last_tap(config), []
    for request in case.requests:
        shown, answered = snapshot.recorded(tap, request.id), snapshot.recorded(LOGITS, request.id)
        rows = {p: i for i, p in enumerate(shown.positions)}
        both = [(rows[p], i) for i, p in enumerate(answered.positions) if p in rows]
        if both:
            states = shown.values[[s for s, _ in both]].double()
            logits = answered.values[[a for _, a in both]].double()
            phases = [answered.phases[a] for _, a in both]
            orders = [shown.orders[s] for s, _ in both]
            found.append((request.id, states, logits, phases, orders, [answered.positions[a] for _, a in both]))
    if not found:
        return []
    states = torch.cat([states for _, states, *_ in found])
    given = torch.cat([logits for _, _, logits, *_ in found])
    oracle = _logits(config, weights, states, profile, None)
    generators = [torch.Generator().manual_seed(seed + r) for r in range(REPLICATES)]
    others = torch.stack([_logits(config, weights, states, profile, g) for g in generators])
    errors = row_errors(oracle, given, others)
    noises = torch.where(errors.finite, errors.z.sqrt(), torch.inf)
    addresses = [(r, *rest) for r, _, _, *lists in found for rest in zip(*lists, strict=True)]
    return [_measure(tap, phase, noises, addresses, given.shape[1]) for phase in dict.fromkeys(a[1] for a in addresses)]


def _stamps(directory: Path) -> tuple[tuple[str, int], ...]:
    return tuple((file.name, file.stat().st_mtime_ns) for file in sorted(directory.glob("*")))


@functools.lru_cache(maxsize=1)
def _read_head(directory: str, stamps: tuple[tuple[str, int], ...]) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """The cases of a run share one directory: it is read once."""
    return _head_of(Checkpoint(directory))


def _head_of(checkpoint: Checkpoint) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    return checkpoint.config, {name: checkpoint.tensor(name).double() for name in _names(checkpoint.config)}


def _names(config: ModelConfig) -> tuple[str, str]:
    return "norm.weight", "embed_tokens.weight" if config.tied_head else "lm_head.weight"


def _logits(
    config: ModelConfig,
    weights: dict[str, torch.Tensor],
    x: torch.Tensor,
    profile: Profile,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Logits [n, V] of states [n, D] or [n, N, D] by the reference's operators, rounded at random with a generator."""

    def call(operator: str, function: Any, first: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return rounded(profile, operator, function, (first,), kwargs, generator)

    norm, head = (weights[name] for name in _names(config))
    if config.residual.kind == "mhc":
        equal = torch.full_like(x[..., 0], 1 / x.shape[1])
        x = call("residual.collapse", collapse_streams, x, pre=equal)
    x = call("norm.rms", rms_norm, x, weight=norm, eps=config.eps)
    return call(LOGITS, linear_float32, x, weight=head)


def _measure(tap: str, phase: str, noises: torch.Tensor, addresses: list[tuple[Any, ...]], width: int) -> Measure:
    mine = [i for i, address in enumerate(addresses) if address[1] == phase]
    worst = max(mine, key=lambda i: float(noises[i]))
    request, _, _, position = addresses[worst]
    error = float(noises[worst])
    passed = error <= LIMIT
    return Measure(
        tap=OPERATOR,
        operator=OPERATOR,
        kind="move",
        phase=phase,
        layer=None,
        order=min(addresses[i][2] for i in mine),
        rows=len(mine),
        elements=len(mine) * width,
        passed=passed,
        statistics={"row": error},
        limits={"row": LIMIT},
        failing="" if passed else "row",
        request=None if passed else request,
        position=None if passed else position,
        pattern="" if passed else "shown elsewhere than used",
        message="" if passed else f"the state shown at {tap} does not give the logits that the candidate answered with",
    )
