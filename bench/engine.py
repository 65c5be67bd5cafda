"""Speed of the engine beside the float32 reference in one run: a prompt, and a decode step in a long context.

    python -m bench.engine [--hidden 1024] [--layers 16] [--prompt 2048] [--context 8192] [--device cpu] [--compile]

Both sides compute in float32 on one thread and are timed in turns. Answers are compared before anything is timed, the
reference following the engine's choices. An operator counts as met when it is as many times faster as asked, or when it
reaches 70% of the roof of this run that bounds it: the product of matrices for a prompt, reading for a decode step,
whose products have one row. A prompt is met when it, or all of it beside such operators, is as fast as asked.

A decode step is held against three things, and the words say which. The reference of a run has no step: a decode
position is a row of one causal pass over all that lies before it, and ten times faster than that pass is what is asked.
A reference that keeps caches of its own, which only this bench has it do, makes a step of the same work; beside it the
figure is told, and what of the time reading takes that nobody can save. 70% of the read roof counts as met as well.
The step is timed twice: operator by operator, as a run with an observer makes it, and with a sublayer a graph, as
`run --compile` makes it where nobody observes (`--no-graphs` leaves that out; without a compiler it is told so).
"""

from __future__ import annotations

import argparse
import copy
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.choices import Choices, Following
from bench.clocks import clock, gemm_roof, paired, read_roof
from bench.models import directory_of, enlarged
from day0check.accelerated.batch import Batch, Part, make_batch
from day0check.accelerated.cache import Caches
from day0check.accelerated.compiled import check_compiler, compiled, one_graph
from day0check.accelerated.engine import Engine
from day0check.accelerated.one_row_step import OneRowStep, why_not
from day0check.accelerated.ops import TABLE, WEIGHTS
from day0check.contracts.costs import cost_of
from day0check.errors import Unavailable
from day0check.probe.memory import Allocations
from day0check.probe.recorder import Call, Caller, Observer, Recorder
from day0check.probe.registry import Operators
from reference.layers import KdaCache, LatentCache
from reference.model import Model, State
from reference.weights import Checkpoint

PAGE = 64
PREFILL, DECODE, ROOF = 5.0, 10.0, 0.7  # what is asked for
NEAR = 1e-3  # of the logits' norm: answers that lie further apart are not the same
FAMILIES = {
    "linears": ("kda.project", "kda.output", "mla.query", "mla.latent", "mla.gate", "mla.output", "moe.down", "moe.up"),
    "MLPs and head": ("mlp.", "moe.shared", "head."),
    "delta rule": ("kda.",),
    "sparse index": ("dsa.index", "dsa.score", "dsa.select", "dsa.pool", "dsa.expand"),
    "attention": ("mla.", "dsa.attention", "rope."),
    "routed experts": ("moe.",),
    "residual spine and norms": ("norm.", "residual."),
    "caches and states": ("kv.", "index.", "state."),
    "the rest": ("",),
}


@dataclass
class Spent:
    """What one operator took on one side: seconds, multiply-adds times two, bytes."""

    seconds: float = 0.0
    operations: float = 0.0
    bytes: float = 0.0
    calls: int = 0


