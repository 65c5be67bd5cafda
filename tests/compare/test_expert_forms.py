"""gpt-oss's forms of the routed experts: the fast path passes on hard inputs and as a layer, faults are named."""

import itertools

import pytest
import torch

from day0check.accelerated.ops import TABLE
from day0check.compare.choices import judge_choice
from day0check.compare.compute import judge_compute
from day0check.compare.replay import Replay
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import generate
from day0check.contracts.profiles import PROFILES
from reference.formats import mxfp4_encode
from reference.gpt_oss import ACTIVATION, ALPHA, LIMIT, ROUTING, ExpertLayer, expert_layer, read_expert_layer

COMPUTED = (("moe.scores", "biased_logits"), ("moe.experts", "biased_clamped"))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ROWS, EXPERTS, TOPK, HIDDEN, WIDTH = 24, 8, 2, 64, 96


def arguments(operator, name, seed, dtype):
    hard = generate(CONTRACTS[operator], name, seed, dtype)
    return {CONTRACTS[operator].args[0].name: hard.args[0], **hard.kwargs}


def called(operator, given):
    first = CONTRACTS[operator].args[0].name
    results = TABLE[operator](given[first], **{k: v for k, v in given.items() if k != first})
    return results if isinstance(results, tuple) else (results,)


def judged(operator, given, results, profile):
    if CONTRACTS[operator].kind == "choose":
        return judge_choice(Replay(CONTRACTS[operator], given), results, claims_tie_rule=True)
    return judge_compute(Replay(CONTRACTS[operator], given), results, PROFILES[profile], seed=3)


@pytest.mark.parametrize("profile", DTYPES)
@pytest.mark.parametrize(("operator", "name"), COMPUTED)
def test_the_fast_path_passes(operator, name, profile):
    """Catches a bound of the new forms that cries wolf."""
    for seed in range(8):
        given = arguments(operator, name, seed, DTYPES[profile])
        for j in judged(operator, given, called(operator, given), profile):
            assert j.passed, (seed, j)


def test_the_fast_router_passes():
    """Catches a room for weights that is too small for the exponentials of large logits."""
    for seed in range(20):
        given = arguments("moe.route", "softmax_of_logits", seed, torch.float32)
        given["scores"] = given["scores"] * (1 + seed)
        for j in judged("moe.route", given, called("moe.route", given), "fp32"):
            assert j.passed, (seed, j)


@pytest.mark.parametrize(
    ("operator", "name", "change"),
    [
        pytest.param("moe.scores", "biased_logits", {"router_bias": None}, id="router bias left out"),
        pytest.param("moe.scores", "biased_logits", {"scoring": "sigmoid"}, id="sigmoid"),
        pytest.param("moe.experts", "biased_clamped", {"b2": None}, id="down bias left out"),
        pytest.param("moe.experts", "biased_clamped", {"b1": None}, id="gate bias left out"),
        pytest.param("moe.experts", "biased_clamped", {"limit": 7.5}, id="limit"),
        pytest.param("moe.experts", "biased_clamped", {"alpha": 1.75}, id="alpha"),
        pytest.param("moe.experts", "biased_clamped", {"activation": "clamped"}, id="no plus one"),
    ],
)
def test_a_fault_is_seen(operator, name, change):
    """Catches a judge that does not look at the new arguments."""
    given = arguments(operator, name, 0, torch.bfloat16)
    results = called(operator, {**given, **change})
    assert not all(j.passed for j in judged(operator, given, results, "bf16"))


def test_a_softmax_over_all_experts_is_called_by_its_name():
    """Catches weights that are normalised over experts that were not chosen."""
    given = arguments("moe.route", "softmax_of_logits", 0, torch.float32)
    ids, _ = called("moe.route", given)
    everywhere = torch.softmax(given["scores"], -1).gather(1, ids)
    (_, weights) = judged("moe.route", given, (ids, everywhere), "fp32")
    assert (weights.passed, weights.pattern) == (False, "softmax over all experts")


