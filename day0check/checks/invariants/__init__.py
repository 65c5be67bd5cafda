"""The invariants, one file per question: further runs of the candidate, or laws of its own results.

Each is asked where the [expect] of a case names it, in this order of accusation.
"""

from __future__ import annotations

from types import ModuleType

from day0check.checks.invariants import (
    aborted,
    alone_equals_batched,
    causality,
    chunked_equals_one_shot,
    decode_equals_prefill,
    delayed_copies,
    experts_once,
    images_alone,
    isolation,
    mixed_steps,
    offloaded,
    padded,
    poisoned_memory,
    preempted,
    prefix_workspace,
    reordered,
    repeated,
    residual_bank,
    slot_reuse,
    spliced,
    warm_prefix,
)

INVARIANTS: dict[str, ModuleType] = {
    "decode_equals_prefill": decode_equals_prefill,
    "chunked_equals_one_shot": chunked_equals_one_shot,
    "prefix_workspace": prefix_workspace,
    "alone_equals_batched": alone_equals_batched,
    "reordered": reordered,
    "mixed_steps": mixed_steps,
    "padded": padded,
    "preempted": preempted,
    "offloaded": offloaded,
    "warm_prefix": warm_prefix,
    "aborted": aborted,
    "causality": causality,
    "isolation": isolation,
    "slot_reuse": slot_reuse,
    "poisoned_memory": poisoned_memory,
    "delayed_copies": delayed_copies,
    "repeated": repeated,
    "residual_bank": residual_bank,
    "experts_once": experts_once,
    "images_alone": images_alone,
    "spliced": spliced,
}

__all__ = ["INVARIANTS"]
