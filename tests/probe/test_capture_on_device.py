"""On a real device: digests that wait for nothing, and copies out of host buffers that a device makes late."""

import contextlib

import pytest
import torch

from day0check.accelerated.staging import StagingQueue, copies, stage_through
from day0check.backends.accelerated import Accelerated
from day0check.probe.capture import Digests
from day0check.probe.recorder import Recorder
from day0check.types import Request, Schedule, Turn
from reference.presets import preset_dir

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class WaitsForNothing(Digests):
    """Every wait for the device inside the observer raises, until the case is over."""

    def after(self, call, token, results):
        with waits_raise():
            super().after(call, token, results)

    def end_step(self, step):
        with waits_raise():
            super().end_step(step)


@contextlib.contextmanager
def waits_raise():
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch's word that it does not see every wait
def test_digests_wait_for_nothing_before_the_end():
    """Catches an observer that makes the host wait: it hides races that it is there to show."""
    backend = Accelerated()
    backend.load(str(preset_dir("tiny")), "bf16", "cuda", {})
    requests = (Request("a", (Turn(tuple(range(40, 120))),), max_new_tokens=4),)
    told = []
    for _ in range(2):
        lines = []
        recorder = Recorder([WaitsForNothing(lines.append)])
        backend.run(requests, Schedule(page=16, chunk=48), recorder)
        assert not [line for line in lines if line["tap"] == "head.logits"], "told before the end"
        recorder.end_case()
        told.append([(line["tap"], line["step"], line["result"], line["digest"]) for line in lines])
    assert told[0] == told[1]
    assert any(tap == "head.logits" for tap, *_ in told[0])


class Unguarded(StagingQueue):
    def free(self, number):
        pass


@pytest.mark.parametrize(("kind", "right"), [(StagingQueue, True), (Unguarded, False)])
def test_a_device_that_is_behind_shows_a_buffer_that_is_not_waited_for(kind, right):
    """Catches late copies that are not late on a device: the next step's input must be able to overtake them."""
    device = torch.device("cuda")
    queue = kind(device, depth=2)
    with copies("late"):
        first = stage_through(queue, torch.full((64,), 1), torch.full((64,), 2))
        stage_through(queue, torch.full((64,), 3), torch.full((64,), 4))
    torch.cuda.synchronize()
    assert (first[0].tolist() == [1] * 64) is right


def test_a_serialised_run_waits_for_each_copy():
    """Catches a control that is no control: with every copy waited for, even an unguarded queue is right."""
    queue = Unguarded(torch.device("cuda"), depth=1)
    with copies("at_once"):
        there = stage_through(queue, *(torch.full((64,), n) for n in range(4)))
    assert [int(array[0]) for array in there] == [0, 1, 2, 3]
