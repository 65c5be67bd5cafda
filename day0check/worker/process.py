"""The runner's side of a worker: starts it, reads what it says, weighs it, ends it with all of its children."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from day0check.probe.records import replace_json
from day0check.types import to_json
from day0check.worker.job import Job, command

_FAMILY_EVERY_S = 0.5  # listing children walks over every process of the machine


class Process:
    """One worker process in a session of its own, so that a Ctrl-C reaches the runner alone."""

    def __init__(self, job: Job, *, name: str, directory: Path) -> None:
        jobs, logs = directory / "jobs", directory / "logs"
        jobs.mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{name}.log"
        self._events_path = Path(job.events)
        self._events_path.touch()
        self._events_read = 0
        replace_json(jobs / f"{name}.json", to_json(job))
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command(jobs / f"{name}.json"),
                stdin=subprocess.PIPE if job.role == "reference" or job.gated else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(job.threads),
                start_new_session=True,
            )
        self._family: list[psutil.Process] = []
        self._family_since = 0.0

    def tell(self, line: str) -> None:
        """A line for the worker's standard input; a worker that is gone is seen by `exit_code`, not here."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def tell_no_more(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def events(self) -> list[dict[str, Any]]:
        """What the worker has said since the last call; a line that is still being written waits."""
        with self._events_path.open("rb") as file:
            file.seek(self._events_read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._events_read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def exit_code(self) -> int | None:
        """None while it runs; minus the number of the signal that ended it, as subprocess has it."""
        return self._process.poll()

    def rss_bytes(self) -> int:
        """Resident bytes of the process and its children, 0 when it is gone."""
        now = time.monotonic()
        if now - self._family_since > _FAMILY_EVERY_S:
            self._family_since = now
            self._family = family(self._process.pid)
        total = 0
        for member in self._family:
            with contextlib.suppress(psutil.Error):
                total += member.memory_info().rss
        return total

    def show_stacks(self, wait_s: float = 0.3) -> None:
        """Asks a hanging worker to write its stacks into its log."""
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGUSR1)
                time.sleep(wait_s)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended by itself within the time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.exit_code() is not None

    def strike(self) -> None:
        """Ends the process without waiting for it: of several that wait for each other none is to see another's end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Ends the process, its group, and children that left the group; returns when the process is gone."""
        members = family(self._process.pid)
        if self._process.poll() is None or members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for member in members:
            with contextlib.suppress(psutil.Error):
                member.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def output(self, since: int = 0, lines: int = 20) -> tuple[str, ...]:
        """The last lines of what was printed from byte `since` on; at most 64 KiB are looked at."""
        return tail(self.log, since, lines)


def environment(threads: int) -> dict[str, str]:
    """The worker's variables: the runner's own, with the numbers of threads fixed."""
    fixed = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return {**os.environ, **fixed, "PYTHONUNBUFFERED": "1"}


def family(pid: int) -> list[psutil.Process]:
    """The process and all that descend from it; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def tail(path: Path, since: int, lines: int) -> tuple[str, ...]:
    """The last printable lines of a log, each cut to 400 characters."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(since, size - 65536))
        text = file.read().decode(errors="replace")
    return tuple(_printable(line) for line in text.splitlines() if line.strip())[-lines:]


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else "�" for c in line[:400])


def signal_name(code: int) -> str:
    """The name of signal number `code`, its number when it has none here."""
    try:
        return signal.Signals(code).name
    except ValueError:
        return f"signal {code}"


def kill_all(processes: Iterable[Process | None]) -> None:
    for process in processes:
        if process is not None:
            process.kill()
