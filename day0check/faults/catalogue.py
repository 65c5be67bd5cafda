"""Finds the entries by folder and reads what each says about itself."""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from day0check.errors import Day0Error, NothingSelected, UsageError
from day0check.faults.entry import KINDS, Entry
from day0check.probe.registry import load_file

ROOT = Path(__file__).resolve().parent
FOLDERS = ("public", "further", "benign")
SERVICE = "service/"  # cases in which our server is started and asked
BACKEND = "Candidate"  # an entry that needs more than operators defines a backend of this name


@dataclass(frozen=True)
class Located:
    """An entry and its file. `backend` is what `--backend` takes; `ops` what `--ops` takes, None without operators."""

    entry: Entry
    file: Path
    backend: str
    ops: str | None

    @property
    def scheduler(self) -> str | None:
        """What `serve --scheduler` takes: of an entry of the service the class is the server's scheduler."""
        return self.backend if self.service and self.backend.endswith(f":{BACKEND}") else None

    @property
    def service(self) -> bool:
        """Whether it is laid over our server, and seen over HTTP."""
        return self.entry.case.startswith(SERVICE)

    @property
    def case(self) -> str:
        """A selector of its case, as `run` takes it."""
        file = ROOT / "cases" / f"{self.entry.case}.toml"
        return str(file) if file.is_file() else self.entry.case


def locate(file: Path) -> Located:
    """The entry in `file`, which is executed. Raises Day0Error when it says nothing about itself or changes nothing."""
    declared = load_file(str(file))
    module = sys.modules[f"day0check_operators_{file.stem}"]
    entry, own = getattr(module, "ENTRY", None), hasattr(module, BACKEND)
    if not isinstance(entry, Entry):
        raise Day0Error("says nothing about itself", where=str(file), todo="define ENTRY = Entry(...)")
    if not declared and not own:
        raise Day0Error("changes nothing", where=str(file), todo=f"declare an operator, or a backend {BACKEND}")
    return Located(entry, file, f"{file}:{BACKEND}" if own else "accelerated", str(file) if declared else None)


@functools.lru_cache(maxsize=1)
def catalogue() -> tuple[Located, ...]:
    """Every entry: public faults, further ones, legal variants, each by id. Imports torch.

    Raises Day0Error for two entries with one id.
    """
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).glob("[a-z]*.py"))]
    found = [locate(file) for file in files]
    seen: dict[str, Path] = {}
    for located in found:
        other = seen.setdefault(located.entry.id, located.file)
        if other != located.file:
            raise Day0Error(f"has the id {located.entry.id} of {other.name}", where=str(located.file))
    return tuple(found)


def select(ids: Sequence[str] = (), kinds: Sequence[str] = ()) -> tuple[Located, ...]:
    """The entries of these ids (all when none is given) and kinds. Raises UsageError, NothingSelected."""
    every = {located.entry.id: located for located in catalogue()}
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(f"there is no kind {kind!r}", where="--kind", todo=f"known: {', '.join(KINDS)}")
    for name in ids:
        if name not in every:
            raise UsageError(f"there is no fault {name!r}", where="--fault", todo=_nearest(name, list(every)))
    chosen = [every[name] for name in dict.fromkeys(ids)] if ids else list(every.values())
    chosen = [located for located in chosen if not kinds or located.entry.kind in kinds]
    if not chosen:
        raise NothingSelected("no entry has this id and this kind", where="--kind", todo="leave one of them out")
    return tuple(chosen)


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
