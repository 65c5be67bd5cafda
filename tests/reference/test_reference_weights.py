"""Checkpoints on disk: what is read is what was written, and damage is named."""

import json
import multiprocessing
import shutil
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from reference.errors import CheckpointError
from reference.presets import preset, preset_dir, write_preset
from reference.tensors import stored_name
from reference.weights import INDEX, Checkpoint, place_tensor, read_header, read_tensor, write_checkpoint


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_preset("tiny", tmp_path_factory.mktemp("weights") / "tiny")


@pytest.fixture
def copy(written, tmp_path):
    return shutil.copytree(written, tmp_path / "tiny")


def refused(directory, *words):
    """Opening must fail with one message that holds all the words."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(directory)
    for word in words:
        assert word in str(caught.value)


def test_every_tensor_comes_back_as_it_was_made(written):
    """Catches a wrong shard, a wrong name, or a dtype that changed on the way."""
    checkpoint = Checkpoint(written)
    made = dict(preset("tiny").tensors())
    assert checkpoint.names() == tuple(sorted(made))
    assert (checkpoint.unknown_keys, checkpoint.unexpected) == ((), ())
    for name, tensor in made.items():
        back = checkpoint.tensor(name)
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)


def test_files_carry_the_released_names(written):
    """Catches a checkpoint that other software of the family could not load."""
    weight_map = json.loads((written / INDEX).read_text())["weight_map"]
    assert "language_model.model.layers.1.block_sparse_moe.experts.15.w2.weight_packed" in weight_map
    assert {"language_model.lm_head.weight", "vision_tower.patch_embed.pos_emb.weight"} <= set(weight_map)
    assert len(set(weight_map.values())) > 1


def test_absent_directory_and_files(tmp_path, copy):
    """Catches a bare FileNotFoundError, or a message that does not say which file."""
    refused(tmp_path / "nowhere", "nowhere", "no such directory")
    refused(tmp_path, "config.json")
    (copy / INDEX).unlink()
    refused(copy, INDEX, "model.safetensors")


def test_broken_json(copy):
    """Catches a JSONDecodeError that reaches the user, in each of the files read."""
    for name in ("config.json", "tokenizer_config.json", "preprocessor_config.json", INDEX):
        before = (copy / name).read_text()
        (copy / name).write_text(before[:-20])
        refused(copy, name)
        (copy / name).write_text("[]")
        refused(copy, name)
        (copy / name).write_text(before)
    Checkpoint(copy)


def test_unknown_model_type_names_the_directory(copy):
    """Catches an error that does not say which of several models is meant."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "mystery"}))
    refused(copy, "mystery", str(copy), "kimi_k3")


def test_missing_and_truncated_shards(copy):
    """Catches damage that would show only when the last tensor is read, hours into a run."""
    shard = sorted(copy.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    for cut in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        shard.write_bytes(whole[:cut])
        refused(copy, shard.name)
    shard.write_bytes(whole + b"\0")
    refused(copy, shard.name, "1")
    shard.unlink()
    refused(copy, shard.name, "missing")


def rewrite_header(file, change):
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda h, n: h[n].update(shape=[1]),
        lambda h, n: h[n].update(shape=[-320, -128]),
        lambda h, n: h[n].update(dtype="F32"),
        lambda h, n: h[n].update(data_offsets=[0, 1 << 40]),
        lambda h, n: h[n].update(data_offsets=[h[n]["data_offsets"][1], h[n]["data_offsets"][0]]),
        lambda h, n: h[n].pop("data_offsets"),
        lambda h, n: h.update({n: 5}),
        lambda h, n: h.pop(n),
    ],
)
def test_a_header_that_lies(copy, change):
    """Catches a shape, dtype or extent that the data do not bear out, and a hole between tensors."""
    shard = copy / "model-00001-of-00003.safetensors"
    rewrite_header(shard, lambda header: change(header, stored_name("embed_tokens.weight")))
    refused(copy, shard.name)


def test_overlapping_extents(tmp_path):
    """Catches two tensors that share bytes."""
    file = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.ones(4)}, str(file))
    rewrite_header(file, lambda h: h["b"].update(data_offsets=h["a"]["data_offsets"]))
    with pytest.raises(CheckpointError, match="begins at byte"):
        read_header(file)


def test_index_that_disagrees_with_the_files(copy):
    """Catches an index entry that points to the wrong shard, out of the directory, or at nothing."""
    index = json.loads((copy / INDEX).read_text())
    name = stored_name("norm.weight")
    for file, word in (("model-00001-of-00003.safetensors", "does not hold"), ("../m.safetensors", "leaves")):
        index["weight_map"][name] = file
        (copy / INDEX).write_text(json.dumps(index))
        refused(copy, word, file)
    del index["weight_map"][name]
    (copy / INDEX).write_text(json.dumps(index))
    refused(copy, "norm.weight", "missing")


def repack(directory, change):
    """The tiny checkpoint again, its tensors changed."""
    tensors = dict(preset("tiny").tensors())
    change(tensors)
    return write_checkpoint(directory, tensors.items(), json_files=preset("tiny").json_files)


