"""Linear-attention projections that are stored in one matrix: which rows are whose, there and back."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from day0check.audit import audit
from reference.errors import CheckpointError
from reference.packing import packed, packed_parts, part_shapes
from reference.presets import preset, write_preset
from reference.weights import Checkpoint

HEADS, DIM = 4, 16
PRESETS = {"fault-packed": "in_proj", "fault-interleaved": "in_proj_ba"}


@pytest.fixture(scope="module", params=PRESETS)
def stored(request, tmp_path_factory):
    """(name of a preset, its directory in one file)."""
    directory = write_preset(request.param, tmp_path_factory.mktemp("packed") / request.param)
    rewrite(directory, lambda tensors: None)
    return request.param, directory


def rewrite(directory, change):
    """Joins all tensors of a directory into one file after `change` has seen them."""
    files = sorted(directory.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    change(tensors)
    for file in (*files, *directory.glob("*.index.json")):
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def copied(stored, tmp_path, change):
    directory = tmp_path / "changed"
    shutil.copytree(stored[1], directory)
    rewrite(directory, change)
    return directory


def matrix_of(name, tensors):
    (found,) = [n for n in tensors if n.endswith(f"layers.0.self_attn.{PRESETS[name]}.weight")]
    return found


def test_every_row_of_a_packed_matrix_has_its_place():
    """Catches components in another order, gates that are not interleaved head by head, a row that nobody owns."""
    config = preset("fault-packed").config()
    at = "layers.0.self_attn."
    rows = packed_parts(f"{at}in_proj.weight", config)
    order = [(part, row) for part in "qkvgba" for row in range(HEADS if part in "ba" else HEADS * DIM)]
    for index, (part, row) in enumerate(order):
        assert rows[f"{at}{part}_proj.weight"][row] == index
    gates = packed_parts(f"{at}in_proj_ba.weight", config)
    assert [(list(gates[f"{at}{part}_proj.weight"])) for part in "ba"] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    for name in (f"{at}q_proj.weight", "layers.3.self_attn.in_proj.weight", "lm_head.weight"):
        assert packed_parts(name, config) == {}
    assert packed_parts(f"{at}in_proj.weight", preset("tiny").config()) == {}


def test_a_checkpoint_gives_the_parts_of_what_it_stores(stored):
    """Catches a part read from the rows of another, and a packed matrix that is passed on as an unexpected tensor."""
    name, directory = stored
    checkpoint, drawn = Checkpoint(directory), dict(preset("tiny").tensors())
    assert checkpoint.unexpected == ()
    assert "layers.0.self_attn.f_a_proj.weight" not in checkpoint
    for layer in (0, 6):
        for part in ("q", "k", "v", "g", "b"):
            at = f"layers.{layer}.self_attn.{part}_proj.weight"
            assert torch.equal(checkpoint.tensor(at), drawn[at]), at
    matrix = load_file(directory / "model.safetensors")
    matrix = matrix[matrix_of(name, matrix)]
    decay = checkpoint.tensor("layers.0.self_attn.a_proj.weight")
    assert torch.equal(decay, matrix[-HEADS:] if name == "fault-packed" else matrix[1::2])
    assert audit(directory) == ()


def test_packing_is_undone_by_reading_whatever_the_order():
    """Catches parts that must come in order, and tensors that are lost because their matrix is never whole."""
    config = preset("fault-packed").config()
    names = list(packed_parts("layers.2.self_attn.in_proj.weight", config))
    counts = [HEADS if name.endswith((".b_proj.weight", ".a_proj.weight")) else HEADS * DIM for name in names]
    plain = {name: torch.full((rows, 3), float(n)) for n, (name, rows) in enumerate(zip(names, counts, strict=True))}
    ((made, matrix),) = packed(reversed(plain.items()), forms=("packed-linear",), config=config)
    assert made == "layers.2.self_attn.in_proj.weight"
    for name, rows in packed_parts(made, config).items():
        assert torch.equal(matrix[list(rows)], plain[name])
    assert dict(packed(plain.items(), forms=(), config=config)).keys() == plain.keys()


@pytest.mark.parametrize("rows", [-1, 1])
def test_a_matrix_of_another_size_is_refused_and_audited(stored, tmp_path, rows):
    """Catches a packed matrix with rows left over or missing, which a reader by offsets would take without a word."""

    def change(tensors):
        at = matrix_of(stored[0], tensors)
        tensors[at] = tensors[at][:rows] if rows < 0 else torch.cat([tensors[at], tensors[at][:rows]])

    directory = copied(stored, tmp_path, change)
    with pytest.raises(CheckpointError, match=PRESETS[stored[0]]):
        Checkpoint(directory)
    found = audit(directory)
    assert {f.evidence["pattern"] for f in found} == {"shape"}
    assert PRESETS[stored[0]] in found[0].message


def test_a_part_that_is_stored_twice_is_refused(stored, tmp_path):
    """Catches a stale projection beside the matrix that holds the new one."""

    def change(tensors):
        at = matrix_of(stored[0], tensors)
        tensors[at.replace(PRESETS[stored[0]], "b_proj")] = tensors[at][:HEADS].clone()

    with pytest.raises(CheckpointError, match="stored by itself and as rows"):
        Checkpoint(copied(stored, tmp_path, change))


def test_a_missing_matrix_is_missed_part_by_part(stored, tmp_path):
    """Catches parameters that would stay as they were initialised."""
    directory = copied(stored, tmp_path, lambda tensors: tensors.pop(matrix_of(stored[0], tensors)))
    with pytest.raises(CheckpointError, match="is missing"):
        Checkpoint(directory)
    missed = [f for f in audit(directory) if f.evidence["pattern"] == "never written"]
    told = {name for f in missed for name in f.evidence["tensors"]}
    parts = packed_parts(f"layers.0.self_attn.{PRESETS[stored[0]]}.weight", preset(stored[0]).config())
    assert {name.removeprefix("language_model.model.") for name in told} == set(parts)


def test_shapes_of_parts():
    """Catches rows left over that no part shows."""
    parts = {"b": range(0, 4, 2), "a": range(1, 4, 2)}
    assert part_shapes(parts, (4, 8)) == {"b": (2, 8), "a": (2, 8)}
    assert part_shapes(parts, (3, 8)) == {"b": (2, 8), "a": (1, 8)}
    assert part_shapes(parts, (7, 8)) == {"b": (2, 8), "a": (5, 8)}
