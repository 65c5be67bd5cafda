"""What was found when a further run of the candidate was compared with another one: a record on disk. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from day0check.errors import InputError
from day0check.probe.records import replace_json
from day0check.types import Measure, from_json, to_json


@dataclass(frozen=True)
class Computed:
    """What a run did for one request: `rows` it computed in all, `positions` of them that are different ones, and the
    number of steps of each phase in which it had rows; `longest_rest`: most steps in a row between its first and
    its last in which it had none; `merged`: rows whose partial results of attention were merged, where the run shows
    them."""

    rows: int
    positions: int
    prefill_steps: int
    decode_steps: int
    longest_rest: int = 0
    merged: int = 0


@dataclass(frozen=True)
class RunComparison:
    """`measures` by noise; of `rows` rows `different` have other bytes, the first of them at `first_tap`, request and
    position. `flips`: request -> first position with another choice. `explained`: requests whose rows are further apart
    than the noise and within it of an oracle that follows the run's own legal choices; `set_aside`: the measures that
    said so. `strayed`: requests that were not answered as they were forced to. `missing`: why something could not be
    compared, empty when all was.
    """

    label: str
    measures: tuple[Measure, ...] = ()
    rows: int = 0
    different: int = 0
    first_tap: str = ""
    first_request: str | None = None
    first_position: int | None = None
    flips: dict[str, int] = field(default_factory=dict)
    explained: tuple[str, ...] = ()
    set_aside: tuple[Measure, ...] = ()
    strayed: tuple[str, ...] = ()
    computed: dict[str, Computed] = field(default_factory=dict)
    missing: str = ""


def file_name(label: str) -> str:
    """The name of the files and folders of a run of this label."""
    return label.replace("/", "__")


def write_comparison(folder: Path, found: RunComparison) -> None:
    """Raises RecordError."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_json(folder / f"{file_name(found.label)}.json", to_json(found))


def read_comparison(folder: Path, label: str) -> RunComparison | None:
    """None when there is none. Raises InputError for a file that is no comparison."""
    path = folder / f"{file_name(label)}.json"
    if not path.is_file():
        return None
    try:
        return from_json(RunComparison, json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise InputError(str(error), where=str(path), todo="run the case again") from error
