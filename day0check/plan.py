"""What a run will take, said before it starts: bytes, memory, minutes; and what of it fits a budget. No torch.

The counts (rows, steps, multiply-adds) follow from the cases and the configuration. The costs per count were measured
with preset `tiny` on one core of a 2-core x86 machine and are good to about a factor of two there; on other machines
they say what is large and what is small.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from day0check.types import NotRun, RunCase
from reference.config import ModelConfig

if TYPE_CHECKING:
    from day0check.checks.invariants.extra_runs import ExtraRun

GIB = float(1 << 30)


@dataclass(frozen=True)
class Costs:
    """Seconds on one core (`per_multiply`: per multiply-add), bytes of a process."""

    start_s: float = 3.0  # a process, torch and the model of a preset
    engine_layer_step_s: float = 0.003
    engine_per_multiply_s: float = 0.5e-9
    judge_layer_step_s: float = 0.0125
    judge_per_multiply_s: float = 2.5e-9
    reference_request_s: float = 1.0
    reference_per_multiply_s: float = 1.8e-9
    operator_case_s: float = 5.0
    compare_run_s: float = 0.5  # a further run with the judged one
    service_case_s: float = 14.0
    process_bytes: int = 400 << 20
    block_bytes: int = 8 << 24  # the largest float64 operand that the reference forms at once
    passes: int = 3  # oracle and replicates of the propagated comparison


CPU = Costs()
ACCELERATOR = Costs(
    start_s=12.0, engine_per_multiply_s=0.5e-11, judge_per_multiply_s=2.5e-11, reference_per_multiply_s=1.8e-9
)


@dataclass(frozen=True)
class CasePlan:
    """One case: rows of its prompts, steps of its decoding, and the predicted seconds of each part, the further runs
    that its checks ask for included."""

    id: str
    prompt_rows: int
    decode_steps: int
    images: int
    candidate_s: float
    reference_s: float
    further_runs: int = 0


@dataclass(frozen=True)
class Plan:
    """The runs of a set of cases. `model_bytes`: read from disk by each of the two processes."""

    cases: tuple[CasePlan, ...]
    model_bytes: int
    candidate_bytes: int
    reference_bytes: int
    start_s: float
    parallel: bool  # whether the reference has a core of its own

    @property
    def peak_bytes(self) -> int:
        """Predicted resident bytes of both processes together."""
        return self.candidate_bytes + self.reference_bytes

    @property
    def seconds(self) -> float:
        """Predicted seconds from start to end."""
        return self.seconds_of(self.cases)

    def seconds_of(self, cases: Sequence[CasePlan]) -> float:
        """Predicted seconds of some of the cases: the reference works one case behind the candidate."""
        candidate, reference = self.start_s, 0.0
        for case in cases:
            candidate += case.candidate_s
            waits_for = candidate if self.parallel else 0.0
            reference = max(reference, waits_for) + case.reference_s
        return reference if self.parallel else candidate + reference

    def within(self, budget_s: float) -> tuple[tuple[str, ...], tuple[NotRun, ...]]:
        """Ids of the cases that fit, in their order up to the first that does not, and the rest by name."""
        fit: list[CasePlan] = []
        for case in self.cases:
            if self.seconds_of([*fit, case]) > budget_s:
                break
            fit.append(case)
        reason = f"does not fit the budget of {duration(budget_s)}"
        left = tuple(NotRun(f"case {case.id}", reason) for case in self.cases[len(fit) :])
        return tuple(case.id for case in fit), left

    def text(self) -> str:
        """The plan as a table and three sentences."""
        width = max((len(case.id) for case in self.cases), default=4)
        lines = [
            f"{'case':{width}}  {'prompt rows':>11}  {'decode steps':>12}  {'images':>6}  {'candidate':>9}  reference"
        ]
        for case in self.cases:
            reference = duration(case.reference_s) if case.reference_s else "-"
            lines.append(
                f"{case.id:{width}}  {case.prompt_rows:>11}  {case.decode_steps:>12}  {case.images:>6}  "
                f"{duration(case.candidate_s):>9}  {reference:>9}"
            )
        count = len(self.cases)
        lines += [
            "",
            f"{count} case{'s' * (count != 1)}: the candidate runs each twice, judged and then unobserved; the "
            f"reference passes over what it answered, {'beside' if self.parallel else 'after'} it.",
            f"{sized(self.model_bytes)} of weights to read, twice; {sized(self.peak_bytes)} of memory at the most "
            f"({sized(self.candidate_bytes)} candidate, {sized(self.reference_bytes)} reference).",
            f"About {duration(self.seconds)}, good to a factor of two.",
        ]
        further = [case for case in self.cases if case.further_runs]
        if further:
            named = ", ".join(f"{case.further_runs} of {case.id}" for case in further)
            lines.insert(-2, f"Checks compare further runs of the candidate: {named}.")
        return "\n".join(lines)


def make_plan(
    config: ModelConfig,
    cases: Sequence[RunCase],
    profile: str,
    device: str,
    *,
    model_dir: str | os.PathLike[str] | None = None,
    repeats: int = 1,
    cores: int | None = None,
    ranks: int = 1,
) -> Plan:
    """The plan of `cases` in their order. `model_dir`: its weights are counted; `cores` (None: those of this machine);
    `ranks` that the candidate is cut over.

    Raises nothing: a plan for a model that is not here has no bytes to read.
    """
    costs = CPU if device.split(":")[0] == "cpu" else ACCELERATOR
    cores = cores if cores is not None else len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    longest = max((_longest(case) for case in cases if not _is_operators(case)), default=0)
    largest_chunk = max(
        (min(_longest(c), c.schedule.chunk or _longest(c)) for c in cases if not _is_operators(c)), default=0
    )
    heads = max(config.index.heads if config.index else 0, config.mla.heads if config.mla else 0, 1)
    weights = all_weights(config)
    stored = 2 if profile != "fp32" else 4
    on_host = device.split(":")[0] == "cpu"
    engine = weights * (stored + 4) if on_host else 0  # the CPU path keeps float32 copies to compute with
    block = min(largest_chunk * longest * heads * 8, costs.block_bytes)
    passes = min(longest * longest * heads * 8, costs.block_bytes) * costs.passes
    kept = min(weights * 8, 2 << 30)
    return Plan(
        tuple(_over_ranks(_case_plan(config, case, costs, repeats), ranks if on_host else 1) for case in cases),
        model_bytes(model_dir),
        ranks * (costs.process_bytes + (2 * block if on_host else 0)) + engine,
        (costs.process_bytes + kept + passes) if longest else 0,
        costs.start_s,
        cores > 1,
    )


def _over_ranks(case: CasePlan, ranks: int) -> CasePlan:
    """The case where `ranks` processes share the cores: each computes its part, and judges also what all have."""
    return replace(case, candidate_s=case.candidate_s * ranks)


def model_bytes(model_dir: str | os.PathLike[str] | None) -> int:
    """Bytes of the safetensors files of a model directory, 0 when it is not there."""
    if model_dir is None:
        return 0
    return sum(file.stat().st_size for file in Path(model_dir).glob("*.safetensors"))


def duration(seconds: float) -> str:
    """42 s, 5 min 30 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"


