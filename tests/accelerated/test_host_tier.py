"""The host tier on whole models: what comes back is what went, byte for byte, and nobody else is touched."""

import functools

import pytest
import torch

from day0check.accelerated.cache import PAGED, STATES
from day0check.accelerated.ops import paging
from day0check.accelerated.records import Formats
from day0check.accelerated.scheduler import Scheduler
from day0check.backends.accelerated import Accelerated
from day0check.probe.recorder import Caller, Observer, Recorder
from day0check.types import Request, Schedule, ScheduleEvent, Turn
from reference.presets import preset_dir

PAGE = 16


@functools.cache
def loaded(name, profile="fp32", formats=None):
    backend = Accelerated()
    backend.formats = formats
    backend.load(str(preset_dir(name)), profile, "cpu", {})
    return backend


def text(seed, count):
    return tuple(torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


class Bytes(Observer):
    """What left the device and what came back, by tap, in the order of the calls."""

    def __init__(self):
        self.out, self.back = {}, {}

    def after(self, call, token, results):
        if call.operator in ("kv.offload", "kv.reload"):
            rows = call.args[0][call.kwargs["pages"]].contiguous().view(torch.uint8).clone()
            kept = self.out if call.operator == "kv.offload" else self.back
            kept.setdefault(call.tap.replace("offload", "").replace("reload", ""), []).append(rows)


def run(backend, *requests, **schedule):
    seen = Bytes()
    caller = Caller(backend.operators(), Recorder([seen]))
    scheduler = Scheduler(backend._engine, requests, Schedule(**{"page": PAGE, **schedule}), caller)
    return scheduler.run(), scheduler, seen


@pytest.mark.parametrize(
    ("name", "profile", "formats"),
    [
        ("tiny", "fp32", None),
        pytest.param("tiny-glm-5.3", "fp32", None, marks=pytest.mark.slow),
        ("tiny-deepseek-v3.2", "bf16", Formats(kv="fp8", index="fp8", state="bfloat16")),
    ],
)
def test_what_went_comes_back(name, profile, formats):
    """Catches a pool that is left out, pages in another order, and values that were converted on the way."""
    backend = loaded(name, profile, formats)
    requests = [Request(n, (Turn(text(i, 30)),), max_new_tokens=5) for i, n in enumerate("ab")]
    late = Request("c", (Turn(text(5, 60)),), max_new_tokens=2, arrive_step=4)
    events = (ScheduleEvent(2, "offload", "a"), ScheduleEvent(7, "reload", "a"))
    outputs, moved, seen = run(backend, *requests, late, host_pages=8, events=events, max_batch=2)
    assert moved.offloads == 1
    assert seen.out.keys() == seen.back.keys()
    pools = {(layer, kind) for kind in PAGED + STATES for layer in getattr(moved.caches, kind)}
    assert len(seen.out) == len(pools)
    for tap, rows in seen.out.items():
        assert all(torch.equal(a, b) for a, b in zip(rows, seen.back[tap], strict=True)), tap
    if profile == "fp32":
        undisturbed, _, _ = run(backend, *requests, late, max_batch=2)
        assert outputs.sequences == undisturbed.sequences
    assert len(moved.host.pages) == moved.host.pages.size
    assert len(moved.host.slots) == moved.host.slots.size


def test_pressure_parks_where_there_is_room_and_recomputes_where_there_is_none():
    """Catches a request that is lost when pages run out, and a host tier that is filled beyond its end."""
    backend = loaded("tiny")
    requests = [Request(n, (Turn(text(i, 28)),), max_new_tokens=6) for i, n in enumerate("abc")]
    plain, _, _ = run(backend, *requests)
    with_host, parked, _ = run(backend, *requests, pages=7, host_pages=8)
    without, again, _ = run(backend, *requests, pages=7)
    assert with_host == without == plain
    assert parked.offloads == parked.preemptions > 0
    assert again.offloads == 0
    assert again.preemptions > 0
    assert len(parked.caches.pages) == parked.caches.pages.size


def test_an_aborted_request_frees_its_place_on_the_host():
    """Catches host memory that nobody gets back."""
    request = Request("a", (Turn(text(1, 30)),), max_new_tokens=9)
    other = Request("b", (Turn(text(2, 30)),), max_new_tokens=9)
    events = (ScheduleEvent(2, "offload", "a"), ScheduleEvent(30, "reload", "a"), ScheduleEvent(5, "abort", "a"))
    outputs, scheduler, _ = run(loaded("tiny"), request, other, host_pages=4, events=events)
    assert outputs.finish == {"a": "aborted", "b": "length"}
    assert len(scheduler.host.pages) == 4


def test_host_memory_keeps_bytes_and_not_values():
    """Catches a copy that changes the payload of NaN or the sign of zero."""
    pool = torch.randint(-(2**31), 2**31 - 1, (5, 4, 3), dtype=torch.int32).view(torch.float32)
    host, pages, places = torch.zeros(6, 4, 3), torch.tensor([3, 0]), torch.tensor([5, 1])
    before = pool.clone()
    paging.offload(pool, host=host, pages=pages, places=places)
    pool[pages] = 1.0
    paging.reload(pool, host=host, pages=pages, places=places)
    assert torch.equal(pool.view(torch.int32), before.view(torch.int32))
