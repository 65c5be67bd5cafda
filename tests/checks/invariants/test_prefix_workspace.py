"""Prefixes through a workspace: the healthy engine, and engines that are wrong in one part of it."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from invariant_stage import Stage

from day0check.accelerated import layers, prefix_chunks
from day0check.probe.registry import Registration


def test_workspaces_of_every_size_give_the_same(prefixes: Stage, tmp_path):
    """Would catch an alarm over the rounding of partial results, and runs in which nothing is merged."""
    answer = prefixes.judge("prefix_workspace", tmp_path)
    assert answer.outcome.status == "passed", answer.outcome.summary
    assert answer.outcome.summary.startswith("5 runs")


def in_bits(inner, q, **kwargs):
    y, lse = inner(q, **kwargs)
    return y, lse / math.log(2)


def garbage_where_nothing_is_seen(inner, q, **kwargs):
    y, lse = inner(q, **kwargs)
    return y.masked_fill((lse == -math.inf).unsqueeze(-1), 0.5), lse.masked_fill(lse == -math.inf, 0.0)


def last_part_forgotten(inner, parts, *, lse):
    return inner(parts[:, :-1], lse=lse[:, :-1]) if parts.shape[1] > 2 else inner(parts, lse=lse)


def rows_of_the_last_chunk(inner, pool, *, indices, out, **kwargs):
    """Rows that a shorter prefix does not have are left as the chunk before left them."""
    stale = out.clone()
    rows = inner(pool, indices=indices, out=out, **kwargs)
    return rows.copy_(torch.where((indices < 0).unsqueeze(-1), stale, rows))


def sees_one_key_more(inner, q, *, visible, keys, **kwargs):
    """... and so a row that sees such a key is wrong: one key beyond the prefix."""
    return inner(q, visible=(visible + 1).clamp(max=keys.shape[1]), keys=keys, **kwargs)


BREAKS = {
    "logarithms to base 2": (("mla.partial", in_bits),),
    "an empty part weighs something": (("mla.partial", garbage_where_nothing_is_seen),),
    "a part is not merged": (("mla.merge", last_part_forgotten),),
    "rows of an earlier chunk are seen": (
        ("prefix.gather", rows_of_the_last_chunk),
        ("mla.partial", sees_one_key_more),
    ),
}
SHOWN = {
    "logarithms to base 2": "workspace-16",  # parts of as many keys have nearly the same weight to any base
    "an empty part weighs something": "workspace-shared-14",
    "rows of an earlier chunk are seen": "workspace-shared-14",
}


def base_of(label: str) -> str:
    return f"{label.rpartition('-')[0]}-whole"


@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_part_is_found(prefixes: Stage, tmp_path, broken):
    """Would catch an invariant that does not see what it is for."""
    label = SHOWN.get(broken, "workspace-8")
    answer = prefixes.judge("prefix_workspace", tmp_path, *BREAKS[broken], only=(base_of(label), label))
    assert answer.outcome.status == "failed", answer.outcome.summary
    first = answer.findings[0]
    assert (first.operator, first.layer, first.evidence["run"]) == ("mla.merge", 2, label)


def test_a_chunk_that_is_dropped_is_found(prefixes: Stage, tmp_path, monkeypatch):
    """Would catch an engine that attends to the first chunks of a prefix alone."""
    real = prefix_chunks.plan_prefix

    def without_the_last(batch, **sizes):
        plan = real(batch, **sizes)
        return plan if plan is None else prefix_chunks.PrefixPlan(plan.chunks[:-1], plan.own)

    monkeypatch.setattr(layers, "plan_prefix", without_the_last)
    answer = prefixes.judge("prefix_workspace", tmp_path, only=("workspace-whole", "workspace-9"))
    assert answer.outcome.status == "failed", answer.outcome.summary
    assert (answer.findings[0].operator, answer.findings[0].layer) == ("mla.merge", 2)


def test_a_run_that_merges_nothing_says_nothing(prefixes: Stage, tmp_path, monkeypatch):
    """Would catch a check that passes although every prefix was attended to whole."""
    monkeypatch.setattr(layers, "plan_prefix", lambda batch, **sizes: None)
    answer = prefixes.judge("prefix_workspace", tmp_path, only=("workspace-whole", "workspace-8"))
    assert answer.outcome.status == "not_run"
    assert "attended to whole" in answer.outcome.summary or "was not made" in answer.outcome.summary


def reads_pages(q, *, pool, table, value_width, owner, visible, scale, window=None):
    """A kernel of a user: it gathers its keys itself, and `window` of them at most."""
    keys = pool[table[owner]].flatten(1, 2).float()
    places = torch.arange(keys.shape[1])
    hidden = places >= visible[:, None]
    if window is not None:
        hidden |= places < visible[:, None] - window
    keys = keys.masked_fill(hidden[..., None], 0)
    s = torch.einsum("rhd,rkd->rhk", q.float(), keys) * scale
    p = s.masked_fill(hidden[:, None], -math.inf).softmax(-1).to(q.dtype).float()
    return torch.einsum("rhk,rkd->rhd", p, keys[..., :value_width]).to(q.dtype)


def in_place_of_dense(kernel) -> Registration:
    return Registration("replace", "mla.attention", kernel, None, ("kv.gather", "mla.attention"))


def test_a_kernel_that_reads_pages_itself_is_asked_too(prefixes: Stage, tmp_path):
    """Would catch a check that cannot be asked where a healthy kernel covers the gather, so that nobody is ready."""
    answer = prefixes.judge("prefix_workspace", tmp_path, in_place_of_dense(reads_pages), base=True, follow=True)
    assert answer.outcome.status == "passed", answer.outcome.summary
    assert answer.outcome.summary.startswith("5 runs")


def test_a_kernel_that_forgets_what_lies_far_back_is_found(prefixes: Stage, tmp_path):
    """Would catch parts that are held against nothing where the kernel on whole prefixes is a user's."""
    forgetful = in_place_of_dense(functools.partial(reads_pages, window=30))
    answer = prefixes.judge("prefix_workspace", tmp_path, forgetful, only=("workspace-whole", "workspace-9"))
    assert answer.outcome.status == "failed", answer.outcome.summary
    assert (answer.findings[0].operator, answer.findings[0].layer) == ("mla.merge", 2)
