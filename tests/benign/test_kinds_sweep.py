"""A legal variant raises no alarm on any preset it applies to: a few of them in CI, others every day."""

import dataclasses
import datetime
import random
import re

import pytest
from benign import kinds_sweep
from benign.counting import read_lines
from benign.legal_variants import (
    TINY,
    Task,
    applies,
    case_text,
    entries,
    judged,
    kept_operators,
    models_of,
    operators_called,
)

from day0check.faults.catalogue import select

CHEAP = tuple(
    name for name in TINY if name.startswith(("tiny-deepseek", "tiny-glm-5", "tiny-kimi-k2.5", "tiny-kimi-l"))
)
SAMPLE = 2
SLOW = ("B-18", "B-80", "B-81", "B-84")  # forty layers, ranks, a sweep of costs: the whole sweep has them


def test_a_rotating_sample_of_legal_variants_raises_no_alarm(tmp_path, monkeypatch):
    """Catches a limit that cries wolf on weights and prompts that no fixed test holds. The day is the seed; it is in
    the message."""
    day = datetime.datetime.now(datetime.UTC).date().toordinal()
    monkeypatch.setenv("DAY0CHECK_CACHE", str(tmp_path))  # a new model every day
    draw = random.Random(day)
    model, seed = draw.choice(CHEAP), 100 + day
    called = operators_called(model)
    able = [i for i, x in entries().items() if i not in SLOW and model in models_of(x) and applies(x, model, called)]
    for entry in draw.sample(able, SAMPLE):
        line = judged((Task(entry, model, seed), called))
        assert line["status"] == "ready", line


def test_every_kind_is_tried_on_every_small_preset():
    """Catches a kind that is counted and tried nowhere, and a preset that is left out."""
    assert len(TINY) >= 8
    assert {"tiny", "tiny-glm-5.3", "tiny-kimi-k3"} <= set(TINY)
    everywhere = [i for i, located in entries().items() if models_of(located) == TINY]
    assert len(everywhere) >= 24
    assert models_of(entries()["B-64"]) == ("fault-packed",)


def test_an_operator_that_a_preset_never_calls_is_left_out():
    """Catches a run that is inconclusive because it replaced what the model has not, and an entry that loses what a
    profile alone calls."""
    both = kept_operators(entries()["B-22"], ["dsa.attention", "mla.attention", "norm.rms"])
    assert both == ["dsa.attention"] or both == ["dsa.attention", "mla.attention"]
    assert kept_operators(entries()["B-22"], ["norm.rms"]) == []
    assert kept_operators(entries()["B-08"], []) == ["quantise.rows"]
    assert not applies(entries()["B-31"], "tiny-glm-5", ["norm.rms"])  # images, and no tower


def test_a_seed_changes_the_words_and_keeps_what_was_equal():
    """Catches prompts that are the same for every seed, and a shared prefix that is lost with another letter."""
    texts = [case_text(entries()["B-71"], seed) for seed in range(3)]
    assert len(set(texts)) == 3
    assert len(set(map(len, texts))) == 1
    for text in texts:
        a, b, _ = re.findall(r'user = "([^"]*)"', text)
        assert b.startswith(a)
    assert case_text(entries()["B-27"], 1) != case_text(entries()["B-27"], 2)
    assert "aaaa" in case_text(entries()["B-30"], 0)
    assert "bbbb" in case_text(entries()["B-30"], 1)


def test_a_fault_is_counted_as_an_alarm(monkeypatch):
    """Catches a sweep that cannot fail: a known fault laid over in place of a legal variant."""
    (fault,) = select(("S-41",))
    fault = dataclasses.replace(fault, entry=dataclasses.replace(fault.entry, case="short"))
    monkeypatch.setattr("benign.legal_variants.entries", lambda: {"S-41": fault})
    line = judged((Task("S-41", "tiny-deepseek-v3.2", 1), ["norm.rms"]))
    assert line["status"] == "not_ready"
    assert "norm.rms" in line["message"]


def test_a_sweep_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    """Catches runs that are counted twice, and one that is lost with a line cut off in the middle."""
    ran = []

    def fake(work):
        ran.append(work[0])
        return dataclasses.asdict(work[0]) | {"status": "ready", "message": "", "seconds": 1.0}

    monkeypatch.setattr(kinds_sweep, "judged", fake)
    state, wanted = tmp_path / "kinds.jsonl", [Task("B-22", "tiny", seed) for seed in range(3)]
    calls = {"tiny": ["dsa.attention"]}
    assert len(list(kinds_sweep.sweep(wanted[:2], state, calls, jobs=1, until=float("inf")))) == 2
    with state.open("a") as file:
        file.write('{"entry": "B-22", "mo\n')
    assert [line["seed"] for line in kinds_sweep.sweep(wanted, state, calls, jobs=1, until=float("inf"))] == [2]
    assert ran == wanted
    assert len(read_lines(state)) == 3
    assert "0 alarms in 3 runs (1 kinds, 1 presets, 3 seeds): at most 63.160%" in kinds_sweep.table(state)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_ten_seeds_of_every_kind_and_preset_raise_no_alarm(tmp_path):
    """The measured benign column of kinds: count, time and upper bound are printed."""
    assert kinds_sweep.main(["--state", str(tmp_path / "kinds.jsonl"), "--jobs", "2"]) == 0
