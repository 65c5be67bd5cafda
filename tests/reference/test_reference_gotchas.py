"""The disagreements of model.md 6 that concern the reference: where each has a test that fails under the other reading
(`GOTCHAS`; number 17 is about one backend of another engine), and those tests that have no better place."""

import ast
import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from per_token_model import PerToken
from test_reference_model import TOKENS, Memory, small

from reference import attention, kda
from reference.config import Residual
from reference.errors import CheckpointError
from reference.families import read_config, read_config_and_rest
from reference.formats import e4m3_rows_encode
from reference.model import Model
from reference.presets import preset
from reference.published import published

F64 = torch.float64
HERE = Path(__file__).parent
# (number or section of model.md, the other reading, the file beside this one, the test)
GOTCHAS = (
    (
        "1",
        "index rotary embedding of the other layout",
        "upstream/test_deepseek_v32.py",
        "test_the_other_reading_is_seen",
    ),
    ("1", "the same, GLM-5", "upstream/test_glm_5.py", "test_the_other_reading_is_seen"),
    ("1", "one layout read as the other", "test_reference_spine.py", "test_rope_turns_the_pairs_of_its_layout"),
    (
        "2",
        "only one side is rotated by Hadamard, or unscaled",
        "test_reference_gotchas.py",
        "test_a_hadamard_rotation_changes_no_score",
    ),
    (
        "3",
        "rows scaled up to powers of two, or a floor",
        "test_reference_gotchas.py",
        "test_scales_of_rows_have_no_floor",
    ),
    (
        "4",
        "another rule among equal scores",
        "test_reference_attention.py",
        "test_select_on_a_plateau_of_zeros_takes_the_lowest_indices",
    ),
    ("4", "another rule among equal scores", "test_reference_attention.py", "test_select_follows_the_documented_rule"),
    (
        "5",
        "nothing added where weights are renormalised",
        "test_reference_moe.py",
        "test_route_of_all_zero_scores_is_finite",
    ),
    ("5", "a router below float32", "test_reference_moe.py", "test_router_scores"),
    (
        "6",
        "index scale from attention's head width",
        "test_reference_gotchas.py",
        "test_index_scores_are_scaled_by_the_index_head",
    ),
    (
        "6",
        "the number of index heads left out",
        "test_reference_attention.py",
        "test_index_weights_scale_with_the_number_of_heads",
    ),
    (
        "7",
        "A_log over channels",
        "test_reference_kda.py",
        "test_gates_refuse_an_a_log_that_would_broadcast_over_channels",
    ),
    ("7", "padding of A_log read as heads", "test_reference_storage.py", "test_tiny_kimi_k3_stores_a_log_padded"),
    ("8", "full attention in every fourth layer", "test_published_sizes.py", "test_kimi_k3_schedule_and_switches"),
    (
        "8",
        "layers counted from 0, or by the class's default",
        "test_reference_gotchas.py",
        "test_layer_lists_are_never_replaced_by_a_rule",
    ),
    ("9", "a frozen block written again", "test_reference_gotchas.py", "test_blocks_stay_as_they_were_frozen"),
    (
        "10",
        "L2 norm with rms_norm_eps, o_norm with 1e-6",
        "test_reference_gotchas.py",
        "test_each_norm_of_kda_has_its_own_eps",
    ),
    ("11", "the lower bound of the decay as a clamp", "test_reference_kda.py", "test_gates_element_by_element"),
    (
        "12",
        "triangular inverse by doubling",
        "test_reference_gotchas.py",
        "test_the_triangular_inverse_is_a_substitution",
    ),
    (
        "13",
        "num_experts_per_tok, a head_dim that counts",
        "test_reference_gotchas.py",
        "test_keys_that_other_families_read",
    ),
    (
        "14",
        "Kimi Linear's class, which ignores K3's keys",
        "test_reference_gotchas.py",
        "test_k3s_switches_under_kimi_linears_name",
    ),
    (
        "15",
        "pools of 16 where the release has 4",
        "test_published_sizes.py",
        "test_glm_5_3_with_its_draft_layer_has_the_published_size",
    ),
    (
        "15",
        "pools of 4 where the key is absent",
        "test_reference_family_readers.py",
        "test_defaults_are_those_of_upstreams_classes",
    ),
    (
        "16",
        "the list of a declaration before what is stored",
        "test_reference_storage.py",
        "test_presence_decides_which_linears_are_quantised",
    ),
    (
        "16",
        "an alarm on linears that the list forgets",
        "../audit/test_audit.py",
        "test_lists_of_what_is_not_quantised",
    ),
    ("2.1", "eps of the latent norms, per family", "upstream/test_kimi_linear.py", "test_the_other_reading_is_seen"),
    (
        "2.8",
        "order, row and residual of the draft layer",
        "test_reference_draft.py",
        "test_drafts_against_the_derivation",
    ),
    ("2.9", "frame 0 of a clip, stills", "upstream/test_kimi_k2_5.py", "test_the_other_reading_of_a_clip_is_seen"),
)


