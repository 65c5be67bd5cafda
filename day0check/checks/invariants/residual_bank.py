"""The bank of attention residuals: a slot that was stored stays as it is until the last mix has read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence, answer, answer_from
from day0check.types import Outputs, RunCase

if TYPE_CHECKING:
    from day0check.checks.invariants.extra_runs import ExtraRun
    from reference.config import ModelConfig

QUESTION = "Does every mix of residuals read the bank as it was stored, by its digests after every layer?"
NAME = "residual_bank"
KEPT = ".kept"  # how the taps of `compare/bank.py` end


def applies(config: ModelConfig) -> bool:
    return config.residual.kind == "attention"


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """None: the digests of the judged run say it."""
    return ()


def judge(evidence: Evidence) -> Answer:
    kept = tuple(m for m in evidence.measures if m.tap.endswith(KEPT))
    phases = {m.phase for m in kept}
    if evidence.finished and kept and all(m.passed for m in kept):
        decodes = any(r.max_new_tokens > 1 for r in evidence.case.requests)
        lacking = {"prefill"} | ({"decode"} if decodes else set())
        lacking -= phases
        if lacking:
            return answer(NAME, evidence, "not_run", f"no slot was read again in {', '.join(sorted(lacking))}")
    return answer_from(NAME, kept, evidence, nothing="no slot of the bank was stored and read again")
