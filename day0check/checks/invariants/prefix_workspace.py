"""Prefixes attended to in chunks through a workspace of any size, against prompts that are attended to whole."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, answered, as_prompt, at_once, pairs, plain
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, Request, RunCase, Schedule

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Do prompts give the same whether what lies before them is attended to whole or through a small workspace?"
NAME = "prefix_workspace"
MERGED, WHOLE = "mla.merge", ("mla.attention", "gqa.attention")


def applies(config: ModelConfig) -> bool:
    """A model has such prefixes where a layer attends to every key."""
    return bool({"mla", "gqa"} & set(config.layers))


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """All sequences as prompts in steps of a page, through workspaces one row below, at and above a page and two pages;
    and the shortest request answering beside the prompts of the others, so that prefixes end at different chunks. Each
    is held against a run of the same steps whose workspace has room for everything."""
    requests, page = answered(case, outputs), case.schedule.page
    prompts = tuple(as_prompt(r, outputs) for r in requests)
    long = at_once(p for p in prompts if len(p.turns[0].tokens) > 3 * page)  # a step of it has two pages behind it
    if not long:
        return ()
    sizes = (page - 1, page, page + 1, 2 * page)
    found = _runs("workspace", long, plain(case, chunk=page), sizes, outputs)
    if len(requests) > 1:
        every = at_once(sorted(requests, key=lambda r: len(outputs.sequences[r.id])))
        size = min(case.schedule.max_batch, len(requests)) * (page - 1)
        found += _runs("workspace-shared", every, plain(case, chunk=page, mixed=True), (size,), outputs)
    return found


def _runs(
    label: str, requests: tuple[Request, ...], schedule: Schedule, sizes: tuple[int, ...], outputs: Outputs
) -> tuple[ExtraRun, ...]:
    """The steps of `schedule` with a workspace for everything, and with one of each of `sizes` rows."""
    together = min(schedule.max_batch, len(requests))
    pages = -(-max(len(outputs.sequences[r.id]) for r in requests) // schedule.page)
    room = together * pages * schedule.page  # a backend may divide it in whole pages
    longest = max(requests, key=lambda r: len(r.turns[0].tokens))
    whole, compared = f"{label}-whole", pairs(requests)
    given = {"requests": requests, "pairings": compared}
    all_at_once = replace(schedule, prefix_workspace=room)
    found = [ExtraRun(whole, "a workspace for whole prefixes", schedule=all_at_once, also=WHOLE, **given)]
    for rows in sizes:
        if rows >= together:
            words, small = f"a prefix workspace of {rows} rows", replace(schedule, prefix_workspace=rows)
            shown = {"against": whole, "merged": (longest.id,), "also": (MERGED,), "law": "parts"}
            found.append(ExtraRun(f"{label}-{rows}", words, schedule=small, **given, **shown))
    return tuple(found)


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="no prompt of the case is longer than three pages")