class Parts(Observer):
    """Adds up the time of every operator of a candidate."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.found = device, {}

    def before(self, call: Call) -> float:
        return clock(self.device)

    def after(self, call: Call, token: float, results: tuple[Tensor, ...]) -> None:
        add(self.found, call.operator, clock(self.device) - token, call.args, call.kwargs)


def add(found: dict[str, Spent], operator: str, seconds: float, args: Any, kwargs: Any) -> None:
    part, cost = found.setdefault(operator, Spent()), cost_of(operator, *args, **kwargs)
    part.seconds += seconds
    part.calls += 1
    if cost is not None:
        part.operations += cost.operations
        part.bytes += cost.bytes


class Sides:
    """The engine and the reference of one model, and a long context that both remember alike."""

    def __init__(self, directory: str, *, context: int, device: torch.device, compiling: bool = False) -> None:
        checkpoint = Checkpoint(directory)
        self.device, self.context, self.config = device, context, checkpoint.config
        self.engine = Engine(checkpoint, dtype=torch.float32, device=device)
        self.model = Model(checkpoint, dtype=torch.float32, device=str(device), kept_bytes=8 << 30)
        self.table = compiled(TABLE, {}) if compiling else TABLE
        self.operators = Operators(self.table, weights=WEIGHTS, pools=("kv", "index", "state"))
        self.graphs: OneRowStep | None = None
        self.pages = tuple(range(-(-(context + 64) // PAGE)))
        self.caches, self.state = self._remembered()

    def _remembered(self) -> tuple[Caches, State]:
        """The caches of both sides, filled with the same values for `context` positions."""
        caches = self.engine.caches(pages=len(self.pages), page=PAGE, slots=1)
        state, draw = self.model.start(), torch.Generator().manual_seed(0)
        for number, cache in enumerate(state.caches):
            pools = [getattr(caches, kind).get(number) for kind in ("kv", "index", "conv", "kda")]
            for pool in (p for p in pools if p is not None):
                pool.copy_(torch.randn(pool.shape, generator=draw) * (0.05 if pool.dim() == 4 else 1.0))
            kv, index, conv, kda = (p if p is None else p.flatten(0, 1) for p in pools)
            if isinstance(cache, LatentCache):
                cache.latent = kv[: self.context].clone()
                cache.index_keys = None if index is None else index[: self.context].clone()
            elif isinstance(cache, KdaCache):
                cache.conv, cache.state = conv.unsqueeze(0).clone(), kda.unsqueeze(0).clone()
        state.length = self.context
        return caches, state

    def remembered(self) -> list[Tensor]:
        """A copy of the caches: a decode step writes its states over those before it."""
        return [pool.clone() for pool in self._pools()]

    def put_back(self, remembered: list[Tensor]) -> None:
        for pool, before in zip(self._pools(), remembered, strict=True):
            pool.copy_(before)

    def _pools(self) -> list[Tensor]:
        return [pool for kind in ("kv", "index", "conv", "kda") for pool in getattr(self.caches, kind).values()]

    def batch(self, phase: str, tokens: tuple[int, ...], start: int) -> Batch:
        part = Part("a", tokens, start, self.pages, 0, wants_logits=True)
        return make_batch(phase, [part], page=PAGE, device=self.device)

    def prefill(self, tokens: tuple[int, ...], recorder: Recorder | None = None) -> Tensor:
        """Logits of the last row of a prompt, by the engine, in caches that are kept for it."""
        recorder, batch = recorder or Recorder(), self.batch("prefill", tokens, 0)
        with recorder.step("prefill", batch.rows, 0):
            self.engine.prefill(Caller(self.operators, recorder), self.prompt_caches, batch)
        return self.engine.wanted_logits[-1]

    def make_graphs(self) -> str:
        """Lets `decode_by_graphs` go; why it cannot, where it cannot."""
        try:
            check_compiler(self.device)
        except Unavailable as error:
            return str(error)
        self.graphs = OneRowStep(self.engine, self.table, one_graph)
        return why_not(self.engine)

    def decode_by_graphs(self) -> Tensor:
        """As `decode`, a graph a sublayer."""
        self.engine.one_row = self.graphs
        try:
            return self.decode()
        finally:
            self.engine.one_row = None

    def decode(self, recorder: Recorder | None = None) -> Tensor:
        """Logits of one token after the context, by the engine; its place is written again each time."""
        recorder, batch = recorder or Recorder(), self.batch("decode", (65,), self.context)
        with recorder.step("decode", batch.rows, 0):
            self.engine.decode(Caller(self.operators, recorder), self.caches, batch)
        return self.engine.wanted_logits[-1]


def timed_call(found: dict[str, Spent], device: torch.device) -> Callable[..., Any]:
    """What the reference's operators go through to be timed."""

    def call(place: str, operator: str, function: Callable[..., Any], *args: Any, site: str = "", **kwargs: Any) -> Any:
        begin = clock(device)
        result = function(*args, **kwargs)
        add(found, operator, clock(device) - begin, args, kwargs)
        return result

    return call


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def least(runs: list[dict[str, Spent]]) -> dict[str, Spent]:
    """The quickest of several runs of each operator."""
    return {name: min((r[name] for r in runs), key=lambda p: p.seconds) for name in runs[0]}


