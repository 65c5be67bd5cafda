"""Each invariant on the healthy engine, and on one that is broken at the place that it guards."""

from __future__ import annotations

import pytest
import torch
from invariant_stage import Stage

from day0check.accelerated.host_tier import HostTier
from day0check.accelerated.ops.prefix import BOUNDARY, ENTRY, HEAD
from day0check.accelerated.scheduler import Scheduler
from day0check.accelerated.staging import StagingQueue, stage_through
from day0check.checks import INVARIANTS

OFTEN = ("decode_equals_prefill", "chunked_equals_one_shot", "preempted", "warm_prefix", "experts_once")
SLOW = (
    "alone_equals_batched",
    "reordered",
    "mixed_steps",
    "padded",
    "offloaded",
    "aborted",
    "causality",
    "isolation",
    "slot_reuse",
    "poisoned_memory",
    "delayed_copies",
    "repeated",
)
TEXTS = (*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))


@pytest.mark.parametrize("check", TEXTS)
def test_the_healthy_engine_passes(texts: Stage, tmp_path, check):
    """Would catch an alarm over legal rounding, and a run that does not do what it is for."""
    answer = texts.judge(check, tmp_path)
    assert answer.outcome.status == "passed", answer.outcome.summary


def window_lost(inner, x, *, state, **kwargs):
    return inner(x, state=torch.zeros_like(state), **kwargs)


def state_lost(inner, pool, *, slots):
    return inner(pool, slots=torch.full_like(slots, -1))


def leaks_from_the_last_row(inner, x, **kwargs):
    y = inner(x, **kwargs)
    return y + 0.05 * y[-1:]


def second_request_scaled(inner, q, *, offsets, **kwargs):
    y, state = inner(q, offsets=offsets, **kwargs)
    scale = torch.ones(len(y), 1, 1, dtype=y.dtype)
    scale[int(offsets[1]) :] = 0.5
    return y * scale, state


def single_rows_afresh(inner, q, *, offsets, state, **kwargs):
    counts = offsets[1:] - offsets[:-1]
    if int(counts.max()) > 1:
        state = state.masked_fill((counts == 1).view(-1, 1, 1, 1), 0)
    return inner(q, offsets=offsets, state=state, **kwargs)


class StaleState:
    """A prompt that begins anew begins from the state that the last store left."""

    def __init__(self):
        self.slots = {}

    def store(self, inner, pool, *, value, slots):
        self.slots[pool.data_ptr()] = slots
        return inner(pool, value=value, slots=slots)

    def load(self, inner, pool, *, slots):
        old = self.slots.get(pool.data_ptr())
        again = old is not None and bool((slots < 0).all()) and len(old) == len(slots)
        return inner(pool, slots=old if again else slots)


def padding_is_one_more_token(inner, q, *, offsets, **kwargs):
    offsets = offsets.clone()
    offsets[-1] = min(len(q), int(offsets[-1]) + 1)
    return inner(q, offsets=offsets, **kwargs)


def first_page_everywhere(inner, pool, *, host, pages, places):
    return inner(pool, host=host, pages=pages, places=places[:1].expand(len(places)))


