"""Records of ranks joined into one: what is cut comes together, what is shared is compared, what differs has a name."""

import copy
import json

import pytest
import torch

from day0check.compare.merge import merge_case, merged_measures, rank_folders
from day0check.compare.merge_exchanges import exchange_measures, number_measures, pair_measures
from day0check.compare.merge_manifest import joined, read_dims
from day0check.compare.merge_parameters import Part, parts_of
from day0check.probe.capture import Capture
from day0check.probe.recorder import Recorder
from day0check.probe.rows import RowMap
from day0check.snapshot import Snapshot
from day0check.types import Measure, to_json

ROWS = RowMap(("a",), (0, 0, 0, 0), (0, 1, 2, 3))


def measure(tap="layers.00.norm.rms.input", **changed):
    fields = {"operator": "norm.rms", "kind": "compute", "phase": "prefill", "layer": 0, "order": 3, "rows": 4}
    fields |= {"elements": 8, "passed": True, "statistics": {"whole": 0.7}, "limits": {"whole": 1.1}} | changed
    return Measure(tap, **fields)


def failing(**changed):
    return measure(passed=False, statistics={"whole": 9.0}, failing="whole", message="too large", **changed)


def test_the_earliest_failure_decides_and_names_its_rank():
    """Catches a failure of one rank that the others' success hides, and one whose rank nobody learns."""
    (found,) = merged_measures([[measure()], [failing(order=7)], [failing(order=5)]])
    assert (found.passed, found.rank, found.order) == (False, 2, 5)
    assert found.message == "on rank 2: too large"
    assert found.rows == 12
    (found,) = merged_measures([[measure(power=0.01)], [measure(power=0.02, statistics={"whole": 0.9})]])
    assert (found.passed, found.rank, found.power, found.statistics["whole"]) == (True, None, 0.02, 0.9)
    (found,) = merged_measures([[measure()], [measure(passed=False, not_judged="no contract")]])
    assert (found.passed, found.not_judged, found.rank) == (False, "on rank 1: no contract", 1)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("rows, heads@tp, dim", (1, 1, False)),
        ("rows, channels@tp/3", (1, 3, False)),
        ("rows, hidden, partial@tp", (None, 1, True)),
        ("rows@ep, ...", (0, 1, False)),
        ("", (None, 1, False)),
    ],
)
def test_dims_strings(text, meaning):
    """Catches a dims string that is read as another cut."""
    dims = read_dims(text)
    assert (dims.axis, dims.components, dims.partial) == meaning
    with pytest.raises(ValueError, match="two axes"):
        read_dims("rows@ep, heads@tp")


def test_components_are_joined_each_by_itself():
    """Catches channels q | k | v of ranks that are laid one rank behind the other."""
    whole = torch.arange(24.0).view(2, 12)
    q, k, v = whole.chunk(3, 1)
    ranks = [torch.cat([part[:, :3] for part in (q, k, v)], 1), torch.cat([part[:, 3:] for part in (q, k, v)], 1)]
    assert torch.equal(joined(ranks, axis=1, components=3), whole)


@pytest.mark.parametrize(
    ("whole", "shapes", "components", "parts"),
    [
        ((8, 4), [(5, 4), (3, 4)], 1, [Part(0, 0, 5), Part(0, 5, 8)]),
        ((4, 8), [(4, 4), (4, 4)], 1, [Part(1, 0, 4), Part(1, 4, 8)]),
        ((12, 2), [(6, 2), (6, 2)], 3, [Part(0, 0, 2, 3), Part(0, 2, 4, 3)]),
        ((2, 4), [(1, 4)] * 4, 1, [Part(0, 0, 1), Part(0, 0, 1), Part(0, 1, 2), Part(0, 1, 2)]),
        ((8, 4), [(8, 4), (8, 4)], 1, [Part(), Part()]),
        ((8, 4), [(5, 4), (5, 4)], 1, [Part(), Part()]),
        ((8, 4), [(4, 4), None], 1, [Part(), Part()]),
    ],
    ids=["rows", "columns", "components", "shared", "whole", "too-much", "absent"],
)
def test_parts_of_a_weight_by_the_shapes_of_ranks(whole, shapes, components, parts):
    """Catches a part that is looked for at another place of the checkpoint, and shapes that do not add up and fit."""
    found = parts_of(whole, shapes, components=components)
    assert [(p.axis, p.start, p.stop) for p in found] == [(p.axis, p.start, p.stop) for p in parts]


