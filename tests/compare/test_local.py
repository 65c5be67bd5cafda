"""Guards the judge as an observer: what it gives, where it says a fault is, and that it leaves the candidate alone."""

import functools

import pytest
import torch

from day0check.compare.local import OF_ALL_ROWS, POOLED_STEPS, Judge
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import Draw
from day0check.contracts.profiles import PROFILES
from day0check.probe.recorder import Caller, Recorder
from day0check.probe.registry import Operators
from day0check.probe.rows import RowMap


def decode_map(step, requests=("a", "b")):
    return RowMap(tuple(requests), tuple(range(len(requests))), tuple(40 + step for _ in requests))


class Candidate:
    """A few operators of one decoder layer in bf16 over prefill and decode steps; `table` may be faulty."""

    def __init__(self, **replaced):
        names = ("norm.rms", "mla.query", "kda.gates", "dsa.select", "kv.write", "moe.experts", "residual.add")
        base = {n: CONTRACTS[n].function() for n in names}
        base["moe.experts"] = self._experts
        base |= {
            n.replace("_", ".", 1): functools.partial(f, base[n.replace("_", ".", 1)]) for n, f in replaced.items()
        }
        self.table = Operators(base)
        d = Draw(1, torch.bfloat16)
        self.draw = d
        self.norm, self.weight = d.norm_weight(64), d.weight(64, 64)
        self.a_log, self.dt_bias = d.float32(4), d.float32(4, 16)
        self.pool = d.act(8, 16, 64)
        self.workspace = torch.zeros(3, 64, 64, dtype=torch.bfloat16)

    @staticmethod
    def _experts(x, **kwargs):
        y = CONTRACTS["moe.experts"].function()(x.float(), **kwargs)
        return y.bfloat16()

    def step(self, recorder, phase, rows, step):
        caller = Caller(self.table, recorder)
        with recorder.step(phase, rows, step):
            at, n = caller.at("layers.02"), len(rows)
            x = self.draw.act(n, 64)
            x = at("norm.rms", x, weight=self.norm, eps=1e-5, site="input")
            q = at("mla.query", x, weight=self.weight, site="up")
            at(
                "kda.gates",
                q.reshape(n, 4, 16),
                b=q[:, :4],
                a_log=self.a_log,
                dt_bias=self.dt_bias,
                lower_bound=-5.0,
            )
            scores = self.draw.float32(n, 48)
            position = torch.tensor(rows.position).clamp(min=0)
            at("dsa.select", scores, k=8, visible=(position + 1).clamp(max=48), threshold=None)
            slots = torch.arange(n) * 3 % 128
            at("kv.write", self.pool, value=q, slots=slots)
            for a in range(3):  # the workspace is filled anew in every step, as by a conversion
                self.workspace[a] = self.draw.act(64, 64, scale=0.125)
            ends = torch.tensor([0, n // 2, n // 2, n])
            w1, w3, w2 = self.workspace, self.workspace.flip(0), self.workspace.transpose(1, 2)
            y = at("moe.experts", x, offsets=ends, w1=w1, w3=w3, w2=w2, activation="silu", row_map=rows)
            at("residual.add", x, y=y, site="mlp")
            x.zero_()  # buffers are used again
            return y


def run(steps=POOLED_STEPS + 5, *, seed=0, **replaced):
    torch.manual_seed(0)
    measures = []
    recorder = Recorder([Judge(PROFILES["bf16"], measures.append, seed=seed)])
    candidate = Candidate(**replaced)
    candidate.step(recorder, "prefill", RowMap(("a",), (0,) * 40, tuple(range(40))), 0)
    for step in range(steps):
        candidate.step(recorder, "decode", decode_map(step), step + 1)
    recorder.end_case()
    return measures, {(m.operator, m.phase): m for m in measures}


def test_a_healthy_candidate_passes_with_one_measure_for_each_tap_and_phase():
    """Catches a buffer that is judged after the candidate used it again, pooled workspaces, and lost taps."""
    measures, by_tap = run()
    assert len(measures) == len(by_tap) == 14
    for m in measures:
        assert m.passed, m
        assert not m.not_judged
        assert m.layer == 2
    assert by_tap[("mla.query", "prefill")].rows == 40
    assert by_tap[("mla.query", "decode")].rows == 2 * (POOLED_STEPS + 5)
    assert by_tap[("mla.query", "decode")].tap == "layers.02.mla.query.up"
    assert by_tap[("moe.experts", "decode")].rows == 2 * (POOLED_STEPS + 5)
    assert [m.order for m in measures] == sorted(m.order for m in measures)
    assert by_tap[("norm.rms", "decode")].power is not None
    assert all(m.digest for m in measures if m.operator != "kv.write")


def decode_only(fault):
    """Applies `fault` to the result of decode rows (two in a step) in the seventh decode step only."""
    calls = [0]

    def wrapped(inner, first, **kwargs):
        y = inner(first, **kwargs)
        if first.shape[0] == 2:
            calls[0] += 1
            if calls[0] == 7:
                y = fault(y)
        return y

    return wrapped


def second_row_larger(y):
    y = y.clone()
    y[1] = (y[1].float() * 1.25).to(y.dtype)
    return y


@pytest.mark.parametrize("operator", ["mla.query", "moe.experts", "norm.rms"])
def test_a_fault_of_one_decode_row_is_placed_to_the_request_and_position(operator):
    """Catches a pooled row that is given the request, position or execution order of another step."""
    measures, by_tap = run(**{operator.replace(".", "_"): decode_only(second_row_larger)})
    m = by_tap[(operator, "decode")]
    assert (m.passed, m.request, m.position, m.pattern) == (False, "b", 46, "one row")
    calls_in_a_step = 7
    offset = ["norm.rms", "mla.query", "kda.gates", "dsa.select", "kv.write", "moe.experts"].index(operator)
    assert m.order == calls_in_a_step * 7 + offset
    assert by_tap[(operator, "prefill")].passed
    others = [x for x in by_tap.values() if x.operator != operator]
    assert all(x.passed for x in others)
    assert measures.index(m) > min(i for i, x in enumerate(measures) if not x.passed)  # told at once, and at the end


def test_what_all_decode_rows_show_has_the_order_of_the_first():
    """Catches layers that are accused in the order of their worst rows: a later layer whose worst row comes earlier
    would be named for a fault that all of them have."""

    def a_little_larger(inner, x, **kwargs):
        y = inner(x, **kwargs)
        return (y.float() * 1.02).to(y.dtype) if len(x) == 2 else y

    _, by_tap = run(moe_experts=a_little_larger)
    m = by_tap[("moe.experts", "decode")]
    assert m.failing in OF_ALL_ROWS
    assert m.order == 7 + 5


def test_beta_through_two_sigmoids_in_decode_is_placed_in_decode():
    """Catches a fault of one phase blamed on the other."""
    _, by_tap = run(kda_gates=decode_only(lambda y: (y[0], torch.sigmoid(y[1]))))
    assert by_tap[("kda.gates", "prefill")].passed
    m = by_tap[("kda.gates", "decode")]
    assert (m.passed, m.failing, m.request, m.position) == (False, "element", "a", 46)


def test_a_selection_of_the_future_and_a_lost_write_are_found():
    """Catches choices and writes that go unjudged."""

    def future(inner, scores, **kwargs):
        return inner(scores, **{**kwargs, "visible": torch.full_like(kwargs["visible"], 48)})

    _, by_tap = run(2, dsa_select=future)
    assert by_tap[("dsa.select", "prefill")].pattern == "selects the future"

    def lost(inner, pool, *, value, slots):
        inner(pool, value=value[:-1], slots=slots[:-1])

    _, by_tap = run(2, kv_write=lost)
    m = by_tap[("kv.write", "decode")]
    assert (m.passed, m.kind, m.request) == (False, "move", "b")


def test_identical_runs_give_identical_measures_and_digests_ignore_chunks():
    """Catches draws that depend on time or object identity, and a digest that depends on the batch order."""
    assert run(3)[0] == run(3)[0]
    whole = RowMap(("a", "b"), (0, 0, 1), (0, 1, 0))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight = Draw(0, torch.bfloat16).weight(32, 64)

    def digest(pieces):
        measures = []
        recorder = Recorder([Judge(PROFILES["bf16"], measures.append)])
        here = Caller(Operators({"mla.query": CONTRACTS["mla.query"].function()}), recorder).at("layers.00")
        for step, rows in enumerate(pieces):
            with recorder.step("prefill", whole.take(rows), step):
                here("mla.query", x[rows], weight=weight)
        recorder.end_case()
        return measures[-1].digest

    assert digest([[0, 1, 2]]) == digest([[2, 0], [1]])
    assert digest([[0, 1, 2]]) != digest([[0, 1]])


def test_what_cannot_be_judged_is_named_and_not_passed():
    """Catches silence about an operator without a contract, a replay that raises, and an operator that raises."""
    measures = []
    recorder = Recorder([Judge(PROFILES["bf16"], measures.append)])

    def breaks(x, **_):
        raise RuntimeError("no kernel")

    table = Operators(
        {"my.own": lambda x: x, "mla.query": lambda x, **_: x, "norm.rms": breaks, "residual.add": lambda x, y: [x]}
    )
    at = Caller(table, recorder).at("layers.00")
    with recorder.step("prefill", RowMap(("a",), (0, 0), (0, 1)), 0):
        x = torch.zeros(2, 8).bfloat16()
        at("my.own", x)
        at("mla.query", x, weight=torch.zeros(3, 9).bfloat16(), site="up")
        at("mla.query", x, site="down")
        at("residual.add", x, y=x)
        with pytest.raises(RuntimeError):
            at("norm.rms", x, weight=None, eps=1e-5)
    recorder.end_case()
    by_tap = {m.tap: m for m in measures}
    assert not any(m.passed for m in measures)
    assert "no contract" in by_tap["layers.00.my.own"].not_judged
    assert "the replay raised" in by_tap["layers.00.mla.query.up"].not_judged
    assert "'weight' is missing" in by_tap["layers.00.mla.query.down"].not_judged
    assert "not a tensor" in by_tap["layers.00.residual.add"].not_judged
    assert by_tap["layers.00.norm.rms"].failing == "raised"


def fused_call(table_of_pages, pool, q, indices, fault=1.0):
    def fused(q, *, pool, table, owner, indices, value_width, scale):
        keys = CONTRACTS["kv.gather"].function()(pool, table=table, owner=owner, indices=indices)
        plain = CONTRACTS["dsa.attention"].function()
        return plain(q * fault, keys=keys, valid=indices >= 0, value_width=value_width, scale=scale)

    measures = []
    recorder = Recorder([Judge(PROFILES["bf16"], measures.append)])
    at = Caller(Operators({"dsa.attention": fused}), recorder).at("layers.01")
    rows = RowMap(("a",), (0,) * len(q), tuple(range(len(q))))
    with recorder.step("prefill", rows, 0):
        at(
            "dsa.attention",
            q,
            pool=pool,
            table=table_of_pages,
            owner=torch.zeros(len(q), dtype=torch.int64),
            indices=indices,
            value_width=32,
            scale=0.15,
        )
    recorder.end_case()
    return measures[-1]


def test_a_fused_kernel_is_judged_as_the_composition():
    """Catches a composite that is skipped because its arguments are not the contract's."""
    d = Draw(4, torch.bfloat16)
    call = (d.shuffled(6).reshape(1, 6), d.act(6, 16, 48), d.act(24, 4, 48), d.integers(-1, 96, 24, 16).to(torch.int32))
    assert fused_call(*call).passed
    assert not fused_call(*call, fault=1.05).passed


@pytest.mark.parametrize(("fault", "passed"), [(1.0, True), (1.05, False)])
def test_a_dense_kernel_that_reads_the_pages_itself_is_judged_as_the_composition(fault, passed):
    """Catches dense attention over pages that goes unjudged, and one that is judged on the keys of another request."""
    d = Draw(6, torch.bfloat16)
    pool, pages, visible = d.act(9, 16, 48), d.shuffled(9)[:6].reshape(2, 3), torch.arange(24) % 12 + 20

    def fused(q, *, pool, table, value_width, owner, visible, scale):
        rows = torch.arange(40).expand(2, 40)
        keys = CONTRACTS["kv.gather"].function()(pool, table=table, owner=torch.arange(2), indices=rows).unsqueeze(2)
        plain, values = CONTRACTS["mla.attention"].function(), keys[..., :value_width]
        return plain(q, keys=keys, values=values, owner=owner, visible=visible, scale=scale * fault)

    measures = []
    recorder = Recorder([Judge(PROFILES["bf16"], measures.append)])
    at = Caller(Operators({"mla.attention": fused}), recorder).at("layers.01")
    owner = torch.arange(24) // 12
    where = {"pool": pool, "table": pages, "value_width": 32}
    with recorder.step("prefill", RowMap(("a", "b"), tuple(owner.tolist()), tuple(range(24))), 0):
        at("mla.attention", d.act(24, 4, 48), **where, owner=owner, visible=visible, scale=0.15)
    recorder.end_case()
    assert (measures[-1].passed, measures[-1].not_judged) == (passed, "")


def test_batch_shaped_results_and_padding_rows_have_their_addresses():
    """Catches a state fault blamed on a row number, and a padding row that is judged."""
    d = Draw(5, torch.bfloat16)
    offsets = torch.tensor([0, 3, 7])

    def conv(x, **kwargs):
        y, state = CONTRACTS["kda.conv"].function()(x, **kwargs)
        y[7] = 99  # the padding row
        state[1] += 1
        return y, state

    measures = []
    recorder = Recorder([Judge(PROFILES["bf16"], measures.append)])
    at = Caller(Operators({"kda.conv": conv}), recorder).at("layers.01")
    rows = RowMap(("a", "b"), (0, 0, 0, 1, 1, 1, 1, -1), (5, 6, 7, 0, 1, 2, 3, -1))
    with recorder.step("prefill", rows, 0):
        at("kda.conv", d.act(8, 12), weight=d.float32(12, 4), state=d.act(2, 3, 12), offsets=offsets)
    recorder.end_case()
    assert (measures[-1].passed, measures[-1].request, measures[-1].position) == (False, "b", 3)


@pytest.mark.parametrize(("owners", "request_id"), [((1, 1, 1, -1), "b"), ((0, 1, 1, -1), None)])
def test_a_result_without_rows_is_of_the_request_that_all_rows_belong_to(owners, request_id):
    """Catches a wrong splice whose request is left out, and one that is blamed on a request of several."""
    ids = torch.tensor([7, 9, 9, 7])
    measures = []
    recorder = Recorder([Judge(PROFILES["bf16"], measures.append)])

    def positions(ids, *, media_pad, first):
        at, feature = CONTRACTS["splice.positions"].function()(ids, media_pad=media_pad, first=first)
        return at + 1, feature

    at = Caller(Operators({"splice.positions": positions}), recorder).at("")
    with recorder.step("prefill", RowMap(("a", "b"), owners, (0, 1, 2, 3)), 0):
        at("splice.positions", ids, media_pad=9, first=0)
    recorder.end_case()
    assert (measures[-1].passed, measures[-1].request, measures[-1].position) == (False, request_id, None)


def test_parameters_are_estimated_on_a_sample_of_layers_and_forms_tried_once():
    """Catches a judged pass that pays for every direction in every layer, and a failure explained a hundred times."""
    d = Draw(7, torch.bfloat16)
    weights = {"gate": d.weight(96, 64), "up": d.weight(96, 64), "down": d.weight(64, 96)}
    eager = CONTRACTS["norm.rms"].function()

    def twice_rounded(x, *, weight, eps):
        return (eager(x, weight=None, eps=eps).float() * weight.float()).bfloat16()

    table = {"mlp.dense": CONTRACTS["mlp.dense"].function(), "norm.rms": twice_rounded}
    measures = []
    recorder = Recorder([Judge(PROFILES["bf16"], measures.append)])
    caller = Caller(Operators(table), recorder)
    with recorder.step("prefill", RowMap(("a",), (0,) * 40, tuple(range(40))), 0):
        for layer in range(7):
            at = caller.at(f"layers.{layer:02}")
            at("norm.rms", d.act(40, 64), weight=d.norm_weight(64), eps=1e-5, site="input")
            at("mlp.dense", d.act(40, 64), **weights, activation="silu")
    recorder.end_case()
    last = {m.tap: m for m in measures}
    mlps = [last[f"layers.{n:02}.mlp.dense"] for n in range(7)]
    assert all(m.passed and "slope" in m.limits for m in mlps)
    assert [n for n, m in enumerate(mlps) if "direction_gate" in m.limits] == [0, 3, 6]
    norms = [last[f"layers.{n:02}.norm.rms.input"] for n in range(7)]
    assert not any(m.passed for m in norms)
    assert "consistent with the looser form 'cast_first' of profile eager-bf16" in norms[0].message
    assert "consistent" not in norms[1].message
