"""Which implementation answers for an operator name: the decorators of an operators file, and the table they fill.

    @day0check.operator("dsa.select")                    replaces an operator
    @day0check.operator("kda.gates", phase="decode")     ... in one phase only
    @day0check.operator("dsa.attention", covers=("kv.gather", "dsa.attention"))   a fused kernel says what it covers
    @day0check.operator.wrap("dsa.select")               receives the present implementation as first argument
    @day0check.layout("kv")                              a class that owns the memory of a pool
    @day0check.prepare("moe.experts")                    repacks the weights of an operator once

A layout ("kv", "index" or "state") is a class made without arguments, with three methods. Rows are logical: slot =
page number * page + place in the page; nobody else knows where the bytes of a row lie.
    allocate(pages, page, width, dtype, device) -> memory    any object; a state pool has pages of one row, and `width`
                                                             is that of the flattened state of a request
    write(memory, rows, slots) -> None                       rows [n, width], slots int64 [n], none negative
    read_logical(memory, slots) -> rows                      the same rows again, byte for byte, [n, width] in `dtype`
Operators receive an `OwnedPool` in place of the tensor; `pool.memory` is what `allocate` returned. A kernel that is not
replaced goes through write and read_logical, and so does the judge.

A `prepare` function is called once for each place of the model, when it is first reached, with the weights of the
operator as keywords (those of the contract; all experts of a layer together, [experts, ...]). It returns a dict of
keywords, any objects, which the operator of the same file receives in place of the weights; for `moe.experts` also
`active`, the numbers of the experts whose pairs it gets (absent: all of them, in order). It must leave the originals
as they are: the judge repeats the call with them. What answers in another phase and is not of the file gets originals.

Standard library only (Python >= 3.9).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

Function = Callable[..., Any]
PHASES = (None, "prefill", "decode")
LAYOUT_METHODS = ("allocate", "write", "read_logical")


@dataclass(frozen=True)
class Registration:
    """One decorated object of an operators file, in the order in which it was declared."""

    role: str  # "replace" | "wrap" | "layout" | "prepare"
    name: str
    target: Any
    phase: Optional[str] = None
    covers: Tuple[str, ...] = ()


_declared: List[Registration] = []  # filled while `load_file` executes one file, empty at any other time


class _Operator:
    """`operator(name, phase=None, covers=())` and `operator.wrap(name, phase=None)`."""

    def __call__(self, name: str, *, phase: Optional[str] = None, covers: Tuple[str, ...] = ()) -> Callable:
        return _declare("replace", name, phase, tuple(covers))

    def wrap(self, name: str, *, phase: Optional[str] = None) -> Callable:
        return _declare("wrap", name, phase, ())


def _declare(role: str, name: str, phase: Optional[str], covers: Tuple[str, ...]) -> Callable:
    if phase not in PHASES:
        raise ValueError(f"phase of {name!r} must be 'prefill', 'decode' or left out, not {phase!r}")

    def register(target: Any) -> Any:
        _declared.append(Registration(role, name, target, phase, covers))
        return target

    return register


operator = _Operator()


def layout(name: str) -> Callable:
    """Declares a class that owns the memory of a pool: `layout("kv")`, `layout("index")`, `layout("state")`."""
    return _declare("layout", name, None, ())


def prepare(name: str) -> Callable:
    """Declares a function that repacks the weights of operator `name` once for each place of the model."""
    return _declare("prepare", name, None, ())


def load_file(path: str) -> Tuple[Registration, ...]:
    """Executes the Python file `path` and returns what it declared.

    Raises FileNotFoundError when there is no such file; whatever the file itself raises passes through.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(path)
    spec = importlib.util.spec_from_file_location(f"day0check_operators_{source.stem}", source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    _declared.clear()
    try:
        spec.loader.exec_module(module)
        return tuple(_declared)
    finally:
        _declared.clear()


@dataclass(frozen=True, eq=False)
class OwnedPool:
    """A pool whose memory a layout owns: `pages` * `page` slots of logical rows of shape `row` and type `dtype`."""

    layout: Any
    memory: Any
    pages: int
    page: int
    row: Tuple[int, ...]
    dtype: Any
    device: Any

    @staticmethod
    def allocate(layout: Any, *, pages: int, page: int, row: Tuple[int, ...], dtype: Any, device: Any) -> "OwnedPool":
        memory = layout.allocate(pages, page, math.prod(row), dtype, device)
        return OwnedPool(layout, memory, pages, page, tuple(row), dtype, device)

    def write(self, rows: Any, slots: Any) -> None:
        """Rows [n, *row] into slots int64 [n], none of them negative."""
        self.layout.write(self.memory, rows.to(self.dtype).reshape(slots.shape[0], math.prod(self.row)), slots)

    def read(self, slots: Any) -> Any:
        """Rows [n, *row] of slots int64 [n]. Raises ValueError when the layout gives another number of values."""
        rows = self.layout.read_logical(self.memory, slots)
        count, width = slots.shape[0], math.prod(self.row)
        if tuple(rows.shape) != (count, width):
            name = type(self.layout).__name__
            raise ValueError(f"{name}.read_logical gave {list(rows.shape)} where [{count}, {width}] is due")
        return rows.reshape(count, *self.row)


@dataclass(frozen=True)
class Whole:
    """The weights that those of a call are a choice of: `weights()` gives all, `active` says which are chosen.

    `owner` is the object that they belong to: as long as it is the same one, they are prepared once.
    """

    owner: Any
    weights: Callable[[], Dict[str, Any]]
    active: Any


class Operators:
    """The implementations in use: looked up by operator name and phase.

    `base` maps each operator name to its function; `apply` lays the registrations of an operators file over it.
    `weights`: the keywords of each operator that `prepare` may repack; `pools`: the pools whose layout may be owned.
    `fused`: calls so far of each group of operators that run as one, the backend's own and those that a file covers.
    """

    def __init__(
        self,
        base: Dict[str, Function],
        *,
        weights: Optional[Mapping[str, Tuple[str, ...]]] = None,
        pools: Tuple[str, ...] = (),
        fused: Optional[Dict[str, int]] = None,
    ) -> None:
        self._table: Dict[Tuple[str, Optional[str]], Function] = {(n, None): f for n, f in base.items()}
        self._covers: Dict[Tuple[str, Optional[str]], Tuple[str, ...]] = {}
        self._base = dict(base)
        self._prepared: Dict[Tuple[str, str, str], Tuple[Tuple[Any, ...], Dict[str, Any]]] = {}
        self.weights, self.pools = dict(weights or {}), pools
        self.layouts: Dict[str, Any] = {}
        self.preparers: Dict[str, Function] = {}
        self.replaced: Tuple[str, ...] = ()
        self.fused: Dict[str, int] = {} if fused is None else fused

    def names(self) -> Tuple[str, ...]:
        return tuple(sorted({name for name, _ in self._table}))

    def apply(self, registrations: Tuple[Registration, ...]) -> None:
        """Raises KeyError(name) when an operator is replaced or wrapped that this backend does not have."""
        for r in registrations:
            if r.role == "layout":
                self.layouts[r.name] = r.target() if isinstance(r.target, type) else r.target
            elif r.role == "prepare":
                self.preparers[r.name] = r.target
            else:
                if (r.name, None) not in self._table:
                    raise KeyError(r.name)
                for phase in (r.phase,) if r.phase else PHASES:
                    if phase is not None and r.phase is None and (r.name, phase) not in self._table:
                        continue  # no phase of its own: the entry for every phase answers
                    inner = self.get(r.name, phase)
                    new = functools.partial(r.target, inner) if r.role == "wrap" else r.target
                    if len(r.covers) > 1:
                        new = self._counted(new, " + ".join(r.covers))
                    self._table[(r.name, phase)] = new
                    if r.role == "replace":
                        self._covers[(r.name, phase)] = r.covers
        self.replaced = tuple(sorted({*self.replaced, *(r.name for r in registrations)}))

    def _counted(self, function: Function, group: str) -> Function:
        self.fused.setdefault(group, 0)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.fused[group] += 1
            return function(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def instead(self, functions: Mapping[str, Function]) -> Iterator[None]:
        """Each of `functions` answers for its operator in every phase until the context ends, with the plain weights.

        Raises KeyError(name) for an operator that this backend does not have.
        """
        before = dict(self._table), dict(self._covers), dict(self.preparers)
        try:
            for name, function in functions.items():
                if (name, None) not in self._table:
                    raise KeyError(name)
                for key in [key for key in self._table if key[0] == name]:
                    self._table[key], self._covers[key] = function, ()
                self.preparers.pop(name, None)
            yield
        finally:
            self._table, self._covers, self.preparers = before

    def get(self, name: str, phase: Optional[str] = None) -> Function:
        return self._table.get((name, phase)) or self._table[(name, None)]

    def covers(self, name: str, phase: Optional[str] = None) -> Tuple[str, ...]:
        """The operators that the implementation of `name` says it covers; empty for a plain one."""
        return self._covers.get((name, phase), self._covers.get((name, None), ()))

    def prepares(self, name: str, phase: Optional[str] = None) -> bool:
        """Whether the implementation in use receives prepared weights: it and a `prepare` come from a file."""
        return name in self.preparers and self.get(name, phase) is not self._base.get(name)

    def with_prepared(self, function: Function, name: str, place: str, site: str, whole: Optional[Whole]) -> Function:
        """`function` with the weights among its keywords exchanged for what `prepare` made of them."""

        def call(*args: Any, **kwargs: Any) -> Any:
            weights = {key: kwargs.pop(key) for key in self.weights.get(name, ()) if key in kwargs}
            owner = tuple(weights.values()) if whole is None else (whole.owner,)
            prepared = self._prepare_once((place, name, site), owner, weights if whole is None else whole.weights)
            active = {} if whole is None else {"active": whole.active}
            return function(*args, **kwargs, **prepared, **active)

        return call

    def _prepare_once(self, at: Tuple[str, str, str], owner: Tuple[Any, ...], weights: Any) -> Dict[str, Any]:
        known = self._prepared.get(at)
        if known is not None and len(known[0]) == len(owner) and all(a is b for a, b in zip(known[0], owner)):
            return known[1]
        made = self.preparers[at[1]](**(weights() if callable(weights) else weights))
        if not isinstance(made, dict):
            raise TypeError(f"prepare of {at[1]} must return a dict of keyword arguments, not {type(made).__name__}")
        self._prepared[at] = (owner, made)
        return made
