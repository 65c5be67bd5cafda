"""Guards the hard inputs: every name that a contract lists has one, and it is as hard as its name says."""

import pytest
import torch

from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import generate

NAMES = [(c.name, name) for c in CONTRACTS.values() for name in c.hard_inputs]


def arguments(operator, name, seed=0):
    hard = generate(CONTRACTS[operator], name, seed, torch.bfloat16)
    return {CONTRACTS[operator].args[0].name: hard.args[0], **hard.kwargs}


@pytest.mark.parametrize(("operator", "name"), NAMES, ids=lambda v: v)
def test_every_hard_input_fits_its_contract_and_repeats_with_its_seed(operator, name):
    """Catches a name without a generator, a missing or unknown argument, a wrong dtype, and unseeded values."""
    contract = CONTRACTS[operator]
    first, again, other = (arguments(operator, name, seed) for seed in (0, 0, 1))
    known = {a.name: a for a in contract.args}
    assert set(first) <= set(known)
    assert {a.name for a in contract.args if not a.optional} <= set(first)
    differs = False
    for key, value in first.items():
        if not isinstance(value, torch.Tensor):
            assert value == again[key]
            continue
        assert torch.equal(
            value.nan_to_num() if value.element_size() > 1 else value.view(torch.uint8),
            again[key].nan_to_num() if value.element_size() > 1 else again[key].view(torch.uint8),
        )
        differs |= value.shape != other[key].shape or not torch.equal(value.float(), other[key].float())
        due = {"act": "bfloat16", "any": None}.get(known[key].dtype, known[key].dtype)
        if due and operator not in ("moe.experts",):
            assert str(value.dtype) == f"torch.{due}", key
    assert differs or name == "every_code"
    contract.function()(first[contract.args[0].name], **{k: v for k, v in first.items() if k != contract.args[0].name})


def test_inputs_are_as_hard_as_their_names():
    """Catches ties without ties, a plateau beside the boundary, rows that see keys where none should."""
    scores, k = arguments("dsa.select", "ties")["scores"], 16
    visible = arguments("dsa.select", "ties")["visible"]
    at_boundary = 0
    for row, seen in zip(scores, visible.tolist(), strict=True):
        best = row[:seen].sort(descending=True).values
        at_boundary += int(best[k - 1] == best[k])
    assert at_boundary > len(scores) // 2
    plateau = arguments("dsa.select", "plateau_of_zeros")["scores"]
    assert ((plateau > 0).sum(-1) < k).float().mean() > 0.8
    assert (arguments("dsa.select", "no_key")["visible"] == 0).any()
    assert (arguments("dsa.select", "one_over_k")["visible"] == k + 1).all()
    assert not arguments("dsa.attention", "no_key")["valid"].any(-1).all()
    assert (arguments("dsa.attention", "one_key")["valid"].sum(-1) == 1).all()
    q = arguments("dsa.score", "all_negative")
    assert (CONTRACTS["dsa.score"].function()(q.pop("q"), **q) == 0).all()
    lengths = arguments("kda.attention", "chunk_edge")["offsets"].diff().tolist()
    assert lengths == [63, 64, 65]
    codes = arguments("moe.convert", "every_code")["packed"]
    assert len(codes.unique()) == 256
    scaled = arguments("moe.convert", "every_scale")
    assert scaled["scale"][scaled["experts"]].unique().tolist() == list(range(255))
    stores = [arguments("residual.store", name) for name in ("first_slot", "last_slot")]
    assert [(a["slot"], len(a["bank"])) for a in stores] == [(0, 4), (3, 4)]
    x = arguments("norm.rms", "small_norm_row")["x"].float()
    assert x.square().mean(-1).min() < 1e-5


def test_an_unlisted_name_is_refused():
    with pytest.raises(KeyError, match="hard input"):
        generate(CONTRACTS["norm.rms"], "nonsense", 0, torch.bfloat16)
