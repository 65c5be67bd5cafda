"""`selftest.html`: the map of a self-test, one offline file made from the content of selftest.json."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import day0check

_TEMPLATES = Path(__file__).parent / "templates"

Row = Mapping[str, Any]


def selftest_page(table: Mapping[str, Any]) -> str:
    """The page of `table`: {"counts", "seconds", "entries"}, entries as `selftest.Outcome` in JSON form."""
    entries: Sequence[Row] = table["entries"]
    good = all(_state(entry)[0] != "failed" for entry in entries) and bool(entries)
    kinds = list(dict.fromkeys(entry["kind"] for entry in entries))
    return _template().render(
        css=(_TEMPLATES / "report.css").read_text(encoding="utf-8"),
        status="ready" if good else "not_ready",
        sentence=_sentence(table["counts"], table["seconds"]),
        kinds=[(kind, [_cell(e) for e in entries if e["kind"] == kind]) for kind in kinds],
        cases=_names(entries, "case"),
        models=[(model, _by_case(entries, model)) for model in _names(entries, "model")],
        rows=[_row(entry) for entry in sorted(entries, key=lambda e: (_state(e)[0] == "passed", e["id"]))],
        version=day0check.__version__,
    )


@functools.cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("selftest.html.j2")


def _names(entries: Sequence[Row], key: str) -> list[str]:
    """The models or cases of a self-test, the most used first; what an older file does not say is left out."""
    names = [entry[key] for entry in entries if entry.get(key)]
    return sorted(dict.fromkeys(names), key=lambda name: (-names.count(name), name))


def _by_case(entries: Sequence[Row], model: str) -> list[list[dict[str, str]]]:
    """The cells of a model, case by case."""
    mine = [entry for entry in entries if entry.get("model") == model]
    return [[_cell(entry) for entry in mine if entry["case"] == case] for case in _names(entries, "case")]


def _sentence(counts: Mapping[str, int], seconds: float) -> str:
    return (
        f"{counts['caught']} of {counts['faults']} public faults were caught, {counts['placed']} of them at exactly "
        f"the expected place; of {counts['further']} further ones {counts['further_caught']} were caught and "
        f"{counts['further_placed']} placed; {counts['false_alarms']} of {counts['legal']} legal variants raised a "
        f"false alarm. "
        f"It took {seconds:.0f} s."
    )


def _state(entry: Row) -> tuple[str, str]:
    """(class of the colour, word) of an entry."""
    if entry["benign"]:
        return ("passed", "let through") if entry["status"] == "ready" else ("failed", "false alarm")
    if not entry["caught"]:
        return "failed", "missed" if entry["status"] == "ready" else entry["status"]
    return ("passed", "caught, placed") if entry["placed"] else ("not_run", "caught elsewhere")


def _cell(entry: Row) -> dict[str, str]:
    state, word = _state(entry)
    return {"id": entry["id"], "state": state, "word": word, "title": entry["title"]}


def _row(entry: Row) -> dict[str, str]:
    wrong = _state(entry) not in (("passed", "let through"), ("passed", "caught, placed"))
    return _cell(entry) | {
        "expected": entry["expected"] or "ready",
        "found": entry["found"] or entry["status"],
        "seconds": f"{entry['seconds']:.1f}",
        "message": entry["message"] if wrong else "",
    }