def test_every_row_of_the_table_is_a_test():
    """Catches a row whose test was renamed or removed, and a gotcha without a row."""
    assert {int(number) for number, *_ in GOTCHAS if "." not in number} == set(range(1, 17))
    for _, reading, file, name in GOTCHAS:
        assert reading
        tree = ast.parse((HERE / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, name)


def random(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def test_a_hadamard_rotation_changes_no_score():
    """Catches a reference that must be rotated as DeepSeek's code rotates: both sides turned by the orthonormal matrix
    score the same, one side alone or a matrix without its 128^-1/2 does not."""
    h = torch.ones(1, 1, dtype=F64)
    while len(h) < 128:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    turn = h * 128**-0.5
    q, keys, weights = random(5, 4, 128), random(1, 9, 128, seed=1), random(5, 4, seed=2)
    given = dict(weights=weights, owner=torch.zeros(5, dtype=torch.int64), scale=128**-0.5)
    plain = attention.index_scores(q, keys=keys, **given)
    assert (attention.index_scores(q @ turn, keys=keys @ turn, **given) - plain).abs().max() < 1e-12
    assert (attention.index_scores(q @ turn, keys=keys, **given) - plain).abs().max() > 0.1
    assert (attention.index_scores(q @ h, keys=keys @ h, **given) - plain).abs().max() > 0.1


def test_scales_of_rows_have_no_floor():
    """Catches 1e-4 under the largest value of a row, as in DeepSeek's code, or 1e-10: the codes of tiny rows would be
    zero or small, here they span the range at every size."""
    for size in (1.0, 1e-6, 1e-12):
        codes, scales = e4m3_rows_encode(random(3, 128, dtype=torch.float32) * size)
        assert codes.float().abs().amax(-1).tolist() == [448.0] * 3
        assert scales.numel() == 3


def test_index_scores_are_scaled_by_the_index_head():
    """Catches the scale of attention, (nope + rope)^-1/2: it selects the same keys, and a threshold would not."""
    config = small()
    seen = []

    def spy(place, operator, function, *args, site="", **kwargs):
        if operator == "dsa.score":
            seen.append(kwargs["scale"])
        return function(*args, **kwargs)

    Model(Memory(config)).forward(TOKENS, call=spy)
    assert set(seen) == {config.index.dim**-0.5}
    assert config.index.dim != config.mla.nope + config.mla.rope


@pytest.mark.parametrize("name", ["kimi-k3", "kimi-linear"])
def test_layer_lists_are_never_replaced_by_a_rule(name):
    """Catches lists counted from 0, and a schedule by period where a list is missing: both change the last layers."""
    release = published(name)
    files = copy.deepcopy(release.config_json)
    linear = files.get("text_config", files)["linear_attn_config"]
    period = tuple("mla" if n % 4 == 3 else "kda" for n in range(len(release.config().layers)))
    assert release.config().layers != period
    shifted = {k: [n - 1 for n in linear[k]] for k in ("kda_layers", "full_attn_layers")}
    for lists in (shifted, {"full_attn_layers": []}):
        changed = copy.deepcopy(files)
        changed.get("text_config", changed)["linear_attn_config"] |= lists
        with pytest.raises(CheckpointError, match="layers 1 to"):
            read_config(changed)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 8])
def test_blocks_stay_as_they_were_frozen(depth):
    """Catches a partial sum that is written into the block before it, which only the layers behind the last boundary
    show, at depths with and without a block that is complete and not frozen (blocks of two layers)."""
    kinds = ("kda", "mla", "kda", "kda", "mla", "kda", "mla", "mla")[:depth]
    checkpoint = Memory(small(layers=kinds, residual=Residual("attention", block=2)))
    arrays = {n: t.double().numpy() for n, t in checkpoint.tensors.items()}
    tokens = TOKENS[:6]
    expected = PerToken(checkpoint.config, arrays).logits(tokens)
    assert np.abs(Model(checkpoint).forward(tokens).numpy() - expected).max() < 1e-9


