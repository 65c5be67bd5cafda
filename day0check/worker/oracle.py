"""The reference's side of a run: the propagated comparison of each case that the candidate has finished."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from day0check.compare.merge import rank_folders
from day0check.compare.merge_parameters import compare_rank_parameters
from day0check.probe.records import Lines, RecordError, replace_bytes
from day0check.snapshot import Snapshot, case_directory
from day0check.types import Measure, RunCase, to_json
from day0check.worker.candidate import describe, peak_rss, reset_peak_rss
from day0check.worker.job import Job, RunRecord, write_record


def run_reference(job: Job, events: Lines, ids: Iterable[str]) -> None:
    """Compares the cases whose ids come in, one a line, until the lines end. Raises RecordError."""
    cases = {case.id: case for case in job.cases}
    for line in ids:
        case = cases[line.rstrip("\n")]
        events.write({"event": "begin", "case": case.id})
        write_record(case_directory(job.out, case.id, "reference"), compare(job, case))
        events.write({"event": "end", "case": case.id})


def compare(job: Job, case: RunCase) -> RunRecord:
    """Writes net.jsonl, capture.jsonl and parameters.jsonl of one case; a comparison that raises is recorded as failed,
    which no check takes for a pass."""
    from day0check.compare.final_state import compare_final_state
    from day0check.compare.noise_book import NoiseBook
    from day0check.compare.propagated import compare_case
    from day0check.worker.extra import compare_extra

    directory = case_directory(job.out, case.id, "reference")
    directory.mkdir(parents=True, exist_ok=True)
    reset_peak_rss()
    begin = time.perf_counter()
    status, message = "finished", ""
    try:
        candidate = Snapshot(case_directory(job.out, case.id, "candidate"))
        _parameters(job, candidate.directory, directory)
        book = NoiseBook() if case.checks else None
        net = compare_case(job.model_dir, job.profile, case, candidate, book=book)
        _write(directory / "net.jsonl", [*net, *_matched(job, case, candidate)])
        _write(directory / "capture.jsonl", compare_final_state(job.model_dir, job.profile, case, candidate))
        if book is not None:
            compare_extra(job, case, candidate, directory, book)
    except RecordError:
        raise
    except Exception as error:
        traceback.print_exc()
        status, message = "failed", describe(error)
    return RunRecord(status, message, seconds=time.perf_counter() - begin, peak_rss_bytes=peak_rss())


def _matched(job: Job, case: RunCase, candidate: Snapshot) -> list[Measure]:
    """What the error of a black box looks like: one whose calls nobody replayed has nothing else that names it."""
    if candidate.measures or rank_folders(candidate.directory) or not candidate.taps():
        return []
    from day0check.compare.matched import compare_matched
    from day0check.compare.matched_case import compare_logits_of_case, shows_logits_alone

    compared = compare_logits_of_case if shows_logits_alone(candidate) else compare_matched
    return compared(job.model_dir, job.profile, case, candidate)


def _parameters(job: Job, candidate: Path, reference: Path) -> None:
    """Compares what the candidate recorded of weights and settings, where it recorded any; of ranks, what each has."""
    if ranks := rank_folders(candidate):
        _write(reference / "parameters.jsonl", compare_rank_parameters(job.model_dir, job.profile, candidate, ranks))
        return
    if not (candidate / "parameters.jsonl").is_file():
        return
    from day0check.compare.checkpoint_parameters import compare_parameters
    from day0check.compare.parameters import read_recorded
    from day0check.compare.raw_config import beside, compare_raw

    recorded = read_recorded(candidate / "parameters.jsonl")
    compared = compare_parameters(job.model_dir, job.profile, recorded)
    raw = json.loads((Path(job.model_dir) / "config.json").read_text(encoding="utf-8"))
    _write(reference / "parameters.jsonl", beside(compared, compare_raw(raw, recorded)))


def _write(path: Path, measures: Iterable[Measure]) -> None:
    replace_bytes(path, "".join(json.dumps(to_json(m), allow_nan=False) + "\n" for m in measures).encode())
