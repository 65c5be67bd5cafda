"""What a contract says: arguments, kind, reference function, forms, rounding points, hard inputs, cost, tie rule."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from day0check.types import Kind

# rows:    first axis is one row per (request, position), or per pair or patch where the contract says so
# batch:   first axis is one entry per request of the step
# owner:   [rows] integers, index of each row's request in the batch axis
# offsets: [n + 1] integers, rows of entry i are offsets[i]:offsets[i+1]
# shared:  a weight, the same for every step
# pool:    paged memory, read or written in place
# static:  a plain Python value; must be equal on both sides
Role = Literal["rows", "batch", "owner", "offsets", "shared", "pool", "static"]


@dataclass(frozen=True)
class Arg:
    """One argument. `shape` uses the legend of its family file; `dtype` "act" is the activation type of the profile."""

    name: str
    role: Role
    shape: str = ""
    dtype: str = "act"
    optional: bool = False


@dataclass(frozen=True)
class Result:
    """One result. `rows` says what its row is: "rows" (as the first argument), "pairs", "batch", "patches" or "".
    `point`: the rounding point that is the rounding of this result; one other than "out" rounds only where a form
    names it, whatever `dtype` says."""

    name: str
    shape: str
    dtype: str = "act"
    rows: str = "rows"
    point: str = "out"


@dataclass(frozen=True)
class Form:
    """A legal way to compute the same thing, with the rounding points that are its own."""

    name: str
    points: tuple[str, ...]
    when: str = ""


@dataclass(frozen=True)
class Direction:
    """A parameter whose error the comparison estimates: an argument, and what people call it. Where it is a static
    value the same factor may be wrong for one head only: `per_head`."""

    argument: str
    words: str
    per_head: bool = False


@dataclass(frozen=True)
class Cost:
    operations: float
    bytes: float


@dataclass(frozen=True)
class Contract:
    """What an operator promises. The first argument is positional, all others are keywords.

    `reference`: "module:function" in `reference/`; it takes the same arguments, and `round=` when there are `points`.
    `points`: named rounding points in order of execution; the last, "out", is the rounding of the result.
    `mutates`: arguments written in place; `after` names the function in `reference/` that reads back what is there.
    `directions`: the parameters whose relative error is estimated from the error of the result.
    `net`: the result travels to the propagated comparison. `hard_inputs`: names in `hard_inputs.py`.
    `joined`: the result depends on what other ranks hold; it is judged where the records of all ranks are joined.
    """

    name: str
    kind: Kind
    summary: str
    args: tuple[Arg, ...]
    results: tuple[Result, ...]
    reference: str
    points: tuple[str, ...] = ()
    forms: tuple[Form, ...] = ()
    mutates: tuple[str, ...] = ()
    after: str = ""
    ties: str = ""
    net: bool = False
    hard_inputs: tuple[str, ...] = ()
    cost: Callable[..., Cost] | None = None
    sites: tuple[str, ...] = ()
    directions: tuple[Direction, ...] = ()
    joined: bool = False

    def result_points(self) -> tuple[str, ...]:
        """The points that round a result; every other one lies inside."""
        return tuple(dict.fromkeys(("out", *(result.point for result in self.results))))

    def function(self) -> Callable[..., Any]:
        """The reference function (imports torch)."""
        module, name = self.reference.split(":")
        return getattr(importlib.import_module(module), name)


def rows(name: str, shape: str, dtype: str = "act", optional: bool = False) -> Arg:
    return Arg(name, "rows", shape, dtype, optional)


def batch(name: str, shape: str, dtype: str = "act", optional: bool = False) -> Arg:
    return Arg(name, "batch", shape, dtype, optional)


def shared(name: str, shape: str, dtype: str = "act", optional: bool = False) -> Arg:
    return Arg(name, "shared", shape, dtype, optional)


def pool(name: str, shape: str, dtype: str = "act", optional: bool = False) -> Arg:
    return Arg(name, "pool", shape, dtype, optional)


def static(name: str, optional: bool = False) -> Arg:
    return Arg(name, "static", "", "", optional)


OWNER = Arg("owner", "owner", "rows", "int64")
OFFSETS = Arg("offsets", "offsets", "batch+1", "int64")
X_SCALE = Arg("x_scale", "rows", "rows in/128 rounded up", "float32", optional=True)  # of an x in E4M3 codes


def linear_cost(x: Any, *, weight: Any, **_: Any) -> Cost:
    """Multiply-adds of x [rows, in] times weight [out, in], and the bytes read and written once."""
    rows_, out = x.numel() // x.shape[-1], weight.shape[0]
    size = x.element_size()
    return Cost(2.0 * x.numel() * out, size * (x.numel() + weight.numel() + rows_ * out))


def linear(name: str, summary: str, *, sites: tuple[str, ...] = (), dtype: str = "act", net: bool = False) -> Contract:
    """A plain linear layer y = x W^T with float32 sums and one rounding."""
    return Contract(
        name,
        "compute",
        summary,
        (rows("x", "rows in"), shared("weight", "out in"), shared("bias", "out", optional=True), X_SCALE),
        (Result("y", "rows out", dtype),),
        "reference.linear:linear_float32" if dtype == "float32" else "reference.linear:linear",
        points=("out",),
        hard_inputs=("plain", "outlier_channel", "uneven_rows", "one_row", "small_values"),
        cost=linear_cost,
        sites=sites,
        net=net,
    )
