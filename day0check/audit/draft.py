"""The layer that drafts tokens: whether it is there as declared, and whether what it stores again is the same."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from day0check.audit.fault import Fault
from reference.inventory import Inventory, declared_draft_layers
from reference.tensors import DRAFT_COPIES
from reference.weights import read_tensor


def audit_draft(inventory: Inventory) -> Iterator[Fault]:
    """Notes on the draft layer; a warning where a copy of the embedding or of the head differs from the model's: then
    it depends on the software with which of them it drafts. Reads a copy and what it copies only when both are there.
    """
    count = len(inventory.config.layers)
    layer = f"layers.{count}"
    stored = {inventory.canonical[name]: name for name in inventory.sound}
    gone = any(name.startswith(f"{layer}.") for name in inventory.lost)
    if inventory.config.draft is None and declared_draft_layers(inventory.config_json) == 1 and not gone:
        what = f"config.json declares a layer that drafts tokens, and none of its tensors ({layer}) is stored"
        yield Fault("draft layer left out", layer, what, ("config.json",), "note", group="")
    for copy, original in DRAFT_COPIES.items():
        first, second = stored.get(f"{layer}.{copy}"), stored.get(original)
        if first is None or second is None or inventory.config.draft is None:
            continue
        files = inventory.index[first], inventory.index[second]
        pair = [read_tensor(n, file=inventory.directory / f) for n, f in zip((first, second), files, strict=True)]
        if not torch.equal(*pair):
            what = f"{first} in {files[0]} differs from {second} in {files[1]}, which it should repeat"
            yield Fault("draft copy differs", first, what, files, "warning")


def is_draft_copy(name: str, inventory: Inventory) -> bool:
    """Whether a canonical name is that of a tensor that the draft layer stores again."""
    layer = f"layers.{len(inventory.config.layers)}."
    return inventory.config.draft is not None and name.removeprefix(layer) in DRAFT_COPIES and name.startswith(layer)
