"""Bytes of a request body to a checked record; every way to be wrong becomes one `Refused` with the field's name."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from day0check.accelerated.server.planning import Refused

Model = TypeVar("Model", bound=BaseModel)


def parse(body: bytes, kind: type[Model]) -> Model:
    """The record of a JSON body. Raises Refused: no JSON, doubled keys, unknown fields, wrong types, wrong values."""
    try:
        found = json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except Refused:
        raise
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(found, dict):
        raise Refused("the body must be a JSON object", code="invalid_json")
    if b"\\ud" in body or b"\\uD" in body:
        _no_half_characters(found)
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise _refusal(error, found) from error
    except RecursionError as error:
        raise Refused("the body is nested too deeply", code="invalid_json") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Refused(f"the field {twice!r} is there twice", param=twice, code="invalid_json")
    return found


def _no_constant(name: str) -> Any:
    raise Refused(f"{name} is no JSON number", code="invalid_json")


def _no_half_characters(found: Any) -> None:
    try:
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise Refused("a string holds half of a character (a lone surrogate)", code="invalid_json") from error


def _refusal(error: ValidationError, body: Any) -> Refused:
    """The first unknown field, or else the first error of the branch that came furthest."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = [e for e in errors if e["type"] == "extra_forbidden"]
    chosen = unknown[0] if unknown else max(errors, key=lambda e: _reach(_path(e["loc"], body)))
    path = _path(chosen["loc"], body)
    where = ".".join(map(str, path)) or None
    if unknown:
        return Refused(f"unknown field {where!r}: this server has no such thing", param=where, code="unknown_field")
    message = chosen["msg"].removeprefix("Value error, ")
    if chosen["type"] == "missing":
        return Refused(f"the field {where!r} is missing", param=where, code="missing_field")
    return Refused(f"{where}: {message}" if where else message, param=where, code="invalid_value")


def _reach(path: tuple[int | str, ...]) -> tuple[int, list[int]]:
    return len(path), [key for key in path if isinstance(key, int)]


def _path(location: tuple[int | str, ...], body: Any) -> tuple[int | str, ...]:
    """The keys of a pydantic location that are of the body: names of union branches are left out."""
    path: list[int | str] = []
    for number, key in enumerate(location):
        if (isinstance(body, dict) and key in body) or (isinstance(body, list) and isinstance(key, int)):
            if isinstance(body, list) and key >= len(body):
                continue
            path.append(key)
            body = body[key]
        elif number == len(location) - 1 and isinstance(body, dict) and isinstance(key, str):
            path.append(key)  # a missing field
    return tuple(path)