def table(ours: dict[str, Spent], theirs: dict[str, Spent], *, asked: float, roofs: tuple[float, float]) -> list[str]:
    """A line an operator, the slowest first: seconds of both, times faster, share of its roof, and if it is met."""
    lines = [f"    {'operator':20} {'engine ms':>10} {'reference ms':>13} {'faster':>8} {'of roof':>8}"]
    for name in sorted(ours, key=lambda n: -ours[n].seconds):
        mine, other = ours[name], theirs.get(name, Spent())
        faster = other.seconds / mine.seconds if mine.seconds else float("inf")
        share = max(mine.operations / roofs[0], mine.bytes / roofs[1]) / mine.seconds if mine.operations else 0.0
        note = "" if faster >= asked or share >= ROOF else "  below"
        roof = f"{share:8.0%}" if mine.operations else f"{'-':>8}"
        lines.append(f"    {name:20} {mine.seconds * 1e3:10.2f} {other.seconds * 1e3:13.2f} {faster:8.1f} {roof}{note}")
    return lines


def at_roof(part: Spent, roofs: tuple[float, float], phase: str) -> bool:
    """Whether an operator multiplies matrices and reaches what counts as met of the roof that bounds it: the GEMM's in
    a prompt, reading in a decode step."""
    if part.operations == 0 or part.seconds == 0:
        return False
    least_seconds = part.operations / roofs[0] if phase == "prefill" else part.bytes / roofs[1]
    return least_seconds / part.seconds >= ROOF


def without(names: list[str], best: dict[str, float], ours: dict[str, Spent], theirs: dict[str, Spent]) -> float:
    """How many times faster everything is beside the operators `names`."""
    mine = best["engine"] - sum(ours[name].seconds for name in names)
    other = best["reference"] - sum(theirs[name].seconds for name in names if name in theirs)
    return other / max(mine, 1e-9)


def families(ours: dict[str, Spent], theirs: dict[str, Spent], roofs: tuple[float, float]) -> list[str]:
    """A line a family of operators: milliseconds of both, GFLOP/s, and shares of both roofs."""
    left, lines = dict(ours), []
    for family, prefixes in FAMILIES.items():
        names = [name for name in left if name.startswith(prefixes)]
        parts = [left.pop(name) for name in names]
        seconds = sum(p.seconds for p in parts)
        if not seconds:
            continue
        operations, read = sum(p.operations for p in parts), sum(p.bytes for p in parts)
        other = sum(theirs[name].seconds for name in names if name in theirs)
        lines.append(
            f"    {family:26} {seconds * 1e3:9.2f} ms, reference {other * 1e3:9.2f} ms, "
            f"{operations / seconds / 1e9:6.1f} GFLOP/s ({operations / seconds / roofs[0]:4.0%} of the GEMM roof), "
            f"{read / seconds / 1e9:5.1f} GB/s ({read / seconds / roofs[1]:4.0%} of reading)"
        )
    return lines


def prompt_part(sides: Sides, rows: int, *, repeats: int, roofs: tuple[float, float], asked: float) -> bool:
    tokens = tuple(torch.randint(0, 256, (rows,), generator=torch.Generator().manual_seed(1)).tolist())
    sides.prompt_caches = sides.engine.caches(pages=len(sides.pages), page=PAGE, slots=1)
    choices = Choices()
    found = sides.prefill(tokens, Recorder([choices]))
    following = Following(choices)
    far = distance(found, sides.model.forward(tokens, call=following)[-1])
    best = paired(
        {"engine": lambda: sides.prefill(tokens), "reference": lambda: sides.model.forward(tokens)},
        device=sides.device,
        repeats={"engine": 2 * repeats, "reference": repeats},
    )
    ours, theirs = [], []
    for _ in range(repeats):
        parts, found = Parts(sides.device), {}
        sides.prefill(tokens, Recorder([parts]))
        sides.model.forward(tokens, call=timed_call(found, sides.device))
        ours.append(parts.found)
        theirs.append(found)
    compared = Compared(f"prefill of {rows} tokens", "prefill", best, least(ours), least(theirs), asked, roofs)
    return report(compared, far, following)


