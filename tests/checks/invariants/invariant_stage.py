"""A case with its judged run and the noise of its reference, made once; runs of broken engines are held to it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from small_model import small_model

from day0check.backends.accelerated import Accelerated
from day0check.checks import INVARIANTS, Answer, read_evidence
from day0check.checks.invariants.extra_runs import forced
from day0check.compare.noise_book import NoiseBook
from day0check.compare.propagated import compare_case
from day0check.probe.capture import Capture
from day0check.probe.recorder import Recorder
from day0check.probe.registry import Registration
from day0check.snapshot import Snapshot, case_directory
from day0check.types import Outputs, RunCase, to_json
from day0check.worker.extra import TRAVELLING, compare_extra, make_run, runs_of
from day0check.worker.job import Job, RunRecord, write_record
from reference.weights import Checkpoint

Break = tuple[str, Callable[..., Any]] | tuple[str, Callable[..., Any], str] | Registration


class Stage:
    """`case` on the small model (the `dense` one) under profile bf16. `root` holds the healthy records."""

    def __init__(self, case: RunCase, folder: Path, *, dense: bool = False) -> None:
        self.model_dir = str(small_model(folder / "model", dense=dense))
        self.case, self.root = case, folder / "healthy"
        root = self.root
        self.config = Checkpoint(self.model_dir).config
        self.book = NoiseBook()
        self.outputs = self._judged(engine(self.model_dir), case, root)
        self._follow(case, root, book=self.book)

    def judge(
        self,
        check: str,
        tmp_path: Path,
        *breaks: Break,
        base: bool = False,
        follow: bool = False,
        only: Collection[str] = (),
    ) -> Answer:
        """The answer of `check` when its further runs (`only` these, if any) are made by an engine with these operators
        wrapped; with `base` the run that they are compared with is made by it, too, and with `follow` an oracle follows
        that one."""
        root, case = tmp_path / "run", replace(self.case, checks=(check,))
        backend = engine(self.model_dir, *breaks)
        if base:
            asked = tuple(forced(r, self.outputs) for r in case.requests)
            self._judged(backend, replace(case, requests=asked), root)
            if follow:
                self._follow(case, root)
        else:
            shutil.copytree(self.root, root)
        candidate = case_directory(root, case.id, "candidate")
        job = Job("candidate", str(root), "", (case,), self.model_dir, "accelerated", "bf16")
        snapshot = Snapshot(candidate)
        for run in runs_of(job, case, snapshot.outputs):
            if only and run.label not in only:
                continue
            make_run(run, candidate, backend.run, table=backend.operators(), lacking=(), byte_cap=1 << 28)
        reference = case_directory(root, case.id, "reference")
        if not reference.exists():
            reference.mkdir(parents=True)
            write_record(reference, RunRecord("finished"))
        compare_extra(job, case, snapshot, reference, self.book)
        evidence = read_evidence(root, case, config=self.config, profile="bf16")
        return INVARIANTS[check].judge(evidence)

    def _follow(self, case: RunCase, root: Path, *, book: NoiseBook | None = None) -> None:
        directory = case_directory(root, case.id, "reference")
        directory.mkdir(parents=True)
        net = compare_case(
            self.model_dir, "bf16", case, Snapshot(case_directory(root, case.id, "candidate")), book=book
        )
        (directory / "net.jsonl").write_text("".join(json.dumps(to_json(m)) + "\n" for m in net))
        write_record(directory, RunRecord("finished"))

    def _judged(self, backend: Accelerated, case: RunCase, root: Path) -> Outputs:
        directory = case_directory(root, case.id, "candidate")
        directory.mkdir(parents=True)
        recorder = Recorder([Capture(directory, TRAVELLING)])
        with torch.no_grad():
            outputs = backend.run(case.requests, case.schedule, recorder)
        recorder.end_case()
        (directory / "outputs.json").write_text(json.dumps(to_json(outputs)))
        write_record(directory, RunRecord("finished", capabilities=tuple(backend.capabilities())))
        return outputs


def engine(model_dir: str, *breaks: Break) -> Accelerated:
    """The accelerated path with operators wrapped: (name, function) or (name, function, phase), or as registered."""
    backend = Accelerated()
    for given in breaks:
        if isinstance(given, Registration):
            backend.operators().apply((given,))
        else:
            name, function, *phase = given
            backend.operators().apply((Registration("wrap", name, function, phase[0] if phase else None),))
    backend.load(model_dir, "bf16", "cpu", {})
    return backend
