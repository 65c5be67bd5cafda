"""What the weights and settings must be: those with which the reference calls its operators on the same checkpoint.

One token goes through the reference (one pool of them where index keys are pooled), and the smallest image where a
candidate has shown one; packed experts are read from the files, all of them. Both are done once for a directory,
whatever the number of cases.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from day0check.compare.parameters import (
    BY_EXPERT,
    Recorded,
    Weight,
    named_arguments,
    settings_of,
    weight_names,
    weight_of,
)
from day0check.compare.weight_digest import part_digests, value_digest
from day0check.contracts import CONTRACTS
from day0check.contracts.profiles import profile_named
from day0check.types import Measure
from reference.formats import mxfp4_decode
from reference.model import Model
from reference.weights import Checkpoint

CLOSE = 1e-6  # relative: a setting may have been through float32
_PARTS = {"mla.partial": CONTRACTS["mla.partial"].sites}
IN_PARTS = {"mla.attention": _PARTS, "gqa.attention": _PARTS}  # calls of an operator in parts
_NAMED = 3

STRANGER = "operator that the layer does not have"
UNKNOWN = "operator with weights that the checkpoint does not have"
CHOOSES = "choice that the layer does not make"

Truth = dict[str, Recorded]


def compare_parameters(model: Any, profile: str, recorded: Iterable[Recorded]) -> list[Measure]:
    """A measure for each tap and phase of what a candidate recorded, in order of execution.

    `model`: a checkpoint directory, or a `reference.weights.Checkpoint`.
    What differs is `pattern` "other setting: NAME" or "other weight: NAME", or STRANGER: an operator that the layer
    does not have, with weights that are not of the layer (UNKNOWN: of no layer); or CHOOSES, when the layer chooses
    where the model's does not: then the operators that only feed this choice, with weights of the checkpoint, are told
    with it. Any other tap that the reference does not have is not judged. Raises what reading the checkpoint raises.
    """
    is_directory = isinstance(model, (str, Path))
    return compare_with(_source(str(model), _stamps(Path(model))) if is_directory else Source(model), profile, recorded)


def compare_with(source: Source, profile: str, recorded: Iterable[Recorded]) -> list[Measure]:
    """`compare_parameters` with a source of truth that is at hand."""
    recorded = tuple(recorded)
    truth = source.truth({part for r in recorded for part in _parts_of(r)})
    rounds = profile_named(profile).act_dtype == "bfloat16"
    found: dict[tuple[str, str], list[_Comparison]] = {}
    for r in recorded:
        stranger = _stranger(r, truth)
        found.setdefault((r.tap, r.phase), []).append(
            _Comparison(r, truth.get(r.tap), source, rounds, stranger=stranger)
        )
    measures = _with_their_choice([measure for comparisons in found.values() for measure in _joined(comparisons)])
    return sorted(measures, key=lambda m: (m.order, m.tap, m.phase))


def _parts_of(recorded: Recorded) -> tuple[str, ...]:
    """The passes of the reference in which this tap occurs."""
    if recorded.tap.startswith("vision."):
        return ("vision",)
    return ("text", "plain") if recorded.operator == "mla.expand" else ("text",)


def _stamps(directory: Path) -> tuple[tuple[str, int], ...]:
    return tuple((file.name, file.stat().st_mtime_ns) for file in sorted(directory.glob("*")))


@functools.lru_cache(maxsize=1)
def _source(directory: str, stamps: tuple[tuple[str, int], ...]) -> Source:
    return Source(Checkpoint(directory))


class Source:
    """A checkpoint as the truth about parameters; every pass and every expert is read once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.rounded: dict[str, str] = {}  # digest of a float32 weight -> digest of its values rounded to bfloat16
        self._passes: dict[str, Truth] = {}
        self._experts: dict[tuple[int, str, str], dict[str, str]] = {}

    def truth(self, parts: set[str]) -> Truth:
        """Recorded settings and weights by tap. `parts`: "text", "plain" (the plain form of attention), "vision"."""
        for part in sorted(parts - set(self._passes), reverse=True):
            self._passes[part] = self._record(part)
        return {tap: r for part in sorted(parts, reverse=True) for tap, r in self._passes[part].items()}

    def _record(self, part: str) -> Truth:
        config, found = self.checkpoint.config, {}
        model = Model(self.checkpoint, dtype=torch.float32, kept_bytes=0)

        def call(place: str, operator: str, function: Callable, *args: Any, site: str = "", **kwargs: Any) -> Any:
            tap = ".".join(p for p in (place, operator, site) if p)
            found[tap] = self._recorded(tap, operator, args, kwargs)
            for part, sites in IN_PARTS.get(operator, {}).items():
                taps = (f"{place}.{part}.{at}" for at in sites)
                found.update({t: replace(found[tap], tap=t, operator=part) for t in taps})
            return function(*args, **kwargs)

        if part == "vision":
            side = config.vision.patch * config.vision.merge
            model.image_features([torch.zeros(side, side, 3, dtype=torch.uint8)], call=call)
            return found
        rows = 1 if config.index is None else config.index.pool  # a whole pool of index keys
        drafts = config.draft is not None
        rows += drafts  # a row of the draft layer waits for its next token
        model.forward([0] * rows, call=call, form="plain" if part == "plain" else "absorbed", drafts=drafts)
        splice = {"media_pad": config.tokens.media_pad}
        found["splice.positions"] = Recorded("splice.positions", "splice.positions", "", None, 0, splice)
        return found

    def _recorded(self, tap: str, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorded:
        contract = CONTRACTS[operator]
        arguments = named_arguments(contract, args, kwargs)
        weights = {}
        for name in weight_names(contract, arguments):
            weights[name] = weight_of(operator, name, arguments[name])
            narrow = arguments[name].bfloat16()
            if not torch.equal(narrow.to(arguments[name].dtype), arguments[name]):
                self.rounded[weights[name].digest] = value_digest(narrow)
        return Recorded(tap, operator, "", None, 0, settings_of(contract, arguments), weights)

    def experts(self, layer: int, part: str, name: str) -> dict[str, str]:
        """Digests by expert number of matrix `part` (w1, w3, w2). `name`: "packed", "scale", or "value" as bfloat16
        or float32 numbers would be stored: by float32 value."""
        key = (layer, part, name)
        if key not in self._experts:
            prefix = f"layers.{layer}.block_sparse_moe.experts"
            self._experts[key] = {
                str(e): part_digests(self._expert(f"{prefix}.{e}.{part}.weight", name)[None])[0]
                for e in range(self.checkpoint.config.moe.experts)
            }
        return self._experts[key]

    def _expert(self, stored: str, name: str) -> torch.Tensor:
        if name != "value":
            return self.checkpoint.tensor(f"{stored}_{name}")
        if stored in self.checkpoint:
            return self.checkpoint.tensor(stored).float()
        packed, scale = (self.checkpoint.tensor(f"{stored}_{n}") for n in ("packed", "scale"))
        return mxfp4_decode(packed, scale, dtype=torch.float32)


def _stranger(recorded: Recorded, truth: Truth) -> str:
    """CHOOSES, UNKNOWN or STRANGER where a decoder layer chooses, or runs an operator with weights, and the model's
    layer has neither the operator nor the weights; else "".

    Another form of what the layer has is none: it works with the weights of the layer.
    """
    if recorded.layer is None or recorded.tap in truth or recorded.operator in BY_EXPERT:
        return ""
    if not recorded.weights and not _chooses(recorded.operator):
        return ""
    layer = [r for tap, r in truth.items() if tap.startswith(f"layers.{recorded.layer:02d}.")]
    ours = {weight.digest for weight in recorded.weights.values()}
    if not layer or recorded.operator in {r.operator for r in layer} or _digests(layer) & ours:
        return ""
    if _chooses(recorded.operator):
        return CHOOSES
    return STRANGER if _digests(truth.values()) & ours else UNKNOWN


def _digests(records: Iterable[Recorded]) -> set[str]:
    return {weight.digest for r in records for weight in r.weights.values()}


def _chooses(operator: str) -> bool:
    return CONTRACTS[operator].kind == "choose"


def _with_their_choice(measures: list[Measure]) -> list[Measure]:
    """A choice that a layer does not make takes the blame for the strange operators of its phase and layer, which run
    for its sake alone: they are named in its message, and its `order` is that of the first of them. An operator whose
    weights the checkpoint does not have answers for itself: something was called before it was loaded."""
    choices = {(m.layer, m.phase): m for m in measures if m.pattern == CHOOSES}
    parts = {key: [m for m in measures if m.pattern == STRANGER and (m.layer, m.phase) == key] for key in choices}
    kept = []
    for m in measures:
        own = parts.get((m.layer, m.phase), [])
        if m in own:
            continue
        if own and m.pattern == CHOOSES:
            fed = ", ".join(p.operator for p in sorted(own, key=lambda p: p.order))
            count = m.statistics | {"different": m.statistics["different"] + len(own)}
            order = min(m.order, *(p.order for p in own))
            m = replace(m, order=order, statistics=count, message=f"{m.message}; what feeds it: {fed}")
        kept.append(m)
    return kept


class _Comparison:
    """One record beside the truth: how many arguments were compared, and (pattern, sentence) of those that differ."""

    def __init__(
        self, recorded: Recorded, true: Recorded | None, source: Source, rounds: bool, *, stranger: str
    ) -> None:
        self.recorded, self.source, self.rounds = recorded, source, rounds
        self.compared = 0
        self.wrong: list[tuple[str, str]] = []
        self.unknown = False
        if recorded.operator == "moe.convert":
            self._experts(recorded.tap.rpartition(".")[2], {"packed": "packed", "scale": "scale"})
            return
        if recorded.operator == "moe.experts":
            for part in recorded.weights:
                self._experts(part, {part: "value"})
        turns_nothing = recorded.operator == "rope.apply" and recorded.settings.get("layout") == "none"
        self.unknown = true is None and not turns_nothing
        if stranger == CHOOSES:
            text = f"layer {recorded.layer} makes a choice of its own, and the model makes no {recorded.operator} there"
            self.wrong.append((CHOOSES, text))
        elif stranger:
            whose = "not of this layer" if stranger == STRANGER else "nowhere in the checkpoint"
            text = f"layer {recorded.layer} of the model has no {recorded.operator}, and its weights are {whose}"
            self.wrong.append((stranger, text))
        if true is not None:
            self._settings(true)
            if recorded.operator != "moe.experts":
                self._weights(true)

    def _settings(self, true: Recorded) -> None:
        ours, due = self.recorded.settings, true.settings
        for name in dict.fromkeys((*due, *ours)):
            self.compared += 1
            if not same_setting(ours.get(name), due.get(name)):
                text = f"{name} is {_word(ours.get(name))} where the checkpoint has {_word(due.get(name))}"
                self.wrong.append((f"other setting: {name}", text))

    def _weights(self, true: Recorded) -> None:
        kinds = {a.name: a.dtype for a in CONTRACTS[self.recorded.operator].args}
        for name in dict.fromkeys((*true.weights, *self.recorded.weights)):
            if name in self.recorded.apart:
                continue
            self.compared += 1
            ours, due = self.recorded.weights.get(name), true.weights.get(name)
            if text := self._other(name, ours, due, may_round=self.rounds and kinds[name] == "act"):
                self.wrong.append((f"other weight: {name}", text))

    def _other(self, name: str, ours: Weight | None, due: Weight | None, *, may_round: bool) -> str:
        if ours is None or due is None:
            return f"{name} is left out" if ours is None else f"{name} is given and the checkpoint has none"
        if ours.digest == due.digest:
            return ""
        if math.prod(ours.shape) != math.prod(due.shape):
            return f"{name} has the shape {list(ours.shape)} where the checkpoint's has {list(due.shape)}"
        if ours.digest == self.source.rounded.get(due.digest):
            return "" if may_round else f"{name} holds the checkpoint's values rounded to bfloat16"
        return f"the values of {name} are not those of the checkpoint"

    def _experts(self, part: str, names: dict[str, str]) -> None:
        """Stacks of experts, expert by expert. `names`: argument -> what `Source.experts` calls it."""
        for argument, name in names.items():
            weight = self.recorded.weights.get(argument)
            if weight is None or self.recorded.layer is None:
                continue
            due = self.source.experts(self.recorded.layer, part, name)
            self.compared += len(weight.parts)
            if name != "value" and len(weight.parts) != len(due):
                text = f"{argument} holds {len(weight.parts)} experts where the checkpoint has {len(due)}"
                self.wrong.append((f"other weight: {argument}", text))
                continue
            other = [e for e, digest in weight.parts.items() if digest != due.get(e)]
            if other:
                listed = ", ".join(other[:_NAMED]) + (", …" if len(other) > _NAMED else "")
                text = (
                    f"{argument} of {len(other)} of {len(due)} experts is not that of the checkpoint: expert {listed}"
                )
                self.wrong.append((f"other weight: {argument}", text))


def same_setting(ours: Any, due: Any) -> bool:
    """Whether two settings in JSON form have one meaning: numbers to a float32's precision, None as left out."""
    if isinstance(ours, dict) and isinstance(due, dict):
        return all(same_setting(ours.get(name), due.get(name)) for name in {*ours, *due})
    if isinstance(ours, list) and isinstance(due, list):
        return len(ours) == len(due) and all(map(same_setting, ours, due))
    numbers = [isinstance(value, (bool, int, float)) for value in (ours, due)]
    return math.isclose(ours, due, rel_tol=CLOSE) if all(numbers) else ours == due


def _word(value: Any) -> str:
    return "nothing" if value is None else repr(value) if isinstance(value, str) else str(value)


def _apart(reasons: dict[str, str]) -> str:
    """What was not compared, as one sentence."""
    names = {why: [n for n, w in reasons.items() if w == why] for why in reasons.values()}
    listed = [f"{', '.join(ns)} ({why})" for why, ns in names.items()]
    return f"not compared: {'; '.join(listed)}" if listed else ""


def _joined(comparisons: list[_Comparison]) -> list[Measure]:
    """The measure of one tap in one phase; the first record that differs gives the place and the words."""
    compared, wrong = sum(c.compared for c in comparisons), [c for c in comparisons if c.wrong]
    unknown = any(c.unknown for c in comparisons)
    if not compared and not unknown:
        return []
    told = (wrong or comparisons)[0]
    r, differences = told.recorded, told.wrong
    shown = {name for c in comparisons for name in c.recorded.weights}
    text = "; ".join(sentence for _, sentence in differences) or _apart(
        {n: w for n, w in r.apart.items() if n not in shown}
    )
    if wrong and comparisons[0] is not told:
        text += "; it was right when the phase began"
    count = float(sum(len(c.wrong) for c in comparisons))
    return [
        Measure(
            tap=r.tap,
            operator=r.operator,
            kind="exact",
            phase=r.phase,
            layer=r.layer,
            order=r.order,
            rows=0,
            elements=compared,
            passed=not differences and not unknown,
            statistics={"compared": float(compared), "different": count},
            limits={"different": 0.0},
            failing="different" if differences else "",
            pattern=differences[0][0] if differences else "",
            message=text,
            not_judged="" if differences or not unknown else "the reference makes no call of this name",
        )
    ]
