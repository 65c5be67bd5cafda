"""Switches that only the `fault-*` presets turn, against loops over tokens, heads and pairs of channels."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from per_token_switches import Switched
from test_reference_model import TOKENS, Memory, small

from reference.config import Gqa, Rope
from reference.errors import CheckpointError
from reference.families import read_config
from reference.grouped import grouped_attention
from reference.model import Model
from reference.pooling import pool_members
from reference.presets import preset
from reference.rope import apply_rope, rope_positions
from reference.tokenizer import chat_turn

PAD, BREAK = 259, 270


def sequence(*parts):
    """(tokens, their three positions) of parts: a number of text tokens, or the (rows, columns) of an image."""
    tokens, three, n = [], [], 0
    for part in parts:
        if isinstance(part, int):
            tokens += [7 + k for k in range(part)]
            three += [(n + k,) * 3 for k in range(part)]
            n += part
            continue
        rows, columns = part
        for r in range(rows):
            tokens += [PAD] * columns + [BREAK]
            three += [(n, n + r, n + c) for c in range(columns + 1)]
        n += max(rows, columns + 1)
    return tokens, three


def against_the_derivation(config, tokens, *, three=None, chunks=(5, 1, 1, 6)):
    """The model in one pass, and in pieces over its caches, beside the derivation."""
    checkpoint = Memory(config)
    arrays = {n: t.double().numpy() for n, t in checkpoint.tensors.items()}
    expected = Switched(config, arrays, three).logits(tokens)
    model = Model(checkpoint)
    once = model.forward(tokens).numpy()
    state, pieces, begin = model.start(), [], 0
    for count in (*chunks, len(tokens) - sum(chunks)):
        pieces.append(model.extend(state, tokens[begin : begin + count]))
        begin += count
    for got in (once, torch.cat(pieces).numpy()):
        assert np.abs(got - expected).max() / np.abs(expected).max() < 1e-11


# ------------------------------------------------------------------------------------------- positions of three axes


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 6)), max_size=4), cut=st.integers(0)
)
def test_positions_are_those_of_the_grids(parts, cut):
    """Catches positions counted from another image's start, a break without a column, text that goes on too early or
    too late behind an image, and positions that change when more tokens come."""
    tokens, three = sequence(*(p for text, rows, columns in parts for p in (text, (rows, columns))), 2)
    cut = cut % (len(tokens) + 1)
    found = rope_positions(torch.tensor(tokens[:cut], dtype=torch.int64), media_pad=PAD, row_break=BREAK)
    assert found.dtype == torch.int64
    assert found.tolist() == [list(t) for t in three[:cut]]


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_each_pair_turns_by_its_own_axis(layout):
    """Catches sections in another order, and a frequency counted from the beginning of its section."""
    sections, pairs = (1, 2, 1), 4
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.tensor([[5, 0, 0], [0, 7, 0], [1, 2, 900]])
    y = apply_rope(x, positions=positions, theta=100.0, layout=layout, sections=sections)
    axis = [0, 1, 1, 2]
    for row, head, pair in np.ndindex(3, 2, pairs):
        a, b = (pair, pair + 4) if layout == "half" else (2 * pair, 2 * pair + 1)
        angle = float(np.float32(positions[row, axis[pair]]) * np.float32(100.0 ** (-pair / 4)))
        turned = complex(x[row, head, a], x[row, head, b]) * complex(math.cos(angle), math.sin(angle))
        assert complex(y[row, head, a], y[row, head, b]) == pytest.approx(turned, abs=1e-12)


def test_sections_that_do_not_fit_are_refused():
    """Catches positions of one axis that are silently broadcast over three."""
    x = torch.zeros(2, 1, 8)
    for positions, sections in ((torch.zeros(2, dtype=torch.int64), (1, 2, 1)), (torch.zeros(2, 3), (1, 2, 2))):
        with pytest.raises(ValueError, match="sections"):
            apply_rope(x, positions=positions, theta=100.0, layout="half", sections=sections)


def test_the_model_with_three_axes_against_the_derivation():
    """Catches an indexer or a key that still turns by its place in the sequence, and positions lost between steps."""
    config = small(rope=Rope("interleaved", sections=(0, 1, 1)))
    tokens, three = sequence(3, (2, 3), 1, (3, 1), 4)
    config = replace(config, tokens=replace(config.tokens, row_break=BREAK))
    against_the_derivation(config, tokens, three=three)
    plain = replace(config, rope=Rope("interleaved"))
    same = Model(Memory(plain)).forward(TOKENS) - Model(Memory(config)).forward(TOKENS)
    assert float(same.abs().max()) < 1e-12  # text turns as it always did


# --------------------------------------------------------------------------------------------------------- pools


POOLED = replace(small().index, rope=0, rope_layout="none", pool=3, topk=6)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_model_with_pools_against_the_derivation(overlap):
    """Catches a lane taken from the wrong pool, a first pool that overlaps something, a pool before that is forgotten
    between two steps, and gates without their place."""
    config = small(index=replace(POOLED, overlap=overlap), layers=("dsa", "kda", "dsa_shared", "dsa"))
    against_the_derivation(config, [*TOKENS, *range(40, 49)])


@settings(max_examples=40, deadline=None)
@given(pool=st.integers(1, 4), tokens=st.integers(0, 17), begun=st.booleans())
def test_members_of_pools_that_overlap(pool, tokens, begun):
    """Catches a token in the wrong place of a pool, and a pool before the first one that is not absent: every row
    carries its own position and lane."""
    previous = pool if begun else 0
    rows = torch.arange(previous + tokens)[:, None, None] * 10 + torch.tensor([0, 1])[:, None]
    found = pool_members(rows, pool=pool, previous=previous, absent=-7)
    assert found.shape == (tokens // pool, 2 * pool, 1)
    for number, members in enumerate(found.flatten(1).tolist()):
        first = previous + number * pool
        before = [10 * t if t >= 0 else -7 for t in range(first - pool, first)]
        assert members == before + [10 * t + 1 for t in range(first, first + pool)]


# ---------------------------------------------------------------------------------------------------- linear attention


def test_the_model_with_a_decay_for_each_head_against_the_derivation():
    """Catches decays that are laid over the channels of another head."""
    config = small(kda=replace(small().kda, decay="per_head"), layers=("kda", "mla", "kda"))
    against_the_derivation(config, TOKENS)


# ---------------------------------------------------------------------------------------------------- grouped queries


@pytest.mark.parametrize(
    ("gqa", "rope"),
    [(Gqa(4, 2, 4), Rope("half")), (Gqa(3, 1, 4), Rope("interleaved")), (Gqa(2, 2, 5), Rope())],
    ids=["two groups", "one group", "a key head each"],
)
def test_the_model_with_grouped_queries_against_the_derivation(gqa, rope):
    """Catches a query head that reads another group's key, a norm over all heads or with another head's weights, a
    rotation before the norm, and keys and values that are mixed up in the cache."""
    index = small().index if rope.layout != "none" else replace(small().index, rope=0, rope_layout="none")
    config = small(gqa=gqa, rope=rope, index=index, layers=("gqa", "dsa", "kda", "gqa", "mla"))
    against_the_derivation(config, TOKENS)


def test_key_heads_that_do_not_divide_the_query_heads_are_refused():
    """Catches query heads without a key head."""
    owner = visible = torch.zeros(1, dtype=torch.int64)
    keys = torch.zeros(1, 2, 2, 4)
    with pytest.raises(ValueError, match="no multiple"):
        grouped_attention(torch.zeros(1, 3, 4), keys=keys, values=keys, owner=owner, visible=visible, scale=1.0)


# ------------------------------------------------------------------------------------------------------ configuration


def test_a_turn_writes_its_images_in_rows():
    """Catches a break left out after the last row, or one that takes the place of a pad."""
    config = preset("fault-vl").config()
    turn = chat_turn(config, "What?", [(100, 70), (30, 30)])
    rows = "".join({PAD: "p", BREAK: "b"}.get(token, " ") for token in turn).split()
    assert rows == ["ppppbppppbppppb", "ppbppb"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"mrope_section": [2, 3, 4]}, "must add up"),
        ({"mrope_section": [4, 4]}, "must be 3 numbers"),
        ({"image_break_token_id": 5000}, "must be below"),
        ({"linear_decay": "scalar"}, "must be low_rank or per_head"),
        ({"index_kpool_overlap": True}, "needs an index with pools"),
        ({"grouped_query": {"layers": [1], "heads": 4, "kv_heads": 3, "head_dim": 16}}, "must divide"),
        ({"grouped_query": {"layers": [8], "heads": 4, "kv_heads": 2, "head_dim": 16}}, "layers must be below 8"),
        ({"image_break_token_id": "x"}, "must be int"),
    ],
)
def test_switches_that_do_not_fit_are_refused(part, message):
    """Catches a preset that silently runs without the switch that it names."""
    files = preset("fault-vl").json_files
    with pytest.raises(CheckpointError, match=message):
        read_config(files["config.json"] | {"day0check": part}, tokenizer=files["tokenizer_config.json"])
