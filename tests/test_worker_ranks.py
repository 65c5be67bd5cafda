"""Ranks that are processes: they begin and end together, and what one of them does wrong carries its number."""

import json
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from day0check.accelerated.parallel.start_up import connect
from day0check.errors import Unavailable
from day0check.probe.heartbeat import Beat
from day0check.probe.records import replace_json
from day0check.runner import RunPlan, run
from day0check.snapshot import case_directory
from day0check.types import Request, RunCase, Turn, to_json
from day0check.worker.job import RunRecord
from day0check.worker.ranks import device_of_rank, joined_record, laggard

FAKES = Path(__file__).with_name("rank_candidates.py")


def case(what: str, time_limit_s: float = 30.0) -> RunCase:
    return RunCase(f"fake/{what}", (Request(f"fake/{what}#1", (Turn((1, 2, 3)),), 1),), time_limit_s=time_limit_s)


def results(tmp_path, *cases, backend="Moody", ranks=2, **rest):
    rest = {"mode": "digest", "reference": False, "repeats": 0, "memory_limit_bytes": 4 << 30, **rest}
    layout = {"tensor_parallel": ranks}
    plan = RunPlan(cases, tmp_path / "out", backend=f"{FAKES}:{backend}", layout=layout, **rest)
    return {r.case.id.removeprefix("fake/"): r.candidate for r in run(plan)}


def test_a_killed_rank_is_named_and_the_next_case_runs(tmp_path):
    """Catches a death of one rank that hangs the others, is told without its number, or ends the run."""
    begin = time.monotonic()
    found = results(tmp_path, case("kill-1"), case("nothing"))
    assert found["kill-1"].status == "aborted"
    assert found["kill-1"].rank == 1
    assert "rank 1 of 2: its process was ended by SIGKILL" in found["kill-1"].message
    assert found["kill-1"].last == {"tap": "layers.01.norm.rms.input", "phase": "prefill", "step": 1}
    assert (found["nothing"].status, found["nothing"].rank) == ("finished", None)
    assert time.monotonic() - begin < 2 * 180  # far from the time limit of a hanging collective
    folder = case_directory(tmp_path / "out", "fake/nothing", "candidate")
    assert json.loads((folder / "ranks.json").read_text())["layout"]["tensor"] == 2
    places = json.loads((tmp_path / "out" / "topology.json").read_text())
    assert [place["rank"] for place in places] == [0, 1]
    assert not [p for p in psutil.Process().children(recursive=True) if "day0check.worker" in " ".join(p.cmdline())]


@pytest.mark.slow
def test_ranks_that_fail_or_hang_are_named(tmp_path):
    """Catches an error of one rank that leaves the others waiting, and a hang that accuses a rank that only waits."""
    found = results(tmp_path, case("raise-2"), case("hang-1", time_limit_s=8), case("nothing"), ranks=4)
    assert (found["raise-2"].status, found["raise-2"].rank) == ("failed", 2)
    assert "rank 2 of 4: ValueError: the link said no" in found["raise-2"].message
    assert (found["hang-1"].status, found["hang-1"].rank) == ("timeout", 1)
    assert "limit of 8 s at layers.01.norm.rms.input; rank 0 waits for it" in found["hang-1"].message
    assert found["nothing"].status == "finished"


@pytest.mark.slow
def test_a_hang_that_nobody_watches_ends_in_time_though_its_run_was_watched_for_long(tmp_path):
    """Catches a limit of the repeat that is longer by what watching the run before it took: the runner would end the
    launcher, with no word of its ranks."""
    found = results(tmp_path, case("later-1", time_limit_s=8), repeats=1)["later-1"]
    assert found.status == "timeout"
    assert found.rank is not None


@pytest.mark.slow
def test_a_backend_that_knows_no_ranks_is_not_run(tmp_path):
    """Catches a whole model on every rank that passes for a sharded one."""
    found = results(tmp_path, case("nothing"), backend="Unaware")
    assert found["nothing"].status == "unavailable"
    assert "rank_taps" in found["nothing"].message


def test_the_rank_that_holds_the_others_up():
    """Catches an accusation of a rank that waits in a call of all."""
    gather, own = "layers.03.comm.all_gather.mlp", "layers.03.mlp.dense"
    beats = {0: Beat(gather, "prefill", 1, 90), 1: Beat(own, "prefill", 1, 95), 2: Beat(gather, "prefill", 1, 91)}
    assert laggard(beats) == (1, [0, 2])
    assert laggard({0: Beat(gather, "prefill", 1, 90), 1: None}) == (1, [0])
    assert laggard({0: Beat(gather, "prefill", 1, 90), 1: Beat(gather, "prefill", 1, 80)}) == (1, [0])


def test_the_worst_rank_decides_the_record(tmp_path):
    """Catches a run that counts as finished while one rank has no record, or failed."""

    def joined(*records):
        folders = [tmp_path / f"{time.monotonic_ns()}" for _ in records]
        for folder, record in zip(folders, records, strict=True):
            folder.mkdir()
            if record is not None:
                replace_json(folder / "run.json", to_json(record))
        return joined_record(folders)

    fine = RunRecord("finished", seconds=1.0, peak_rss_bytes=5, links={"checked": 2}, repeat_equal=True)
    together = joined(
        fine, RunRecord("finished", seconds=2.0, peak_rss_bytes=6, links={"checked": 3}, repeat_equal=True)
    )
    assert (together.status, together.seconds, together.peak_rss_bytes) == ("finished", 2.0, 11)
    assert (together.links, together.repeat_equal) == ({"checked": 5}, True)
    assert joined(fine, RunRecord("finished", repeat_equal=False)).repeat_equal is False
    failed = joined(fine, RunRecord("failed", "it broke"))
    assert (failed.status, failed.message, failed.rank) == ("failed", "rank 1 of 2: it broke", 1)
    assert joined(fine, None).message == "rank 1 of 2: it left no record"


def test_a_rank_that_never_comes_is_named_after_a_bounded_number_of_attempts():
    """Catches a start-up without end, and one that gives up without saying who was missing."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    layout = {"store_host": "127.0.0.1", "store_port": store.port, "world": 3, "rank": 0}
    begin = time.monotonic()
    with pytest.raises(Unavailable, match="rank 0 of 3 gave up after 2 attempts: ranks 1, 2 did not come"):
        connect({**layout, "start_attempts": 2, "start_attempt_s": 0.2})
    assert time.monotonic() - begin < 20
    with pytest.raises(Unavailable, match="nobody says where"):
        connect({"rank": 0, "world": 2, "store_port": 0})


def test_devices_of_ranks():
    """Catches ranks that share one accelerator, or a CPU that is asked for by a number."""
    assert [device_of_rank(d, 3) for d in ("cpu", "cuda", "cuda:0")] == ["cpu", "cuda:3", "cuda:3"]
