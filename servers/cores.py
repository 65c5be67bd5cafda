"""Which core each process of a server computes on. Linux only; elsewhere nothing is bound. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def apart(process: int) -> bool:
    """Binds the children of `process` to its first core and `process` itself to its others; whether it could.

    vLLM's engine and its worker spin while they wait for each other. Where one of them may run on the core of the
    process that answers, whole answers leave in one piece in some runs and token by token in others.
    """
    if not hasattr(os, "sched_setaffinity"):
        return False
    cores = sorted(os.sched_getaffinity(process))
    children = descendants(process)
    if len(cores) < 2 or not children:
        return False
    for child in children:
        _bind(child, {cores[0]})
    _bind(process, set(cores[1:]))
    return True


def descendants(process: int) -> tuple[int, ...]:
    """Numbers of the processes that `process` started, and theirs."""
    children: dict[int, list[int]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            parent = _parent(folder)
            children.setdefault(parent, []).append(int(folder.name))
    found, waiting = [], [process]
    while waiting:
        mine = children.get(waiting.pop(), [])
        found += mine
        waiting += mine
    return tuple(sorted(found))


def _parent(folder: Path) -> int:
    """0 for a process that has ended meanwhile. The second field, a name in brackets, may hold anything."""
    try:
        return int((folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _bind(process: int, cores: set[int]) -> None:
    """Every thread of `process`; those that it starts later follow the thread that starts them."""
    for thread in (PROC / str(process) / "task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:
            continue
