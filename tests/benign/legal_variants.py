"""Legal variants laid over every small preset they apply to, each with other weights and prompts: what a sweep runs.

An entry of `day0check/faults/benign` is one kind. A task is (entry, preset, seed); `judged` runs it as the self-test
does: candidate, reference, checks and gate in this process.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
import string
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from day0check.case import load_cases
from day0check.errors import NothingSelected
from day0check.faults.catalogue import ROOT, Located, catalogue
from day0check.probe.registry import load_file
from day0check.selftest import judge_entry
from day0check.snapshot import read_measures
from reference.presets import preset, preset_dir, preset_names

TINY = tuple(name for name in preset_names() if name == "tiny" or name.startswith("tiny-"))
HEALTHY = "B-28"  # an entry that changes no operator
PROSE_BYTES = 5_000  # of cases/data/prose.txt, as far as it is ASCII
# what no model calls by itself: a profile, a layout over ranks or a schedule makes these calls
ELSEWHERE = ("comm", "quantise", "kv", "index", "state", "prefix", "pool", "batch")
OPERATORS_FILE = """import day0check
from day0check.probe.registry import load_file

for r in load_file({file!r}):
    if r.name in {kept!r}:
        declare = {{
            "replace": lambda r: day0check.operator(r.name, phase=r.phase, covers=r.covers),
            "wrap": lambda r: day0check.operator.wrap(r.name, phase=r.phase),
            "layout": lambda r: day0check.layout(r.name),
            "prepare": lambda r: day0check.prepare(r.name),
        }}
        declare[r.role](r)(r.target)
"""


@dataclass(frozen=True)
class Task:
    """One run: an entry on a preset; its weights and its prompts are those of `seed`."""

    entry: str
    model: str
    seed: int


@functools.cache
def entries() -> dict[str, Located]:
    return {located.entry.id: located for located in catalogue() if located.entry.benign and not located.service}


def models_of(located: Located) -> tuple[str, ...]:
    """The presets on which an entry is tried: all small ones, or its own where another is the point of it, or where its
    case is a sweep in itself."""
    own = located.entry.model
    return TINY if own == "tiny" and located.entry.case != "cost" else (own,)


def documented(entry: str) -> bool:
    """Whether it is one of the 24 kinds of benign difference that are documented in public, B-01 to B-24."""
    return entry <= "B-24"


def case_text(located: Located, seed: int) -> str:
    """The entry's case with other words: letters take each other's places, so that what was equal stays equal, and
    ranges of the prose begin elsewhere."""
    text = (ROOT / "cases" / f"{located.entry.case}.toml").read_text(encoding="utf-8")
    letters = string.ascii_lowercase
    turned = str.maketrans(letters, letters[seed % 26 :] + letters[: seed % 26])

    def moved(found: re.Match[str]) -> str:
        start, stop = int(found[1]), int(found[2])
        start, width = (start + 131 * seed) % (PROSE_BYTES - (stop - start)), stop - start
        return f"file:prose.txt#{start}:{start + width}"

    def spoken(found: re.Match[str]) -> str:
        words = found[1] if found[1].startswith("file:") else found[1].translate(turned)
        return f'user = "{words}"'

    text = re.sub(r"file:prose\.txt#(\d+):(\d+)", moved, text)
    return re.sub(r'user = "([^"]*)"', spoken, text)


def applies(located: Located, model: str, called: list[str]) -> bool:
    """Whether the preset has what the entry changes: one of its operators, and a tower where its case has images."""
    config = preset(model).config()
    try:
        load_cases((located.case,), config=config, model=model, profile=located.entry.profile)
    except NothingSelected:
        return False
    return located.ops is None or bool(kept_operators(located, called)) or ":" in located.backend


def kept_operators(located: Located, called: list[str]) -> list[str]:
    """Names that the entry declares, without operators of a model that this one, which makes the calls `called`, has
    not: what is replaced and never called makes a verdict inconclusive."""
    declared = sorted({r.name for r in load_file(str(located.file))}) if located.ops else []
    return [name for name in declared if name in called or name.partition(".")[0] in ELSEWHERE]


def operators_called(model: str) -> list[str]:
    """The operators that a run of the preset calls: its text, and images where it has a tower."""
    vision = preset(model).config().vision is not None
    found: set[str] = set()
    for case in ("pools", "two_images") if vision else ("pools",):
        with tempfile.TemporaryDirectory(prefix="day0check-benign-") as folder:
            entry = dataclasses.replace(entries()[HEALTHY].entry, model=model, case=case)
            judge_entry(dataclasses.replace(entries()[HEALTHY], entry=entry), Path(folder) / "run")
            for file in Path(folder).rglob("measures.jsonl"):
                found |= {measure.operator for measure in read_measures(file, [])}
    return sorted(found)


def judged(work: tuple[Task, list[str]]) -> dict[str, Any]:
    """The line of one task, whose preset makes the calls given: the verdict, and why where it is not `ready`."""
    task, called = work
    located = entries()[task.entry]
    folder = Path(tempfile.mkdtemp(prefix="day0check-benign-"))
    try:
        case = folder / f"{located.entry.case}.toml"
        case.write_text(case_text(located, task.seed), encoding="utf-8")
        model = f"{task.model}@{task.seed}" if task.seed else task.model
        preset_dir(model)
        entry = dataclasses.replace(located.entry, model=model, case=str(case))
        laid = dataclasses.replace(located, entry=entry, ops=_kept(located, called, folder))
        outcome = judge_entry(laid, folder / "run")
        status, message, seconds = outcome.status, f"{outcome.found}: {outcome.message}", outcome.seconds
    except Exception as error:
        traceback.print_exc()
        status, message, seconds = "failed", f"{type(error).__name__}: {error}", 0.0
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    good = status == "ready"
    return dataclasses.asdict(task) | {"status": status, "message": "" if good else message, "seconds": seconds}


def _kept(located: Located, called: list[str], folder: Path) -> str | None:
    if located.ops is None:
        return None
    declared = {r.name for r in load_file(str(located.file))}
    kept = kept_operators(located, called)
    if declared == set(kept):
        return located.ops
    file = folder / "kept_operators.py"
    file.write_text(OPERATORS_FILE.format(file=str(located.file), kept=tuple(kept)), encoding="utf-8")
    return str(file) if kept else None