def test_each_norm_of_kda_has_its_own_eps():
    """Catches rms_norm_eps in the L2 norm of queries and keys, and 1e-6 in the norm of the output: with rms_norm_eps of
    a tenth the derivation, which has 1e-6 written into the one and reads the other, differs at once."""
    checkpoint = Memory(small(layers=("kda", "kda"), eps=0.1, residual=Residual()))
    arrays = {n: t.double().numpy() for n, t in checkpoint.tensors.items()}
    tokens = TOKENS[:8]
    expected = PerToken(checkpoint.config, arrays).logits(tokens)
    assert checkpoint.config.kda.l2_eps == 1e-6
    assert np.abs(Model(checkpoint).forward(tokens).numpy() - expected).max() < 1e-9


def by_doubling(matrix, right, **_):
    """(I + N)^-1 right with (I - N)(I + N^2)(I + N^4)..., N strictly lower: exact in exact arithmetic."""
    n = matrix.shape[-1]
    eye = torch.eye(n, dtype=matrix.dtype)
    strict = torch.tril(matrix, -1)
    inverse, power = eye - strict, strict @ strict
    for _ in range((n - 1).bit_length() - 1):
        inverse, power = inverse @ (eye + power), power @ power
    return inverse @ right


def test_the_triangular_inverse_is_a_substitution(monkeypatch):
    """Catches an inverse by doubling: with keys that resemble each other and decays as trained, its terms are large and
    cancel, and float32 keeps nothing of the result."""
    rows, width = 64, 16
    k = random(1, 1, width) + 0.3 * random(rows, 1, width, seed=1)
    g = -0.02 * torch.rand(rows, 1, width, generator=torch.Generator().manual_seed(2), dtype=F64)
    q, v = random(rows, 1, width, seed=3), random(rows, 1, width, seed=4)
    rest = dict(
        k=k, v=v, g=g, beta=torch.full((rows, 1), 0.98, dtype=F64), state=torch.zeros(1, 1, width, width, dtype=F64)
    )
    offsets = torch.tensor([0, rows])
    expected, _ = kda.attention(q, **rest, offsets=offsets, chunk=None)
    low = {name: value.float() for name, value in rest.items()}

    def error():
        y, _ = kda.attention(q.float(), **low, offsets=offsets, chunk=64)
        return float((y.double() - expected).norm() / expected.norm())

    substituted = error()
    assert substituted < 1e-5
    monkeypatch.setattr(torch.linalg, "solve_triangular", by_doubling)
    doubled = error()
    assert not doubled < 1000 * substituted


def test_keys_that_other_families_read():
    """Catches `num_experts_per_tok`, which Kimi does not have, taken in place of its own key, and the computed head_dim
    of 74 used for anything."""
    release = published("kimi-k3")
    files = copy.deepcopy(release.config_json)
    text = files["text_config"]
    text["head_dim"] = 4096
    assert read_config(files | {"name": "kimi-k3"}, preprocessor=release.preprocessor) == release.config()
    text["num_experts_per_tok"] = text.pop("num_experts_per_token")
    with pytest.raises(CheckpointError, match="num_experts_per_token"):
        read_config(files)


def test_k3s_switches_under_kimi_linears_name():
    """Catches a Kimi Linear that ignores what K3 added, as transformers' class does: each key must change the model."""
    plain = preset("tiny-kimi-linear").json_files["config.json"]
    base = read_config(plain)
    for key, value, part in (
        ("attn_res_block_size", 4, "residual"),
        ("mla_use_output_gate", True, "mla"),
        ("hidden_act", "situ", "activation"),
        ("routed_expert_hidden_size", 64, "moe"),
        ("linear_attn_config", plain["linear_attn_config"] | {"gate_lower_bound": -5.0}, "kda"),
        ("linear_attn_config", plain["linear_attn_config"] | {"use_full_rank_gate": True}, "kda"),
    ):
        config, rest = read_config_and_rest(plain | {key: value})
        assert rest == ()
        assert getattr(config, part) != getattr(base, part), key
        assert replace(config, **{part: getattr(base, part)}) == base
