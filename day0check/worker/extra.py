"""The further runs of a case, in the process that has the model loaded, and their comparison beside the reference.

Under `candidate/extra/<label>/` lies a snapshot of the travelling results as for the judged run, with a run.json of its
own, its tensors only until it has been found to agree; `reference/extra/<label>.json` is a
`compare/run_comparison.py:RunComparison`.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from day0check.checks import extra_runs_of
from day0check.checks.evidence import EXTRA
from day0check.checks.invariants.extra_runs import ExtraRun
from day0check.compare.experts_law import experts_law
from day0check.compare.experts_law_ranks import experts_law_of_ranks
from day0check.compare.host_buffers import OPERATOR as STAGING
from day0check.compare.host_buffers import HostBuffers
from day0check.compare.lent_rows import LentRows
from day0check.compare.merge import EXCHANGES, rank_folders, ranks_facts
from day0check.compare.noise_book import FILE, NoiseBook
from day0check.compare.parts_law import parts_law
from day0check.compare.run_comparison import Computed, RunComparison, file_name, write_comparison
from day0check.compare.shadow import Shadow
from day0check.compare.splice_law import splice_law
from day0check.compare.two_runs import Compared, compare_runs
from day0check.contracts import CONTRACTS
from day0check.errors import Unavailable
from day0check.probe.capture import Capture
from day0check.probe.exchanges import Exchanges
from day0check.probe.heartbeat import Heartbeat
from day0check.probe.recorder import Recorder
from day0check.probe.records import Lines, RecordError, replace_json
from day0check.snapshot import Snapshot
from day0check.types import Measure, Outputs, Request, RunCase, to_json
from day0check.worker.observe import Guard

if TYPE_CHECKING:
    from day0check.probe.registry import Operators
    from day0check.worker.job import Job

Run = Callable[[tuple[Request, ...], Any, Recorder], Outputs]
TRAVELLING = frozenset(c.name for c in CONTRACTS.values() if c.net)


def runs_of(job: Job, case: RunCase, outputs: Outputs) -> tuple[ExtraRun, ...]:
    """The further runs of a case; none for a case whose checks want none, and then the model is not looked at."""
    if not case.checks:
        return ()
    from reference.weights import Checkpoint

    return extra_runs_of(case, outputs, Checkpoint(job.model_dir).config)


# ----------------------------------------------------------------------------------------------------- the candidate


def make_run(
    run: ExtraRun,
    directory: Path,
    execute: Run,
    *,
    table: Operators | None,
    lacking: Sequence[str],
    byte_cap: int,
    of_rank: bool = False,
) -> None:
    """Makes one run and leaves its records under `directory`; what the candidate raises is its outcome.

    `execute` runs requests and checks the form of what it gives; `table`: the backend's operators; `lacking`:
    capabilities that the run needs and the backend does not have; `of_rank`: this process is one rank of several.
    Raises what is ours.
    """
    folder = directory / EXTRA / file_name(run.label)
    folder.mkdir(parents=True)
    begin = time.perf_counter()
    if run.identity and (table is None or not set(run.identity) <= set(table.names())):
        lacking = (*lacking, f"operator {run.identity[0]} that can be replaced")
    if lacking:
        status, message = "unavailable", f"the backend has no {', '.join(lacking)}, which this run needs"
    else:
        instead = table.instead(dict.fromkeys(run.identity, _first)) if run.identity else contextlib.nullcontext()
        with instead:
            status, message = _execute(run, folder, execute, byte_cap, of_rank=of_rank)
    record = {"label": run.label, "status": status, "message": message, "seconds": time.perf_counter() - begin}
    replace_json(folder / "run.json", record)


def _first(first: torch.Tensor, **_: Any) -> torch.Tensor:
    return first


def _execute(run: ExtraRun, folder: Path, execute: Run, byte_cap: int, *, of_rank: bool) -> tuple[str, str]:
    lines, exchanges = Lines(folder / "measures.jsonl"), None
    capture = Capture(folder, TRAVELLING | set(run.also), byte_cap=byte_cap)

    def sink(measure: Measure) -> None:
        lines.write(to_json(measure))

    guards = (Guard(capture), Guard(Shadow(sink, run.requests)))
    guards += (Guard(HostBuffers(sink)),) if run.law == "copies" else ()
    if of_rank and run.law == "experts":
        exchanges = Lines(folder / EXCHANGES)
        guards += (Guard(Exchanges(exchanges.write)),)
    heartbeat = Heartbeat(folder / "heartbeat")
    recorder = Recorder(guards, heartbeat)
    try:
        with torch.no_grad():
            outputs = execute(run.requests, run.schedule, recorder)
        recorder.end_case()
        _raise_faults(guards)
    except RecordError:
        raise
    except (Exception, SystemExit) as error:
        _raise_faults(guards, error)
        traceback.print_exc()
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return ("unavailable" if isinstance(error, Unavailable) else "failed"), text
    finally:
        heartbeat.close()
        lines.close()
        if exchanges is not None:
            exchanges.close()
    replace_json(folder / "outputs.json", to_json(outputs))
    return "finished", ""


def _raise_faults(guards: Sequence[Guard], error: BaseException | None = None) -> None:
    """Raises what an observer of ours raised, in case that the candidate caught it."""
    for guard in guards:
        if guard.fault is not None:
            raise guard.fault from error


# ----------------------------------------------------------------------------------------------------- the reference


def compare_extra(job: Job, case: RunCase, candidate: Snapshot, directory: Path, book: NoiseBook) -> None:
    """Compares every further run of a case that finished and writes what was found under `directory`/extra."""
    runs = runs_of(job, case, candidate.outputs)
    if not runs:
        return
    book.write(directory / FILE)
    snapshots, agreed = {"": candidate}, []
    for run in runs:
        folder = candidate.directory / EXTRA / file_name(run.label)
        if not (folder / "run.json").is_file():
            continue  # it was never made, and its check says so
        snapshots[run.label] = here = Snapshot(folder)
        if here.run["status"] != "finished":
            continue
        there = snapshots.get(run.against)
        if there is None or there.run["status"] != "finished":
            found = RunComparison(run.label, missing=f"the run {run.against!r} that it is compared with did not finish")
        else:
            found = _compare(job, case, run, here, there, book)
        if run.law:
            found = _with_law(job, run, here, there, found)
        found = _with_memory(here, found)
        write_comparison(directory / EXTRA, found)
        agreed += [folder] if all(m.passed for m in found.measures) and not found.missing else []
    ranks = rank_folders(candidate.directory)
    for folder in agreed:  # the tensors of a run that agrees serve nobody any more, nor do those of its ranks
        for place in (folder, *(rank / EXTRA / folder.name for rank in ranks)):
            for file in place.glob("*.safetensors"):
                file.unlink()


def _compare(job: Job, case: RunCase, run: ExtraRun, here: Snapshot, there: Snapshot, book: NoiseBook) -> RunComparison:
    here = LentRows(here.directory, {})  # without rows that were computed again since
    found = compare_runs(here, there, run.pairings, book)
    for borrower, lender in run.lenders:
        if lender in found.flips:  # its choices lie in the cache behind which the other began
            found.flips[borrower] = min(found.flips[lender], found.flips.get(borrower, found.flips[lender]))
    measures, explained = found.measures, ()
    if not all(m.passed for m in measures) and found.flips:
        measures, explained = _behind_choices(job, case, run, here, there, book, found)
    first = found.first or ("", None, None)
    return RunComparison(
        run.label,
        measures=tuple(_in_its_place(here, m) for m in measures),
        rows=found.rows,
        different=found.different,
        first_tap=first[0],
        first_request=first[1],
        first_position=first[2],
        flips=found.flips,
        explained=explained,
        set_aside=tuple(m for m in found.measures if not m.passed) if explained else (),
        strayed=_strayed(run, here),
        computed=_computed(here),
        missing=found.missing,
    )


def _with_law(job: Job, run: ExtraRun, here: Snapshot, there: Snapshot | None, found: RunComparison) -> RunComparison:
    """Adds what the results of the run must hold by themselves."""
    from reference.weights import Checkpoint

    config = Checkpoint(job.model_dir).config
    if run.law == "copies":
        staged = tuple(m for m in here.measures if m.operator == STAGING)
        missing = "" if staged else f"the candidate makes no call of {STAGING}"
        measures = tuple(m for m in staged if m.passed)  # the others are added in front, below
    elif run.law == "experts":
        judged = here.directory.parent.parent
        if ranks := rank_folders(judged):
            folders = [folder / EXTRA / here.directory.name for folder in ranks]
            layout = ranks_facts(judged)["layout"]
            measures, missing = experts_law_of_ranks(folders, config, layout=layout)
        else:
            measures, missing = experts_law(here, config)
    elif run.law == "parts":
        alone = there is None or there.run["status"] != "finished"
        measures, missing = ((), "") if alone else parts_law(here, there, config, run.requests)
    else:
        measures, missing = splice_law(here, config, run.requests)
    rows = found.rows + sum(m.rows for m in measures)
    return replace(found, measures=(*measures, *found.measures), rows=rows, missing=missing or found.missing)


def _with_memory(here: Snapshot, found: RunComparison) -> RunComparison:
    """Adds what the shadow of the run's caches accuses, in front of what differs because of it."""
    wrong = sorted((m for m in here.measures if not m.passed and not m.not_judged), key=lambda m: m.order)
    others = min((m.order for m in found.measures if not m.passed), default=0)
    placed = [replace(m, order=min(m.order, others - len(wrong) + number)) for number, m in enumerate(wrong)]
    return replace(found, measures=(*placed, *found.measures))


