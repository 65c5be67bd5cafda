"""Counts the memory that tensor operations take, on any device: every new storage, and how many bytes live at a time.

    with Allocations() as taken:
        y = model(x)
    taken.made, taken.peak_bytes, taken.live_bytes

It sees what an operation gives back; scratch that lives and dies inside one native kernel is the device allocator's to
tell. Standard library + torch >= 2.1, Python >= 3.9.
"""

from __future__ import annotations

import weakref
from typing import Any, Dict

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts storages that are made inside it: `made` of them, `live_bytes` alive now, `peak_bytes` at the most.

    Storages that existed before count nothing, whatever is done with them. `largest_bytes`: of one storage.
    `sizes` counts how often a storage of so many bytes was made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made = self.live_bytes = self.peak_bytes = self.largest_bytes = 0
        self.sizes: Dict[int, int] = {}
        self._known: Dict[int, Any] = {}  # identity of a storage -> a weak reference that ends the entry with it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, new=False)
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, new=True)
        return result

    def restart_peak(self) -> None:
        """Lets `peak_bytes` begin anew at what lives now."""
        self.peak_bytes = self.live_bytes

    def _see(self, tensor: torch.Tensor, *, new: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if new else 0
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key, size))
        if not new:
            return
        self.made += 1
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.largest_bytes = max(self.largest_bytes, size)
        self.sizes[size] = self.sizes.get(size, 0) + 1

    def _gone(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.live_bytes -= size
