"""The tables of a verdict as CSV files for spreadsheets and notebooks, written with pandas."""

from __future__ import annotations

from typing import Any

from day0check.types import Verdict, to_json

_NAMES = ("findings", "checks", "not_run", "drift", "choices", "operators")
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def csv_texts(verdict: Verdict) -> dict[str, str]:
    """File name -> CSV text, one per table that has rows; nested values become columns joined by dots."""
    import pandas

    texts: dict[str, str] = {}
    for name in _NAMES:
        records = [_flat(row) for row in to_json(getattr(verdict, name))]
        if records:
            texts[f"{name}.csv"] = pandas.DataFrame.from_records(records).to_csv(index=False, lineterminator="\n")
    return texts


def _flat(record: dict[str, Any], within: str = "") -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in record.items():
        name = encodable(f"{within}.{key}" if within else key)
        if isinstance(value, dict):
            row.update(_flat(value, name))
        elif isinstance(value, list):
            row[name] = safe("; ".join(str(v) for v in value))
        else:
            row[name] = safe(value)
    return row


def safe(value: Any) -> Any:
    """A text that UTF-8 can hold and a spreadsheet does not take for a formula."""
    if not isinstance(value, str):
        return value
    formula = value.startswith(_FORMULA_STARTS) and value != "-Infinity"
    return encodable("'" + value if formula else value)


def encodable(text: str) -> str:
    """`text` with lone surrogates written as \\udXXX: pandas keeps text in Arrow where that is installed, and Arrow
    refuses them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