def _in_its_place(here: Snapshot, measure: Measure) -> Measure:
    """The measure at the execution index of its tap's first call: with prescribed tokens no layer depends on a later
    one in whatever step, so the tap that comes first in the model is to be accused."""
    return replace(measure, order=here.first_order(measure.tap))


def _behind_choices(
    job: Job, case: RunCase, run: ExtraRun, here: Snapshot, there: Snapshot, book: NoiseBook, found: Compared
) -> tuple[tuple[Measure, ...], tuple[str, ...]]:
    """Judges again where the runs chose differently: before the first such position against the other run, behind it
    against an oracle that follows the run's own choices and judges them. (measures, requests that it explains)."""
    from day0check.compare.propagated import compare_case

    before = compare_runs(here, there, run.pairings, book, before=found.flips).measures
    if not all(m.passed for m in before):
        return before, ()
    flipped = [r for r in run.requests if r.id in found.flips]
    own = LentRows(here.directory, dict(run.lenders))
    followed = compare_case(job.model_dir, job.profile, replace(case, requests=tuple(flipped)), own)
    wrong = tuple(m for m in followed if not m.passed and not m.not_judged)
    if wrong:
        return (*before, *wrong), ()
    return before, tuple(r.id for r in flipped)


def _strayed(run: ExtraRun, here: Snapshot) -> tuple[str, ...]:
    """Compared requests that do not have the tokens that were given to them."""
    paired = {p.here for p in run.pairings}
    return tuple(r.id for r in run.requests if r.id in paired and here.outputs.sequences.get(r.id) != _expected(r))


