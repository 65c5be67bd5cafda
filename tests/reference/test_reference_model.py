"""The assembled model against a per-token derivation, its two forms, and its caches against the full pass."""

import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from per_token_model import PerToken

from reference.config import Activation, Residual
from reference.generate import generate
from reference.image_grid import image_grid
from reference.model import Model, OneByOne
from reference.presets import preset, recipe_for, values
from reference.sampling import sample
from reference.tensors import expected_tensors
from reference.tokenizer import chat_turn
from reference.vision import preprocess

TOKENS = [256, 72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 33, 10, 72, 255, 0, 7, 101]


def small(**changes):
    """tiny cut down to what the derivation can loop over: every kind of layer, blocks of two layers."""
    c = preset("tiny").config()
    config = replace(
        c,
        hidden=32,
        layers=("kda", "dsa", "dsa_shared", "mla", "kda", "dsa"),
        mlp_width=48,
        mla=replace(c.mla, heads=2, q_lora=12, kv_lora=8, nope=6, rope=4, v=5),
        index=replace(c.index, heads=4, dim=8, rope=4, topk=3),
        kda=replace(c.kda, heads=2, dim=4, rank=3, chunk=4),
        moe=replace(c.moe, experts=8, topk=2, width=32, shared_width=24, latent=32),
        residual=replace(c.residual, block=2),
        vision=replace(c.vision, hidden=8, heads=2, head_dim=4, mlp=12, patch_limit=16, side_limit=6),
    )
    return replace(config, **changes)


class Memory:
    """A checkpoint that lies in memory: what `Model` asks of one."""

    def __init__(self, config):
        self.config = config
        self.tensors = {}
        for name, stored in expected_tensors(config).items():
            recipe = recipe_for(name, stored)
            if name.endswith(("o_proj.weight", "down_proj.weight", "up_proj.weight")):
                recipe = replace(recipe, scale=1 / stored.shape[-1] ** 0.5)  # loud enough to be compared
            self.tensors[name] = values(name, stored, recipe).reshape(stored.shape)

    def tensor(self, name):
        return self.tensors[name]

    def __contains__(self, name):
        return name in self.tensors


@functools.cache
def tiny():
    """tiny from memory, so that no test depends on a directory."""
    return Model(Memory(preset("tiny").config()))


