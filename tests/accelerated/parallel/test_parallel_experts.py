"""Each pair of row and expert once, and the scaling once, where experts lie on several ranks: experts that give back
their input make it visible, and an engine that is broken there is told."""

from __future__ import annotations

import pytest
import torch
from thread_ranks import run_ranks

from day0check.accelerated.parallel.layout import Placement, layout_of
from day0check.backends.accelerated import Accelerated
from day0check.checks.invariants import experts_once
from day0check.compare.experts_law_ranks import experts_law_of_ranks
from day0check.compare.merge import EXCHANGES, EXTRA
from day0check.types import Outputs, Request, RunCase, Schedule, Turn, to_json
from day0check.worker.extra import make_run
from reference.presets import preset_dir
from reference.weights import Checkpoint

TP, EP, REDUCE = "tensor_parallel", "expert_parallel", {"expert_dispatch": "reduce", "redundant_experts": 5}
TOKENS = tuple(torch.randint(0, 256, (13,), generator=torch.Generator().manual_seed(1)).tolist())
REQUEST = Request("x/a#1", (Turn(TOKENS),), 2)
CASE = RunCase("x", (REQUEST,), Schedule(max_batch=1), checks=("experts_once",))
OUTPUTS = Outputs({"x/a#1": (*TOKENS, 7, 9)}, {"x/a#1": ((13, 15),)}, {"x/a#1": "length"})


class Elsewhere(Placement):
    """Pairs of expert 0 belong to a rank that is not there."""

    def in_turn(self, row):
        return (99, *super().in_turn(row)[1:])


class OnEveryRank(Placement):
    """Each of two ranks takes the pairs of expert 0 for its own."""

    rank = 0

    def in_turn(self, row):
        return (self.rank, *super().in_turn(row)[1:])


def law(tmp_path, layout, *, placement=None, combine=None):
    """(measures, what is missing) of a run over ranks with identity experts, on an engine with these breaks."""
    config = Checkpoint(preset_dir("fault-ranks")).config
    (run,) = experts_once.runs(CASE, OUTPUTS, config)

    class Identity(Accelerated):
        def run(self, requests, schedule, recorder):
            ranks, table = self._engine.ranks, self.operators()
            if placement is not None:
                own = placement(ranks.placement.owners, ranks.placement.ranks)
                object.__setattr__(own, "rank", ranks.rank)
                ranks.shares.placement = own
            known, instead = table.get("moe.combine", "prefill"), {}
            if combine is not None:
                instead["moe.combine"] = lambda *a, **k: combine(known(*a, **k), ranks.rank)
            folder = tmp_path / str(ranks.rank)
            folder.mkdir()
            with table.instead(instead):
                make_run(run, folder, super().run, table=table, lacking=(), byte_cap=1 << 28, of_rank=True)

    world = layout_of(layout).world
    run_ranks(preset_dir("fault-ranks"), "bf16", layout, CASE.requests, CASE.schedule, backend=Identity)
    folders = [tmp_path / str(rank) / EXTRA / "identity-experts" for rank in range(world)]
    return experts_law_of_ranks(folders, config, layout=to_json(layout_of(layout))), folders


LAYOUTS = ({TP: 2}, {EP: 2, "redundant_experts": 5}, {EP: 2, **REDUCE}, {TP: 2, EP: 2, "sums": "reduce_scatter"})


@pytest.mark.parametrize("layout", LAYOUTS, ids=("tp", "exchanged", "reduced", "scattered"))
def test_every_pair_once_on_healthy_ranks(tmp_path, layout):
    """Catches an alarm over pairs that travel, have replicas or are computed in parts, and a layer that nobody asks;
    and records of a rank that are lost and pass."""
    (measures, missing), folders = law(tmp_path, layout)
    assert missing == ""
    assert [m for m in measures if not m.passed] == []
    config = Checkpoint(preset_dir("fault-ranks")).config
    expected = {n for n in range(len(config.layers)) if config.is_moe(n)}
    for kind in ("moe.dispatch.once", "moe.combine.pairs", "moe.combine"):
        told = {(m.layer, m.phase) for m in measures if m.tap.endswith(kind)}
        assert told == {(n, phase) for n in expected for phase in ("prefill", "decode")}
    (folders[1] / EXCHANGES).unlink()
    again = experts_law_of_ranks(folders, config, layout=to_json(layout_of(layout)))
    assert again == ([], "rank 1 recorded no pairs of row and expert in this run")


@pytest.mark.parametrize(
    ("layout", "broken", "tap", "pattern"),
    [
        ({EP: 2, **REDUCE}, {"placement": OnEveryRank}, "moe.dispatch.once", "computed twice"),
        ({EP: 2, **REDUCE}, {"placement": Elsewhere}, "moe.dispatch.once", "never computed"),
        ({EP: 2, **REDUCE}, {"combine": lambda y, rank: y * (2 - rank)}, "moe.combine", "factor"),
        ({EP: 2}, {"combine": lambda y, rank: y * (1 + rank)}, "moe.combine", "factor"),
        ({TP: 2}, {"combine": lambda y, rank: y * (1 + rank)}, "moe.combine", "factor"),
    ],
    ids=("twice", "never", "scaled-in-a-sum", "scaled-by-a-rank", "scaled-in-a-part"),
)
def test_a_pair_or_a_scaling_that_goes_astray_is_told(tmp_path, layout, broken, tap, pattern):
    """Catches a pair that two ranks or none compute, and a scaling that one rank applies twice, passing as healthy."""
    (measures, _), _ = law(tmp_path, layout, **broken)
    first = min((m for m in measures if not m.passed), key=lambda m: (m.order, m.tap))
    assert (first.tap.endswith(tap), first.pattern, first.layer) == (True, pattern, 1), first
