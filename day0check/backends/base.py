"""What a backend is: five methods, duck-typed, so that a vendor's file needs to import nothing of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from day0check.types import Outputs, Request, Schedule

if TYPE_CHECKING:
    import torch

    from day0check.probe.recorder import Recorder
    from day0check.probe.registry import Operators

CAPABILITIES = frozenset(
    {
        "taps",  # operator calls go through the recorder
        "operators",  # --ops can replace its operators
        "chunk",
        "batch",
        "mixed",  # single tokens and prompts in one step
        "preempt",
        "prefix",  # requests begin behind a prefix that earlier ones have computed
        "offload",  # to the host tier, and "reload" from there
        "reload",
        "abort",
        "images",
        "logprobs",
        "forced_tokens",
        "rank_taps",
        "pools",
        "memory",  # the kinds of memory that a schedule may ask for
        "copies",  # the moments at which copies out of host buffers are made
        "fixed_rows",  # decode steps padded to a fixed number of rows
        "prefix_workspace",  # prefixes attended to in chunks through memory of a set size
    }
)


class Pools(Protocol):
    def read(self, layer: int, kind: str, request: str, positions: list[int]) -> torch.Tensor:
        """Logical rows of a cache: [positions, width]. `kind`: "kv", "index", "conv", "kda", "pool"."""


@runtime_checkable
class Backend(Protocol):
    """One way to run a model. Made without arguments (`NAME()` of FILE.py:NAME), then `load`ed once."""

    def capabilities(self) -> set[str]: ...

    def operators(self) -> Operators | None:
        """The table that `--ops` is laid over, before `load`; None when its operators cannot be replaced."""

    def load(self, model_dir: str, profile: str, device: str, layout: dict[str, Any]) -> None:
        """`layout`: {"page": 64, "max_batch": 8, ...}. Raises Unavailable (or any error) when it cannot."""

    def run(self, requests: tuple[Request, ...], schedule: Schedule, recorder: Recorder) -> Outputs: ...

    def pools(self) -> Pools | None: ...

    def close(self) -> None: ...
