"""Runs a model cut over ranks that are threads of this process."""

from __future__ import annotations

import threading

import torch

from day0check.accelerated.parallel.group import ThreadTransport
from day0check.backends.accelerated import Accelerated
from day0check.probe.recorder import Recorder


def run_ranks(model_dir, profile, settings, requests, schedule, observers=lambda rank: [], backend=Accelerated):
    """[(outputs, recorder)] of each rank; raises what the first rank raised that did not fail because of another."""
    world = max(settings.get("tensor_parallel", 1), settings.get("expert_parallel", 1))
    transports = ThreadTransport.make(world)
    found, errors = [None] * world, [None] * world

    def work(rank):
        try:
            candidate = backend()
            candidate.load(str(model_dir), profile, "cpu", {**settings, "transport": transports[rank]})
            recorder = Recorder(observers(rank))
            with torch.no_grad():
                outputs = candidate.run(requests, schedule, recorder)
            recorder.end_case()
            found[rank] = (outputs, recorder)
        except BaseException as error:  # kept for the main thread
            errors[rank] = error
            transports[rank].abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    own = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
    for error in own or [e for e in errors if e is not None]:
        raise error
    return found