# ------------------------------------------------------------------------------------------------------- exchanges


def gather(rank, received, *, size=2, where=True, nth=0):
    return {
        "tap": "layers.01.comm.all_gather.mlp",
        "operator": "comm.all_gather",
        "phase": "prefill",
        "step": 0,
        "order": 9,
        "nth": nth,
        "layer": 1,
        "requests": ["a"],
        "group": "tp",
        "rank": rank,
        "size": size,
        "sent": {str(rank): [10 * rank, 10 * rank + 1]},
        "received": {str(r): rows for r, rows in enumerate(received)},
        "where": [[0, 5], [0, 6]] if where else [],
    }


def test_bytes_between_ranks_must_arrive():
    """Catches a row that another rank gets with other bytes, a rank that gets too few, and one that is not there."""
    good = [[0, 1], [10, 11]]
    (found,) = exchange_measures([[gather(0, good)], [gather(1, good)]])
    assert (found.passed, found.rows) == (True, 8)
    (found,) = exchange_measures([[gather(0, good)], [gather(1, [[0, 7], [10, 11]])]])
    assert (found.passed, found.rank, found.request, found.position) == (False, 1, "a", 6)
    assert found.message == "what rank 0 gave is not what rank 1 got: 1 of 2 rows differ"
    (found,) = exchange_measures([[gather(0, [[0, 1], [10]])], [gather(1, good)]])
    assert found.message == "rank 1 gave 2 rows and rank 0 got 1"
    (found,) = exchange_measures([[gather(0, good)], []])
    assert (found.passed, found.pattern, found.rank) == (False, "a rank is absent", 1)


def routed(step=0, place="layers.01"):
    """Two rows with two experts each; rank 0 computes experts 0 and 1, rank 1 expert 2; rank 0 sums."""
    head = {"phase": "prefill", "step": step, "order": 4, "nth": 0, "layer": 1, "requests": ["a"]}

    def line(operator, **rest):
        return {**head, "tap": f"{place}.{operator}", "operator": operator, **rest}

    zero = [
        line("moe.route", chosen=[[0, 0, 0, 2], [0, 1, 1, 2]]),
        line("moe.experts", pairs=[[0, 0, 0], [0, 1, 1]], results=[100, 111]),
        line("moe.combine", where=[[0, 0], [0, 1]], pairs=[0, 2, 1, 3], results=[100, 111, 102, 112]),
    ]
    return [zero, [line("moe.experts", pairs=[[0, 0, 2], [0, 1, 2]], results=[102, 112])]]


def broken(change):
    ranks = copy.deepcopy(routed())
    change(ranks)
    return [m for m in pair_measures(ranks, expert_parallel=True) if not m.passed]


def test_each_pair_is_computed_once_and_summed_where_it_belongs():
    """Catches a pair that no rank computes, that two compute, or whose result another row gets."""
    assert all(m.passed for m in pair_measures(routed(), expert_parallel=True))
    assert not all(m.passed for m in pair_measures(routed(), expert_parallel=False))  # alone, each rank lacks some

    def twice(ranks):
        ranks[1][0]["pairs"].append([0, 1, 1])
        ranks[1][0]["results"].append(111)

    def never(ranks):
        del ranks[1][0]["pairs"][0], ranks[1][0]["results"][0]

    def exchanged(ranks):
        ranks[0][2]["results"][2:] = [112, 102]

    def doubled(ranks):
        ranks[0][2]["pairs"] = [0, 0, 1, 3]

    for change, operator, pattern, position in (
        (twice, "moe.dispatch", "computed twice", 1),
        (never, "moe.dispatch", "never computed", 0),
        (exchanged, "moe.combine", "results of other pairs", 0),
        (doubled, "moe.combine", "results of other pairs", None),
    ):
        found = broken(change)
        assert operator in {m.operator for m in found}, change
        first = next(m for m in found if m.operator == operator)
        assert first.pattern == pattern
        assert position is None or first.position == position


