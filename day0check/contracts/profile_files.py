"""Profiles from TOML files: a built-in profile with other forms or rounding points for some operators. No torch.

name = "flash with P in e4m3"
base = "bf16"                      # a built-in profile: the activation type, and what the file does not say
[forms]
"norm.rms" = "cast_first"          # a form of the operator's contract
[points."mla.attention"]           # or point by point; "float32" is not rounded
p = "float8_e4m3fn"
[inputs]
"mla.query" = "float8_e4m3fn/128"  # rows quantised before or inside the operator; "plain": not
[partials]
"mla.query" = { dtype = "bfloat16", parts = 4 }    # sums of a linear split over its input, each part rounded
[chunks]
"kda.attention" = 16               # computed so many rows at once, whatever chunk it is called with
[resample]
"image.preprocess" = "bicubic-antialias"   # by any implementation of the rule; without it, the reference's very bytes
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from day0check.contracts import CONTRACTS
from day0check.contracts.contract import Contract
from day0check.contracts.profiles import (
    FP8_INPUTS,
    PARTIALS,
    PROFILES,
    RESAMPLED,
    RESAMPLERS,
    ROW_FORMATS,
    Profile,
    with_form,
)
from day0check.errors import InputError

KEYS = ("name", "base", "forms", "points", "inputs", "partials", "chunks", "resample")
MOST_PARTS, MOST_CHUNK = 256, 4096
DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float32")
PARTIAL_DTYPES = ("bfloat16", "float16")


def read_profile(path: Path) -> Profile:
    """The profile of a file. Raises InputError that names the file, the key and what may stand there."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror}", where=str(path), todo="give a file that is there"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"is no TOML: {error}", where=str(path), todo="mend the file") from error
    unknown = sorted(set(data) - set(KEYS))
    if unknown:
        raise _refused(path, unknown[0], "is not a key of a profile", KEYS)
    name = data.get("name", path.stem)
    if not isinstance(name, str) or not name or name in PROFILES:
        raise _refused(path, "name", f"{name!r} must be a name that no built-in profile has", ())
    base = data.get("base", "bf16")
    if base not in PROFILES:
        raise _refused(path, "base", f"{base!r} is no built-in profile", PROFILES)
    profile = PROFILES[base]
    for operator, form in _table(path, data, "forms").items():
        contract, key = _contract(path, "forms", operator), f'forms."{operator}"'
        if form not in [f.name for f in contract.forms]:
            raise _refused(path, key, f"{operator} has no form {form!r}", [f.name for f in contract.forms])
        profile = with_form(profile, contract, str(form))
    points = dict(profile.points)
    for operator, given in _table(path, data, "points").items():
        contract, key = _contract(path, "points", operator), f'points."{operator}"'
        if not isinstance(given, dict):
            raise _refused(path, key, "must be a table of point = dtype", ())
        points[operator] = MappingProxyType(_points(path, key, contract, points.get(operator, {}), given))
    parts, resample = _parts(path, data, points), _resample(path, data, points)
    return replace(
        profile,
        name=name,
        points=MappingProxyType(points),
        inputs=MappingProxyType(_inputs(path, data, profile)),
        parts=MappingProxyType(parts),
        chunks=MappingProxyType(_chunks(path, data)),
        resample=MappingProxyType(resample),
    )


def _parts(path: Path, data: Mapping[str, Any], points: dict[str, Mapping[str, str]]) -> dict[str, int]:
    """Parts of the split sums of a file; their rounding goes into `points`."""
    found, linears = {}, [c.name for c in CONTRACTS.values() if c.reference.startswith("reference.linear:linear")]
    for operator, given in _table(path, data, "partials").items():
        key = f'partials."{operator}"'
        if operator not in linears:
            raise _refused(path, key, "is no linear, whose sums are split", linears)
        if not isinstance(given, dict) or set(given) != {"dtype", "parts"}:
            raise _refused(path, key, "must be { dtype = ..., parts = ... }", ())
        if given["dtype"] not in PARTIAL_DTYPES:
            raise _refused(path, f"{key}.dtype", f"{given['dtype']!r} is no dtype of partial sums", PARTIAL_DTYPES)
        found[operator] = _count(path, f"{key}.parts", given["parts"], 2, MOST_PARTS)
        points[operator] = MappingProxyType({PARTIALS: given["dtype"], **points.get(operator, {})})
    return found


