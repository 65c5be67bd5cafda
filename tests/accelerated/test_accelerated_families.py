"""Every family on the fast path, beside the reference in float64 on its `tiny` preset."""

import numpy as np
import pytest
import torch
from PIL import Image

from day0check.backends.accelerated import Accelerated
from day0check.compare.checkpoint_parameters import compare_parameters
from day0check.compare.parameters import ParametersRecorder
from day0check.probe.recorder import Observer, Recorder
from day0check.types import Request, Schedule, Turn
from reference.image_grid import image_grid
from reference.model import Model
from reference.preset_families import FAMILY_PRESETS
from reference.presets import preset_dir
from reference.weights import Checkpoint

CHUNKS = (50, 50, 63, 33, 45, 51, 37)
CHUNKS = (50, 63, 33, 45, 51)
CASES = {name: Schedule(chunk=CHUNKS[n % len(CHUNKS)], page=16) for n, name in enumerate(FAMILY_PRESETS)}


KEPT = ("kv.record", "index.record")  # the fast path keeps a row where it writes it


class Seen(Observer):
    """Rows of the logits by position, and every call's tap in prefill and in decode."""

    def __init__(self) -> None:
        self.rows, self.taps = {}, {"prefill": set(), "decode": set()}

    def after(self, call, token, results):
        self.taps[call.phase].add(call.tap)
        if call.tap == "head.logits":  # a layer that drafts has logits of its own
            for i, row in enumerate(results[0].double()):
                self.rows[call.rows.address(i)[1]] = row.clone()


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    down, across = np.indices((70, 100))
    pixels = np.stack((down * 3 % 256, across * 2 % 256, (down * across) % 256), -1).astype(np.uint8)
    path = tmp_path_factory.mktemp("pictures") / "waves.png"
    Image.fromarray(pixels).save(path)
    return str(path)


def text(seed: int, count: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def request_for(config, picture: str) -> Request:
    """Two turns, the first with a picture where there is a tower; more keys than a selection keeps."""
    first = text(1, 110)
    if config.vision is None:
        return Request("a", (Turn(first), Turn(text(2, 9))), max_new_tokens=7)
    pads = (config.tokens.media_pad,) * image_grid(100, 70, config.vision).tokens
    return Request("a", (Turn((*first[:30], *pads, *first[30:]), (picture,)), Turn(text(2, 9))), max_new_tokens=7)


def run(name: str, profile: str, schedule: Schedule, picture: str, *observers: Observer, request=None):
    backend = Accelerated()
    backend.load(str(preset_dir(name)), profile, "cpu", {})
    config = Checkpoint(preset_dir(name)).config
    return backend.run((request or request_for(config, picture),), schedule, Recorder(list(observers)))


@pytest.mark.parametrize("name", FAMILY_PRESETS)
def test_a_family_is_its_reference_and_decodes_as_it_prefills(name, picture):
    """Catches a formula, an order, a weight or a position of a family that the two derivations read differently, and a
    decode path that leaves an operator out."""
    seen = Seen()
    outputs = run(name, "fp32", CASES[name], picture, seen)
    checkpoint, sequence, called = Checkpoint(preset_dir(name)), outputs.sequences["a"], set()

    def call(place, operator, function, *args, site="", **kwargs):
        if operator not in KEPT:
            called.add(".".join(part for part in (place, operator, site) if part))
        return function(*args, **kwargs)

    images = [picture] if checkpoint.config.vision else []
    oracle = Model(checkpoint).forward(list(sequence), images=images, call=call)
    at = sorted(seen.rows)
    assert len(at) == 14
    got = torch.stack([seen.rows[p] for p in at])
    assert float((got - oracle[at]).abs().max() / oracle.abs().max()) < 2e-5
    assert torch.equal(got.argmax(-1), oracle[at].argmax(-1))
    assert called <= seen.taps["prefill"] | {"sample.token"}
    once = Seen()
    run(name, "fp32", Schedule(), picture, once, request=Request("a", (Turn(sequence, tuple(images)),), 1))
    last = len(sequence) - 1
    assert float((once.rows[last] - oracle[last]).abs().max() / oracle.abs().max()) < 2e-5
    text_only = {tap for tap in called if not tap.startswith(("vision.", "splice."))}
    assert text_only - seen.taps["decode"] == set()


@pytest.mark.parametrize("name", FAMILY_PRESETS)
def test_the_parameters_of_a_family_are_those_of_its_checkpoint(name, picture):
    """Catches a false alarm, and a tap that the check does not know, in a family's own operators."""
    found = []
    recorder = ParametersRecorder(found.append)
    run(name, "bf16", CASES[name], picture, recorder)
    recorder.end_case()
    measures = compare_parameters(preset_dir(name), "bf16", found)
    assert [m for m in measures if not m.passed] == []
    shown = {m.operator for m in measures}
    for operator in {"tiny-glm-5.3": ("dsa.pool_gate", "dsa.pool_key", "dsa.expand", "residual.coefficients")}.get(
        name, ()
    ):
        assert operator in shown
