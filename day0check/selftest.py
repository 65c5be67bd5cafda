"""The self-test: every known fault and every legal variant through the main job's own path, with what it said.

`run` lays the entries over worker processes; `judge_entry` is one entry inside such a process: candidate, reference,
checks and gate as in a run. An entry that kills its process or hangs loses itself alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from day0check.errors import Day0Error, ExitCode
from day0check.faults.catalogue import Located, locate
from day0check.faults.entry import Address, Entry
from day0check.types import Verdict, from_json, to_json

START_LIMIT_S = 180.0  # from the start of a worker to its first entry
ENTRY_LIMIT_S = 180.0
_TICK_S = 0.05
_DIED = ("crashed", "timeout")
CAPTURE = "capture.tap"


@dataclass(frozen=True)
class Outcome:
    """What the self-test said of one entry. `status`: that of the verdict, or "crashed", "timeout", "failed" when the
    entry did not come to one. `found`: the address of the first fault, "" when there was none. `model`, `case`: on what
    it was laid over."""

    id: str
    kind: str
    title: str
    benign: bool
    status: str
    caught: bool
    placed: bool
    expected: str
    found: str
    message: str
    seconds: float
    model: str = ""
    case: str = ""

    @property
    def good(self) -> bool:
        """Whether a fault was caught, or a legal variant was let through."""
        return self.status == "ready" if self.benign else self.caught

    @property
    def further(self) -> bool:
        """Whether it is a fault of our own and none of the public catalogue, whose ids begin with S."""
        return not self.benign and not self.id.startswith("S-")


def exit_code(outcomes: Sequence[Outcome]) -> ExitCode:
    """Ready only when every fault was caught and no legal variant raised an alarm."""
    return ExitCode.READY if outcomes and all(outcome.good for outcome in outcomes) else ExitCode.NOT_READY


def counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """How many public faults there were, were caught and placed; the same of further ones, which are in none of these;
    how many legal variants, and false alarms."""
    public = [o for o in outcomes if not o.benign and not o.further]
    further = [o for o in outcomes if o.further]
    benign = [o for o in outcomes if o.benign]
    return {
        "faults": len(public),
        "caught": sum(o.caught for o in public),
        "placed": sum(o.placed for o in public),
        "further": len(further),
        "further_caught": sum(o.caught for o in further),
        "further_placed": sum(o.placed for o in further),
        "legal": len(benign),
        "false_alarms": sum(not o.good for o in benign),
    }


# ------------------------------------------------------------------------------------------------------- one entry


def judge_entry(located: Located, out: Path, *, device: str = "cpu") -> Outcome:
    """Runs one entry in this process under the directory `out`, which must not be there yet, and judges it."""
    begin = time.monotonic()
    try:
        verdict = _verdict(located, out, device)
    except Day0Error as error:
        return _without_verdict(located.entry, "failed", str(error), time.monotonic() - begin)
    return from_verdict(located.entry, verdict, time.monotonic() - begin)


def from_verdict(entry: Entry, verdict: Verdict, seconds: float) -> Outcome:
    """What a verdict says of an entry."""
    first = verdict.first_fault
    caught = verdict.status == "not_ready" or _is_the_captures_fault(verdict)
    found = "" if first is None else str(Address(first.operator or "-", first.layer, first.phase or "-"))
    return Outcome(
        entry.id,
        entry.kind,
        entry.title,
        entry.benign,
        verdict.status,
        caught,
        caught and not entry.benign and entry.expected.names(first),
        "" if entry.benign else str(entry.expected),
        found,
        first.message if first is not None else "; ".join(f"{n.check}: {n.reason}" for n in verdict.not_run),
        round(seconds, 2),
        entry.model,
        entry.case,
    )


def _is_the_captures_fault(verdict: Verdict) -> bool:
    """Whether the verdict is that what was captured cannot be believed: an error of its own, which accuses no layer."""
    first = verdict.first_fault
    return verdict.status == "error" and first is not None and first.operator == CAPTURE


def _without_verdict(entry: Entry, status: str, message: str, seconds: float) -> Outcome:
    expected = "" if entry.benign else str(entry.expected)
    fixed = (entry.id, entry.kind, entry.title, entry.benign, status, False, False, expected, "", message)
    return Outcome(*fixed, round(seconds, 2), entry.model, entry.case)


def _verdict(located: Located, out: Path, device: str) -> Verdict:
    from day0check import gate
    from day0check.case import load_cases
    from day0check.checks import checks_of, judge_case, judge_run, read_evidence
    from reference.presets import preset_dir
    from reference.weights import Checkpoint

    entry = located.entry
    model_dir = preset_dir(entry.model)
    config = Checkpoint(model_dir).config
    cases = load_cases((located.case,), config=config, model=entry.model, profile=entry.profile)
    if located.service:
        return _served_verdict(located, out, device, cases, Path(model_dir))
    capabilities = _run(located, out, device, cases, str(model_dir))
    outcomes, findings, expected, every = [], [], [], []
    for case in cases:
        evidence = read_evidence(out, case, config=config, profile=entry.profile, capabilities=capabilities)
        every.append(evidence)
        expected += [(case.id, check) for check in checks_of(case, config)]
        for answer in judge_case(evidence):
            outcomes.append(answer.outcome)
            findings += answer.findings
    for answer in judge_run(every):
        outcomes.append(answer.outcome)
        findings += answer.findings
    scene = gate.Scene({"name": entry.model}, entry.profile, tuple(c.id for c in cases), expected=tuple(expected))
    verdict = gate.decide(outcomes, findings, scene)
    gate.write_verdict(verdict, out / "verdict.json")
    return verdict


def _served_verdict(located: Located, out: Path, device: str, cases: tuple[Any, ...], model_dir: Path) -> Verdict:
    """Our server started with the entry laid over, asked and stopped, as in a run."""
    from day0check import gate
    from day0check.service.cases import Served, ask_case
    from reference.weights import Checkpoint

    entry, config = located.entry, Checkpoint(model_dir).config
    out.mkdir(parents=True)
    scheduler, ops = located.scheduler, located.ops
    what = Served(model_dir, entry.model, config, entry.profile, device, ops=ops, scheduler=scheduler)
    asked = {case.id: ask_case(case, what, out) for case in cases}
    answers = [answer for a in asked.values() for answer in a.answers]
    scene = gate.Scene(
        {"name": entry.model},
        entry.profile,
        tuple(asked),
        expected=tuple((case, name) for case, a in asked.items() for name in a.expected),
        not_run=tuple(n for a in asked.values() for n in a.not_run),
    )
    verdict = gate.decide([a.outcome for a in answers], [f for a in answers for f in a.findings], scene)
    gate.write_verdict(verdict, out / "verdict.json")
    return verdict


def _run(located: Located, out: Path, device: str, cases: tuple[Any, ...], model_dir: str) -> frozenset[str]:
    """Candidate and reference, one after the other; the capabilities of the backend."""
    from day0check.probe.records import Lines
    from day0check.worker.candidate import run_candidate
    from day0check.worker.job import Job, is_operator_case, read_record
    from day0check.worker.oracle import run_reference
    from day0check.worker.ranks import is_launcher, run_ranks

    out.mkdir(parents=True)
    events = Lines(out / "events.jsonl")
    job = Job(
        role="candidate",
        out=str(out),
        events=str(out / "events.jsonl"),
        cases=cases,
        model_dir=model_dir,
        backend=located.backend,
        profile=located.entry.profile,
        ops=located.ops,
        device=device,
        layout=located.entry.layout,
    )
    try:
        (run_ranks if is_launcher(job) else run_candidate)(job, events)
        from day0check.snapshot import case_directory

        records = {case.id: read_record(case_directory(out, case.id, "candidate")) for case in cases}
        followed = [c.id for c in cases if records[c.id].status == "finished" and not is_operator_case(c)]
        run_reference(job, events, followed)
    finally:
        events.close()
    return frozenset(name for record in records.values() for name in record.capabilities)


# ---------------------------------------------------------------------------------------------------- the processes


class _Worker:
    """A process that runs entries in order; `queue` are those without an outcome."""

    def __init__(self, number: int, queue: list[Located], out: Path, device: str) -> None:
        self.number, self.queue, self.out, self.device = number, queue, out, device
        self.process: subprocess.Popen | None = None
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        stem = f"worker-{self.number}-{self.starts}"
        self.results = self.out / f"{stem}.jsonl"
        self.results.touch()
        self.heard, self.since, self.begun = 0, time.monotonic(), ""
        files = [str(located.file) for located in self.queue]
        task = {"files": files, "out": str(self.out), "results": str(self.results), "device": self.device}
        file = self.out / f"{stem}.json"
        file.write_text(json.dumps(task), encoding="utf-8")
        with (self.out / f"{stem}.log").open("w") as log:
            command = [sys.executable, "-m", "day0check.selftest", str(file)]
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def turn(self) -> list[Outcome]:
        """What has ended since the last turn."""
        if not self.queue:
            return []
        if self.process is None:
            self.start()
        code = self.process.poll()  # before reading: what it wrote last is then there
        ended = self._read()
        late = time.monotonic() - self.since > (ENTRY_LIMIT_S if self.begun else START_LIMIT_S)
        if self.queue and (code is not None or late):
            self.stop()
            lost = self.queue.pop(0)
            how = f"took more than {ENTRY_LIMIT_S:g} s" if late else f"the process ended with code {code}"
            ended.append(_without_verdict(lost.entry, _DIED[late], how, time.monotonic() - self.since))
            self.process = None
        return ended

    def _read(self) -> list[Outcome]:
        ended = []
        text = self.results.read_text(encoding="utf-8")
        complete = text[: text.rfind("\n") + 1].splitlines()
        for line in complete[self.heard :]:
            event = json.loads(line)
            self.since = time.monotonic()
            self.begun = event.get("begin", "")
            if "end" in event:
                ended.append(from_json(Outcome, event["end"]))
                self.queue.pop(0)
        self.heard = len(complete)
        return ended

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def run(
    entries: Sequence[Located],
    out: Path,
    *,
    jobs: int = 1,
    device: str = "cpu",
    tell: Callable[[Outcome], None] = lambda _: None,
) -> tuple[Outcome, ...]:
    """The outcomes of `entries` in their order; records stay under `out`. No process of ours stays behind."""
    out.mkdir(parents=True, exist_ok=True)
    workers = [_Worker(n, list(entries[n::jobs]), out, device) for n in range(jobs)]
    outcomes: dict[str, Outcome] = {}
    try:
        while any(worker.queue for worker in workers):
            for worker in workers:
                for outcome in worker.turn():
                    outcomes[outcome.id] = outcome
                    tell(outcome)
            time.sleep(_TICK_S)
    finally:
        for worker in workers:
            worker.stop()
    return tuple(outcomes[located.entry.id] for located in entries)


def work(task: dict[str, Any]) -> None:
    """Runs the entries of a task in this process and writes a line at the begin and at the end of each."""
    import torch

    torch.set_num_threads(1)
    out = Path(task["out"])
    with Path(task["results"]).open("a", encoding="utf-8") as results:

        def say(event: dict[str, Any]) -> None:
            results.write(json.dumps(event, allow_nan=False) + "\n")
            results.flush()

        for located in map(locate, map(Path, task["files"])):
            entry, begin = located.entry, time.monotonic()
            say({"begin": entry.id})
            try:
                outcome = judge_entry(located, out / entry.id, device=task["device"])
            except Exception as error:
                traceback.print_exc()
                text = f"{type(error).__name__}: {error}"
                outcome = _without_verdict(entry, "failed", text, time.monotonic() - begin)
            say({"end": to_json(outcome)})


if __name__ == "__main__":
    work(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