def _chunks(path: Path, data: Mapping[str, Any]) -> dict[str, int]:
    known = [c.name for c in CONTRACTS.values() if any(a.name == "chunk" for a in c.args)]
    found = {}
    for operator, given in _table(path, data, "chunks").items():
        key = f'chunks."{operator}"'
        if operator not in known:
            raise _refused(path, key, "is no operator that computes in chunks", known)
        found[operator] = _count(path, key, given, 1, MOST_CHUNK)
    return found


def _resample(path: Path, data: Mapping[str, Any], points: dict[str, Mapping[str, str]]) -> dict[str, str]:
    """Rules of the resamplers of a file; what they round goes into `points`."""
    known = [name for name in CONTRACTS if name.startswith("image.preprocess")]
    found = {}
    for operator, given in _table(path, data, "resample").items():
        key = f'resample."{operator}"'
        if operator not in known:
            raise _refused(path, key, "is no operator that resizes an image", known)
        if given not in RESAMPLERS:
            raise _refused(path, key, f"{given!r} is no rule of a resampler", RESAMPLERS)
        found[operator] = given
        points[operator] = MappingProxyType({**RESAMPLED, **points.get(operator, {})})
    return found


def _count(path: Path, key: str, given: Any, least: int, most: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not least <= given <= most:
        raise _refused(path, key, f"{given!r} is no number from {least} to {most}", ())
    return given


def _inputs(path: Path, data: Mapping[str, Any], profile: Profile) -> dict[str, str]:
    inputs = dict(profile.inputs)
    for operator, given in _table(path, data, "inputs").items():
        if operator not in FP8_INPUTS:
            raise _refused(path, f'inputs."{operator}"', "is no operator whose rows may be quantised", FP8_INPUTS)
        if given not in (*ROW_FORMATS, "plain"):
            raise _refused(path, f'inputs."{operator}"', f"{given!r} is no format of rows", (*ROW_FORMATS, "plain"))
        inputs[operator] = given
    return {operator: given for operator, given in inputs.items() if given != "plain"}


def _table(path: Path, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = data.get(key, {})
    if not isinstance(table, dict):
        raise _refused(path, key, "must be a table", ())
    return table


def _contract(path: Path, key: str, operator: str) -> Contract:
    if operator not in CONTRACTS or not CONTRACTS[operator].points:
        known = [c.name for c in CONTRACTS.values() if c.points]
        raise _refused(path, f'{key}."{operator}"', "is no operator that rounds", known)
    return CONTRACTS[operator]


def _points(
    path: Path, key: str, contract: Contract, before: Mapping[str, str], given: Mapping[str, Any]
) -> dict[str, str]:
    merged = {**before}
    for point, dtype in given.items():
        if point not in contract.points or point == "out":
            what = "the result is rounded to its own type" if point == "out" else f"{contract.name} has no such point"
            raise _refused(path, f"{key}.{point}", what, [p for p in contract.points if p != "out"])
        if dtype not in (*DTYPES, *ROW_FORMATS):
            what = f"{dtype!r} is no dtype that a point rounds to"
            raise _refused(path, f"{key}.{point}", what, (*DTYPES, *ROW_FORMATS))
        merged[point] = dtype
    return {p: merged[p] for p in contract.points if p in merged and (merged[p] != "float32" or p == "out")}


def _refused(path: Path, key: str, what: str, known: Any) -> InputError:
    return InputError(what, where=f"{path}: {key}", todo=f"one of {', '.join(known)}" if known else "mend the file")