def decode_part(sides: Sides, *, repeats: int, roofs: tuple[float, float], graphs: bool) -> bool:
    def reference(**kwargs: Any) -> Tensor:
        state = copy.copy(sides.state)
        state.caches = [copy.copy(cache) for cache in sides.state.caches]  # `extend` rebinds and never writes in place
        return sides.model.extend(state, (65,), **kwargs)[-1]

    found, following = by_choices(sides)
    far = distance(found, reference(call=following))
    timed = {"engine": sides.decode, "reference": reference}
    why = sides.make_graphs() if graphs else "left out"
    if not why:
        remembered = sides.remembered()
        far = max(far, distance(sides.decode_by_graphs(), found))
        sides.put_back(remembered)
        timed["graphs"] = sides.decode_by_graphs
    best = paired(timed, device=sides.device, repeats=4 * repeats)
    ours, theirs = [], []
    for _ in range(2 * repeats):
        parts, by_operator = Parts(sides.device), {}
        sides.decode(Recorder([parts]))
        reference(call=timed_call(by_operator, sides.device))
        ours.append(parts.found)
        theirs.append(by_operator)
    compared = Compared(
        f"decode step at context {sides.context}", "decode", best, least(ours), least(theirs), DECODE, roofs
    )
    report(compared, far, following)
    print(memory_of_a_step(sides))
    return judged_step(compared, causal_pass(sides), why) and far < NEAR


def by_choices(sides: Sides) -> tuple[Tensor, Following]:
    """Logits of a decode step, and a reference that follows its choices. What the step wrote is taken back."""
    choices, remembered = Choices(), sides.remembered()
    found = sides.decode(Recorder([choices])).clone()
    sides.put_back(remembered)
    return found, Following(choices)


def causal_pass(sides: Sides) -> float:
    """Seconds of the reference's one causal pass over the context and the row behind it."""
    tokens = torch.randint(0, 256, (sides.context + 1,), generator=torch.Generator().manual_seed(2))
    begin = clock(sides.device)
    sides.model.forward(tokens)
    return clock(sides.device) - begin


def judged_step(c: Compared, causal: float, why: str) -> bool:
    """Says what a decode step is held against; whether it is as fast as asked, operator by operator and by graphs."""
    floor = sum(part.bytes for part in c.ours.values())
    roof = floor / c.roofs[1]
    cached = c.best["reference"]
    print(
        f"    asked: {c.asked:g} times faster than the reference needs for the row, whose decode positions are rows of "
        f"one causal pass ({causal:.1f} s),\n    or {ROOF:.0%} of the read roof: a step must read and write "
        f"{floor / 1e6:.1f} MB, {roof * 1e3:.1f} ms of this run's reading;\n    not asked, told: the reference with "
        f"caches of its own, {cached * 1e3:.1f} ms ({c.asked:g} times faster would be {cached / c.asked * 1e3:.1f} ms)"
    )
    kinds = {"engine": "operator by operator", "graphs": "a graph a sublayer, unobserved, as with --compile"}
    verdicts = []
    for kind, words in kinds.items():
        if kind not in c.best:
            print(f"    {words}: not measured ({why})")
            continue
        seconds = c.best[kind]
        met = causal / seconds >= c.asked or roof / seconds >= ROOF
        verdicts.append(met)
        print(
            f"    {words}: {seconds * 1e3:.1f} ms; {causal / seconds:.0f} times the causal pass, {roof / seconds:.0%} "
            f"of the read roof, {cached / seconds:.1f} times the reference with caches: {'met' if met else 'NOT MET'}"
        )
    return all(verdicts)


