"""Candidates over ranks that die, hang or fail on the rank and at the case whose name says so."""

import os
import signal
import time

import torch

from day0check.accelerated.parallel.group import Group
from day0check.accelerated.parallel.start_up import connect
from day0check.probe.rows import RowMap
from day0check.types import Outputs


class Moody:
    """Gathers a row of every rank; case "fake/WHAT-RANK" does WHAT on that rank, in its second step."""

    def __init__(self):
        self.group = None

    def capabilities(self):
        return {"taps", "rank_taps"}

    def operators(self):
        return None

    def load(self, model_dir, profile, device, layout):
        self.rank = layout["rank"]
        self.group = Group("tp", connect(layout))

    def run(self, requests, schedule, recorder):
        what, _, rank = requests[0].id.removeprefix("fake/").partition("#")[0].partition("-")
        if what == "later":  # it is well, and watched for long, and hangs when nobody watches
            what = "nothing" if recorder.heartbeat is not None else "hang"
            recorder.watched_s += 60.0
        rows = RowMap((requests[0].id,), (0,), (0,))
        for step in range(3):
            with recorder.step("prefill", rows, step):
                recorder.call("layers.01", "norm.rms", self._own(what, rank, step), (torch.ones(1, 2),), {}, "input")
                gather = {"group": self.group, "axis": 0, "sizes": (1,) * self.group.size}
                recorder.call("layers.01", "comm.all_gather", self._gather, (torch.ones(1, 2),), gather, "mlp")
        return Outputs({requests[0].id: (1, 2, 3)}, {requests[0].id: ()}, {requests[0].id: "length"})

    def _own(self, what, rank, step):
        def call(x):
            if step == 1 and rank == str(self.rank):
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what == "hang":
                    time.sleep(600)
                if what == "raise":
                    raise ValueError("the link said no")
            return x * 2

        return call

    def _gather(self, x, *, group, axis, sizes):
        return torch.cat(group.parts(x, axis=axis, sizes=sizes), axis)

    def pools(self):
        return None

    def close(self):
        self.group = None


class Unaware(Moody):
    """Knows nothing of ranks: it would run whole on every one of them."""

    def capabilities(self):
        return {"taps"}
