"""The prefix cache on whole models: a warm request is the cold one, what is shared is right, what differs is not."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.accelerated.ops import TABLE
from day0check.accelerated.scheduler import Scheduler
from day0check.backends.accelerated import Accelerated
from day0check.errors import Day0Error, InputError, Unavailable
from day0check.probe.recorder import Caller, Observer, Recorder
from day0check.probe.registry import Operators
from day0check.types import Request, Schedule, ScheduleEvent, Turn
from reference.presets import preset_dir

PAGE = 16


def loaded(name):
    backend = Accelerated()
    backend.load(str(preset_dir(name)), "fp32", "cpu", {})
    return backend


@pytest.fixture(scope="module")
def tiny():
    return loaded("tiny")


def text(seed, count):
    return tuple(torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


class Logits(Observer):
    """The logits of every request by position."""

    def __init__(self):
        self.rows = {}

    def after(self, call, token, results):
        if call.operator == "head.logits":
            for row, value in enumerate(results[0].clone()):
                self.rows[call.rows.address(row)] = value


alone_before = {}


def run_alone(backend, request):
    """(outputs, logits) of a request by itself, computed once."""
    key = id(backend), dataclasses.replace(request, arrive_step=0)
    if key not in alone_before:
        outputs, _, rows = run(backend, request)
        alone_before[key] = outputs, rows
    return alone_before[key]


def run(backend, *requests, caches=None, **schedule):
    seen = Logits()
    schedule = Schedule(**{"page": PAGE, **schedule})
    scheduler = Scheduler(
        backend._engine, requests, schedule, Caller(backend.operators(), Recorder([seen])), caches=caches
    )
    return scheduler.run(), scheduler, seen.rows


def cold_and_warm(backend, prompts, *, gap=20, **schedule):
    """Runs each prompt alone, then all one after the other with the cache, and compares them at every logit; the
    scheduler of the latter."""
    requests = [
        Request(f"r{n}", (Turn(p),), max_new_tokens=3, arrive_step=gap * n, forced=((7, 8, 9),))
        for n, p in enumerate(prompts)
    ]
    _, warm, rows = run(backend, *requests, prefix_cache=True, **schedule)
    for request in requests:
        _, alone = run_alone(backend, request)
        assert set(alone) <= set(rows)
        for at, value in alone.items():
            assert float((rows[at] - value).norm() / value.norm()) < 1e-4, at  # NaN is no less
    return warm


@pytest.mark.parametrize("name", ["tiny", "tiny-glm-5.3", pytest.param("tiny-deepseek-v3.2", marks=pytest.mark.slow)])
def test_warm_is_cold_on_every_kind_of_cache(name):
    """Catches states that are not restored or belong to another boundary, pages of the wrong positions, and index keys
    or pools that a hit leaves out: models with KDA, with pools of index keys, with pages alone."""
    base = text(1, 40)
    warm = cold_and_warm(loaded(name), [base + text(2, 5), base + text(3, 9), base + text(2, 5)], chunk=23)
    assert warm.prefixes.counters.hit_tokens == 2 * 32
    assert warm.prefixes.counters.hit_blocks == 4


@pytest.mark.parametrize("offset", [0, 1, PAGE - 1])
def test_prompts_that_part_inside_a_block_share_only_what_comes_before(tiny, offset):
    """Catches a hit that counts a block whose tokens agree in part."""
    first = text(4, 50)
    other = (*first[: PAGE + offset], *text(5, 34 - offset))
    warm = cold_and_warm(tiny, [first, other])
    assert warm.prefixes.counters.hit_tokens == PAGE


def test_a_prompt_that_is_known_to_its_end_computes_its_last_token(tiny):
    """Catches a hit that leaves no row to choose the first token from."""
    warm = cold_and_warm(tiny, [text(6, 2 * PAGE), text(6, 2 * PAGE)])
    assert warm.prefixes.counters.hit_tokens == PAGE


def test_answers_are_known_too(tiny):
    """Catches a cache that enters prompts alone: the next turn of a conversation begins behind the last answer."""
    first = Request("a", (Turn(text(7, 20)),), max_new_tokens=14)
    outputs, _, _ = run(tiny, first)
    whole = outputs.sequences["a"] + text(8, 6)
    second = Request("b", (Turn(whole),), max_new_tokens=2, arrive_step=30)
    both, warm, _ = run(tiny, first, second, prefix_cache=True)
    alone, _, _ = run(tiny, second)
    assert both.sequences["b"] == alone.sequences["b"]
    assert warm.prefixes.counters.hit_tokens == 2 * PAGE


def test_pages_are_given_up_in_turn_and_states_with_them(tiny):
    """Catches an evicted block that is still found, a page taken while somebody reads it, and a leak."""
    prompts = [text(20 + n, 3 * PAGE + 1) for n in (0, 1, 2, 0, 2)]
    warm = cold_and_warm(tiny, prompts, pages=9, max_batch=1)
    assert warm.prefixes.counters.evicted_blocks == 2
    assert warm.prefixes.counters.hit_tokens == 2 * PAGE + 3 * PAGE  # the end of the first has been given up once
    pages = warm.caches.pages
    assert len(pages) == pages.size
    assert int(pages.counts.sum()) == 0
    kept = int((warm.prefixes.held[:, 3] >= 0).sum())
    assert len(warm.caches.snapshots) + kept + (warm.prefixes._spare >= 0) == warm.caches.snapshots.size


def test_requests_of_one_step_with_one_prefix(tiny):
    """Catches blocks entered twice, and a second copy that is given up under its reader."""
    base = text(9, 40)
    requests = [Request(n, (Turn(base + text(i, 6)),), max_new_tokens=3) for i, n in enumerate("abc")]
    late = Request("d", (Turn(base + text(77, 3)),), max_new_tokens=3, arrive_step=9)
    outputs, warm, _ = run(tiny, *requests, late, prefix_cache=True, chunk=30, max_batch=4)
    for request in (*requests, late):
        alone, _ = run_alone(tiny, request)
        assert outputs.sequences[request.id] == alone.sequences[request.id]
    entries = warm.prefixes.held[:, 4]
    assert len(entries[entries >= 0].unique()) == int((entries >= 0).sum())


def test_a_preempted_request_begins_behind_its_own_prefix(tiny):
    """Catches a request that comes back with a prefix and the state of the moment it was interrupted in."""
    request = Request("a", (Turn(text(10, 45)),), max_new_tokens=8)
    events = (ScheduleEvent(6, "preempt", "a"),)
    outputs, warm, _ = run(tiny, request, prefix_cache=True, events=events)
    alone, _, _ = run(tiny, request)
    assert outputs == alone
    assert warm.prefixes.counters.hit_tokens == 3 * PAGE


def test_states_are_kept_as_often_as_asked(tiny):
    """Catches a hit that ends where no state was kept."""
    base = text(11, 5 * PAGE)
    warm = cold_and_warm(tiny, [(*base, 1), (*base, 2)], snapshot_blocks=2)
    assert warm.prefixes.counters.hit_tokens == 4 * PAGE
    assert warm.prefixes.counters.stored_snapshots == 2


def test_operators_that_lose_pages_or_find_too_much_end_in_an_error(tiny):
    """Catches a scheduler that goes in circles where a replaced operator breaks its promise."""
    requests = [Request(n, (Turn(text(i, 2 * PAGE)),), max_new_tokens=1) for i, n in enumerate("abc")]
    for name, wrong, error in (
        ("pool.release", lambda counts, *, pages, held: None, Unavailable),
        ("prefix.match", lambda tokens, *, salts, held: torch.tensor([0, 1, 2]), Day0Error),
    ):
        table = Operators({**TABLE, name: wrong})
        schedule = Schedule(page=PAGE, pages=5, max_batch=1, prefix_cache=True)
        with pytest.raises(error):
            Scheduler(tiny._engine, tuple(requests), schedule, Caller(table)).run()


def test_pages_that_cut_pools_are_refused():
    """Catches shared pages that a later request would have to write into."""
    with pytest.raises(InputError, match="cut pools"):
        run(loaded("tiny-glm-5.3"), Request("a", (Turn(text(1, 9)),)), prefix_cache=True, page=6)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_whatever_the_schedule_a_warm_request_is_the_cold_one(tiny, data):
    """Catches what only some order of arrivals, chunks, pool sizes and interruptions shows."""
    pick = lambda *options: data.draw(st.sampled_from(options))  # noqa: E731
    base = text(31, 40)
    requests = tuple(
        Request(
            name,
            (Turn(base[: pick(0, 16, 20, 32, 40)] + text(40 + pick(0, 1), pick(1, 7, 20))),),
            max_new_tokens=3,
            arrive_step=pick(0, 1, 4, 9),
        )
        for name in "abcd"
    )
    events = tuple(
        ScheduleEvent(pick(1, 2, 3, 5, 8), pick("preempt", "offload"), pick(*"abcd")) for _ in range(pick(0, 1, 2))
    )
    outputs, warm, _ = run(
        tiny,
        *requests,
        prefix_cache=True,
        mixed=pick(False, True),
        chunk=pick(None, 9, 16, 25),
        max_batch=pick(1, 2, 4),
        pages=pick(5, 8, 20),
        host_pages=pick(0, 6),
        snapshot_blocks=pick(1, 2),
        events=events,
    )
    for request in requests:
        alone, _ = run_alone(tiny, request)
        assert outputs.sequences[request.id] == alone.sequences[request.id]
    assert len(warm.caches.pages) == warm.caches.pages.size
    assert len(warm.caches.slots) == warm.caches.slots.size