def memory_of_a_step(sides: Sides) -> str:
    """What a warm decode step takes of memory: tensors that operations make, and pages that the system or a device's
    allocator must give for them."""
    sides.decode()
    with Allocations() as taken:
        sides.decode()
    before = reserved(sides.device)
    sides.decode()
    more = reserved(sides.device) - before
    return (
        f"    a warm step makes {taken.made} tensors (results of operations and what lies between them), the "
        f"largest of {taken.largest_bytes / 1e6:.2f} MB, at most {taken.peak_bytes / 1e6:.2f} MB at a time, and keeps "
        f"{taken.live_bytes} bytes;\n    {more} pages or blocks of new memory are asked of the system for it"
    )


def reserved(device: torch.device) -> int:
    """How often memory was asked of the system: pages first touched by this process, or blocks a device's allocator
    has taken from the device."""
    if device.type == "cuda":
        return int(torch.cuda.memory_stats(device)["segment.all.allocated"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@dataclass(frozen=True)
class Compared:
    """One comparison: least seconds of both sides as a whole and of each operator."""

    title: str
    phase: str
    best: dict[str, float]
    ours: dict[str, Spent]
    theirs: dict[str, Spent]
    asked: float
    roofs: tuple[float, float]


def report(c: Compared, far: float, following: Following) -> bool:
    """Prints one comparison; whether it is met: as a whole, or beside what is at the roof that bounds it."""
    bound = [name for name, part in c.ours.items() if at_roof(part, c.roofs, c.phase)]
    faster, rest = c.best["reference"] / c.best["engine"], without(bound, c.best, c.ours, c.theirs)
    roof = "GEMM" if c.phase == "prefill" else "read"
    share = sum(c.ours[name].seconds for name in bound) / c.best["engine"]
    met = faster >= c.asked or rest >= c.asked
    asked = f" (asked: {c.asked:g})" if c.phase == "prefill" else " than with caches of its own"
    print(f"\n{c.title}: engine {c.best['engine'] * 1e3:.1f} ms, reference {c.best['reference'] * 1e3:.1f} ms")
    print(f"    {faster:.1f} times faster{asked}")
    print(
        f"    {rest:.1f} times faster beside the operators that reach {ROOF:.0%} of the {roof} roof ({share:.0%} of "
        f"the engine's time: {', '.join(bound) or 'none'})"
    )
    print(f"    answers differ by {far:.1e} of the logits' norm, the reference following the engine's choices;")
    print(f"    it would have chosen otherwise in {len(following.otherwise)}: {following.otherwise[:4]}")
    outside = c.best["engine"] - sum(p.seconds for p in c.ours.values())
    print(f"    {max(outside, 0.0) * 1e3:.1f} ms of the engine's time outside its operators")
    print("\n".join(families(c.ours, c.theirs, c.roofs)))
    print("\n".join(table(c.ours, c.theirs, asked=c.asked, roofs=c.roofs)))
    if c.phase == "prefill":
        print(f"    {'met' if met else 'NOT MET'}")
    return met and far < NEAR


def main(argv: list[str] | None = None) -> int:
    ask = argparse.ArgumentParser(prog="bench.engine", description=__doc__.split("\n", 1)[0])
    for name, default in (("hidden", 1024), ("layers", 16), ("prompt", 2048), ("context", 8192), ("repeats", 3)):
        ask.add_argument(f"--{name}", type=int, default=default)
    ask.add_argument("--device", default="cpu")
    ask.add_argument("--no-graphs", action="store_true", help="the decode step operator by operator alone")
    ask.add_argument("--compile", action="store_true", help="the engine's operators by torch.compile, as run --compile")
    given = ask.parse_args(argv)
    torch.set_num_threads(1)
    device = torch.device(given.device)
    positions = max(given.prompt, given.context) + 64
    model = enlarged("speed", layers=given.layers, positions=positions, hidden_size=given.hidden)
    roofs = gemm_roof(device), read_roof(device)
    print(
        f"roofs of this run: GEMM {roofs[0] / 1e9:.1f} GFLOP/s, reading {roofs[1] / 1e9:.1f} GB/s, float32, one thread"
    )
    sides = Sides(str(directory_of(model)), context=given.context, device=device, compiling=given.compile)
    met = prompt_part(sides, given.prompt, repeats=given.repeats, roofs=roofs, asked=PREFILL)
    met &= decode_part(sides, repeats=given.repeats, roofs=roofs, graphs=not given.no_graphs)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
