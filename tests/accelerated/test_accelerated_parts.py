"""The parts around the operators: free lists, the residual spine, images, the backend's doors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from day0check.accelerated.cache import FreeList
from day0check.accelerated.residual import AttentionSpine
from day0check.accelerated.vision import place, read_image
from day0check.accelerated.weights import Layer, Mix, Model
from day0check.backends.accelerated import Accelerated
from day0check.backends.base import CAPABILITIES, Backend
from day0check.errors import InputError, Unavailable, UsageError
from day0check.probe.recorder import Caller
from day0check.probe.rows import RowMap
from day0check.types import Request, Schedule, Turn
from reference.config import ModelConfig, Residual
from reference.config import Vision as VisionConfig
from reference.presets import preset_dir


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.booleans(), max_size=40), seed=st.integers(0, 9))
def test_a_free_list_never_gives_a_number_twice(steps, seed):
    """Catches a number given to two holders, one that is lost, and a generation that does not move."""
    free, held, given_out = FreeList(5, seed), [], 0
    for take in steps:
        if take and len(held) < 5:
            number = free.take()
            assert number not in held
            held.append(number)
            given_out += 1
        elif held:
            free.give([held.pop(0)])
    assert len(free) + len(held) == 5
    assert sum(free.generation) == given_out


def test_an_empty_free_list_says_so():
    """Catches an exhausted cache that hands out a used page."""
    with pytest.raises(Unavailable, match="cache is full"):
        FreeList(0).take()


# -------------------------------------------------------------------------------------------------- residual spine


def mix(sources: list[torch.Tensor], w: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """model.md 2.7 for one set of sources [rows, D]."""
    logits = [(a * w * v).sum(-1) / torch.sqrt((v * v).mean(-1) + 1e-5) for v in sources]
    p = torch.softmax(torch.stack(logits), 0)
    return sum(p[i, :, None] * v for i, v in enumerate(sources))


def by_definition(x, outputs, weights, block):
    """Inputs of every sublayer and the last mix, from sums of whole blocks, not from a running bank."""
    seen, layers = [], len(outputs)
    flat = [y for pair in outputs for y in pair]  # sublayer outputs in order

    def blocks_before(layer: int) -> list[torch.Tensor]:
        """Embedding and every block that was complete when `layer` began."""
        whole = [x]
        for b in range(layer // block):
            whole.append(sum(flat[2 * block * b : 2 * block * (b + 1)]))
        return whole

    for layer in range(layers):
        start = layer // block * block
        running = flat[2 * start : 2 * layer]
        sources = [*blocks_before(layer), *([sum(running)] if running else [])]
        seen.append(mix(sources, *weights[layer][0]))
        seen.append(mix([*blocks_before(layer), sum(flat[2 * start : 2 * layer + 1])], *weights[layer][1]))
    last = (layers - 1) // block * block
    return seen, mix([*blocks_before(layers - 1), sum(flat[2 * last :])], *weights[layers])


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 6, 7])
def test_attention_residuals_follow_their_definition(layers):
    """Catches a boundary one layer off, a partial that keeps the old block, a block stored in the wrong slot."""
    block, width = 3, 5
    generator = torch.Generator().manual_seed(layers)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = [[(draw(width), draw(width)) for _ in range(2)] for _ in range(layers)] + [(draw(width), draw(width))]
    outputs = [(draw(4, width), draw(4, width)) for _ in range(layers)]
    x = draw(4, width)
    config = ModelConfig("m", width, ("kda",) * layers, 8, 8, 8, residual=Residual("attention", block))
    model = Model(
        x, tuple(Layer(x, x, Mix(*w[0]), Mix(*w[1]), None, None) for w in weights[:-1]), Mix(*weights[-1]), x, x, None
    )
    caller = Caller(Accelerated().operators())
    spine, seen = AttentionSpine(x, model, config), []
    for layer, (attention, mlp) in enumerate(outputs):
        at = caller.at(f"layers.{layer:02d}")
        seen.append(spine.attention_input(at, layer))
        spine.add_attention(at, layer, attention)
        seen.append(spine.mlp_input(at, layer))
        spine.add_mlp(at, layer, mlp)
    want, want_last = by_definition(x, outputs, weights, block)
    for got, expected in zip(seen, want, strict=True):
        assert torch.allclose(got, expected, rtol=0, atol=1e-12)
    last = spine.output(caller.at(""), torch.tensor([3, 1]), RowMap(("a",), (0, 0), (3, 1)))
    assert torch.allclose(last, want_last[[3, 1]], rtol=0, atol=1e-12)


# -------------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("LA", 2), ("RGB", 3), ("RGBA", 4), ("P", 3), ("CMYK", 3)])
def test_images_are_read_in_their_own_mode(tmp_path, mode, channels):
    """Catches alpha that is dropped before resizing and palette numbers taken for gray."""
    picture = Image.fromarray(np.arange(60, dtype=np.uint8).reshape(5, 12)).convert("RGB").convert(mode)
    path = tmp_path / ("p.tif" if mode == "CMYK" else "p.png")
    picture.save(path)
    pixels = read_image(str(path))
    assert pixels.shape == (5, 12, channels)
    assert pixels.dtype == torch.uint8
    assert int(pixels[4, 11].max()) > int(pixels[0, 0, 0]) or mode == "CMYK"


def test_patches_belong_to_the_token_of_their_group():
    """Catches an address that names another token: groups are two by two, row by row."""
    config = VisionConfig(hidden=8, layers=1, heads=1, head_dim=8, mlp=8)
    image = torch.zeros(28, 70, 3, dtype=torch.uint8)  # padded to 28 x 84: 2 x 6 patches, 3 tokens
    pictures = place([image, image], config, "r", [7, 8, 9, 20, 21, 22])
    assert pictures.grids == ((1, 2, 6), (1, 2, 6))
    assert pictures.patches[0].position == (7, 7, 8, 8, 9, 9) * 2
    assert pictures.patches[1].position == (20, 20, 21, 21, 22, 22) * 2
    with pytest.raises(InputError, match="fill 3 media pads, the turn has 2"):
        place([image], config, "r", [1, 2])


# ------------------------------------------------------------------------------------------------------- backend


def test_backend_keeps_the_protocol():
    """Catches a capability that no schedule knows and a method that the runner would miss."""
    backend = Accelerated()
    assert isinstance(backend, Backend)
    assert backend.capabilities() <= CAPABILITIES


@pytest.mark.parametrize(
    ("profile", "device", "words"),
    [
        ("bf16", "quantum", "quantum"),
        ("bf16", "meta", "holds no values"),
        ("bf16", "cuda:99", "cuda:99"),
        ("fp4", "cpu", "fp4"),
    ],
)
def test_unknown_device_or_profile_is_a_usage_error(profile, device, words):
    """Catches a traceback from torch where a message with what there is is due."""
    with pytest.raises(UsageError, match=words) as caught:
        Accelerated().load(str(preset_dir("tiny")), profile, device, {})
    assert "cpu" in caught.value.todo or "bf16" in caught.value.todo


def test_running_before_loading_is_refused():
    """Catches an attribute error where the missing call should be named."""
    request = Request("a", (Turn((1,)),))
    with pytest.raises(UsageError, match="no model is loaded"):
        Accelerated().run((request,), Schedule(), None)


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ((Request("a", (Turn((1,)),)), Request("a", (Turn((1,)),))), "two requests"),
        ((Request("a", ()),), "without tokens"),
        ((Request("a", (Turn((400,)),)),), "outside 0..319"),
        ((Request("a", (Turn((1,) * 8190),), max_new_tokens=3),), "8193 positions"),
    ],
)
def test_requests_that_make_no_sense_are_refused(requests, words):
    """Catches an index error deep in a step where an input error with the request is due."""
    backend = Accelerated()
    backend.load(str(preset_dir("tiny")), "bf16", "cpu", {})
    with pytest.raises(InputError, match=words):
        backend.run(requests, Schedule(), None)
