"""The tensors of a checkpoint against those that its configuration asks for: written, consumed, shape, dtype, form."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from day0check.audit.draft import is_draft_copy
from day0check.audit.fault import Fault
from reference.coded import BLOCK_FP8, GROUP_SCALES, INT4, PACKED, SCALES, beside, scales_due, with_int4
from reference.inventory import Inventory, declared_draft_layers, declared_quantisation
from reference.names import stored_name
from reference.packing import packed_parts, part_shapes
from reference.tensors import Stored, expected_tensors
from reference.weights import PLAIN, fits

_SPELLED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "uint8": "U8"}
_BITS = {"BF16": 16, "F16": 16, "F32": 32, "F64": 64}
_KV_SCALE = re.compile(r"\.(q|k|v|kv|prob)_scale$|\.[kv]_proj\.output_scale$")
_PACKED = (".weight_packed", ".weight_scale")


@dataclass(frozen=True)
class Lying:
    """A tensor that lies where the index puts it."""

    stored: str
    file: str
    dtype: str
    shape: tuple[int, ...]


def audit_table(inventory: Inventory) -> Iterator[Fault]:
    """Faults of single tensors, then of the quantisation as a whole. Tensors of lost files are not told again."""
    table = expected_tensors(inventory.config)
    lying = with_int4(_lying(inventory), weights=table)
    gone = inventory.lost - set(lying)
    gone |= {part for name in gone for part in packed_parts(name, inventory.config)}
    contrary = tuple(_quantisation(inventory, lying, table, gone))
    yield from contrary
    excused = _excused(contrary, lying, table)
    declared = _declared_dtype(inventory)
    excused.add("lm_head.weight")  # the head has a check of its own
    for name, stored in table.items():
        found = lying.get(name)
        if found is not None:
            scales = next(iter(beside(name, found)), "")
            yield from _form(found, stored, lying.get(scales), name, declared)
        elif name not in gone and name not in excused:
            spelled = _spelled(name, inventory)
            yield Fault("never written", spelled, f"{spelled} is in no shard: the parameter would never be written")
    consumed = {other for name, found in lying.items() for other in beside(name, found)}
    for name, found in lying.items():
        if name not in table and name not in excused | consumed and not is_draft_copy(name, inventory):
            yield _unconsumed(name, found, inventory)


def _lying(inventory: Inventory) -> dict[str, Lying]:
    """Canonical name -> what lies where the index puts it; of a packed matrix each part by itself."""
    found = {}
    for stored, entry in sorted(inventory.sound.items()):
        whole = Lying(stored, *entry)
        parts = packed_parts(inventory.canonical[stored], inventory.config)
        shapes = part_shapes(parts, whole.shape) if parts else {inventory.canonical[stored]: whole.shape}
        found |= {name: replace(whole, shape=shape) for name, shape in shapes.items()}
    return found


def _spelled(name: str, inventory: Inventory) -> str:
    return stored_name(name, family=str(inventory.config_json["model_type"]))


# ------------------------------------------------------------------------------------------------------ one tensor


def _form(found: Lying, stored: Stored, scales: Lying | None, name: str, declared: str) -> Iterator[Fault]:
    """Shape and dtype of a tensor that is there."""
    at, files = f"{found.stored} in {found.file}", (found.file,)
    if not fits(name, found.shape, stored):
        pattern = "packed width" if stored.dtype == "uint8" else "shape"
        what = f"{at} has shape {list(found.shape)}; config.json asks for {list(stored.shape)}"
        yield Fault(pattern, found.stored, what, files)
    due = _SPELLED[stored.dtype]
    if found.dtype == due:
        return
    if due == "U8":
        yield Fault("dtype", found.stored, f"{at} is {found.dtype}; packed codes and their scales are U8", files)
    elif found.dtype in (BLOCK_FP8, INT4):
        yield from _coded(found, scales)
    elif found.dtype not in PLAIN:
        yield Fault("dtype", found.stored, f"{at} is {found.dtype}, of which no weight can be read", files)
    elif found.dtype != declared or due == "F32":
        wider = _BITS[found.dtype] > _BITS[due]
        what = f"{at} is {found.dtype} where releases of the family have {due}"
        yield Fault("other float", found.stored, what, files, "note" if wider else "warning")


def _coded(found: Lying, scales: Lying | None) -> Iterator[Fault]:
    at = f"{found.stored} in {found.file}"
    kind, end = ("INT4", GROUP_SCALES) if found.dtype == INT4 else ("FP8", SCALES)
    if scales is None:
        beside_it = f"{found.stored.removesuffix(PACKED)}{end}"
        what = f"{at} holds {kind} codes and there is no {beside_it}: the codes alone are other weights"
        yield Fault("codes without scales", found.stored, what, (found.file,))
        return
    dtypes, shape = scales_due(found)
    if scales.dtype not in dtypes or scales.shape != shape:
        due = f"{' or '.join(dtypes)} {list(shape)}"
        what = f"{scales.stored} in {scales.file} is {scales.dtype} {list(scales.shape)}; {at} needs {due}"
        yield Fault("scales do not cover", scales.stored, what, (found.file, scales.file))


def _declared_dtype(inventory: Inventory) -> str:
    """The dtype that config.json names, as safetensors spells it, or ""."""
    outer, text = inventory.config_json, inventory.config_json.get("text_config") or {}
    named = next((part[key] for part in (text, outer) for key in ("dtype", "torch_dtype") if part.get(key)), "")
    return _SPELLED.get(str(named), "")


def _unconsumed(name: str, found: Lying, inventory: Inventory) -> Fault:
    at, files = f"{found.stored} in {found.file}", (found.file,)
    layer = re.match(r"layers\.(\d+)\.", name)
    count = len(inventory.config.layers)
    drafting = declared_draft_layers(inventory.config_json) if inventory.config.draft is None else 0
    if layer and count <= int(layer[1]) < count + drafting:
        what = f"{at} belongs to a layer that drafts tokens: the model's own tokens do not depend on it"
        return Fault("draft layer", found.stored, what, files, "note", group="")
    if name.endswith("rotary_emb.inv_freq"):
        return Fault("buffer", found.stored, f"{at} says again what config.json says", files, "note")
    if _KV_SCALE.search(name):
        what = f"{at} is a calibrated scale of the cache that nothing applies: an FP8 cache would run with scale 1"
        return Fault("cache scale never consumed", found.stored, what, files)
    what = f"{at} is a tensor that the configured model has no use for: it would never be consumed"
    return Fault("never consumed", found.stored, what, files)


# ---------------------------------------------------------------------------------------------------- quantisation


def _quantisation(
    inventory: Inventory, lying: dict[str, Lying], table: dict[str, Stored], gone: frozenset[str]
) -> Iterator[Fault]:
    """What config.json declares against what is there, where they contradict each other as a whole."""
    declared = declared_quantisation(inventory.config_json)
    present = {
        "mxfp4": next((found for name, found in lying.items() if name.endswith(_PACKED[0])), None),
        "block-fp8": next((found for found in lying.values() if found.dtype == BLOCK_FP8), None),
        "int4": next((found for found in lying.values() if found.dtype == INT4), None),
    }
    for method, found in present.items():
        if found is not None and declared != method:
            what = (
                f"{found.stored} in {found.file} is stored in {method}, and config.json declares no such quantisation"
            )
            yield Fault("quantised, undeclared", found.stored, what, (found.file, "config.json"), group=method)
        wanted = method != "mxfp4" or any(name.endswith(_PACKED[0]) for name in set(table) - gone)
        if found is None and declared == method and wanted:
            what = f"config.json declares {method} and no tensor is stored so"
            yield Fault("declared, not quantised", "quantization_config", what, ("config.json",), group=method)


def _excused(contrary: tuple[Fault, ...], lying: dict[str, Lying], table: dict[str, Stored]) -> set[str]:
    """Names of which the contradiction of a whole method says all that is to say."""
    if not any(fault.group == "mxfp4" for fault in contrary):
        return set()
    stems = {name.removesuffix(end) for name in (*lying, *table) for end in _PACKED if name.endswith(end)}
    return {f"{stem}{end}" for stem in stems for end in (".weight", *_PACKED)}