def half_a_block_is_a_hit(inner, tokens, *, salts, held):
    page = (held.shape[1] - HEAD) // 3
    tokens = tokens.clone()
    for block in range(len(tokens) // page):
        begin = block * page
        for row in held[(held[:, ENTRY] > 0) & (held[:, BOUNDARY] == begin + page)]:
            known = row[HEAD : HEAD + page]
            if torch.equal(known[: page // 2], tokens[begin : begin + page // 2]):
                tokens[begin : begin + page] = known
                break
    return inner(tokens, salts=salts, held=held)


def sees_the_next_row(inner, y, **kwargs):
    out = inner(y, **kwargs)
    return out + out.roll(-1, 0)


def of_limited_capacity(inner, x, *, offsets, **kwargs):
    y = inner(x, offsets=offsets, **kwargs)
    place = torch.arange(len(x)) - offsets[:-1].repeat_interleave(offsets[1:] - offsets[:-1])
    return y.masked_fill((place >= 9).unsqueeze(1), 0)


def fresh_states_are_not_fresh(inner, pool, *, slots):
    states = inner(pool, slots=slots)
    old = 0.2 * pool[:1].nan_to_num()
    return torch.where((slots < 0).view(-1, *[1] * (states.dim() - 1)), old.to(states.dtype), states)


class NeverTheSame:
    def __init__(self):
        self.calls = 0

    def scores(self, inner, x, **kwargs):
        self.calls += 1
        return inner(x, **kwargs) * (1 + 0.02 * (self.calls % 7))


def pair_doubled(inner, x, **kwargs):
    y, order, active, offsets = inner(x, **kwargs)
    order = order.clone()
    order[-1] = order[0]
    return y, order, active, offsets


def scaled_twice(inner, y, **kwargs):
    return inner(y, **kwargs) * 2.5


# check -> the break, and the runs in which it shows
BITES = {
    "decode_equals_prefill": (("kda.conv", window_lost, "decode"), ("whole-short",)),
    "chunked_equals_one_shot": (("state.load", state_lost, "prefill"), ("chunk-9",)),
    "alone_equals_batched": (("mlp.dense", leaks_from_the_last_row), ("alone-long",)),
    "reordered": (("kda.attention", second_request_scaled), ("reversed",)),
    "mixed_steps": (("kda.attention", single_rows_afresh, "prefill"), ("mixed-7",)),
    "padded": (("kda.attention", padding_is_one_more_token, "decode"), ("padded-5",)),
    "offloaded": (("kv.reload", first_page_everywhere), ("offload-long",)),
    "warm_prefix": (("prefix.match", half_a_block_is_a_hit), ("warm-long-12",)),
    "causality": (("kda.output", sees_the_next_row), ("whole-long", "later-long-18")),
    "isolation": (("moe.experts", of_limited_capacity), ("others-turns",)),
    "slot_reuse": (("state.load", fresh_states_are_not_fresh), ("again", "alone-short", "used-short")),
    "repeated": (("mlp.dense", NeverTheSame().scores), ()),
}


@pytest.mark.parametrize("check", BITES)
def test_a_broken_operator_is_found(texts: Stage, tmp_path, check):
    """Would catch an invariant that no longer sees the fault it is for."""
    broken, labels = BITES[check]
    answer = texts.judge(check, tmp_path, broken, base=True, follow=check == "decode_equals_prefill", only=labels)
    assert answer.outcome.status == "failed", answer.outcome.summary
    assert answer.findings[0].severity == "blocker"
    assert answer.findings[0].evidence["run"] == (labels or ("again",))[-1]


def test_a_state_that_survives_preemption_is_found(texts: Stage, tmp_path):
    """Would catch a resumed request that goes on from where it was interrupted, and counts tokens twice."""
    stale = StaleState()
    answer = texts.judge(
        "preempted",
        tmp_path,
        ("state.store", stale.store),
        ("state.load", stale.load),
        only=("preempt-short",),
    )
    assert answer.outcome.status == "failed", answer.outcome.summary
    first = answer.findings[0]
    assert (first.request, first.layer) == ("invariants/x/short#1", 0)


def test_memory_that_an_abort_gives_away_is_found(texts: Stage, tmp_path, monkeypatch):
    """Would catch an abort that frees the memory of a neighbour, which the next request then shares."""
    real = Scheduler._drop

    def drop(self, running):
        real(self, running)
        if self.active:
            self.caches.slots._free.appendleft(self.active[0].tenancy.slot)

    monkeypatch.setattr(Scheduler, "_drop", drop)
    answer = texts.judge("aborted", tmp_path, only=("abort-long",))
    assert answer.outcome.status == "failed", answer.outcome.summary


def page_numbers_overflow(inner, pool, *, table, **kwargs):
    return inner(pool, table=table.where(table < 0, table % 512), **kwargs)


def pages_are_neighbours(inner, pool, *, table, **kwargs):
    width = table.shape[1]
    guess = (table[:, :1] + torch.arange(width)).clamp(max=len(pool) - 1)
    return inner(pool, table=guess, **kwargs)


def rows_of_a_copy(inner, pool, *, value, slots):
    inner(pool.contiguous(), value=value, slots=slots)


def garbage_is_read(inner, pool, **kwargs):
    unwritten = bool((pool.flatten(0, 1)[:, 0] == 240).any())
    return inner(pool, **kwargs) * (1.02 if unwritten else 1)


MEMORY = {
    "memory-garbage": ("kv.gather", garbage_is_read),
    "memory-shuffled": ("kv.gather", pages_are_neighbours),
    "memory-end": ("kv.gather", page_numbers_overflow),
    "memory-strided": ("kv.write", rows_of_a_copy),
}


@pytest.mark.parametrize("label", MEMORY)
def test_memory_that_shows_is_found(texts: Stage, tmp_path, label):
    """Would catch a kind of memory that is not what it says, and a comparison that does not look at bytes."""
    answer = texts.judge("poisoned_memory", tmp_path, MEMORY[label], only=("again", label))
    assert answer.outcome.status == "failed", answer.outcome.summary
    assert answer.findings[0].evidence["run"] == label


class NobodyWaits(StagingQueue):
    """Copies are issued one by one out of `depth` buffers, and buffers are taken again without a wait."""

    def free(self, number):
        pass

    def stage(self, inner, ids, *, on, **others):
        there = stage_through(self, ids, *others.values())
        return (there[0].clamp(0, 255), *(array.to(on.device) for array in others.values()))


@pytest.mark.parametrize(
    ("moment", "told"), [("late", "a race, where a buffer is written again"), ("always", "no race alone")]
)
def test_a_buffer_that_is_written_too_early_is_found(texts: Stage, tmp_path, moment, told):
    """Would catch copies that nobody delays, buffers that nobody digests, and a control whose word is not asked."""
    broken = NobodyWaits(torch.device("cpu"), depth=4, deferred=False).stage
    if moment == "always":

        def broken(inner, ids, **others):
            return (ids.roll(1), *inner(ids, **others)[1:])

    labels = ("again", "copies-late", "copies-at-once")
    answer = texts.judge("delayed_copies", tmp_path, ("batch.stage", broken), only=labels)
    assert answer.outcome.status == "failed", answer.outcome.summary
    first = answer.findings[0]
    assert (first.operator, first.phase, first.evidence["run"]) == ("batch.stage", "prefill", "copies-late")
    assert "host buffer `ids` of step 0: " in first.message
    assert told in first.message


TIER = ("again", "tier-late", "tier-at-once")


@pytest.mark.parametrize("method", ["settle", "make"])
def test_memory_that_nobody_waits_for_is_found(texts: Stage, tmp_path, monkeypatch, method):
    """Would catch copies of the host tier that nobody delays: pages that are written before their copy out was made,
    and pages that are read before their copy in was."""
    monkeypatch.setattr(HostTier, method, lambda *_: None)
    answer = texts.judge("delayed_copies", tmp_path, only=TIER)
    assert answer.outcome.status == "failed", answer.outcome.summary
    assert answer.findings[0].evidence["run"] == "tier-late"
    assert "a race, where memory is used before its copy was made" in answer.findings[0].message


@pytest.mark.parametrize(
    ("broken", "operator", "pattern"),
    [
        (("moe.dispatch", pair_doubled), "moe.dispatch", "wrong pairs"),
        (("moe.combine", scaled_twice), "moe.combine", "factor"),
    ],
)
def test_pairs_and_scaling_are_counted(texts: Stage, tmp_path, broken, operator, pattern):
    """Would catch an expert that computes a pair twice or never, and a scaling applied twice."""
    answer = texts.judge("experts_once", tmp_path, broken)
    assert answer.outcome.status == "failed", answer.outcome.summary
    assert answer.findings[0].operator == operator
    assert answer.findings[0].evidence["pattern"] == pattern


def test_every_invariant_says_what_it_asks():
    """Would catch a check that the list shows without a question, or under another name than it answers with."""
    for name, module in INVARIANTS.items():
        assert (module.NAME, module.QUESTION[-1]) == (name, "?")
        assert callable(getattr(module, "runs", None))
