"""What a quantisation leaves out by its own list, against what is stored; and the size that the index states.

The lists are `ignore` of compressed-tensors and `modules_to_not_convert` of the others. Which tensors are quantised
the files decide (model.md 6.16): software that follows the list instead reads other tensors than are there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from day0check.audit.fault import Fault
from reference.coded import BLOCK_FP8
from reference.inventory import Inventory
from reference.weights import DTYPES

_KEYS = ("ignore", "modules_to_not_convert")
_CODES = (".weight_packed", "_blocks")
_TOWER = re.compile(r"^(model\.)?(vision_tower|mm_projector|visual)\.")
_NO_LINEAR = re.compile(r"(^|\.)(embed_tokens|pos_emb)\.weight$|norm\d?\.weight$")


def audit_exempt(inventory: Inventory) -> Iterator[Fault]:
    """A warning for codes of a module that the list exempts, a note for plain linears that it does not; nothing for a
    configuration without a list, or with an empty one. A list in text_config says nothing of a vision tower."""
    entries = exempted(inventory.config_json)
    if not entries:
        return
    whole_model = bool(exempted({**inventory.config_json, "text_config": None}))
    rules = tuple(_rule(entry) for entry in entries)
    for stored, (file, dtype, shape) in sorted(inventory.sound.items()):
        coded = stored.endswith(_CODES) or (stored.endswith(".weight") and dtype == BLOCK_FP8)
        if not whole_model and _TOWER.search(stored):
            continue
        if not coded and (not stored.endswith(".weight") or len(shape) != 2 or _NO_LINEAR.search(stored)):
            continue
        module = re.sub(r"(\.weight(_packed)?|_blocks)$", "", stored)
        exempt = any(rule.search(name) for rule in rules for name in _spellings(module))
        if coded and exempt:
            what = f"{stored} in {file} holds codes, and config.json says that {module} is not quantised"
            yield Fault("quantised though exempt", stored, what, (file, "config.json"), "warning")
        elif not coded and not exempt:
            what = (
                f"{stored} in {file} is {dtype}, and the list of what is not quantised leaves {module} out: whoever "
                "follows the list looks for codes there"
            )
            yield Fault("plain though not exempt", stored, what, (file, "config.json"), "note", group="")


def exempted(config_json: dict[str, Any]) -> tuple[str, ...]:
    """Entries of the lists in config.json and its text_config, each once."""
    found: dict[str, None] = {}
    for part in (config_json, config_json.get("text_config") or {}):
        quantisation = part.get("quantization_config")
        for key in _KEYS if isinstance(quantisation, dict) else ():
            entries = quantisation.get(key)
            if isinstance(entries, list):
                found |= dict.fromkeys(entry for entry in entries if isinstance(entry, str))
    return tuple(found)


def _rule(entry: str) -> re.Pattern[str]:
    """An entry as a pattern on module names: "re:" is a regular expression from the name's begin on, anything else a
    run of whole parts of the name, "*" standing for any. An expression that cannot be read matches nothing."""
    if entry.startswith("re:"):
        try:
            return re.compile(rf"^(?:{entry[3:]})")
        except re.error:
            return re.compile(r"(?!)")
    parts = r"[^.]+".join(re.escape(part) for part in entry.split("*"))
    return re.compile(rf"(^|\.){parts}($|\.)")


def _spellings(module: str) -> tuple[str, ...]:
    """A module's name in the checkpoint, and inside the text model that a list in text_config speaks of."""
    return tuple(dict.fromkeys((module, module.removeprefix("language_model."))))


def audit_total_size(inventory: Inventory) -> Iterator[Fault]:
    """The bytes that the index says there are against those of the tensors it lists, when all of them are there."""
    stated = inventory.stated_bytes
    if stated is None or inventory.missing or inventory.damaged or len(inventory.sound) != len(inventory.index):
        return
    if any(dtype not in DTYPES for _, dtype, _ in inventory.sound.values()):
        return
    held = sum(math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in inventory.sound.values())
    if stated > held:
        what = f"the index states {stated} bytes and lists tensors of {held}: {stated - held} bytes are of none of them"
        yield Fault("fewer bytes than stated", "metadata.total_size", what, ("index",), "warning", group="")
    elif stated < held:
        what = f"the index states {stated} bytes and lists tensors of {held}"
        yield Fault("more bytes than stated", "metadata.total_size", what, ("index",), "note", group="")
