"""Presets: the same bytes everywhere, and weights a model can live with."""

import hashlib
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.formats import mxfp4_decode
from reference.presets import Recipe, counter_bits, preset, preset_names, values, write_preset
from reference.tensors import Stored

MASK = (1 << 64) - 1


def content_digest(tensors):
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_bytes_of_tiny_are_pinned():
    """Catches any change of a weight, by us or by a build of torch: recorded numbers hang on these bytes. A wanted
    change raises GENERATOR_VERSION and pins the new digest."""
    pinned = "a8820c84b694689b34634c6792da6a01c78337b0e7afc613ad78371302c9510e"
    assert content_digest(preset("tiny").tensors()) == pinned


def test_counter_against_plain_integers():
    """Catches an arithmetic shift, a wrap that differs, or a seed read from the wrong end."""
    name = "layers.3.self_attn.A_log"
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    for index, got in enumerate(counter_bits(name, 0, 40).tolist()):
        z = (index * 0x9E3779B97F4A7C15 + seed) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        assert got & MASK == z ^ (z >> 31)


RECIPES = (
    Recipe(outlier=3.0, quiet_from=2),
    Recipe(mean=1.0, scale=0.1, outlier=2.5),
    Recipe("uniform", low=-8.0, high=1.0),
    Recipe("codes", common=208),
    Recipe("exponents", mean=120),
)


@settings(max_examples=20, deadline=None)
@given(recipe=st.sampled_from(RECIPES), bounds=st.tuples(st.integers(0, 250), st.integers(0, 250)))
def test_any_slice_can_be_made_alone(recipe, bounds):
    """Catches a value that depends on where its slice begins."""
    start, stop = sorted(bounds)
    dtype = "uint8" if recipe.kind in ("codes", "exponents") else "bfloat16"
    stored = Stored((5, 50), dtype)
    name = "layers.1.block_sparse_moe.experts.7.w1.weight_packed"
    assert torch.equal(values(name, stored, recipe, start=start, stop=stop), values(name, stored, recipe)[start:stop])


def test_normal_and_uniform_are_what_they_say():
    """Catches a scale or range that is off, which would blow up or silence the model."""
    x = values("a", Stored((200, 500), "float32"), Recipe(scale=2.0))
    assert x.mean().abs() < 0.03
    assert x.std() == pytest.approx(2.0, rel=0.01)
    y = values("a", Stored((100_000,), "float32"), Recipe("uniform", low=-8.0, high=1.0))
    assert -8.0 <= y.min() < -7.99
    assert 0.99 < y.max() < 1.0
    assert y.mean() == pytest.approx(-3.5, abs=0.05)
    z = values("a", Stored((4, 82), "float32"), Recipe(outlier=10.0, quiet_from=2))
    plain = values("a", Stored((4, 82), "float32"), Recipe())
    assert torch.allclose(z[7], plain[7] * 10)
    assert torch.allclose(z[2 * 82 + 8], plain[2 * 82 + 8] / 64)


def test_experts_are_really_packed():
    """Catches codes missing from the experts, scales that a folded FP8 block cannot hold (spread over 14), a scale of
    NaN, experts that are all alike, and experts out of proportion to their input."""
    made = dict(preset("tiny").tensors())
    packed = {n: t for n, t in made.items() if n.endswith("weight_packed")}
    assert len(packed) == 7 * 16 * 3
    codes = torch.cat([t.flatten() for t in packed.values()])
    assert len(torch.unique(codes)) == 256
    scales = torch.cat([t.flatten() for n, t in made.items() if n.endswith("weight_scale")])
    assert int(scales.max()) - int(scales.min()) == 7
    first, second = (
        mxfp4_decode(made[f"layers.1.block_sparse_moe.experts.{e}.w1.weight_packed"],
                     made[f"layers.1.block_sparse_moe.experts.{e}.w1.weight_scale"])
        for e in (0, 1)
    )  # fmt: skip
    assert 0.05 < first.std() < 0.2
    assert (first - second).norm() > 0.5 * first.norm()


def test_writing_tiny_is_quick_and_repeatable(tmp_path):
    """Catches a preset that takes longer to write than a smoke run may, and files that differ between two writes."""
    start = time.monotonic()
    one, two = (write_preset("tiny", tmp_path / name) for name in ("a", "b"))
    assert time.monotonic() - start < 20
    for file in sorted(one.iterdir()):
        assert file.read_bytes() == (two / file.name).read_bytes(), file.name


def test_names_and_digest():
    """Catches an unknown name that is not a KeyError, and a digest that does not follow the configuration."""
    assert "tiny" in preset_names()
    with pytest.raises(KeyError, match="nothing"):
        preset("nothing")
    changed = preset("tiny")
    changed.json_files["config.json"]["text_config"]["rope_theta"] = 5000.0
    assert changed.digest() != preset("tiny").digest()


def test_a_seed_changes_every_drawn_value_and_nothing_else():
    """Catches a seed that some tensor ignores (a sweep over seeds would then repeat itself), and one that changes what
    tensors there are; seed 0 is the preset itself."""
    plain, other = dict(preset("tiny-glm-5").tensors()), dict(preset("tiny-glm-5@3").tensors())
    assert {n: (t.dtype, t.shape) for n, t in plain.items()} == {n: (t.dtype, t.shape) for n, t in other.items()}
    assert [n for n, t in plain.items() if torch.equal(t, other[n])] == []
    assert preset("tiny@0").digest() == preset("tiny").digest() != preset("tiny@3").digest()
    for name in ("tiny@", "tinny@3", "tiny@x"):
        with pytest.raises(KeyError):
            preset(name)
