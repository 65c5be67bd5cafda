"""Links: the bytes that a call receives are those that their producer gave.

The result of every call of a step is remembered with the identity of its storage and, up to a limit, a copy of its
bytes (a digest above it). When a later call of the step receives that result, or a view of it, the bytes are compared.

What is no fault, and is not reported:
- memory that is written in place by design: `memory` names the pools among the arguments of each operator, `mutates`
  those that it writes; what shares memory with the latter is forgotten;
- an operator that works in place on what it received: its result takes the place of its argument;
- a new tensor at an old address: a storage is recognised by itself (a weak reference), never by its address;
- a buffer used again: a view is compared with the newest result that it overlaps, a result itself with itself;
- an input that an operator used up and that nobody reads afterwards; rows that are padding.
Standard library + torch >= 2.1, Python >= 3.9.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Tuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .digest import digest
from .recorder import Call, Observer
from .rows import PADDING

PATTERN = "overwritten after it was produced"


def _span(tensor: torch.Tensor) -> Tuple[int, int]:
    """First byte and byte after the last one that a strided tensor touches, from the start of its storage."""
    size, first = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return first, first + (last + 1) * size


def _overlap(a: Tuple[int, int], b: Tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _layout(tensor: torch.Tensor) -> Tuple[Any, ...]:
    return tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor with bytes of its own; subclasses (distributed, fake) are not looked into."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and value.numel() > 0


def _tensors(call: Call) -> List[Tuple[str, torch.Tensor]]:
    named = [(str(i), v) for i, v in enumerate(call.args)] + list(call.kwargs.items())
    return [(name, value) for name, value in named if _is_plain(value)]


class _Product:
    """One result of one call, as it was when the call returned."""

    def __init__(self, call: Call, index: int, tensor: torch.Tensor, copies: bool) -> None:
        self.call, self.index = call, index
        self.object = weakref.ref(tensor)
        self.storage = StorageWeakRef(tensor.untyped_storage())  # its number is not used again while this lives
        self.layout, self.span = _layout(tensor), _span(tensor)
        self.copy: Optional[torch.Tensor] = None
        self.digest = ""
        if copies:  # the bytes of the whole span, so that any view of it can be cut out of the copy
            length = (self.span[1] - self.span[0]) // tensor.element_size()
            self.copy = torch.as_strided(tensor.detach(), (length,), (1,)).clone().view(torch.uint8)
        else:
            self.digest = digest(tensor)
        self.overwritten_by: Optional[Call] = None

    def as_produced(self, tensor: torch.Tensor) -> Optional[torch.Tensor]:
        """The copied bytes seen through `tensor`'s shape and strides; None where that reaches beyond this product."""
        (first, end), size = _span(tensor), tensor.element_size()
        if self.copy is None or first < self.span[0] or end > self.span[1] or (first - self.span[0]) % size:
            return None
        cells = self.copy[first - self.span[0] : end - self.span[0]]
        if cells.storage_offset() % size:
            cells = cells.clone()
        return torch.as_strided(cells.view(tensor.dtype), tensor.shape, tensor.stride())

    def changed_rows(self, tensor: torch.Tensor) -> Optional[Tuple[int, ...]]:
        """Indices along the first axis of `tensor` whose bytes are no longer those produced (rank 0: index 0).

        None when this product cannot say; with a digest alone every row of a changed tensor is named.
        """
        rows = tensor.shape[0] if tensor.dim() else 1
        if self.copy is None:
            if _layout(tensor) != self.layout:
                return None
            return () if digest(tensor) == self.digest else tuple(range(rows))
        then = self.as_produced(tensor)
        if then is None:
            return None
        now_bytes, then_bytes = _bytes(tensor), _bytes(then)
        if torch.equal(now_bytes, then_bytes):
            return ()
        return tuple((now_bytes != then_bytes).reshape(rows, -1).any(1).nonzero().reshape(-1).tolist())


