"""What is wrong with a checkpoint, told before anything runs on it: files, names, shapes, dtypes, scales, config keys.

Only headers are read, the scales of quantised weights (model.md 3: byte 255 of E8M0 is NaN) and a row of some tensors
of codes, which two decoders must read alike; two tensors more when a tied checkpoint holds a head of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from day0check.audit.decoding import audit_decoding
from day0check.audit.draft import audit_draft
from day0check.audit.exempt import audit_exempt, audit_total_size
from day0check.audit.fault import Fault, told
from day0check.audit.table import audit_table
from day0check.errors import InputError
from day0check.types import Finding, Severity, finding_id
from reference.errors import CheckpointError
from reference.inventory import Inventory, broken_scales, take_inventory, wrong_shapes
from reference.names import canonical_name
from reference.weights import read_tensor

NAME = "weights"
OPERATOR = "weights.read"
_SEVERITIES: tuple[Severity, ...] = ("blocker", "warning", "note")
_LISTED = 64  # tensors and files named in the evidence of one finding


@dataclass(frozen=True)
class Audited:
    """The findings on a checkpoint, and how much was looked at."""

    findings: tuple[Finding, ...]
    tensors: int
    files: int


def audit(model_dir: str | Path) -> tuple[Finding, ...]:
    """The findings on the checkpoint in `model_dir`, blockers first; empty when all is as it should be.

    A blocker is a fault with which the weights of a run are not those of the model; a warning may be one for some
    software; a note is without effect. Raises InputError when there is nothing to audit (no config.json that can be
    read, no index and no weights).
    """
    return inspect(model_dir).findings


def inspect(model_dir: str | Path) -> Audited:
    """As `audit`, with the numbers of tensors and files. Raises InputError as `audit` does."""
    try:
        inventory = take_inventory(model_dir)
        faults = [*_files(inventory), *_names(inventory), *audit_table(inventory), *_head(inventory)]
        faults += [*audit_draft(inventory), *audit_exempt(inventory), *audit_total_size(inventory)]
        faults += [*_scales(inventory), *audit_decoding(inventory), *_keys(inventory)]
    except CheckpointError as cause:
        raise InputError(cause.what, where=cause.where, todo=cause.todo) from cause
    return Audited(_findings(faults), len(inventory.index), len(inventory.listed))


# ------------------------------------------------------------------------------------------------ files and index


def _files(inventory: Inventory) -> Iterator[Fault]:
    by_file: dict[str, list[str]] = {}
    for stored, file in sorted(inventory.index.items()):
        by_file.setdefault(file, []).append(stored)
    for file in inventory.missing:
        held = by_file[file]
        what = f"the shard {file} is missing, and with it {len(held)} tensors, the first {held[0]}"
        yield Fault("shard missing", held[0], what, (file,), group="")
    for file, why in inventory.damaged.items():
        severity = "blocker" if file in by_file else "warning"
        yield Fault("shard damaged", file, f"{file} cannot be read: {why}", (file,), severity, group="")
    for file in sorted(set(inventory.headers) - inventory.listed):
        header = inventory.headers[file]
        twice = sum(stored in inventory.index for stored in header)
        what = (
            f"{file} lies in the directory and the index does not name it: {len(header)} tensors, {twice} of them "
            "under names that the index places elsewhere; whoever loads every file takes them"
        )
        yield Fault("file not in the index", file, what, (file,), "warning", group="")
    holders = _holders(inventory)
    for stored, file in sorted(inventory.index.items()):
        others = tuple(f for f in holders.get(stored, ()) if f != file and f in inventory.listed)
        if file in inventory.headers and stored not in inventory.headers[file]:
            elsewhere = f"it lies in {', '.join(others)}" if others else "no other shard holds it either"
            what = f"the index places {stored} in {file}, which does not hold it; {elsewhere}"
            yield Fault("not in its shard", stored, what, (file, *others))
        elif others:
            what = (
                f"{stored} lies in {file}, where the index places it, and a stale copy in {', '.join(others)}: whoever "
                "loads all tensors of a shard keeps the one that comes last"
            )
            yield Fault("stale duplicate", stored, what, (file, *others))


def _holders(inventory: Inventory) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for file, header in inventory.headers.items():
        for stored in header:
            found[stored] = (*found.get(stored, ()), file)
    return found


def _names(inventory: Inventory) -> Iterator[Fault]:
    for file in sorted(inventory.listed & set(inventory.headers)):
        for stored in sorted(inventory.headers[file].keys() - inventory.index.keys()):
            what = f"{stored} lies in {file} and the index does not name it: whoever follows the index leaves it out"
            yield Fault("not in the index", stored, what, (file,))
    first: dict[str, str] = {}
    for stored, name in inventory.canonical.items():
        other = first.setdefault(name, stored)
        if other != stored:
            files = (inventory.index[other], inventory.index[stored])
            what = f"{other} in {files[0]} and {stored} in {files[1]} are the same tensor of the model: one is stale"
            yield Fault("two names", stored, what, files)


# ------------------------------------------------------------------------------------------- head, scales, config


def _head(inventory: Inventory) -> Iterator[Fault]:
    """The flag that ties the head to the embedding, at both places where it may stand, against what is stored."""
    key = "tie_word_embeddings"
    outer, text = inventory.config_json.get(key), (inventory.config_json.get("text_config") or {}).get(key)
    told_twice = f"{key} is {told(outer)} at the top of config.json and {told(text)} in text_config"
    if text is not None and text is not bool(outer):
        what = f"{told_twice}: software that reads one of them alone {'un' if inventory.config.tied_head else ''}ties"
        yield Fault("tie flags disagree", "lm_head.weight", f"{what} the head", ("config.json",), "warning")
    names = {inventory.canonical[stored]: stored for stored in inventory.sound}
    head, embedding = names.get("lm_head.weight"), names.get("embed_tokens.weight")
    if not inventory.config.tied_head and head is None and "lm_head.weight" not in inventory.lost:
        what = (
            f"there is no lm_head.weight and the head is not tied ({told_twice}): it would stay as it was initialised"
        )
        yield Fault("head never written", "lm_head.weight", what, ("config.json",))
    if inventory.config.tied_head and head is not None and embedding is not None:
        files = tuple(inventory.index[stored] for stored in (head, embedding))
        pair = (read_tensor(s, file=inventory.directory / f) for s, f in zip((head, embedding), files, strict=True))
        if torch.equal(*pair):
            yield Fault("head stored twice", head, f"{head} in {files[0]} repeats the tied embedding", files, "note")
        else:
            what = f"{head} in {files[0]} differs from {embedding} in {files[1]}, to which config.json ties it"
            yield Fault("tied head differs", head, what, files)


def _scales(inventory: Inventory) -> Iterator[Fault]:
    scales = {
        stored
        for stored, (_, dtype, _) in inventory.sound.items()
        if stored.endswith(("weight_scale", "weight_scale_inv")) and dtype in ("U8", "F32", "BF16", "F16")
    }
    for stored, file, what in broken_scales(inventory, scales):
        yield Fault("scale is no number", stored, f"{stored} in {file} holds {what}", (file,))
    for stored, file, what in wrong_shapes(inventory):
        yield Fault("packed width", stored, f"{stored} in {file} says {what}", (file,))


def _keys(inventory: Inventory) -> Iterator[Fault]:
    for key in inventory.unknown_keys:
        what = f"key {key!r} of config.json has no reader: if it changes the mathematics, the reference does not follow"
        yield Fault("unknown key", key, what, ("config.json",), "warning", group=key)


# ------------------------------------------------------------------------------------------------------- findings


def _findings(faults: Iterable[Fault]) -> tuple[Finding, ...]:
    """One finding per (pattern, kind of tensor), blockers first, else in the order of the audit."""
    groups: dict[tuple[Severity, str, str], list[Fault]] = {}
    for fault in faults:
        groups.setdefault((fault.severity, fault.pattern, fault.kind), []).append(fault)
    found = [_finding(members) for members in groups.values()]
    return tuple(sorted(found, key=lambda f: _SEVERITIES.index(f.severity)))


def _finding(members: list[Fault]) -> Finding:
    first = members[0]
    text = first.what + (f"; the same of {len(members) - 1} more" if len(members) > 1 else "")
    layer = re.match(r"layers\.(\d+)\.", canonical_name(first.tensor))
    return Finding(
        id=finding_id(NAME, OPERATOR, first.kind, "load", first.pattern),
        severity=first.severity,
        check=NAME,
        operator=OPERATOR,
        message=text,
        layer=int(layer[1]) if layer else None,
        phase="load",
        value=float(len(members)),
        stack_layer="model",
        evidence={
            "pattern": first.pattern,
            "count": len(members),
            "tensors": [m.tensor for m in members[:_LISTED]],
            "files": sorted({file for m in members for file in m.files})[:_LISTED],
            "details": [m.what for m in members[:_LISTED]],
        },
    )
