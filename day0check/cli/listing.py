"""`day0check list WHAT`: one name a line on stdout, the rest of the line says what it is. Never imports torch."""

from __future__ import annotations

import json
from collections.abc import Callable

import click

Row = tuple[str, str]


def _cases() -> list[Row]:
    from day0check.case import catalogue

    rows = []
    for located in catalogue():
        entry = located.entry
        parts = [f"stage {', '.join(entry.stage)}", f"{len(entry.request)} requests" if entry.request else "no model"]
        parts += [f"model {entry.model}"] if entry.model else []
        parts += ["images"] if entry.needs_vision else []
        rows.append((entry.id, "; ".join(parts)))
    return rows


def _operators() -> list[Row]:
    from day0check.contracts import CONTRACTS

    return [(c.name, f"{c.kind}: {c.summary}") for c in sorted(CONTRACTS.values(), key=lambda c: c.name)]


def _presets() -> list[Row]:
    """The names of `reference.presets.preset_names`, which cannot be asked without importing torch; a test compares."""
    from reference.fault_presets import FAULT_PRESETS
    from reference.preset_families import FAMILY_PRESETS
    from reference.published import published, published_names

    about = "seeded small model, written on first use"
    family = [(name, f"{about}: {name.removeprefix('tiny-')}") for name in FAMILY_PRESETS]
    variants = [(name, f"{about}: {base} with one switch changed") for name, (base, _) in FAULT_PRESETS.items()]
    sizes = [(name, f"published full size, to plan with: {published(name).title}") for name in published_names()]
    return [("tiny", f"{about}: every part in one"), *family, *variants, *sizes]


def _checks() -> list[Row]:
    from day0check.checks import (
        CHECKS,
        INVARIANTS,
        MEASURED,
        MODEL_CHECKS,
        RUN_CHECKS,
        service_operators,
        service_start,
    )
    from day0check.checks.endpoint import ENDPOINT_CHECKS

    service = {module.NAME: module for module in (service_start, service_operators)} | ENDPOINT_CHECKS
    every = MODEL_CHECKS | CHECKS | INVARIANTS | MEASURED | RUN_CHECKS | service
    return [(name, module.QUESTION) for name, module in every.items()]


def _profiles() -> list[Row]:
    from day0check.contracts.profiles import PROFILES

    return [(name, f"activations in {profile.act_dtype}") for name, profile in PROFILES.items()]


def _backends() -> list[Row]:
    from day0check.backends.loader import BACKENDS

    return [(name, where) for name, where in BACKENDS.items()]


KINDS: dict[str, Callable[[], list[Row]]] = {
    "cases": _cases,
    "operators": _operators,
    "presets": _presets,
    "checks": _checks,
    "profiles": _profiles,
    "backends": _backends,
}


@click.command("list")
@click.argument("what", type=click.Choice(tuple(KINDS)))
@click.option("--json", "as_json", is_flag=True, help="A JSON list of {name, about} instead of lines.")
def list_(what: str, as_json: bool) -> None:
    """List what there is: names that `run` and operators files understand."""
    rows = KINDS[what]()
    if as_json:
        click.echo(json.dumps([{"name": name, "about": about} for name, about in rows], ensure_ascii=False, indent=2))
        return
    width = max((len(name) for name, _ in rows), default=0)
    for name, about in rows:
        click.echo(f"{name:<{width}}  {about}")