def test_experts_are_computed_with_their_own_weights():
    """Catches a rank that counts the experts in its stack from another one."""
    ranks = routed()
    ranks[0][1] |= {"active": [0, 1], "converted": [0, 1]}
    ranks[1][0] |= {"active": [2], "converted": [0]}
    (right,) = number_measures(ranks, [[0, 1], [2, 3]])
    assert (right.passed, right.operator) == (True, "moe.convert")
    ranks[1][0]["converted"] = [1]
    (wrong,) = number_measures(ranks, [[0, 1], [2, 3]])
    assert (wrong.passed, wrong.rank) == (False, 1)
    assert wrong.message == "rank 1 computes the pairs of expert 2 with the weights of expert 3"


# ----------------------------------------------------------------------------------------------------- a whole case


def snapshot(folder, values, rows=ROWS, dims=""):
    """A rank's snapshot with one captured tap."""
    folder.mkdir(parents=True)
    recorder = Recorder([Capture(folder, None)])
    recorder.dims = lambda place, operator, site: dims
    with recorder.step("prefill", rows, 0):
        recorder.call("layers.00", "residual.add", lambda x: x, (values,), {}, "mlp")
    recorder.end_case()
    (folder / "measures.jsonl").write_text(json.dumps(to_json(measure())) + "\n")
    (folder / "outputs.json").write_text(json.dumps({"sequences": {"a": [1]}, "generated": {"a": []}, "finish": {}}))
    (folder / "run.json").write_text(json.dumps({"status": "finished"}))


def merged(tmp_path, *snapshots):
    folders = [tmp_path / "ranks" / str(rank) for rank in range(len(snapshots))]
    for folder, arguments in zip(folders, snapshots, strict=True):
        snapshot(folder, **arguments)
    into = tmp_path / "candidate"
    into.mkdir()
    measures = merge_case(folders, into, expert_parallel=False, facts={"layout": {}})
    assert rank_folders(into) == folders
    (into / "run.json").write_text(json.dumps({"status": "finished"}))
    return measures, Snapshot(into)


def test_a_merged_snapshot_reads_as_one(tmp_path):
    """Catches columns, rows or sums of ranks that do not come together, and a tap that only one rank has."""
    whole = torch.randn(4, 6).bfloat16()
    halves = [{"values": part.contiguous(), "dims": "rows, hidden@tp"} for part in (whole[:, :4], whole[:, 4:])]
    measures, found = merged(tmp_path / "columns", *halves)
    assert torch.equal(found.rows("layers.00.residual.add.mlp", "a")[1], whole)
    assert all(m.passed for m in measures)
    first, second = ROWS.take([0, 1, 2]), ROWS.take([3])
    rows = [{"values": whole[:3], "rows": first, "dims": "rows@ep, ..."}, {"values": whole[3:], "rows": second}]
    rows[1]["dims"] = rows[0]["dims"]
    _, found = merged(tmp_path / "rows", *rows)
    positions, values = found.rows("layers.00.residual.add.mlp", "a")
    assert (positions, torch.equal(values, whole)) == ((0, 1, 2, 3), True)
    parts = [{"values": whole, "dims": "rows, hidden, partial@tp"} for _ in range(2)]
    _, found = merged(tmp_path / "sums", *parts)
    assert torch.equal(found.rows("layers.00.residual.add.mlp", "a")[1], whole * 2)


def test_what_all_ranks_share_must_be_the_same(tmp_path):
    """Catches a rank that went astray while rank 0, whose values are taken, is right."""
    whole = torch.randn(4, 6)
    other = whole.clone()
    other[2, 5] += 1
    measures, found = merged(tmp_path, {"values": whole}, {"values": other})
    wrong = [m for m in measures if not m.passed]
    assert [(m.operator, m.layer, m.rank, m.request, m.position) for m in wrong] == [("residual.add", 0, 1, "a", 2)]
    assert torch.equal(found.rows("layers.00.residual.add.mlp", "a")[1], whole)