VARIANTS = {
    "composition": {},
    "plain residual, NoPE, no gate": dict(
        residual=Residual(),
        rope=replace(preset("tiny").config().rope, layout="none"),
        index=replace(small().index, rope=0, rope_layout="none"),
        mla=replace(small().mla, gate=False),
        tied_head=True,
    ),
    "mHC, softplus and low-rank gates, SwiGLU": dict(
        residual=Residual("mhc", streams=3, sinkhorn=4),
        kda=replace(small().kda, gate_lower_bound=None, full_rank_gate=False),
        activation=Activation("silu"),
    ),
    "plain experts without a latent, softmax router": dict(
        moe=replace(
            small().moe, packed="none", latent=None, latent_norm=False, scoring="softmax", renormalise=False, groups=1,
            kept_groups=1,
        ),
        rope=replace(preset("tiny").config().rope, layout="half"),
    ),
    "no query latent, no shared expert, one block": dict(
        layers=("mla", "kda", "mla"),
        mla=replace(small().mla, q_lora=None),
        moe=replace(small().moe, shared_width=0, latent_norm=False, frequency=2),
        residual=Residual("attention", block=8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_whole_model_against_the_derivation(name):
    """Catches any error of assembly: a norm left out, a residual block frozen a layer late, a router fed the latent, a
    selection from the wrong layer, a gate on the wrong side, a rotated part on the wrong end."""
    checkpoint = Memory(small(**VARIANTS[name]))
    arrays = {n: t.double().numpy() for n, t in checkpoint.tensors.items()}
    expected = PerToken(checkpoint.config, arrays).logits(TOKENS)
    for form, chunk in (("absorbed", 4), ("plain", 0)):
        got = Model(checkpoint).forward(TOKENS, form=form, chunk_kda=chunk).numpy()
        assert np.abs(expected).max() > 1
        assert np.abs(got - expected).max() < 1e-9, (form, chunk)


@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(1, 18), max_size=4), form=st.sampled_from(["absorbed", "plain"]))
def test_pieces_equal_the_whole_at_every_position(cuts, form):
    """Catches a cache that forgets, repeats or misplaces a row at some cut: latent, index key, convolution or state."""
    model = Model(Memory(small()))
    whole = model.forward(TOKENS)
    state, parts = model.start(), []
    bounds = sorted({0, *cuts, len(TOKENS)})
    for begin, end in itertools.pairwise(bounds):
        parts.append(model.extend(state, TOKENS[begin:end], form=form))
    assert (torch.cat(parts) - whole).abs().max() < 1e-10
    assert state.length == len(TOKENS)


def test_decoding_tiny_token_by_token_equals_the_full_pass():
    """Catches decode that drifts from prefill in the model that everything else is proved on, past its top-k."""
    model = tiny()
    tokens = chat_turn(model.config, "It was the best of times, it was the worst of times. " * 3)
    whole, state = model.forward(tokens), model.start()
    parts = [model.extend(state, tokens[:100]), *(model.extend(state, [t]) for t in tokens[100:])]
    assert len(tokens) > 2 * model.config.index.topk
    assert (torch.cat(parts) - whole).abs().max() < 1e-10


def test_tiny_answers_with_a_variety_of_bytes():
    """Catches weights with which greedy decoding falls into one token, picks special tokens, or does not look at its
    prompt: then a wrong cache or a wrong position would leave the answer as it is."""
    answers = []
    for text in ("What is the sum of two and three?", "def fibonacci(n: int) -> int:"):
        request = SimpleNamespace(
            turns=[SimpleNamespace(tokens=chat_turn(tiny().config, text), images=())],
            max_new_tokens=48, stop_tokens=(), temperature=0.0, seed=0, forced=(),
        )  # fmt: skip
        answers.append(generate(tiny(), request).tokens[-48:])
    assert min(len(set(answer)) for answer in answers) >= 20
    assert max(max(answer) for answer in answers) < 256
    assert answers[0] != answers[1]


def test_every_call_is_a_contract_with_its_arguments():
    """Catches a tap, site or argument that the contracts do not know: comparison would not find its counterpart."""
    from day0check.contracts import CONTRACTS

    taps = []

    def spy(place, operator, function, *args, site="", **kwargs):
        contract = CONTRACTS[operator]
        assert function is contract.function() or operator == "head.logits", operator
        others = contract.args[1:]
        assert len(args) == 1, operator
        assert set(kwargs) <= {a.name for a in others}, operator
        assert {a.name for a in others if not a.optional} <= set(kwargs), operator
        taps.append((place, operator, site))
        return function(*args, **kwargs)

    model = Model(Memory(small()))
    picture = torch.zeros(30, 50, 3, dtype=torch.uint8)
    tokens = chat_turn(model.config, "hi", [(50, 30)])
    model.forward(tokens, images=[picture], call=spy)
    assert len(taps) == len(set(taps))
    layer = [tap[1:] for tap in taps if tap[0] == "layers.01"]
    assert layer[:4] == [
        ("residual.mix", "attention"),
        ("norm.rms", "input"),
        ("mla.query", "down"),
        ("norm.rms", "q_latent"),
    ]
    assert layer[-2:] == [("residual.add", "moe"), ("residual.add", "mlp")]
    stores = [place for place, operator, _ in taps if operator == "residual.store"]
    assert stores == ["layers.00", "layers.02", "layers.04"]
    assert taps[0] == ("", "embed.tokens", "")
    assert [tap[1:] for tap in taps[-3:]] == [("residual.mix", "output"), ("norm.rms", "final"), ("head.logits", "")]


def test_what_call_returns_is_what_the_model_goes_on_with():
    """Catches a result that bypasses `call`: replayed choices would then not reach the oracle."""
    model = Model(Memory(small()))

    def first_keys(place, operator, function, *args, site="", **kwargs):
        result = function(*args, **kwargs)
        return torch.zeros_like(result) if operator == "dsa.select" else result

    assert not torch.allclose(model.forward(TOKENS, call=first_keys), model.forward(TOKENS))


# ---------------------------------------------------------------------------------------------------------- vision


def tower(config, tensors, picture):
    """The tower of one still image in plain torch, with torch's own interpolation."""
    v, t = config.vision, {n: x.double() for n, x in tensors.items()}
    at = "vision_tower.patch_embed."
    pixels, (_, h, w) = preprocess(
        picture, patch=v.patch, merge=v.merge, patch_limit=v.patch_limit, side_limit=v.side_limit, mean=v.image_mean,
        std=v.image_std,
    )  # fmt: skip
    h, w = int(h), int(w)
    x = pixels @ t[f"{at}proj.weight"].flatten(1).T
    table = t[f"{at}pos_emb.weight"].permute(2, 0, 1)[None]
    x = x + F.interpolate(table, size=(h, w), mode="bilinear", align_corners=False)[0].flatten(1).T
    for n in range(v.layers):
        block = {
            k.removeprefix(f"vision_tower.encoder.blocks.{n}."): y
            for k, y in t.items()
            if k.startswith(f"vision_tower.encoder.blocks.{n}.")
        }
        q, k, value = (F.rms_norm(x, (v.hidden,), block["norm0.weight"], v.eps) @ block["wqkv.weight"].T).chunk(3, -1)
        heads = []
        for head in range(v.heads):
            own = slice(head * v.head_dim, (head + 1) * v.head_dim)
            turned = [turn_2d(z[:, own], w) for z in (q, k)]
            p = (turned[0] @ turned[1].T * v.head_dim**-0.5).softmax(-1)
            heads.append(p @ value[:, own])
        x = x + torch.cat(heads, -1) @ block["wo.weight"].T
        hidden = F.rms_norm(x, (v.hidden,), block["norm1.weight"], v.eps) @ block["mlp.fc0.weight"].T
        x = x + F.gelu(hidden, approximate="tanh") @ block["mlp.fc1.weight"].T
    x = F.rms_norm(x, (v.hidden,), t["vision_tower.encoder.final_layernorm.weight"], v.eps)
    groups = [
        torch.cat([x[(r + a) * w + c + b] for a in (0, 1) for b in (0, 1)])
        for r in range(0, h, 2)
        for c in range(0, w, 2)
    ]
    y = F.gelu(torch.stack(groups) @ t["mm_projector.proj.0.weight"].T) @ t["mm_projector.proj.2.weight"].T
    return F.rms_norm(y, (config.hidden,), t["mm_projector.post_norm.weight"], v.projector_eps)


def turn_2d(x, width):
    """Complex multiplication by the angle of column (even pairs) or row (odd pairs)."""
    patches, d = x.shape
    place = torch.arange(patches)
    angle = torch.empty(patches, d // 2, dtype=torch.float64)
    for pair in range(d // 2):
        frequency = np.float32(10000.0) ** np.float32(-4 * (pair // 2) / d)
        where = place // width if pair % 2 else place % width
        angle[:, pair] = (where.float() * float(frequency)).double()
    turned = torch.view_as_complex(x.reshape(patches, d // 2, 2).contiguous()) * torch.exp(1j * angle)
    return torch.view_as_real(turned).reshape(patches, d)


def photo(height, width, seed):
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_image_features_against_plain_torch():
    """Catches an error in the order of the tower, and images of one request that see each other."""
    checkpoint = Memory(small())
    pictures = [photo(40, 60, 1), photo(84, 30, 2)]
    expected = torch.cat([tower(checkpoint.config, checkpoint.tensors, p) for p in pictures])
    got = Model(checkpoint).image_features(pictures)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 1e-6  # angles are float32 products on both sides, made in another order


def test_images_take_the_place_of_their_pads():
    """Catches features spliced in another order, or beside their pads: swapping two images must change the answer, and
    the rows before the first image must not see any."""
    model = Model(Memory(small()))
    pictures = [photo(40, 40, 3), photo(40, 40, 4)]
    tokens = chat_turn(model.config, "which?", [(40, 40), (40, 40)])
    one, two = model.forward(tokens, images=pictures), model.forward(tokens, images=pictures[::-1])
    first = tokens.index(model.config.tokens.media_pad)
    assert (one[:first] - two[:first]).abs().max() < 1e-10
    assert (one[first:] - two[first:]).abs().max() > 1e-3
    blind = model.forward(tokens)
    assert (blind[:first] - one[:first]).abs().max() < 1e-10
    state = model.start()
    cut = tokens.index(model.config.tokens.media_end) + 1
    parts = [
        model.extend(state, tokens[:cut], images=pictures[:1]),
        model.extend(state, tokens[cut:], images=pictures[1:]),
    ]
    assert (torch.cat(parts) - one).abs().max() < 1e-10


def test_pads_and_features_must_agree():
    """Catches an image that is cut off in silence; pads beyond the features are a model's own and stay text."""
    model = Model(Memory(small()))
    tokens = chat_turn(model.config, "?", [(40, 40)])
    pads = image_grid(40, 40, model.config.vision).tokens
    with pytest.raises(ValueError, match=f"{pads} media pads"):
        model.forward(tokens, images=[photo(80, 80, 1)])
    more = model.forward([*tokens, model.config.tokens.media_pad], images=[photo(40, 40, 1)])
    assert torch.equal(more[:-1].argmax(-1), model.forward(tokens, images=[photo(40, 40, 1)]).argmax(-1))
    with pytest.raises(ValueError, match="no vision"):
        Model(Memory(small(vision=None))).forward([1], images=[photo(40, 40, 1)])


# ------------------------------------------------------------------------------------------------ limits and dtypes


def test_lengths_are_checked():
    """Catches an empty prompt that fails deep inside, and positions beyond the model's."""
    model = Model(Memory(small(max_positions=4)))
    with pytest.raises(ValueError, match="0 tokens"):
        model.forward([])
    state = model.start()
    model.extend(state, [1, 2, 3])
    with pytest.raises(ValueError, match="after 3"):
        model.extend(state, [4, 5])


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_lower_dtypes_are_the_same_model(dtype, limit):
    """Catches an operator that needs float64, a state or parameter that silently narrows, and a dtype that leaks."""
    checkpoint = Memory(small())
    exact, low = Model(checkpoint).forward(TOKENS), Model(checkpoint, dtype=dtype).forward(TOKENS)
    assert low.dtype == torch.float32
    relative = (low - exact).norm(dim=1) / exact.norm(dim=1)
    assert relative.median() < limit


def test_parameters_stored_in_float32_are_never_narrowed():
    """Catches decays, router biases and convolutions rounded to bfloat16: that would be another model."""
    checkpoint = Memory(small())
    model = Model(checkpoint, dtype=torch.bfloat16)
    for name in ("self_attn.A_log", "self_attn.dt_bias", "self_attn.q_conv1d.weight", "self_attn.o_norm.weight"):
        assert torch.equal(model.weights(f"layers.0.{name}"), checkpoint.tensor(f"layers.0.{name}"))
    assert model.weights("norm.weight").dtype == torch.bfloat16
    assert model.start().caches[0].state.dtype == torch.float32


def test_experts_one_by_one_are_the_stacked_ones():
    """Catches the path for layers too large for memory going wrong unseen: it must give the same bytes."""
    model = Model(Memory(small()), kept_bytes=0)
    whole = model.forward(TOKENS)

    def unstacked(prefix, w, *, active):
        return OneByOne(model.weights, prefix, w, active)

    model.weights.experts = unstacked
    assert torch.equal(model.forward(TOKENS), whole)


# ------------------------------------------------------------------------------------------------------ generation


def request(*turns, **changes):
    base = dict(max_new_tokens=5, stop_tokens=(), temperature=0.0, seed=3, forced=())
    return SimpleNamespace(turns=[SimpleNamespace(tokens=t, images=()) for t in turns], **(base | changes))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_are_those_of_the_full_pass(temperature):
    """Catches an answer that is not fed before the next turn, spans off by one, and a draw at another position."""
    model = Model(Memory(small()))
    answer = generate(model, request(TOKENS, [263, 65, 264], temperature=temperature))
    assert answer.tokens[: len(TOKENS)] == tuple(TOKENS)
    assert answer.spans == ((19, 24), (27, 32))
    assert answer.tokens[24:27] == (263, 65, 264)
    logits = model.forward(answer.tokens)
    chosen = [p for begin, end in answer.spans for p in range(begin, end)]
    assert (answer.logits - logits[[p - 1 for p in chosen]]).abs().max() < 1e-10
    for position in chosen:
        again = sample(
            logits[position - 1 : position],
            temperature=torch.tensor([temperature]),
            seed=torch.tensor([3]),
            positions=torch.tensor([position - 1]),
        )
        assert answer.tokens[position] == int(again)


def test_stop_tokens_and_forced_answers():
    """Catches a stop token that is dropped or passed over, and forcing that does not replace the choice."""
    model = Model(Memory(small()))
    free = generate(model, request(TOKENS))
    stop = free.tokens[len(TOKENS) + 2]
    early = generate(model, request(TOKENS, stop_tokens=(stop,)))
    end = free.tokens.index(stop, len(TOKENS)) + 1
    assert (early.tokens, early.finish, free.finish) == (free.tokens[:end], "stop", "length")
    forced = generate(model, request(TOKENS, [65], forced=((1, 2, 3), (4,))))
    assert forced.tokens == (*TOKENS, 1, 2, 3, 65, 4)
    assert forced.spans == ((19, 22), (23, 24))
