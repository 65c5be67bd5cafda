"""The draft layer of multi-token prediction: a per-token derivation, caches, and checkpoints with and without it."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from per_token_model import PerToken
from safetensors.torch import load_file, save_file
from test_reference_model import TOKENS, Memory, small

from reference.config import Draft, Residual
from reference.errors import CheckpointError
from reference.families import read_config_and_rest
from reference.model import Model
from reference.presets import preset, preset_dir
from reference.tensors import expected_tensors
from reference.weights import INDEX, Checkpoint

PRESET = "tiny-glm-5"
VARIANTS = {
    "its own selection, plain residual": dict(residual=Residual(), draft=Draft("dsa")),
    "full attention behind attention residuals": dict(draft=Draft("mla")),
    "behind streams, tied head": dict(
        residual=Residual("mhc", streams=3, sinkhorn=4), draft=Draft("dsa"), tied_head=True
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_against_the_derivation(name):
    """Catches the token of the row itself instead of the next one, the two halves of the projection changed over, a
    hidden row from before the final norm, the model's residual around the draft layer, another layer's selection."""
    checkpoint = Memory(small(**VARIANTS[name]))
    arrays = {n: t.double().numpy() for n, t in checkpoint.tensors.items()}
    expected = PerToken(checkpoint.config, arrays).drafts(TOKENS)
    model = Model(checkpoint)
    for form in ("absorbed", "plain"):
        state = model.start()
        model.extend(state, TOKENS, form=form, drafts=True)
        assert state.drafted.shape == (len(TOKENS) - 1, checkpoint.config.vocab)
        assert np.abs(expected).max() > 1
        assert np.abs(state.drafted.numpy() - expected).max() < 1e-9


def test_drafts_in_pieces_are_those_of_the_whole():
    """Catches a row that loses its hidden state or its place where a piece ends before its next token is known."""
    model = Model(Memory(small(residual=Residual(), draft=Draft("dsa"))))
    whole = model.start()
    model.extend(whole, TOKENS, drafts=True)
    state, parts = model.start(), []
    for begin, end in ((0, 1), (1, 7), (7, 8), (8, 9), (9, len(TOKENS))):
        model.extend(state, TOKENS[begin:end], drafts=True)
        parts.append(state.drafted)
    assert [len(p) for p in parts] == [0, 6, 1, 1, len(TOKENS) - 9]
    assert (torch.cat(parts) - whole.drafted).abs().max() < 1e-10


def test_the_models_own_tokens_do_not_depend_on_drafting():
    """Catches a draft layer that writes into a cache of the model, or that runs unasked."""
    model = Model(Memory(small(residual=Residual(), draft=Draft("dsa"))))
    calls = []

    def spy(place, operator, function, *args, site="", **kwargs):
        calls.append(place)
        return function(*args, **kwargs)

    alone = model.forward(TOKENS, call=spy)
    assert "layers.06" not in calls
    assert torch.equal(model.extend(model.start(), TOKENS, drafts=True, call=spy), alone)
    assert calls.count("layers.06") > 20
    with pytest.raises(ValueError, match="no draft layer"):
        Model(Memory(small())).extend(Model(Memory(small())).start(), TOKENS, drafts=True)


def test_every_call_of_the_layer_is_a_contract():
    """Catches a tap or an argument of the draft layer that the contracts do not know."""
    from day0check.contracts import CONTRACTS

    taps = []

    def spy(place, operator, function, *args, site="", **kwargs):
        contract = CONTRACTS[operator]
        assert {a.name for a in contract.args[1:] if not a.optional} <= set(kwargs), operator
        assert set(kwargs) <= {a.name for a in contract.args}, operator
        assert not site or not contract.sites or site in contract.sites or operator == "residual.add", (operator, site)
        if place == "layers.06":
            taps.append((operator, site))
        return function(*args, **kwargs)

    model = Model(Memory(small(residual=Residual(), draft=Draft("dsa"))))
    model.extend(model.start(), TOKENS, drafts=True, call=spy)
    assert taps[:4] == [
        ("embed.tokens", ""),
        ("norm.rms", "draft_embedding"),
        ("norm.rms", "draft_hidden"),
        ("draft.project", ""),
    ]
    assert taps[-2:] == [("norm.rms", "draft_head"), ("head.logits", "")]
    assert len(taps) == len(set(taps))


def test_the_key_that_declares_it():
    """Catches a draft layer that is ignored in silence, and more of them than have a reader."""
    files = preset(PRESET).json_files["config.json"]
    for count, draft, rest in ((1, Draft("dsa"), ()), (0, None, ()), (2, None, ("num_nextn_predict_layers",))):
        config, unknown = read_config_and_rest(files | {"num_nextn_predict_layers": count})
        assert (config.draft, unknown) == (draft, rest)
    assert preset(PRESET).config().draft == Draft("dsa")


def edited(folder, change):
    """A copy of the preset in one place whose tensors `change` may change."""
    directory = shutil.copytree(preset_dir(PRESET), folder)
    index = json.loads((directory / INDEX).read_text())
    for file in sorted(set(index["weight_map"].values())):
        tensors = load_file(directory / file)
        change(tensors)
        save_file(tensors, directory / file)
    held = {n: f.name for f in directory.glob("*.safetensors") for n in load_file(f)}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": held}))
    return directory


def test_a_checkpoint_that_leaves_the_layer_out_is_whole(tmp_path):
    """Catches a refusal of the many checkpoints that keep the key and drop the layer, and one of which a part is gone
    that is read as if it were whole."""
    prefix = f"model.layers.{len(preset(PRESET).config().layers)}."

    def without(tensors):
        for name in [n for n in tensors if n.startswith(prefix)]:
            del tensors[name]

    assert Checkpoint(preset_dir(PRESET)).config.draft == Draft("dsa")
    assert Checkpoint(edited(tmp_path / "a", without)).config.draft is None
    with pytest.raises(CheckpointError, match="eh_proj"):
        Checkpoint(edited(tmp_path / "b", lambda tensors: tensors.pop(f"{prefix}eh_proj.weight", None)))


def test_names_of_the_layer_are_those_of_the_releases():
    """Catches a name that DeepSeek-V3.2 and GLM-5 do not store."""
    config = replace(preset(PRESET).config(), draft=Draft("mla"))
    own = {name for name in expected_tensors(config) if name.startswith("layers.5.")}
    assert {f"layers.5.{n}.weight" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm")} < own
    assert not any("indexer" in name or "embed" in name for name in own)
