"""The weights of all ranks together are the checkpoint's, each slice on the rank that it belongs to."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "accelerated" / "parallel"))
from thread_ranks import run_ranks

from day0check.compare.merge import RANKS
from day0check.compare.merge_parameters import compare_rank_parameters
from day0check.compare.parameters import ParametersRecorder
from day0check.types import Request, Schedule, Turn, to_json
from reference.presets import preset_dir

MODEL = "tiny"


@pytest.fixture(scope="module")
def recorded():
    """What each of two ranks records of its weights and settings for a prompt of three tokens."""
    found = [[], []]
    requests = (Request("a", (Turn((5, 6, 7)),), 1),)
    layout = {"tensor_parallel": 2, "expert_parallel": 2}
    run_ranks(preset_dir(MODEL), "bf16", layout, requests, Schedule(), lambda r: [ParametersRecorder(found[r].append)])
    return [[to_json(r) for r in mine] for mine in found]


def compared(tmp_path, ranks, *, experts=None):
    """The failing measures, and how many passed."""
    folders = []
    for rank, records in enumerate(ranks):
        folders.append(tmp_path / f"rank-{rank}")
        folders[-1].mkdir()
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folders[-1] / "parameters.jsonl").write_text(lines)
    if experts is not None:
        (tmp_path / RANKS).write_text(json.dumps({"experts": experts, "folders": []}))
    measures = compare_rank_parameters(str(preset_dir(MODEL)), "bf16", tmp_path, folders)
    return [m for m in measures if not m.passed], sum(m.passed for m in measures)


def held(recorded):
    import reference.weights

    count = reference.weights.Checkpoint(preset_dir(MODEL)).config.moe.experts
    return [list(range(count // 2)), list(range(count // 2, count))]


def test_slices_of_ranks_are_those_of_the_checkpoint(recorded, tmp_path):
    """Catches a false alarm on a cut weight, and a comparison that leaves the cut ones out."""
    failed, passed = compared(tmp_path, recorded, experts=held(recorded))
    assert failed == []
    assert passed > 30


def exchanged(recorded, tap, weight):
    """The records with one weight of the two ranks exchanged."""
    ranks = json.loads(json.dumps(recorded))
    chosen = [next(r for r in mine if r["tap"] == tap) for mine in ranks]
    weights = [r["weights"] for r in chosen]
    weights[0][weight], weights[1][weight] = weights[1][weight], weights[0][weight]
    return ranks


@pytest.mark.parametrize(
    ("tap", "weight"),
    [("layers.03.mla.output", "weight"), ("layers.03.mla.absorb", "weight"), ("head.logits", "weight")],
)
def test_a_slice_on_another_rank_is_named(recorded, tmp_path, tap, weight):
    """Catches ranks that hold each other's part: every part is of the checkpoint, and the sum is wrong."""
    failed, _ = compared(tmp_path, exchanged(recorded, tap, weight), experts=held(recorded))
    assert {m.tap for m in failed} == {tap}
    assert all(m.pattern == f"other weight: {weight}" and m.rank == 0 for m in failed)


def test_a_changed_slice_and_a_rank_that_recorded_nothing_are_named(recorded, tmp_path):
    """Catches one rank's changed weight behind the others' right ones, and a rank that shows none and passes."""
    ranks = json.loads(json.dumps(recorded))
    mine = next(r for r in ranks[1] if r["operator"] == "mla.query" and r["weights"])
    name = next(iter(mine["weights"]))
    mine["weights"][name]["digest"] = "0" * 32
    (tmp_path / "a").mkdir()
    failed, _ = compared(tmp_path / "a", ranks, experts=held(recorded))
    assert [(m.tap, m.rank) for m in failed] == [(mine["tap"], 1)]
    (tmp_path / "b").mkdir()
    failed, _ = compared(tmp_path / "b", [recorded[0], []], experts=held(recorded))
    assert [m.not_judged for m in failed] == ["rank 1 recorded no weights and settings"]


def test_experts_that_are_not_where_they_are_held_are_named(recorded, tmp_path):
    """Catches a rank whose stack holds the experts of another one."""
    failed, _ = compared(tmp_path, recorded, experts=held(recorded)[::-1])
    assert {m.operator for m in failed} == {"moe.convert"}
    assert all(m.pattern.startswith("other weight") for m in failed)
