"""Counts the memory and the work of tensor operations, on any device: every new storage, how many bytes live at a
time, how many are read and written, how many multiply-adds matrices take.

    with Allocations() as taken:
        y = model(x)
    taken.made, taken.peak_bytes, taken.live_bytes

It sees what an operation gives back; scratch that lives and dies inside one native kernel is the device allocator's to
tell. Standard library + torch >= 2.1, Python >= 3.9.
"""

from __future__ import annotations

import weakref
from typing import Any, Dict, List

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TAKES = frozenset({"index", "index_select", "gather", "take", "embedding"})
_PUTS = frozenset({"index_put", "index_put_", "index_copy_", "index_add_", "scatter_"})
_OPERATIONS = {"mm": 2, "bmm": 2, "addmm": 3, "baddbmm": 3}  # products of matrices by their number of operands


class Allocations(TorchDispatchMode):
    """Counts storages that are made inside it: `made` of them, `live_bytes` alive now, `peak_bytes` at the most.

    Storages that existed before count nothing, whatever is done with them. `largest_bytes`: of one storage.
    `sizes` counts how often a storage of so many bytes was made. `moved_bytes`: bytes of the tensors that operations
    read and wrote (views move nothing); `operations`: two for each multiply-add of a product of matrices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made = self.live_bytes = self.peak_bytes = self.largest_bytes = 0
        self.moved_bytes = self.operations = 0
        self.sizes: Dict[int, int] = {}
        self._known: Dict[int, Any] = {}  # identity of a storage -> a weak reference that ends the entry with it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in given:
            self._see(tensor, new=False)
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            self._see(tensor, new=True)
        if not _only_looks(func):
            self.moved_bytes += _moved(func, given, made)
            self.operations += _multiplications(func, given, made)
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


def _only_looks(func: Any) -> bool:
    """Whether an operation gives another view of what it was given."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _moved(func: Any, given: List[torch.Tensor], made: List[torch.Tensor]) -> int:
    """Bytes read and written. Of a tensor that is indexed, only what is taken from it or put into it."""
    name = func._schema.name.rpartition("::")[2]
    if name.startswith(("empty", "new_empty")):
        return 0
    if func._schema.overload_name.endswith("out"):  # what is only written is among the given, too
        given = [tensor for tensor in given if all(tensor is not result for result in made)]
    if name in _TAKES:
        tensors = [*given[1:], *made, *made]
    elif name in _PUTS:
        tensors = [*given[1:], *given[-1:]]
    else:
        tensors = [*given, *made]
    return sum(t.numel() * t.element_size() for t in tensors)


def _multiplications(func: Any, given: List[torch.Tensor], made: List[torch.Tensor]) -> int:
    operands = _OPERATIONS.get(func._schema.name.rpartition("::")[2])
    if operands is None or len(given) < operands or not made:
        return 0
    return 2 * made[0].numel() * given[operands - 2].shape[-1]