def packed_layer(seed: int) -> dict[str, torch.Tensor]:
    """The stored tensors of an expert layer: blocks, scales and biases as the release has them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=generator) * scale

    tensors = {
        "router.weight": normal(EXPERTS, HIDDEN, scale=0.3).bfloat16(),
        "router.bias": normal(EXPERTS).bfloat16(),
    }
    for name, rows, columns in (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
        codes, scales = mxfp4_encode(normal(EXPERTS, rows, columns, scale=0.7))
        tensors[f"experts.{name}_blocks"], tensors[f"experts.{name}_scales"] = codes.unflatten(-1, (-1, 16)), scales
        tensors[f"experts.{name}_bias"] = normal(EXPERTS, rows).bfloat16()
    return tensors


class Path:
    """The layer through the operators of the fast path, experts converted from their codes, every call judged."""

    def __init__(self, tensors: dict[str, torch.Tensor], profile: str, **table: object) -> None:
        self.tensors, self.profile, self.table, self.failed = tensors, profile, {**TABLE, **table}, []

    def call(self, operator, x, **given):
        contract = CONTRACTS[operator]
        before = {contract.args[0].name: x, **given}
        results = self.table[operator](x, **given)
        results = results if isinstance(results, tuple) else (results,)
        if contract.kind in ("compute", "choose"):
            found = judged(operator, before, results, self.profile)
            self.failed += [(operator, j.failing) for j in found if not j.passed]
        return results if len(results) > 1 else results[0]

    def converted(self, name, rows, active):
        packed, scale = (self.tensors[f"experts.{name}_{part}"] for part in ("blocks", "scales"))
        packed = packed.flatten(-2)[:, rows].contiguous()
        payload, block, lost = self.call("moe.convert", packed, scale=scale[:, rows].contiguous(), experts=active)
        assert int(lost) == 0
        return payload, block

    def run(self, x):
        t = self.tensors
        scores = self.call("moe.scores", x, weight=t["router.weight"], scoring="logit", router_bias=t["router.bias"])
        ids, weights = self.call("moe.route", scores, k=TOPK, **ROUTING)
        pairs, order, active, offsets = self.call("moe.dispatch", x, ids=ids, experts=EXPERTS)
        given = {}
        for w, name, rows in (
            ("1", "gate_up_proj", slice(0, None, 2)),
            ("3", "gate_up_proj", slice(1, None, 2)),
            ("2", "down_proj", slice(None)),
        ):
            given[f"w{w}"], given[f"w{w}_scale"] = self.converted(name, rows, active)
            given[f"b{w}"] = t[f"experts.{name}_bias"][active][:, rows].to(x.dtype)
        form = {"activation": ACTIVATION, "limit": LIMIT, "alpha": ALPHA}
        y = self.call("moe.experts", pairs, offsets=offsets, **given, **form)
        return self.call("moe.combine", y, order=order, weights=weights)


def oracle(tensors: dict[str, torch.Tensor]) -> ExpertLayer:
    return read_expert_layer(lambda name: tensors[name.removeprefix("layer.")], prefix="layer")


@pytest.mark.parametrize(("profile", "bound"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_the_layer_on_the_fast_path_is_the_references(profile, bound):
    """Catches rows of gate and up as halves, a nibble order, a bias of another expert, and a judge that cries wolf on
    the healthy layer; routing must be decided clearly for the comparison to mean something."""
    tensors = packed_layer(1)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(7)).to(DTYPES[profile])
    path = Path(tensors, profile)
    found = path.run(x).double()
    expected = expert_layer(x.double(), oracle(tensors), k=TOPK)
    assert path.failed == []
    rows = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(rows.median()) < bound
    assert float(rows.max()) < bound or profile == "bf16"


@pytest.mark.parametrize(
    ("operator", "wrong"),
    [
        ("moe.experts", lambda x, **g: TABLE["moe.experts"](x, **{**g, "b1": g["b3"], "b3": g["b1"]})),
        ("moe.experts", lambda x, **g: TABLE["moe.experts"](x, **{**g, "b2": g["b2"].roll(1, 0)})),
        ("moe.route", lambda s, **g: TABLE["moe.route"](s, **{**g, "weighting": "score"})),
        ("moe.scores", lambda x, **g: TABLE["moe.scores"](x, **{**g, "router_bias": None})),
    ],
)
def test_a_wrong_operator_of_the_layer_is_the_only_one_accused(operator, wrong):
    """Catches a fault of the layer whose address is another operator: judged on the candidate's own inputs, only the
    operator that is wrong may fail."""
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(7)).bfloat16()
    path = Path(packed_layer(1), "bf16", **{operator: wrong})
    path.run(x)
    assert {name for name, _ in path.failed} == {operator}


def test_hard_inputs_reach_both_sides_of_the_clamps():
    """Catches a hard input on which the limit does nothing."""
    given = arguments("moe.experts", "biased_clamped", 0, torch.float32)
    seen = []

    def keep(point, value):
        seen.append((point, value))
        return value

    Replay(CONTRACTS["moe.experts"], given).run(keep)
    for point, (low, high) in (("gate", (-7, 7)), ("up", (-7, 7))):
        values = torch.cat([v.flatten() for p, v in seen if p == point])
        assert (values > high).float().mean() > 0.05
        assert (values < low).float().mean() > 0.05
    assert len(list(itertools.pairwise(given["offsets"].tolist()))) == 3