def _expected(request: Request) -> tuple[int, ...]:
    tokens: list[int] = []
    for number, turn in enumerate(request.turns):
        tokens += turn.tokens
        tokens += request.forced[number] if number < len(request.forced) else ()
    return tuple(tokens)


def _computed(here: Snapshot) -> dict[str, Computed]:
    """What the run computed for each request, by the rows of the first tap of the decoder."""
    first = next((tap for tap in here.taps() if tap.endswith("embed.tokens")), None)
    rows: dict[str, list[tuple[int, str, int]]] = {}
    merged: Counter[str] = Counter()
    for entry in here.entries:
        if entry.operator == "mla.merge":
            merged.update(entry.requests[owner] for owner in entry.owner if owner >= 0)
        if entry.tap == first:
            for owner, position in zip(entry.owner, entry.position, strict=True):
                if owner >= 0:
                    rows.setdefault(entry.requests[owner], []).append((position, entry.phase, entry.step))
    return {
        name: Computed(
            len(mine),
            len({p for p, _, _ in mine}),
            len({s for _, phase, s in mine if phase == "prefill"}),
            len({s for _, phase, s in mine if phase == "decode"}),
            _longest_rest(sorted({s for _, _, s in mine})),
            merged[name],
        )
        for name, mine in rows.items()
    }


def _longest_rest(steps: list[int]) -> int:
    return max((b - a - 1 for a, b in pairwise(steps)), default=0)