def sized(count: float) -> str:
    """3.4 MiB, 12 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


# ---------------------------------------------------------------------------------------------------------- counts


def _is_operators(case: RunCase) -> bool:
    return case.id.startswith("operators/")


def _longest(case: RunCase) -> int:
    """Positions of the longest request, answers included."""
    return max(
        (sum(len(t.tokens) for t in r.turns) + r.max_new_tokens * len(r.turns) for r in case.requests), default=0
    )


def _case_plan(config: ModelConfig, case: RunCase, costs: Costs, repeats: int) -> CasePlan:
    if _is_operators(case):
        return CasePlan(case.id, 0, 0, 0, costs.operator_case_s, 0.0)
    if case.id.startswith("service/"):
        return CasePlan(case.id, 0, 0, 0, costs.service_case_s, 0.0)
    prompt_rows, decode_steps, steps, multiplies = _work(config, case)
    engine = steps * costs.engine_layer_step_s + multiplies * costs.engine_per_multiply_s
    judge = steps * costs.judge_layer_step_s + multiplies * costs.judge_per_multiply_s
    reference = len(case.requests) * costs.reference_request_s + multiplies * costs.reference_per_multiply_s
    images = sum(len(t.images) for r in case.requests for t in r.turns)
    further = _further_runs(config, case)
    more = 0.0
    for run in further:
        _, _, own_steps, own = _work(config, replace(case, requests=run.requests, schedule=run.schedule))
        more += own_steps * costs.engine_layer_step_s + own * costs.engine_per_multiply_s
    candidate = engine * (1 + repeats) + judge + more
    reference += len(further) * costs.compare_run_s
    return CasePlan(case.id, prompt_rows, decode_steps, images, candidate, reference, len(further))


def _further_runs(config: ModelConfig, case: RunCase) -> tuple[ExtraRun, ...]:
    """The further runs that the checks of a case want, for answers as long as they may become."""
    if not case.checks:
        return ()
    from day0check.checks import extra_runs_of
    from day0check.checks.invariants.extra_runs import predicted

    return extra_runs_of(case, predicted(case), config)


def _work(config: ModelConfig, case: RunCase) -> tuple[int, int, int, float]:
    """(rows of prompts, steps of decoding, layers times steps, multiply-adds) of one run of a case."""
    prompt = [sum(len(t.tokens) for t in r.turns) for r in case.requests]
    answers = [r.max_new_tokens * len(r.turns) for r in case.requests]
    chunk = case.schedule.chunk
    prefill_steps = sum(-(-len(t.tokens) // (chunk or len(t.tokens) or 1)) for r in case.requests for t in r.turns)
    together = max(1, min(case.schedule.max_batch, len(case.requests)))
    decode_steps = max(max(answers, default=0), -(-sum(answers) // together))
    steps = (prefill_steps + decode_steps) * len(config.layers)
    multiplies = sum(sequence_multiplies(config, p + a) for p, a in zip(prompt, answers, strict=True))
    return sum(prompt), decode_steps, steps, multiplies + image_multiplies(config, case)


def sequence_multiplies(config: ModelConfig, rows: int) -> float:
    """Multiply-adds of one pass over `rows` positions: weights at work per row, and pairs of rows and keys."""
    weights = float(config.hidden * config.vocab)
    pairs = 0.0
    causal = rows * (rows + 1) / 2
    for layer, kind in enumerate(config.layers):
        weights += attention_weights(config, kind) + feed_forward_weights(config, layer, active=True)
        if kind == "kda":
            pairs += 3.0 * rows * config.kda.heads * config.kda.dim**2
            continue
        if kind == "gqa":
            pairs += causal * config.gqa.heads * 2 * config.gqa.dim
            continue
        width = config.mla.heads * (2 * config.mla.kv_lora + config.mla.rope)
        if kind == "mla":
            pairs += causal * width
        else:
            pairs += min(causal, rows * config.index.topk) * width
            pairs += causal * config.index.heads * config.index.dim if kind == "dsa" else 0.0
    return rows * weights + pairs


def attention_weights(config: ModelConfig, kind: str) -> int:
    """Elements of the matrices of one attention sublayer of this kind."""
    hidden = config.hidden
    if kind == "kda":
        k = config.kda
        inner = k.heads * k.dim
        gate = hidden * inner if k.full_rank_gate else k.rank * (hidden + inner)
        return 3 * hidden * inner + k.rank * (hidden + inner) + hidden * k.heads + gate + inner * hidden
    if kind == "gqa":
        return 2 * hidden * config.gqa.dim * (config.gqa.heads + config.gqa.kv_heads)
    m = config.mla
    query = m.heads * (m.nope + m.rope)
    total = m.q_lora * (hidden + query) if m.q_lora is not None else hidden * query
    total += hidden * (m.kv_lora + m.rope) + m.kv_lora * m.heads * (m.nope + m.v)
    total += m.heads * m.v * hidden * (2 if m.gate else 1)
    if kind == "dsa":
        i = config.index
        total += (m.q_lora or hidden) * i.heads * i.dim + hidden * (i.heads + i.dim)
    return total


def feed_forward_weights(config: ModelConfig, layer: int, *, active: bool) -> int:
    """Elements of the matrices of one feed-forward sublayer: all of them, or those at work for one row."""
    if not config.is_moe(layer):
        return 3 * config.hidden * config.mlp_width
    m = config.moe
    inner = m.latent or config.hidden
    experts = m.topk if active else m.experts
    total = config.hidden * m.experts + 3 * experts * inner * m.width + 3 * config.hidden * m.shared_width
    return total + (2 * config.hidden * m.latent if m.latent else 0)


def image_multiplies(config: ModelConfig, case: RunCase) -> float:
    """Multiply-adds of the vision tower over the images of a case; a media pad stands for merge x merge patches."""
    v, total = config.vision, 0.0
    if v is None:
        return total
    inner = v.heads * v.head_dim
    for turn in (t for r in case.requests for t in r.turns if t.images):
        patches = turn.tokens.count(config.tokens.media_pad) * v.merge**2
        per_image = patches / len(turn.images)
        block = 4 * v.hidden * inner + 2 * v.hidden * v.mlp + 2 * per_image * inner
        total += patches * v.layers * block
    return total


def all_weights(config: ModelConfig) -> int:
    """Elements of all matrices of the language model."""
    layers = sum(
        attention_weights(config, kind) + feed_forward_weights(config, n, active=False)
        for n, kind in enumerate(config.layers)
    )
    return layers + config.hidden * config.vocab * (1 if config.tied_head else 2)
