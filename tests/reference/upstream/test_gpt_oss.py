"""The expert layer of gpt-oss beside transformers: MXFP4 blocks, interleaved gate and up, biases, clamps."""

from dataclasses import replace

import pytest
import torch
from crosscheck import BOUNDS, relative_error
from gpt_oss_layers import TOPK, both_layers, expected_rows, input_rows, layer_error, write_packed_model

from reference.gpt_oss import ROUTING, expert_layer
from reference.moe import route


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_packed_model(tmp_path_factory.mktemp("gpt-oss"))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_expert_layer_is_upstreams(directory, dtype):
    """Catches swapped nibbles, groups along the output, gate and up as halves, a clamp on the wrong side, a bias that
    is added once per row and not per expert, and a softmax over all experts."""
    assert layer_error(directory, dtype) <= BOUNDS[dtype]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda o: replace(o, w1=o.w3, w3=o.w1, b1=o.b3, b3=o.b1), id="odd gate"),
        pytest.param(lambda o: replace(o, b2=0 * o.b2), id="no down bias"),
        pytest.param(lambda o: replace(o, router_bias=0 * o.router_bias), id="no router bias"),
        pytest.param(lambda o: replace(o, w2=o.w2.flip(-1)), id="order of inputs"),
    ],
)
def test_the_other_reading_is_seen(directory, change):
    """Catches a comparison that would not see the gotcha."""
    theirs, ours = both_layers(directory, torch.float64)
    x = input_rows(torch.float64)
    expected = expected_rows(theirs, x)
    assert relative_error(expert_layer(x, change(ours), k=TOPK), expected) > 1e-3
    assert relative_error(expert_layer(x, ours, k=TOPK, limit=1e9), expected) > 1e-3
    assert relative_error(expert_layer(x, ours, k=TOPK, alpha=1.0), expected) > 1e-3


def test_equal_logits_go_to_the_lower_expert():
    """Catches another tie rule than the one of every other choice here, and a softmax over all experts."""
    ids, weights = route(torch.tensor([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 5.0, 0.0]]), k=2, **ROUTING)
    assert ids.tolist() == [[1, 2], [0, 2]]
    assert weights[0].tolist() == [0.5, 0.5]
    assert float(weights[1, 1]) == pytest.approx(1 / (1 + torch.tensor(-5.0).exp()))
