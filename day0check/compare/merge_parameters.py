"""The weights of every rank against the checkpoint: together they are it, and each part is where it belongs.

Which axis is cut is read off the shapes that the ranks recorded; the parts must then be the slices of the checkpoint's
weight in order of rank, by digest. What is not cut must be whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from day0check.compare.checkpoint_parameters import Source, Truth, compare_with
from day0check.compare.merge import PARAMETERS, merged_measures, ranks_facts
from day0check.compare.parameters import Recorded, named_arguments, read_recorded, settings_of, weight_names, weight_of
from day0check.compare.weight_digest import part_digests, value_digest
from day0check.contracts import CONTRACTS
from day0check.types import Measure
from reference.weights import Checkpoint

COMPONENTS = {("kda.conv", "weight"): 3}  # q, k and v follow each other; each of them is cut
RECEIVED = "moe.dispatch"  # a rank sorts what it received by the same operator again, at a site of its own
Shape = tuple[int, ...]


def compare_rank_parameters(model_dir: str, profile: str, candidate: Path, folders: Sequence[Path]) -> list[Measure]:
    """Measures as those of `compare_parameters`, joined over ranks; `candidate` is the merged snapshot of `folders`.

    A rank that recorded nothing is named in a measure that is not judged. Raises what reading the checkpoint raises.
    """
    checkpoint = Checkpoint(model_dir)
    experts = ranks_facts(candidate).get("experts")
    recorded = [read_recorded(folder / PARAMETERS) if (folder / PARAMETERS).is_file() else () for folder in folders]
    known = _Shapes(recorded)
    truths = _RankTruths(checkpoint, known)
    found = []
    for rank, mine in enumerate(recorded):
        if not mine:
            return [_nothing(rank)]
        held = None if experts is None else experts[rank]
        source = _RankSource(checkpoint, truths, known, rank=rank, held=held)
        found.append(compare_with(source, profile, mine))
    return sorted(merged_measures(found), key=lambda m: (m.order, m.tap, m.phase))


def _nothing(rank: int) -> Measure:
    text = f"rank {rank} recorded no weights and settings"
    return Measure("parameters", "weights.place", "exact", "load", None, 0, 0, 0, False, not_judged=text, rank=rank)


class _Shapes:
    """Shapes of the weights that the ranks recorded: `of(tap, name)` gives one for each rank, None where it has none.

    A stack of experts has the shape of one of them.
    """

    def __init__(self, recorded: Sequence[Sequence[Recorded]]) -> None:
        self.size = len(recorded)
        self._found: dict[tuple[str, str], list[Shape | None]] = {}
        for rank, records in enumerate(recorded):
            for r in records:
                for name, weight in r.weights.items():
                    shapes = self._found.setdefault((r.tap, name), [None] * len(recorded))
                    shapes[rank] = tuple(weight.shape[1:] if weight.parts else weight.shape)

    def of(self, tap: str, name: str) -> list[Shape | None]:
        return self._found.get((tap, name), [])


@dataclass(frozen=True)
class Part:
    """One rank's part of a weight: start:stop along `axis`, in each of `components` equal parts of it; the whole
    weight where `axis` is None."""

    axis: int | None = None
    start: int = 0
    stop: int = 0
    components: int = 1

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        if self.axis is None:
            return whole
        apart = whole.unflatten(self.axis, (self.components, -1))
        return apart.narrow(self.axis + 1, self.start, self.stop - self.start).flatten(self.axis, self.axis + 1)


def parts_of(whole: Shape, shapes: Sequence[Shape | None], *, components: int = 1) -> list[Part]:
    """The part of each rank by the `shapes` that they have: slices in order of rank.

    A part that several ranks hold (a head that is on more than one) goes to neighbours. Whole where no axis fits: the
    comparison then says that the shape is another one.
    """
    nothing = [Part() for _ in shapes]
    if not shapes or any(s is None or len(s) != len(whole) for s in shapes):
        return nothing
    cut = [axis for axis in range(len(whole)) if any(s[axis] != whole[axis] for s in shapes)]
    if len(cut) != 1:
        return nothing
    axis, sizes = cut[0], [s[cut[0]] for s in shapes]
    total = sum(sizes)
    if any(n % components for n in (*sizes, whole[axis])):
        return nothing
    found, start = [], 0
    copies = total // whole[axis] if whole[axis] else 0
    if total == whole[axis]:
        for size in sizes:
            found.append(Part(axis, start // components, (start + size) // components, components))
            start += size
        return found
    if copies > 1 and total % whole[axis] == 0 and len(set(sizes)) == 1:
        width = sizes[0] // components
        return [Part(axis, r // copies * width, (r // copies + 1) * width, components) for r in range(len(sizes))]
    return nothing


class _RankTruths:
    """What each rank must have, from one pass of the reference for all of them."""

    def __init__(self, checkpoint: Checkpoint, shapes: _Shapes) -> None:
        self.checkpoint, self.shapes = checkpoint, shapes
        self.rounded: dict[str, str] = {}
        self._passes: dict[str, list[Truth]] = {}

    def of(self, part: str, rank: int, size: int) -> Truth:
        if part not in self._passes:
            recording = _Recording(self.checkpoint, self.shapes, size, self.rounded)
            recording.record(part)
            self._passes[part] = recording.found
        return self._passes[part][rank]


class _Recording(Source):
    """One pass, in which every weight is digested as each rank has it."""

    def __init__(self, checkpoint: Checkpoint, shapes: _Shapes, size: int, rounded: dict[str, str]) -> None:
        super().__init__(checkpoint)
        self.shapes, self.rounded = shapes, rounded
        self.found: list[Truth] = [{} for _ in range(size)]

    def record(self, part: str) -> None:
        first = self._record(part)
        for truth in self.found:
            for tap, recorded in first.items():
                truth.setdefault(tap, recorded)
                if recorded.operator == RECEIVED:
                    truth.setdefault(f"{tap}.received", replace(recorded, tap=f"{tap}.received"))

    def _recorded(self, tap: str, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recorded:
        contract = CONTRACTS[operator]
        arguments = named_arguments(contract, args, kwargs)
        settings = settings_of(contract, arguments)
        names = weight_names(contract, arguments)
        parts = {name: self._parts(tap, operator, name, arguments[name]) for name in names}
        for rank, truth in enumerate(self.found):
            weights = {}
            for name in names:
                own = parts[name][rank].of(arguments[name])
                weights[name] = weight_of(operator, name, own)
                narrow = own.bfloat16()
                if not torch.equal(narrow.to(own.dtype), own):
                    self.rounded[weights[name].digest] = value_digest(narrow)
            truth[tap] = Recorded(tap, operator, "", None, 0, settings, weights)
        return self.found[0][tap]

    def _parts(self, tap: str, operator: str, name: str, weight: torch.Tensor) -> list[Part]:
        shapes = self.shapes.of(tap, name) or [None] * len(self.found)
        return parts_of(tuple(weight.shape), shapes, components=COMPONENTS.get((operator, name), 1))


class _RankSource(Source):
    """The truth for one rank. `held`: the experts in its stacks in their order, None where it has a part of each."""

    def __init__(
        self, checkpoint: Checkpoint, truths: _RankTruths, shapes: _Shapes, *, rank: int, held: Sequence[int] | None
    ) -> None:
        super().__init__(checkpoint)
        self._truths, self._shapes, self._rank, self._held = truths, shapes, rank, held

    def truth(self, parts: set[str]) -> Truth:
        size = self._shapes.size
        found = {part: self._truths.of(part, self._rank, size) for part in parts}
        self.rounded = self._truths.rounded
        return {tap: r for part in sorted(parts, reverse=True) for tap, r in found[part].items()}

    def experts(self, layer: int, part: str, name: str) -> dict[str, str]:
        key = (layer, part, name)
        if key in self._experts:
            return self._experts[key]
        place, prefix = f"layers.{layer:02d}", f"layers.{layer}.block_sparse_moe.experts"
        converted = name != "value"
        tap, argument = (f"{place}.moe.convert.{part}", name) if converted else (f"{place}.moe.experts", part)
        shapes = [None] if self._held is not None else self._shapes.of(tap, argument)
        every = range(self.checkpoint.config.moe.experts)
        numbers = every if self._held is None or not converted else self._held

        def digest(expert: int) -> str:
            whole = self._expert(f"{prefix}.{expert}.{part}.weight", name)
            mine = parts_of(tuple(whole.shape), shapes)[self._rank if self._held is None else 0] if shapes else Part()
            return part_digests(mine.of(whole)[None])[0]

        names: Callable[[int, int], str] = (lambda i, e: str(i)) if converted else (lambda i, e: str(e))
        self._experts[key] = {names(i, e): digest(e) for i, e in enumerate(numbers)}
        return self._experts[key]
