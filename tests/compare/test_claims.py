"""Guards what a file claims beside rounding points: split sums of a linear, the chunk of delta attention."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from day0check.compare.claims import as_claimed
from day0check.compare.compute import judge_compute
from day0check.compare.propagated import rounded, seeded
from day0check.compare.replay import Replay
from day0check.compare.rounding import Rounder, round_nearest
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import Draw, generate
from day0check.contracts.profiles import PROFILES, profile_named
from day0check.errors import InputError
from reference.kda import attention
from reference.linear import linear

BF16 = PROFILES["bf16"]
SPLIT = '[partials]\n"mla.query" = { dtype = "bfloat16", parts = 4 }\n'


def claimed(tmp_path: Path, text: str):
    (tmp_path / "mine.toml").write_text(text)
    return profile_named(str(tmp_path / "mine.toml"))


def split(x: torch.Tensor, weight: torch.Tensor, parts: int) -> torch.Tensor:
    """A split-K kernel: float32 sums of each part, kept in bfloat16, added in float32."""
    pieces = zip(x.float().tensor_split(parts, -1), weight.float().tensor_split(parts, -1), strict=True)
    return sum(round_nearest(a @ w.T, "bfloat16") for a, w in pieces).bfloat16()


def test_split_sums_pass_where_they_are_claimed_and_only_there(tmp_path):
    """Catches partial sums in bfloat16 that nobody has to claim, and a claim that refuses them or hides a fault."""
    d = Draw(0, torch.bfloat16)
    x, weight = d.act(96, 128), d.weight(64, 128)
    replay = Replay(CONTRACTS["mla.query"], {"x": x, "weight": weight})
    profile = claimed(tmp_path, SPLIT)
    y = split(x, weight, 4)
    assert judge_compute(replay, (y,), profile, seed=0)[0].passed
    unnamed = judge_compute(replay, (y,), BF16, seed=0)[0]
    assert unnamed.failing == "element"
    for wrong in (split(x, weight * 1.02, 4), split(x[:, :96], weight[:, :96], 3)):
        assert not judge_compute(replay, (wrong,), profile, seed=0)[0].passed
    assert judge_compute(replay, (linear(x, weight=weight),), profile, seed=0)[0].passed


def test_a_split_sum_is_the_sum_and_its_rounding_is_carried_by_the_net(tmp_path):
    """Catches columns that are lost between the parts, a bias added in each, and a net without the claimed noise."""
    d, profile = Draw(1, torch.bfloat16), claimed(tmp_path, SPLIT)
    x, weight, bias = (t.double() for t in (d.act(5, 130), d.weight(7, 130), d.act(7)))
    function = as_claimed(linear, profile, "mla.query")
    whole = linear(x, weight=weight, bias=bias)
    assert torch.allclose(function(x, weight=weight, bias=bias), whole, rtol=0, atol=1e-12)
    assert as_claimed(linear, BF16, "mla.query") is linear
    once = replace(profile, points={**profile.points, "mla.query": {"partials": "bfloat16"}})
    noisy = rounded(once, "mla.query", linear, (x,), {"weight": weight, "bias": bias}, seeded((1,), "cpu"))
    assert float((noisy - whole).abs().max()) > 1e-4


def test_a_chunk_of_its_own_is_replayed_where_it_is_claimed(tmp_path):
    """Catches a claim of chunks that never reaches the replicates: the noise of chunks of 16 judged as that of 64."""
    text = 'base = "eager-bf16"\n[chunks]\n"kda.attention" = 16\n'
    profile, contract = claimed(tmp_path, text), CONTRACTS["kda.attention"]
    hard = generate(contract, "plain", 0, torch.bfloat16)
    arguments = {"q": hard.args[0], **hard.kwargs}
    assert arguments["chunk"] == 64
    seen = []
    spy = lambda q, *, chunk, **kwargs: seen.append(chunk) or attention(q, chunk=chunk, **kwargs)  # noqa: E731
    function = as_claimed(spy, profile, "kda.attention")
    wide = Replay(contract, arguments).wide(torch.float64)
    exact = wide.run()
    assert torch.allclose(wide.run(function=function)[0], exact[0], rtol=0, atol=1e-10)
    wide.changed(chunk=None).run(function=function)
    assert seen == [16, None]
    own = wide.changed(chunk=16)
    low = own.wide(torch.float32).run(Rounder(profile.points_of("kda.attention"), leave=contract.result_points()))
    results = (low[0].bfloat16(), low[1])
    assert all(j.passed for j in judge_compute(Replay(contract, arguments), results, profile, seed=2))
    as_64 = judge_compute(Replay(contract, arguments), results, PROFILES["eager-bf16"], seed=2)
    as_16 = judge_compute(Replay(contract, arguments), results, profile, seed=2)
    assert as_64[0].statistics["row"] != as_16[0].statistics["row"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[partials]\n"norm.rms" = { dtype = "bfloat16", parts = 4 }', "is no linear"),
        ('[partials]\n"mla.query" = { dtype = "bfloat16" }', "must be { dtype"),
        ('[partials]\n"mla.query" = { dtype = "fp4", parts = 2 }', "'fp4' is no dtype"),
        ('[partials]\n"mla.query" = { dtype = "bfloat16", parts = 1 }', "1 is no number from 2"),
        ('[chunks]\n"mla.query" = 16', "computes in chunks"),
        ('[chunks]\n"kda.attention" = true', "True is no number from 1"),
    ],
)
def test_a_claim_that_means_nothing_is_refused(tmp_path, text, words):
    """Catches a key that is read and then ignored."""
    with pytest.raises(InputError, match=words):
        claimed(tmp_path, text)
