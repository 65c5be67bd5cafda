"""Which implementation answers for an operator name: the decorators of an operators file, and the table they fill.

    @day0check.operator("dsa.select")                    replaces an operator
    @day0check.operator("kda.gates", phase="decode")     ... in one phase only
    @day0check.operator("dsa.attention", covers=("kv.gather", "dsa.attention"))   a fused kernel says what it covers
    @day0check.operator.wrap("dsa.select")               receives the present implementation as first argument
    @day0check.layout("kv")                              a class with allocate, write, read_logical
    @day0check.prepare("moe.experts")                    repacks the weights of an operator once, after loading

Standard library only (Python >= 3.9).
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

Function = Callable[..., Any]
PHASES = (None, "prefill", "decode")


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
    """Declares a class that owns the memory layout of a pool: `layout("kv")`, `layout("index")`, `layout("state")`."""
    return _declare("layout", name, None, ())


def prepare(name: str) -> Callable:
    """Declares a function that repacks the weights of operator `name` once, after loading."""
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


class Operators:
    """The implementations in use: looked up by operator name and phase.

    `base` maps each operator name to its function; `apply` lays the registrations of an operators file over it.
    """

    def __init__(self, base: Dict[str, Function]) -> None:
        self._table: Dict[Tuple[str, Optional[str]], Function] = {(n, None): f for n, f in base.items()}
        self._covers: Dict[Tuple[str, Optional[str]], Tuple[str, ...]] = {}
        self.layouts: Dict[str, Any] = {}
        self.preparers: Dict[str, Function] = {}
        self.replaced: Tuple[str, ...] = ()

    def names(self) -> Tuple[str, ...]:
        return tuple(sorted({name for name, _ in self._table}))

    def apply(self, registrations: Tuple[Registration, ...]) -> None:
        """Raises KeyError(name) when an operator is replaced or wrapped that this backend does not have."""
        for r in registrations:
            if r.role == "layout":
                self.layouts[r.name] = r.target
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
                    self._table[(r.name, phase)] = new
                    if r.role == "replace":
                        self._covers[(r.name, phase)] = r.covers
        self.replaced = tuple(sorted({*self.replaced, *(r.name for r in registrations)}))

    def get(self, name: str, phase: Optional[str] = None) -> Function:
        return self._table.get((name, phase)) or self._table[(name, None)]

    def covers(self, name: str, phase: Optional[str] = None) -> Tuple[str, ...]:
        """The operators that the implementation of `name` says it covers; empty for a plain one."""
        return self._covers.get((name, phase), self._covers.get((name, None), ()))
