"""Input staging through one queue, and decode steps of a fixed number of rows."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from day0check.accelerated.staging import ARRAYS, MOMENTS, StagingQueue, copies, queue_of, stage_through
from day0check.backends.accelerated import Accelerated
from day0check.errors import InputError
from day0check.probe.recorder import Observer, Recorder
from day0check.types import Request, Schedule, Turn
from reference.presets import preset_dir

CPU = torch.device("cpu")
REQUESTS = (
    Request("long", (Turn(tuple(range(40, 70))),), max_new_tokens=7),
    Request("short", (Turn(tuple(range(90, 100))),), max_new_tokens=3),
)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_a_host_buffer_is_not_written_before_its_copy(depth, deferred, moment):
    """Catches a queue whose later arrays reach the device in place of earlier ones."""
    arrays = [torch.randint(0, 1 << 40, (n,)) for n in (3, 5000, 1, 7, 2000, 0, 4)]
    queue = StagingQueue(CPU, depth=depth, deferred=deferred)
    with copies(moment):
        for _ in range(2):
            for there, array in zip(stage_through(queue, *arrays), arrays, strict=True):
                assert torch.equal(there, array)


class Unguarded(StagingQueue):
    def free(self, number):
        pass


@pytest.mark.parametrize(
    ("depth", "deferred", "wrong_at"),
    [(2, False, {"late"}), (2, True, {"", "late"}), (8, False, set()), (8, True, set())],
)
def test_only_delay_shows_a_buffer_that_is_not_waited_for(depth, deferred, wrong_at):
    """Catches a late copy that is not late, and a control that is not serialised: it must be right for all of them."""
    arrays = [torch.full((4,), n) for n in range(5)]
    wrong = set()
    for moment in MOMENTS:
        with copies(moment):
            there = stage_through(Unguarded(CPU, depth=depth, deferred=deferred), *arrays)
        if not all(map(torch.equal, there, arrays)):
            wrong.add(moment)
    assert wrong == wrong_at


def test_a_moment_that_there_is_not_is_refused():
    """Catches a misspelt moment that is taken for the usual one: nothing would be delayed, and nothing seen."""
    with pytest.raises(InputError, match="sometimes"), copies("sometimes"):
        pass


def test_deferred_copies_are_carried_out_when_they_are_asked_for():
    """Catches a deferral that defers nothing: then the faults of deferred copies could not be shown."""
    queue = StagingQueue(CPU, depth=8)
    there = queue.put(torch.tensor([11, 12]))
    there.fill_(-1)
    queue.run()
    assert there.tolist() == [11, 12]


def test_engines_in_two_threads_have_queues_of_their_own():
    """Catches one queue for all threads: a step of one engine then gets rows of the other's."""
    with ThreadPoolExecutor(1) as other:
        assert other.submit(queue_of, CPU).result() is not queue_of(CPU)
        assert other.submit(queue_of, CPU).result() is other.submit(queue_of, CPU).result()
    assert queue_of(CPU) is queue_of(CPU)


class Steps(Observer):
    def __init__(self) -> None:
        self.staged, self.logits = [], {}

    def after(self, call, token, results):
        if call.operator == "batch.stage":
            self.staged.append((call.phase, dict(zip(ARRAYS, results, strict=True)), call.rows))
        if call.operator == "head.logits":
            for i, row in enumerate(results[0].clone()):
                self.logits[call.rows.address(i)] = row


def run(backend, **schedule):
    steps = Steps()
    outputs = backend.run(REQUESTS, Schedule(page=16, **schedule), Recorder([steps]))
    return outputs, steps


@pytest.fixture(scope="module")
def backend():
    loaded = Accelerated()
    loaded.load(str(preset_dir("tiny")), "fp32", "cpu", {})
    return loaded


def test_padding_rows_keep_what_was_there_and_change_nothing(backend):
    """Catches padding that is cleared (no replay of a graph clears it), or that reaches a request."""
    plain, alone = run(backend)
    padded, fixed = run(backend, fixed_rows=4)
    assert padded == plain
    decode = [(arrays, rows) for phase, arrays, rows in fixed.staged if phase == "decode"]
    assert {len(arrays["ids"]) for arrays, _ in decode} == {4}
    assert all(len(arrays["ids"]) < 3 for phase, arrays, _ in alone.staged if phase == "decode")
    both = [n for n, (_, rows) in enumerate(decode) if rows.owner.count(-1) == 2]
    later = [n for n, (_, rows) in enumerate(decode) if rows.owner.count(-1) == 3]
    assert both
    assert later
    left = decode[both[-1]][0]
    for number in later:
        arrays = decode[number][0]
        assert arrays["ids"][1] == left["ids"][1], "the row of the request that ended"
        assert arrays["positions"][1] == left["positions"][1] > 0
    for address, row in alone.logits.items():
        torch.testing.assert_close(fixed.logits[address], row, rtol=1e-4, atol=1e-5)


def test_longer_steps_than_the_fixed_rows_are_left_as_they_are(backend):
    """Catches rows that are cut off."""
    plain, _ = run(backend)
    padded, _ = run(backend, fixed_rows=1)
    assert padded == plain
