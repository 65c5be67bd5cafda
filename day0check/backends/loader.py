"""Finds a backend by name: one of ours, or `FILE.py:NAME`. Bad names and files are told here."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from day0check.errors import InputError, UsageError
from day0check.probe.registry import LAYOUT_METHODS, Operators, Registration, load_file

BACKENDS = {
    "accelerated": "day0check.backends.accelerated:Accelerated",
    "compiled": "day0check.backends.compiled:Compiled",
    "reference": "day0check.backends.reference:Reference",
}
_METHODS = ("capabilities", "operators", "load", "run", "pools", "close")


@dataclass(frozen=True)
class Source:
    """Where a backend comes from: `module` of ours, or `file`; and the `name` in it."""

    name: str
    module: str = ""
    file: str = ""


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that offers the known name most like `name`, or lists all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def parse(backend: str) -> Source:
    """The source of a backend, without importing anything. Raises UsageError for unknown names and absent files."""
    if backend in BACKENDS:
        module, name = BACKENDS[backend].split(":")
        return Source(name, module=module)
    file, colon, name = backend.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise UsageError(
            f"there is no backend {backend!r}",
            where="--backend",
            todo=f"{nearest(backend, BACKENDS)}; your own is given as FILE.py:NAME",
        )
    if not name.isidentifier():
        raise UsageError(f"{name!r} is no name of a class", where=f"--backend {backend}", todo="give FILE.py:NAME")
    if not Path(file).is_file():
        raise UsageError("there is no such file", where=f"--backend {file}", todo="give the path of the backend's file")
    return Source(name, file=str(Path(file).resolve()))


def make(backend: str) -> Any:
    """A new backend, made without arguments. Raises UsageError, InputError (the file cannot be executed)."""
    source = parse(backend)
    module = importlib.import_module(source.module) if source.module else _execute(source.file)
    kind = getattr(module, source.name, None)
    if kind is None:
        names = [n for n, v in vars(module).items() if isinstance(v, type)]
        raise UsageError(
            f"the file has no {source.name!r}", where=f"--backend {source.file}", todo=nearest(source.name, names)
        )
    made = kind()
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if missing:
        raise UsageError(
            f"{source.name} has no method {missing[0]!r}",
            where=f"--backend {backend}",
            todo=f"a backend has {', '.join(_METHODS)}: see day0check/backends/base.py",
        )
    return made


def find_subclass(source: str, base: type, *, where: str) -> type:
    """The class `FILE.py:NAME`, which must be a subclass of `base`. Raises UsageError, InputError."""
    file, _, name = source.rpartition(":")
    if not Path(file).is_file():
        raise UsageError("there is no such file", where=f"{where} {source}", todo="give FILE.py:NAME")
    kind = getattr(_execute(str(Path(file).resolve())), name, None)
    if not isinstance(kind, type) or not issubclass(kind, base):
        todo = f"a subclass of {base.__module__}.{base.__name__} is needed"
        raise UsageError(f"the file has no such class {name!r}", where=f"{where} {source}", todo=todo)
    return kind


def _execute(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"day0check_backend_{Path(file).stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise unreadable(error, file, "the backend's file cannot be executed") from error
    return module


def unreadable(error: Exception, file: str, what: str) -> InputError:
    """An InputError that names the line of `file` at which executing it ended."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    line = error.lineno if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    where = f"{file}:{line}" if line else file
    return InputError(f"{what}: {type(error).__name__}: {text}", where=where, todo="correct the file and run again")


def check_operators_file(path: str) -> str:
    """The absolute path of an operators file. Raises UsageError when there is none."""
    if not Path(path).is_file():
        raise UsageError(
            "there is no such operators file", where=f"--ops {path}", todo="give the path of a Python file"
        )
    return str(Path(path).resolve())


def read_operators(path: str) -> tuple[Registration, ...]:
    """What an operators file declares. Raises UsageError (absent, declares nothing), InputError (not executable)."""
    path = check_operators_file(path)
    try:
        declared = load_file(path)
    except Exception as error:
        raise unreadable(error, path, "the operators file cannot be executed") from error
    if not declared:
        raise UsageError(
            "the operators file declares nothing",
            where=f"--ops {path}",
            todo='decorate a function with @day0check.operator("NAME"); `day0check list operators` prints the names',
        )
    return declared


def lay_over(table: Operators | None, declared: tuple[Registration, ...], *, path: str, backend: str) -> None:
    """Lays the declarations of an operators file over a backend's table. Raises UsageError for names it has not."""
    where = f"--ops {path}"
    if table is None:
        raise UsageError(
            f"the operators of backend {backend} cannot be replaced",
            where=where,
            todo="leave --ops out for this backend",
        )
    answered = {r.name for r in declared if r.role in ("replace", "wrap")}
    for r in declared:
        what, known = _known(table, r.role)
        for name in (r.name, *r.covers):
            if name not in known:
                todo = nearest(name, known) if known else "leave it out for this backend"
                raise UsageError(f"backend {backend} has no {what} {name!r}", where=where, todo=todo)
        missing = [m for m in LAYOUT_METHODS if r.role == "layout" and not callable(getattr(r.target, m, None))]
        if missing:
            todo = f"a layout has {', '.join(LAYOUT_METHODS)}: see day0check/probe/registry.py"
            raise UsageError(f"the layout {r.name!r} has no method {missing[0]!r}", where=where, todo=todo)
        if r.role == "prepare" and r.name not in answered:
            todo = f'replace the operator too: @day0check.operator("{r.name}")'
            raise UsageError(f"nothing receives what is prepared for {r.name!r}", where=where, todo=todo)
    table.apply(declared)


def _known(table: Operators, role: str) -> tuple[str, tuple[str, ...]]:
    """What a declaration of this role is about, in words, and the names that the backend has of it."""
    if role == "layout":
        return "layout", table.pools
    if role == "prepare":
        return "operator with weights", tuple(table.weights)
    return "operator", table.names()