class Provenance(Observer):
    """Gives `sink` one record, with the fields of a Measure, for each result that was changed before it was used.

    `memory`: operator -> names of its arguments that are memory ("0" for the positional one); they are not checked.
    `mutates`: those of them that the operator writes. `copy_bytes`: a result up to this size is copied, a larger one
    digested; `step_bytes`: copies of one step. `links`: how many inputs were checked, changed, or could not be checked.
    """

    def __init__(
        self,
        sink: Callable[[Dict[str, Any]], None],
        *,
        memory: Mapping[str, Collection[str]],
        mutates: Mapping[str, Collection[str]],
        copy_bytes: int = 4 << 20,
        step_bytes: int = 128 << 20,
    ) -> None:
        self.sink, self.memory, self.mutates = sink, memory, mutates
        self.copy_bytes, self.step_bytes = copy_bytes, step_bytes
        self.links = {"checked": 0, "changed": 0, "unchecked": 0}
        self._products: Dict[int, List[_Product]] = {}  # by storage number, oldest first
        self._kept_bytes = 0

    def before(self, call: Call) -> List[Tuple[_Product, torch.Tensor]]:
        memory = self.memory.get(call.operator, ())
        whole = []
        for name, value in _tensors(call):
            product = self._find(value) if name not in memory else None
            if product is not None and self._check(product, call, name, value):
                whole.append((product, value))
        return whole

    def after(self, call: Call, token: Any, results: Tuple[Any, ...]) -> None:
        memory = self.memory.get(call.operator, ())
        written = self.mutates.get(call.operator, ())
        for name, value in _tensors(call):
            if name in written:
                self._forget(value, lambda product: True)
        plain = [(index, value) for index, value in enumerate(results) if _is_plain(value)]
        received = [_place(value) for name, value in _tensors(call) if name not in memory]
        for _, value in plain:
            self._forget(value, lambda p, v=value: p.object() is v or _among((p.storage.cdata, p.span), received))
        for index, value in plain:
            self._remember(call, index, value)
        for product, value in token:  # who overwrote it, in case that somebody reads it later
            if product.overwritten_by is None and product in self._products.get(product.storage.cdata, ()):
                product.overwritten_by = call if product.changed_rows(value) else None

    def end_step(self, step: int) -> None:
        self._products, self._kept_bytes = {}, 0

    def end_case(self) -> None:
        self.end_step(0)

    def _find(self, tensor: torch.Tensor) -> Optional[_Product]:
        """The product that `tensor` is, or else the newest one that its cells belong to."""
        products = self._products.get(tensor.untyped_storage()._cdata, ())
        span = _span(tensor) if products else (0, 0)
        overlapping = None
        for product in reversed(products):
            if product.object() is tensor:
                return product
            if overlapping is None and _overlap(product.span, span):
                overlapping = product
        return overlapping

    def _check(self, product: _Product, call: Call, name: str, value: torch.Tensor) -> bool:
        """Whether the bytes are those produced; tells the sink, once a product, when they are not."""
        changed = product.changed_rows(value)
        if changed is None:
            self.links["unchecked"] += 1
            return False
        self.links["checked"] += 1
        rows = product.call.rows
        if changed and value.dim() and value.shape[0] == len(rows):
            changed = tuple(row for row in changed if rows.owner[row] != PADDING)
        if changed:
            self.links["changed"] += 1
            self.sink(measure(product, call, name, value, changed))
            self._products[product.storage.cdata].remove(product)
        return not changed

    def _forget(self, value: torch.Tensor, which: Callable[[_Product], bool]) -> None:
        products = self._products.get(value.untyped_storage()._cdata)
        if products:
            span = _span(value)
            products[:] = [p for p in products if not (_overlap(p.span, span) and which(p))]

    def _remember(self, call: Call, index: int, value: torch.Tensor) -> None:
        first, end = _span(value)
        if self._kept_bytes + end - first > self.step_bytes:
            self._drop_freed()
        copies = end - first <= self.copy_bytes and self._kept_bytes + end - first <= self.step_bytes
        product = _Product(call, index, value, copies)
        self._kept_bytes += end - first if copies else 0
        self._products.setdefault(product.storage.cdata, []).append(product)

    def _drop_freed(self) -> None:
        self._products = {n: ps for n, ps in self._products.items() if not ps or not ps[0].storage.expired()}
        kept = (p.copy.numel() for ps in self._products.values() for p in ps if p.copy is not None)
        self._kept_bytes = sum(kept)


def _place(value: torch.Tensor) -> Tuple[int, Tuple[int, int]]:
    return value.untyped_storage()._cdata, _span(value)


def _among(place: Tuple[int, Tuple[int, int]], places: List[Tuple[int, Tuple[int, int]]]) -> bool:
    return any(place[0] == number and _overlap(place[1], span) for number, span in places)


def measure(
    product: _Product, reader: Call, name: str, value: torch.Tensor, changed: Tuple[int, ...]
) -> Dict[str, Any]:
    """The record of a broken link, as the JSON form of a Measure.

    Its tap is the producer's (or that of the call that is known to have written over it) with ".link" appended, so
    that it never stands for the judgement of the call's own result.
    """
    accused = product.overwritten_by or product.call
    rows = value.shape[0] if value.dim() else 1
    request, position = None, None
    if value.dim() and rows == len(product.call.rows):
        request, position = product.call.rows.address(changed[0])
    argument = "the first argument" if name == "0" else f"argument {name!r}"
    by = f" by {accused.tap}" if product.overwritten_by else ""
    return {
        "tap": f"{accused.tap}.link",
        "operator": accused.operator,
        "kind": "move",
        "phase": accused.phase,
        "layer": accused.layer,
        "order": accused.order,
        "rows": rows,
        "elements": value.numel(),
        "passed": False,
        "statistics": {"changed_rows": float(len(changed))},
        "limits": {"changed_rows": 0.0},
        "failing": "changed_rows",
        "request": request,
        "position": position,
        "pattern": PATTERN,
        "message": f"result {product.index} of {product.call.tap} was overwritten{by} before {reader.tap} read it as "
        f"{argument}: {len(changed)} of {rows} rows changed",
    }