def test_wrong_shape_and_dtype(tmp_path):
    """Catches weights of another model beside this config.json, and packed codes stored as numbers."""
    refused(repack(tmp_path / "a", lambda t: t.update({"norm.weight": torch.ones(64)})), "norm.weight", "[64]", "[128]")
    scale = "layers.1.block_sparse_moe.experts.0.w1.weight_scale"
    refused(repack(tmp_path / "b", lambda t: t.update({scale: t[scale].float()})), scale, "F32")


def test_padded_a_log_is_cut_to_the_heads(tmp_path):
    """Catches the padding of released files read as heads, or refused."""
    name = "layers.0.self_attn.A_log"
    padded = torch.arange(16.0)
    checkpoint = Checkpoint(repack(tmp_path / "a", lambda t: t.update({name: padded})))
    assert torch.equal(checkpoint.tensor(name), padded[:4])
    refused(repack(tmp_path / "b", lambda t: t.update({name: padded[:3]})), name)


def test_unexpected_tensors_are_listed_and_single_files_work(tmp_path):
    """Catches an extra tensor that disappears in silence, and a checkpoint of one file without an index."""
    directory = repack(tmp_path / "a", lambda t: t.update({"layers.8.extra": torch.ones(1)}))
    assert Checkpoint(directory).unexpected == ("layers.8.extra",)
    tensors = {stored_name(name): tensor for name, tensor in preset("tiny").tensors()}
    for file in (*directory.glob("*.safetensors"), directory / INDEX):
        file.unlink()
    save_file(tensors, str(directory / "model.safetensors"))
    assert torch.equal(Checkpoint(directory).tensor("norm.weight"), tensors[stored_name("norm.weight")])


def test_a_name_that_is_not_there(written):
    """Catches a KeyError without the name of the checkpoint."""
    with pytest.raises(CheckpointError, match=r"layers\.9\.nothing"):
        Checkpoint(written).tensor("layers.9.nothing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_tensor("nothing", file=next(written.glob("*.safetensors")))


@settings(max_examples=15, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.int64]),
    shard_bytes=st.integers(1, 64),
)
def test_any_tensors_survive_any_sharding(tmp_path_factory, shapes, dtype, shard_bytes):
    """Catches tensors lost at shard borders, empty and scalar shapes, and a header our own check would refuse."""
    tensors = {f"layers.{n}.x": torch.full(s, n + 1).to(dtype) for n, s in enumerate(shapes)}
    out = tmp_path_factory.mktemp("any") / "m"
    write_checkpoint(out, tensors.items(), json_files={}, shard_bytes=shard_bytes)
    weight_map = json.loads((out / INDEX).read_text())["weight_map"]
    for name, tensor in tensors.items():
        file = out / weight_map[stored_name(name)]
        assert read_header(file)[stored_name(name)][1] == tuple(tensor.shape)
        back = read_tensor(stored_name(name), file=file)
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back.float(), tensor.float())


def test_writing_is_all_or_nothing(tmp_path):
    """Catches a half-written directory that a later run would take for a model."""

    def tensors():
        yield "norm.weight", torch.ones(2)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_checkpoint(tmp_path / "m", tensors(), json_files={})
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_there_is_left_alone(tmp_path):
    """Catches a second writer that replaces files another process is reading."""
    first = write_checkpoint(tmp_path / "m", [("norm.weight", torch.ones(2))], json_files={})
    before = {file.name: file.stat().st_ino for file in first.iterdir()}
    write_checkpoint(tmp_path / "m", [("norm.weight", torch.zeros(2))], json_files={})
    assert {file.name: file.stat().st_ino for file in first.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_processes_may_race_for_a_preset(tmp_path, monkeypatch):
    """Catches a loser of the race that fails, or that leaves its temporary directory."""
    monkeypatch.setenv("DAY0CHECK_CACHE", str(tmp_path))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        directories = pool.map(preset_dir, ["tiny", "tiny"], chunksize=1)
    assert len(set(directories)) == 1
    assert [p.name for p in (tmp_path / "models").iterdir()] == [directories[0].name]
    assert len(Checkpoint(directories[0]).names()) == 906


def test_place_tensor():
    """Catches a transpose of the wrong axes, and a view that is not contiguous."""
    x = torch.arange(24).reshape(2, 3, 4)
    placed = place_tensor(x, transpose=True)
    assert placed.is_contiguous()
    assert placed[1, 3, 2] == x[1, 2, 3]
    assert torch.equal(place_tensor(x), x)


def test_a_tensor_that_was_changed_is_read_anew(tmp_path):
    """Catches a file that is kept open, whose tensors share its memory: one reader's change showed in the next."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, file)
    read_tensor("a", file=file).zero_()
    assert read_tensor("a", file=file).tolist() == [1.0] * 3


def test_a_file_that_is_replaced_is_read_anew(tmp_path):
    """Catches a file that is kept open and answers for the one that took its place."""
    file = tmp_path / "model.safetensors"
    for value in (1.0, 2.0):
        other = tmp_path / "other.safetensors"
        save_file({"a": torch.full((3,), value)}, other)
        other.replace(file)
        assert read_tensor("a", file=file).tolist() == [value] * 3
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_tensor("a", file=file)
