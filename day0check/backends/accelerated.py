"""The accelerated engine as a candidate: torch operators on any torch device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from day0check.accelerated.cache import CachePools
from day0check.accelerated.draft import FinalRows, run_drafts
from day0check.accelerated.engine import Engine
from day0check.accelerated.ops import TABLE, WEIGHTS
from day0check.accelerated.parallel.layout import layout_of
from day0check.accelerated.quantised import QuantisingCaller
from day0check.accelerated.records import Formats
from day0check.accelerated.scheduler import Scheduler
from day0check.errors import UsageError
from day0check.probe.recorder import Caller, Recorder
from day0check.probe.registry import Operators
from day0check.types import Outputs, Request, Schedule
from reference.weights import Checkpoint

# Under eager-bf16 our operators round less often than that profile allows; those of an operators file need not.

if TYPE_CHECKING:
    from day0check.accelerated.parallel.ranks import Ranks

DTYPES = {"bf16": torch.bfloat16, "eager-bf16": torch.bfloat16, "fp32": torch.float32}
QUANTISING = {"fp8-activations": torch.bfloat16}  # what lies between the linears
CACHING = {"fp8-cache": torch.bfloat16, "bf16-states": torch.bfloat16}  # everything but what the caches keep
CACHES = {"fp8-cache": Formats(kv="fp8", index="fp8"), "bf16-states": Formats(state="bfloat16")}


class Accelerated:
    """Loads a model once and runs any number of cases on it; `pools` shows the caches of the latest run.

    `formats` of a subclass: how its caches keep what is written, whatever the profile says.
    """

    formats: Formats | None = None

    def __init__(self) -> None:
        self._operators = Operators(TABLE, weights=WEIGHTS, pools=("kv", "index", "state"))
        self._engine: Engine | None = None
        self._caller: type[Caller] = Caller
        self._pools: CachePools | None = None

    def capabilities(self) -> set[str]:
        schedules = {"chunk", "batch", "mixed", "preempt", "abort", "prefix", "offload", "reload", "memory"}
        schedules |= {"copies", "fixed_rows", "prefix_workspace"}
        return {"taps", "operators", "images", "forced_tokens", "pools", "rank_taps"} | schedules

    def operators(self) -> Operators:
        return self._operators

    def load(self, model_dir: str, profile: str, device: str, layout: dict[str, Any]) -> None:
        """Reads the checkpoint onto `device` in the precision of `profile`.

        Raises UsageError for an unknown profile or device, Unavailable for what this engine cannot do, CheckpointError
        for what it cannot read.
        """
        dtypes = DTYPES | QUANTISING | CACHING
        if profile not in dtypes:
            raise UsageError(
                f"the accelerated backend has no profile {profile!r}",
                where="--profile",
                todo=f"use {', '.join(dtypes)}",
            )
        self._caller = QuantisingCaller if profile in QUANTISING else Caller
        self._engine = Engine(
            Checkpoint(model_dir),
            dtype=dtypes[profile],
            device=find_device(device),
            layouts=self._operators.layouts,
            ranks=self.ranks(layout),
            formats=self.formats or CACHES.get(profile),
        )

    def run(self, requests: tuple[Request, ...], schedule: Schedule, recorder: Recorder) -> Outputs:
        """Runs `requests` to their end. Raises UsageError before `load`, InputError for requests that make no sense."""
        if self._engine is None:
            raise UsageError("no model is loaded", where="accelerated backend", todo="call load first")
        if self._engine.ranks is not None:
            recorder.dims = self._engine.ranks.dims
        caller = self._caller(self._operators, recorder)
        scheduler = Scheduler(self._engine, requests, schedule, caller)
        self._pools = CachePools(scheduler.caches, scheduler.tenancies)
        with FinalRows(self._engine, caller) as finals:
            outputs = scheduler.run()
        run_drafts(self._engine, requests, outputs, caller, finals, step=scheduler.step)
        return outputs

    def ranks(self, layout: dict[str, Any]) -> Ranks | None:
        """This process among the ranks of `layout`: see `ranks_of`."""
        return ranks_of(layout)

    def pools(self) -> CachePools | None:
        return self._pools

    def close(self) -> None:
        self._engine = self._pools = None


def ranks_of(layout: dict[str, Any]) -> Ranks | None:
    """This process among the ranks of `layout`, connected with the others; None for a model that is not cut.

    `layout` holds the keys of `parallel.layout.layout_of`, and those of `parallel.start_up.connect`, or a `transport`.
    Raises UsageError for a layout that cannot be, Unavailable when other ranks do not answer.
    """
    wanted = layout_of(layout)
    if wanted.world == 1:
        return None
    from day0check.accelerated.parallel.ranks import Ranks
    from day0check.accelerated.parallel.start_up import connect

    return Ranks(wanted, layout["transport"] if "transport" in layout else connect(layout))


def find_device(name: str) -> torch.device:
    """The torch device called `name`. Raises UsageError that lists what there is."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError, AttributeError) as error:
        reason = str(error).split("\n", 1)[0]
        raise UsageError(
            f"device {name!r} cannot be used: {reason}", where="--device", todo=f"there is {', '.join(devices())}"
        ) from error
    if device.type == "meta":
        raise UsageError("device 'meta' holds no values", where="--device", todo=f"there is {', '.join(devices())}")
    return device


def devices() -> list[str]:
    """Names of the devices that this torch can use here."""
    found = ["cpu"]
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None:
        found += [f"{kind.type}:{i}" for i in range(torch.accelerator.device_count())]
    return found
