"""Parts of sums are followed to whoever reads them; exchanges are recorded as they were."""

import torch

from day0check.probe.exchanges import Exchanges
from day0check.probe.flow import MISSING, TWICE, Flow
from day0check.probe.recorder import Recorder
from day0check.probe.rows import RowMap

ROWS = RowMap(("a",), (0, 0), (3, 4))
PARTS = {"mla.output": "rows, hidden, partial@tp", "kda.attention": "rows, heads@tp; batch, heads@tp"}


class Pair:
    """A group of two ranks whose other one has the same."""

    name, rank, size = "tp", 0, 2


def run(*calls):
    """The records of a step of calls (operator, site, function of what was made before)."""
    found = []
    recorder = Recorder([Flow(found.append)])
    recorder.dims = lambda place, operator, site: PARTS.get(operator, "")
    made = [torch.ones(2, 4)]
    with recorder.step("prefill", ROWS, 0):
        for operator, site, argument, function in calls:
            kwargs = {"group": Pair(), "axis": 1, "sizes": (1, 1)} if operator == "comm.all_gather" else {}
            call = (lambda f: lambda x, **_: f(x))(function)
            made.append(recorder.call("layers.02", operator, call, (argument(made),), kwargs, site))
    recorder.end_case()
    return found


def output(made):
    return made[0]


def latest(made):
    return made[-1]


MADE = ("mla.output", "", output, lambda x: x * 2)
GATHERED = ("comm.all_gather", "attention", lambda made: made[-1].unsqueeze(1), lambda x: torch.cat((x, x), 1))
REDUCED = ("comm.all_reduce", "attention", latest, lambda x: x.sum(1))
USED = ("residual.add", "attention", latest, lambda x: x + 1)


def test_a_part_that_is_reduced_once_is_right():
    """Catches a false alarm where a part is gathered, summed and used."""
    (found,) = run(MADE, GATHERED, REDUCED, USED)
    assert (found["passed"], found["operator"], found["layer"]) == (True, "comm.all_reduce", 2)


def test_a_part_that_is_used_is_told_with_its_maker():
    """Catches a reduction that is left out, also where a view of the part is read."""
    for use in (USED, ("residual.add", "attention", lambda made: made[-1].view(4, 2), lambda x: x + 1)):
        (found,) = run(MADE, use)
        assert (found["passed"], found["pattern"]) == (False, MISSING)
        assert (found["tap"], found["request"], found["position"]) == ("layers.02.mla.output.reduced", "a", 3)


def test_a_whole_value_that_is_reduced_again_is_told():
    """Catches a sum that is reduced twice and counts once for each rank."""
    found = run(MADE, GATHERED, REDUCED, GATHERED, REDUCED, USED)
    wrong = [f for f in found if not f["passed"]]
    assert [(f["operator"], f["pattern"]) for f in wrong] == [("comm.all_reduce", TWICE)]


def test_values_of_unknown_origin_accuse_nobody():
    """Catches a finding about a value that came from outside the recorded calls."""
    copied = ("comm.all_gather", "attention", lambda made: torch.cat((made[-1],)).unsqueeze(1), lambda x: x)
    assert run(MADE, copied, REDUCED, USED) == []
    read = ("residual.add", "attention", lambda made: made[-1][0], lambda x: x + 1)
    assert run(("kda.attention", "", output, lambda x: (x + 1, x + 2)), read) == []


def test_an_exchange_is_recorded_row_by_row():
    """Catches digests that do not see a changed row, or that are taken after the bytes were overwritten."""
    found = []
    recorder = Recorder([Exchanges(found.append)])
    x = torch.arange(6.0).view(3, 2)

    def exchange(rows, **_):
        result = rows.clone()
        rows.zero_()
        return result

    with recorder.step("prefill", RowMap(("a",), (0, 0, 0), (0, 1, 2)), 4):
        kwargs = {"group": Pair(), "send": (1, 2), "receive": (2, 1)}
        recorder.call("layers.02", "comm.all_to_all", exchange, (x,), kwargs, "dispatch")
    (line,) = found
    assert list(map(len, line["sent"].values())) == [1, 2]
    assert list(map(len, line["received"].values())) == [2, 1]
    assert [*line["sent"]["0"], *line["sent"]["1"]] == [*line["received"]["0"], *line["received"]["1"]]
    assert len({*line["sent"]["0"], *line["sent"]["1"]}) == 3
    assert line["where"] == [[0, 0], [0, 1], [0, 2]]


def test_experts_computed_some_at_a_time_keep_their_own_pairs():
    """Catches pairs of the second group that are told as those of the first one's experts, and weights of the next
    group, which are decoded ahead, that are held against this one's."""
    found = []
    recorder = Recorder([Exchanges(found.append)])
    ids, order = torch.tensor([4, 7, 9]), torch.tensor([0, 1, 2, 3])
    pairs, offsets = torch.arange(4.0).view(4, 1), torch.tensor([0, 1, 3, 4])

    def called(operator, result, kwargs, rows, site=""):
        return recorder.call("layers.02", operator, lambda *_, **__: result, (pairs,), kwargs, site, rows)

    rows = RowMap(("a",), (0, 0, 0, 0), (5, 5, 6, 7))
    with recorder.step("decode", rows, 4):
        called("moe.dispatch", (pairs, order, ids, offsets), {}, rows)
        for site in ("w1", "w3"):
            called("moe.convert", pairs, {"experts": torch.tensor([0])}, rows, site)
        for site in ("w1", "w3"):
            called("moe.convert", pairs, {"experts": torch.tensor([3, 5])}, rows, site)
        called("moe.experts", pairs[:1], {"offsets": offsets[:2]}, rows.take((0,)))
        called("moe.experts", pairs[1:], {"offsets": offsets[1:] - 1}, rows.take((1, 2, 3)))
    first, second = (line for line in found if line["operator"] == "moe.experts")
    assert (first["pairs"], first["active"], first["converted"]) == ([[0, 5, 4]], [4], [0])
    assert second["pairs"] == [[0, 5, 7], [0, 6, 7], [0, 7, 9]]
    assert (second["active"], second["converted"]) == ([7, 9], [3, 5])


def test_scattered_sums_are_followed_like_reduced_ones():
    """Catches parts that are sent to their ranks and used without a sum; and an alarm over a healthy scattered sum."""
    sent = ("comm.all_to_all", "attention", latest, lambda x: torch.cat((x[:1], x[:1])))
    summed = (
        "comm.reduce_scatter",
        "attention",
        lambda made: made[-1].view(2, 1, 4).transpose(0, 1),
        lambda x: x.sum(1),
    )
    (healthy,) = run(MADE, sent, summed, USED)
    assert (healthy["passed"], healthy["operator"]) == (True, "comm.reduce_scatter")
    (unsummed,) = run(MADE, sent, USED)
    assert (unsummed["passed"], unsummed["pattern"]) == (False, MISSING)
