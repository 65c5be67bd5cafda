"""Baselines: recorded, compared, never silently replaced; unchanged code is ready, a slower or other one is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from baseline_runs import Knobs, scene, write_run

from day0check.baseline import collect, read_baseline, read_entry, read_timing, record
from day0check.baseline_compare import CHOICES, DRIFT, MEMORY, SPEED, compare_run
from day0check.errors import InputError, UsageError
from day0check.gate import decide

CASES = ("text/a",)


def entries(folder: Path, knobs: Knobs, *, seed: int = 0, cases: tuple[str, ...] = CASES):
    return collect(write_run(folder, knobs, seed=seed, cases=cases), scene(knobs, cases))


@pytest.fixture
def kept(tmp_path: Path):
    record([entries(tmp_path / "first", Knobs(), seed=1)], tmp_path / "baselines", "a", at="2026-11-30T00:00:00Z")
    return read_baseline(tmp_path / "baselines", "a")


def gated(kept, tmp_path: Path, knobs: Knobs, *, seed: int = 2, name: str = "second"):
    comparison = compare_run(kept, entries(tmp_path / name, knobs, seed=seed))
    return decide(comparison.outcomes, comparison.findings, comparison.into(scene(knobs, CASES))), comparison


def test_twenty_repeats_of_the_same_are_ready(kept, tmp_path: Path) -> None:
    """Would catch a gate that cries wolf over the noise of a clock."""
    for seed in range(2, 22):
        verdict, _ = gated(kept, tmp_path, Knobs(), seed=seed, name=f"repeat{seed}")
        assert verdict.status == "ready", (seed, verdict.findings, verdict.not_run)


@pytest.mark.parametrize(("noise", "steps"), [(0.02, 30), (0.1, 30), (0.2, 200)])
def test_a_candidate_slowed_by_thirty_percent_fails(tmp_path: Path, noise: float, steps: int) -> None:
    """Would catch a speed gate that never fires; no figure of time may stand in the finding."""
    healthy = Knobs(noise=noise, decode_steps=steps)
    record([entries(tmp_path / "first", healthy, seed=1)], tmp_path / "baselines", "a", at="")
    kept = read_baseline(tmp_path / "baselines", "a")
    for seed in range(2, 6):
        knobs = replace(healthy, slow=1.3)
        verdict, comparison = gated(kept, tmp_path, knobs, seed=seed, name=f"slow{seed}")
        assert verdict.status == "not_ready"
        assert {f.check for f in verdict.findings} == {SPEED}
        assert verdict.first_fault.value is None
        row = next(r for r in comparison.record["speed"] if r["what"] == "decode of all cases")
        assert 1.2 < row["ratio"] < 1.4
        assert row["verdict"] == "failed"


@pytest.mark.parametrize("knobs", [Knobs(machine=0.6), Knobs(machine=1.6), Knobs(busy=4), Knobs(machine=1.3, busy=2)])
def test_a_busy_or_another_machine_is_no_slow_candidate(kept, tmp_path: Path, knobs: Knobs) -> None:
    """Would catch a gate that takes the machine's other work, or its own speed, for the candidate's."""
    verdict, comparison = gated(kept, tmp_path, knobs)
    assert verdict.status == "ready"
    words = {row["verdict"] for row in comparison.record["speed"]}
    assert words == ({"passed"} if knobs.machine < 1 else {"straddles"})


@pytest.mark.parametrize("knobs", [Knobs(slow=1.3, machine=0.9), Knobs(slow=1.3, busy=3)])
def test_a_slow_candidate_on_another_machine_is_seen(kept, tmp_path: Path, knobs: Knobs) -> None:
    """Would catch a slowdown that hides behind the machine."""
    assert gated(kept, tmp_path, knobs)[0].status == "not_ready"


def test_a_slow_candidate_against_a_baseline_of_a_busy_machine(tmp_path: Path) -> None:
    """Would catch a slowdown that hides behind other work during the recording."""
    record([entries(tmp_path / "first", Knobs(busy=3))], tmp_path / "baselines", "a", at="")
    kept = read_baseline(tmp_path / "baselines", "a")
    assert gated(kept, tmp_path, Knobs(slow=1.3))[0].status == "not_ready"
    assert gated(kept, tmp_path, Knobs(), name="third")[0].status == "ready"


def test_another_tie_rule_is_another_choice_from_the_same_inputs(kept, tmp_path: Path) -> None:
    """Would catch a gate that compares scores but not what was chosen from them."""
    verdict, _ = gated(kept, tmp_path, Knobs(rule=True))
    assert verdict.status == "not_ready"
    first = verdict.first_fault
    assert (first.check, first.operator, first.layer, first.phase) == (CHOICES, "dsa.select", 3, "prefill")


def test_choices_that_follow_their_scores_are_noted(kept, tmp_path: Path) -> None:
    """Would catch a false alarm at every kernel that sums in another order."""
    verdict, _ = gated(kept, tmp_path, Knobs(scores=True))
    assert verdict.status == "ready"
    assert {f.check: f.severity for f in verdict.findings} == {"baseline.bits": "note", CHOICES: "note"}


@pytest.mark.parametrize(
    ("knobs", "status"),
    [
        (Knobs(whole=0.75, row=1.2), "ready"),
        (Knobs(whole=0.95), "not_ready"),
        (Knobs(row=1.499 + 0.1), "not_ready"),
        (Knobs(row=float("nan")), "not_ready"),
        (Knobs(whole=0.3), "ready"),
        (Knobs(peak_rss_bytes=540_000_000), "ready"),
        (Knobs(peak_rss_bytes=600_000_000), "not_ready"),
    ],
)
def test_numbers_and_memory_have_an_effect_floor(kept, tmp_path: Path, knobs: Knobs, status: str) -> None:
    """Would catch a drift inside the absolute limit that goes unseen, and an alarm over a small change."""
    verdict, _ = gated(kept, tmp_path, knobs)
    assert verdict.status == status, verdict.findings
    if status == "not_ready":
        assert {f.check for f in verdict.findings if f.severity == "blocker"} <= {DRIFT, MEMORY}


def test_a_small_process_may_grow_by_its_tenth(tmp_path: Path) -> None:
    """Would catch a memory gate without a floor in bytes."""
    record([entries(tmp_path / "first", Knobs(peak_rss_bytes=100_000_000))], tmp_path / "b", "a", at="")
    small = read_baseline(tmp_path / "b", "a")
    assert gated(small, tmp_path, Knobs(peak_rss_bytes=150_000_000))[0].status == "ready"


def test_another_key_is_inconclusive_and_says_what_differs(kept, tmp_path: Path) -> None:
    """Would catch a comparison with a baseline of another model, and one that passes because nothing was compared."""
    verdict, comparison = gated(kept, tmp_path, Knobs(digest="ffffffffffff"))
    assert verdict.status == "inconclusive"
    assert comparison.outcomes[0].summary == "baseline a holds this case with another model"


def test_another_torch_is_the_same_key(kept, tmp_path: Path) -> None:
    """Would catch a version in the key: then no upgrade would ever be compared."""
    assert gated(kept, tmp_path, Knobs(torch="2.14.0"))[0].status == "ready"


def test_a_recorded_case_that_the_run_lacks_is_named(tmp_path: Path) -> None:
    """Would catch a case that is dropped and nobody notices; a chosen selection may lack it."""
    both = ("text/a", "text/b")
    record([entries(tmp_path / "first", Knobs(), cases=both)], tmp_path / "baselines", "a", at="")
    kept = read_baseline(tmp_path / "baselines", "a")
    run = entries(tmp_path / "second", Knobs(), seed=2)
    assert [n.check for n in compare_run(kept, run).not_run] == ["baseline.case of text/b"]
    assert compare_run(kept, run, partial=True).not_run == ()


def test_times_that_are_missing_are_not_a_pass(kept, tmp_path: Path) -> None:
    """Would catch a run without times that the speed gate waves through."""
    verdict, _ = gated(kept, tmp_path, Knobs(decode_steps=0, prefill_steps=0))
    assert verdict.status == "inconclusive"
    assert any(n.check == SPEED for n in verdict.not_run)


def test_a_case_of_one_bad_decode_is_seen_among_healthy_ones(tmp_path: Path) -> None:
    """Would catch a slowdown of one case that the pool of all cases washes out."""
    cases = tuple(f"text/{c}" for c in "abcdefgh")
    record([entries(tmp_path / "first", Knobs(), cases=cases)], tmp_path / "baselines", "a", at="")
    kept = read_baseline(tmp_path / "baselines", "a")
    run = entries(tmp_path / "second", Knobs(), seed=2, cases=cases)
    slow = entries(tmp_path / "slow", Knobs(slow=1.4), seed=3, cases=cases[:1])
    rows = compare_run(kept, {**run, **slow}).record["speed"]
    assert [r["what"] for r in rows if r["verdict"] == "failed"] == ["decode of text/a"]


# ---------------------------------------------------------------------------------------------------- the files


def test_recording_again_needs_a_reason_and_keeps_it(tmp_path: Path) -> None:
    """Would catch a baseline that is replaced without a trace."""
    run = [entries(tmp_path / "first", Knobs())]
    (file,) = record(run, tmp_path / "baselines", "a", at="monday")
    before = file.read_bytes()
    with pytest.raises(UsageError, match="already"):
        record(run, tmp_path / "baselines", "a", at="tuesday")
    assert file.read_bytes() == before
    record(run, tmp_path / "baselines", "a", at="tuesday", reason="new kernel")
    history = read_entry(file).recorded["history"]
    assert [h["reason"] for h in history] == ["first recorded", "new kernel"]


def test_several_runs_make_one_baseline(tmp_path: Path) -> None:
    """Would catch bits that differ among the recorded runs themselves being held against a later run."""
    runs = [entries(tmp_path / f"run{i}", Knobs(rule=i == 2), seed=i) for i in range(3)]
    record(runs, tmp_path / "baselines", "a", at="")
    kept = read_baseline(tmp_path / "baselines", "a")
    assert len(kept.entries[0].runs) == 3
    assert "layers.03.dsa.select|prefill" in kept.entries[0].unstable
    assert gated(kept, tmp_path, Knobs(rule=True), seed=9)[0].status == "ready"


def test_runs_of_different_things_are_not_mixed(tmp_path: Path) -> None:
    """Would catch two models in one baseline."""
    runs = [entries(tmp_path / "a", Knobs()), entries(tmp_path / "b", Knobs(digest="ffffffffffff"))]
    with pytest.raises(UsageError, match="differ in model"):
        record(runs, tmp_path / "baselines", "a", at="")
    assert not (tmp_path / "baselines").exists()


def _cut(data: dict, text: str) -> str:
    return text[: len(text) // 2]


def _newer(data: dict, text: str) -> str:
    return json.dumps({**data, "schema_version": 2, "new_field": 1})


def _foreign(data: dict, text: str) -> str:
    return json.dumps({"schema_version": 1, "hello": 1})


def _no_version(data: dict, text: str) -> str:
    return json.dumps({k: v for k, v in data.items() if k != "schema_version"})


@pytest.mark.parametrize(
    ("damage", "word"),
    [(_cut, "truncated"), (_newer, "schema_version 2"), (_foreign, "not a baseline"), (_no_version, "schema_version")],
)
def test_a_file_that_cannot_be_used_is_told_and_left_as_it_was(tmp_path: Path, damage, word: str) -> None:
    """Would catch a damaged or newer baseline that is ignored, repaired or overwritten."""
    run = [entries(tmp_path / "first", Knobs())]
    (file,) = record(run, tmp_path / "baselines", "a", at="")
    file.write_text(damage(json.loads(file.read_text()), file.read_text()))
    before = file.read_bytes()
    with pytest.raises(InputError, match=word) as caught:
        read_baseline(tmp_path / "baselines", "a")
    assert str(file) in str(caught.value)
    with pytest.raises(InputError, match=word):
        record(run, tmp_path / "baselines", "a", at="", reason="because")
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_runs_that_differ_among_themselves_widen_the_interval(tmp_path: Path) -> None:
    """Would catch a slow moment of the machine that fails a run, though recorded runs were as slow, in pools too."""
    runs = [entries(tmp_path / f"run{i}", Knobs(slow=1 + 0.15 * i), seed=i) for i in range(3)]
    record(runs, tmp_path / "baselines", "a", at="")
    kept = read_baseline(tmp_path / "baselines", "a")
    verdict, comparison = gated(kept, tmp_path, Knobs(slow=1.4), seed=9)
    assert verdict.status == "ready"
    assert {row["verdict"] for row in comparison.record["speed"]} == {"straddles"}
    assert "is not decided" in comparison.record["sentence"]
    assert gated(kept, tmp_path, Knobs(slow=1.9), seed=9, name="third")[0].status == "not_ready"


def test_names_and_absent_baselines(tmp_path: Path) -> None:
    """Would catch a name that leads out of the folder, and a traceback for one that does not exist."""
    record([entries(tmp_path / "first", Knobs())], tmp_path / "baselines", "nightly", at="")
    with pytest.raises(UsageError, match="recorded here: nightly"):
        read_baseline(tmp_path / "baselines", "nihgtly")
    for name in ("../x", "", "a/b", ".hidden"):
        with pytest.raises(UsageError, match="no name"):
            record([], tmp_path / "baselines", name, at="")


def test_an_unfinished_case_is_not_recorded(tmp_path: Path) -> None:
    """Would catch the times of a candidate that died becoming the measure of a healthy one."""
    folder = write_run(tmp_path / "run")
    run = folder / "snapshots" / "text__a" / "candidate" / "run.json"
    run.write_text(json.dumps({"status": "timeout"}))
    assert collect(folder, scene(Knobs(), CASES)) == {}
    with pytest.raises(UsageError, match="no case"):
        record([{}], tmp_path / "baselines", "a", at="")


def test_a_timing_line_that_is_none(tmp_path: Path) -> None:
    """Would catch a cut timing file that counts as fewer samples."""
    path = tmp_path / "timing.jsonl"
    sample = {"phase": "decode", "step": 1, "rows": 1, "seconds": 0.1, "waited_seconds": 0.0, "machine_seconds": 0.001}
    path.write_text(json.dumps(sample) + '\n{"pha')
    with pytest.raises(InputError, match=r"timing.jsonl:2"):
        read_timing(path)


def test_the_sentence_says_what_is_worse(kept, tmp_path: Path) -> None:
    """Would catch a comforting sentence over a failed comparison."""
    assert "are no worse" in gated(kept, tmp_path, Knobs())[1].record["sentence"]
    knobs = replace(Knobs(), slow=1.5, whole=1.0)
    assert "worse in drift, speed" in gated(kept, tmp_path, knobs, name="third")[1].record["sentence"]
