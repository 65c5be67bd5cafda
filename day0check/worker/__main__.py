"""`python -m day0check.worker job.json`: the runner starts it; nobody else needs to."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import traceback

from day0check.errors import Day0Error, ExitCode
from day0check.probe.records import Lines, RecordError
from day0check.worker.job import Job, error_event, load_job

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with(parent: int) -> None:
    """Lets the kernel end this process when the runner ends, where it can (Linux)."""
    if not parent:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(ExitCode.HARNESS)  # it ended while this process was starting


def run(job: Job, events: Lines) -> None:
    import torch

    from day0check.worker.ranks import is_launcher, run_rank, run_ranks

    torch.set_num_threads(job.threads)
    if is_launcher(job):
        run_ranks(job, events)
    elif job.gated:
        run_rank(job, events, sys.stdin)
    elif job.role == "candidate":
        from day0check.worker.candidate import run_candidate

        run_candidate(job, events)
    else:
        from day0check.worker.oracle import run_reference

        run_reference(job, events, sys.stdin)


def main(arguments: list[str]) -> int:
    """Exit code 0 when every case has its outcome; otherwise the last event says what went wrong."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the runner asks for it before it ends a hanging process
    job = load_job(arguments[1])
    end_with(job.parent)
    events = Lines(job.events)
    try:
        run(job, events)
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, RecordError):
            todo = "make room on the disk, or give another --out, and run again"
            error = Day0Error(f"cannot be written: {error.strerror}", where=str(error.filename), todo=todo)
        elif not isinstance(error, Day0Error):
            text = f"the {job.role}'s worker failed: {type(error).__name__}: {error}"
            error = Day0Error(text, todo="this is a fault of day0check; the worker's log holds the traceback")
        events.write(error_event(error))
        return int(error.exit_code)
    finally:
        events.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
