"""`day0check plan MODEL`: how large a model is and what serving it needs, from its configuration alone. No torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from day0check.errors import InputError, UsageError

Row = tuple[str, str]


@click.command()
@click.argument("model", metavar="FAMILY|DIR")
@click.option("--context", type=click.IntRange(min=1), metavar="N", help="Tokens of a request.  [default: the longest]")
@click.option("--requests", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="At a time.")
@click.option("--rows", type=click.IntRange(min=1), default=8192, show_default=True, metavar="N", help="Of a step.")
@click.option("--json", "as_json", is_flag=True, help="Print numbers of bytes as one JSON document.")
def plan(model: str, context: int | None, requests: int, rows: int, as_json: bool) -> None:
    """Say how many parameters a published family (or a checkpoint directory's config.json) has, and how many bytes its
    weights in each form, its caches and the workspaces of a step take. No weights are needed. "As read" counts codes in
    MXFP4 as they are and every other code as the bfloat16 weight that it is read as.
    """
    numbers = counted(model, context=context, requests=requests, rows=rows)
    if as_json:
        click.echo(json.dumps(numbers, indent=2, ensure_ascii=False))
        return
    click.echo(text(numbers))


def counted(model: str, *, context: int | None, requests: int, rows: int) -> dict[str, Any]:
    """Every number of the plan, in bytes and parameters.

    Raises UsageError for a name that is neither a family nor a directory, InputError for a configuration that cannot
    be read.
    """
    from reference.errors import CheckpointError
    from reference.families.gpt_oss import gpt_oss_sizes
    from reference.published import published, published_names
    from reference.sizes import gpt_oss_size, size_of

    try:
        if model in published_names():
            release = published(model)
            title, source = release.title, release.source
            if release.config_json["model_type"] == "gpt_oss":
                return _weights(model, title, source, gpt_oss_size(gpt_oss_sizes(release.config_json)[0]))
            config = release.config()
        elif Path(model).is_dir():
            config, title, source = _config_of(Path(model)), Path(model).resolve().name, "its config.json"
        else:
            todo = f"families: {', '.join(published_names())}; or give a directory with a config.json"
            raise UsageError(f"{model!r} is neither a published family nor a directory", where="MODEL", todo=todo)
    except CheckpointError as cause:
        raise InputError(cause.what, where=cause.where, todo=cause.todo) from cause
    context = config.max_positions if context is None else context
    if context > config.max_positions:
        todo = f"{title} has {config.max_positions} positions"
        raise UsageError(f"a context of {context} tokens is too long", where="--context", todo=todo)
    return _weights(model, title, source, size_of(config)) | _serving(config, context, requests, rows)


def _config_of(directory: Path) -> Any:
    from reference.errors import CheckpointError
    from reference.families import read_config

    files = {}
    for part in ("config", "preprocessor_config", "tokenizer_config"):
        file = directory / f"{part}.json"
        try:
            files[part] = json.loads(file.read_text(encoding="utf-8")) if part == "config" or file.is_file() else {}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"not readable as JSON: {error}", where=str(file), todo="correct it") from error
    return read_config(files["config"], preprocessor=files["preprocessor_config"], tokenizer=files["tokenizer_config"])


def _weights(model: str, title: str, source: str, size: Any) -> dict[str, Any]:
    from reference.sizes import EXPERT_FORMS

    counts = dataclasses.asdict(size)
    return {
        "model": model,
        "title": title,
        "source": source,
        "parameters": {k: counts[k] for k in ("total", "activated", "routed", "vision", "draft")},
        "tensors": size.tensors,
        "weight_bytes": {"as read": size.stored_bytes}
        | ({f"experts in {form}": size.bytes_with_experts_in(form) for form in EXPERT_FORMS} if size.routed else {}),
    }


def _serving(config: Any, context: int, requests: int, rows: int) -> dict[str, Any]:
    from reference.sizes import cache_bytes_per_token, state_bytes_per_request, workspaces

    token, state = cache_bytes_per_token(config), state_bytes_per_request(config)
    return {
        "context_tokens": context,
        "requests": requests,
        "step_rows": rows,
        "cache_bytes_per_token": token,
        "state_bytes_per_request": state,
        "cache_bytes": requests * (context * token + state),
        "workspace_bytes": workspaces(config, rows=rows, context=context),
    }


def text(numbers: dict[str, Any]) -> str:
    """The numbers as lines for people."""
    from day0check.plan import sized

    p = numbers["parameters"]
    rows: list[Row] = [
        ("parameters", f"{counted_in_words(p['total'])}, {counted_in_words(p['activated'])} at work for a token"),
        ("  of routed experts", counted_in_words(p["routed"])),
    ]
    rows += [("  of the vision tower", counted_in_words(p["vision"]))] if p["vision"] else []
    rows += [("draft layer, besides", counted_in_words(p["draft"]))] if p["draft"] else []
    rows += [(f"weights {form}", sized(n)) for form, n in numbers["weight_bytes"].items()]
    if "cache_bytes" in numbers:
        rows += [
            ("cache of a token", f"{sized(numbers['cache_bytes_per_token'])} (bf16)"),
            ("state of a request", sized(numbers["state_bytes_per_request"])),
            (
                f"caches of {numbers['requests']} x {numbers['context_tokens']} tokens",
                sized(numbers["cache_bytes"]),
            ),
        ]
        rows += [
            (f"{what}, step of {numbers['step_rows']} rows", sized(n)) for what, n in numbers["workspace_bytes"].items()
        ]
    else:
        rows.append(("caches", "not counted: the attention of this family is not described here"))
    width = max(len(name) for name, _ in rows)
    head = f"{numbers['title']}, from {numbers['source']}: {numbers['tensors']:,} tensors"
    return "\n".join([head, *(f"{name:<{width}}  {value}" for name, value in rows)])


def counted_in_words(count: int) -> str:
    """2.78 T, 104 B, 447 M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
