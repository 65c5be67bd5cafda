"""The reference's side of a run: the propagated comparison of each case that the candidate has finished."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterable

from day0check.probe.records import Lines, RecordError, replace_bytes
from day0check.snapshot import Snapshot, case_directory
from day0check.types import RunCase, to_json
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
    """Writes net.jsonl of one case; a comparison that raises is recorded as failed, which no check takes for a pass."""
    from day0check.compare.propagated import compare_case

    directory = case_directory(job.out, case.id, "reference")
    directory.mkdir(parents=True, exist_ok=True)
    reset_peak_rss()
    begin = time.perf_counter()
    status, message = "finished", ""
    try:
        candidate = Snapshot(case_directory(job.out, case.id, "candidate"))
        measures = compare_case(job.model_dir, job.profile, case, candidate)
        lines = "".join(json.dumps(to_json(m), allow_nan=False) + "\n" for m in measures)
        replace_bytes(directory / "net.jsonl", lines.encode())
    except RecordError:
        raise
    except Exception as error:
        traceback.print_exc()
        status, message = "failed", describe(error)
    return RunRecord(status, message, seconds=time.perf_counter() - begin, peak_rss_bytes=peak_rss())
