"""The faults and the healthy code that the verdict was promised to tell apart, each under the words of the promise.

Those that need a model are entries of the catalogue: one of them runs every day, all of them in the long target; what
an operator alone shows is judged here at once.
"""

from __future__ import annotations

import datetime

import pytest
import torch

from day0check.accelerated.ops import TABLE
from day0check.compare.choices import judge_choice
from day0check.compare.compute import judge_compute
from day0check.compare.replay import Replay
from day0check.compare.weight_digest import part_digests
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import Draw
from day0check.contracts.profiles import PROFILES
from day0check.faults.catalogue import catalogue, select
from day0check.faults.entry import KINDS
from day0check.selftest import judge_entry

NAMED = {
    "double sigmoid on beta in decode only": "S-38",
    "bf16 variance with outlier channels": "S-41",
    "transposed square state in the chunk output": "S-33",
    "mscale squared missing": "S-43",
    "one wrong expert scale": "F-08",
    "error only beyond a page boundary": "F-36",
    "error only beyond the top-k boundary": "F-33",
    "a legal prefix hit passes": "B-71",
    "a state resumed from before a preemption fails": "S-37",
    "a repeated-token prompt on healthy code passes": "B-30",
}
FURTHER = {
    "one element off by one ulp": "F-01",
    "one output column x 1.004": "F-02",
    "fp16 accumulator": "F-03",
    "truncation instead of rounding": "F-04",
    "one token-block scale x 1.02": "F-85",
    "chunk decay one token short": "F-05",
    "scale of one head x 1.002": "F-06",
    "eps 1e-6 for 1e-5": "F-07",
}
OWN = 20
TODAY = sorted(NAMED)[datetime.datetime.now(datetime.UTC).date().toordinal() % len(NAMED)]
ROWS, EXPERTS, PAGE = 4096, 896, 16


def judged(operator, arguments, *results):
    return judge_compute(Replay(CONTRACTS[operator], arguments), results, PROFILES["bf16"], seed=1)


def told_apart(name: str, folder) -> None:
    (located,) = select((NAMED[name],))
    outcome = judge_entry(located, folder)
    assert outcome.good, outcome
    assert outcome.benign or outcome.placed, outcome


def test_one_of_them_a_day(tmp_path):
    """Catches a promise that is no longer kept; the day chooses, its name is in the message."""
    told_apart(TODAY, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMED))
def test_each_is_caught_at_its_place_or_let_through(tmp_path, name):
    """Catches the same, of all of them."""
    told_apart(name, tmp_path / "run")


def test_every_name_is_an_entry_of_its_kind():
    """Catches a name whose entry was renumbered, or whose expectation was turned round."""
    entries = {located.entry.id: located.entry for located in catalogue()}
    for name, number in (NAMED | FURTHER).items():
        assert entries[number].benign == name.endswith("passes"), name
    assert (entries["S-38"].expected.operator, entries["S-38"].expected.phase) == ("kda.gates", "decode")
    assert entries["S-37"].case == "preempt"


def test_further_faults_of_our_own_of_every_kind():
    """Catches a kind of fault that only the public catalogue has, which the checks were written beside."""
    own = [x.entry for x in catalogue() if x.file.parent.name == "further" and x.entry.id not in FURTHER.values()]
    assert len(own) >= OWN
    assert {entry.kind for entry in own} == set(KINDS)


def test_one_wrong_row_among_4096():
    """Catches statistics that drown one row in thousands: it is one percent too large and no other is."""
    d = Draw(11, torch.bfloat16)
    arguments = {"x": d.act(ROWS, 64), "weight": d.weight(96, 64)}
    y = TABLE["mla.query"](arguments["x"], weight=arguments["weight"])
    assert judged("mla.query", arguments, y)[0].passed
    y[2711] = (y[2711].float() * 1.01).bfloat16()
    (j,) = judged("mla.query", arguments, y)
    assert (j.passed, j.row) == (False, 2711)


def test_one_wrong_expert_scale_among_896():
    """Catches an audit that samples experts, or sums their digests: one scale byte of one expert is one step off."""
    d = Draw(12, torch.bfloat16)
    scales = d.integers(110, 130, EXPERTS, 8, 4).to(torch.uint8)
    other = scales.clone()
    other[611, 5, 2] += 1
    pairs = zip(part_digests(scales), part_digests(other), strict=True)
    assert [number for number, (a, b) in enumerate(pairs) if a != b] == [611]


def beyond(arguments, first):
    """Attention whose keys from position `first` on are read one place too early."""
    keys, values = (arguments[name].clone() for name in ("keys", "values"))
    for t in (keys, values):
        t[:, first + 1 :] = t[:, first:-1].clone()
    rest = {k: v for k, v in arguments.items() if k != "q"} | {"keys": keys, "values": values}
    return TABLE["mla.attention"](arguments["q"], **rest)


def test_an_error_only_beyond_a_page_boundary():
    """Catches a judgement that rows of the first page carry: those that see no more than a page are right."""
    d = Draw(13, torch.bfloat16)
    n = 3 * PAGE
    arguments = {
        "q": d.act(n, 4, 16),
        "keys": d.act(1, n, 1, 16),
        "values": d.act(1, n, 1, 16),
        "owner": torch.zeros(n, dtype=torch.int64),
        "visible": torch.arange(1, n + 1),
        "scale": 0.25,
    }
    assert judged("mla.attention", arguments, beyond(arguments, n - 1))[0].passed
    (j,) = judged("mla.attention", arguments, beyond(arguments, PAGE))
    assert not j.passed
    assert j.row > PAGE


def test_an_error_only_beyond_the_top_k_boundary():
    """Catches a check of choices that short rows satisfy: rows that see k keys or fewer are right."""
    d = Draw(14, torch.bfloat16)
    k, n = 8, 24
    arguments = {"scores": d.float32(n, n), "k": k, "visible": torch.arange(1, n + 1)}
    replay = Replay(CONTRACTS["dsa.select"], arguments)
    chosen = TABLE["dsa.select"](arguments["scores"], k=k, visible=arguments["visible"])
    assert all(j.passed for j in judge_choice(replay, (chosen,), claims_tie_rule=True))
    first = torch.arange(k, dtype=torch.int32).expand(n, -1)
    wrong = torch.where((arguments["visible"] > k).unsqueeze(1), first, chosen)  # takes the first k, not the best
    failed = [j for j in judge_choice(replay, (wrong,), claims_tie_rule=True) if not j.passed]
    assert failed
    assert failed[0].row >= k
