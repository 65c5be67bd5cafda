"""The audit of a checkpoint: every fault that a loader can swallow is found, named, and nothing else is."""

import copy
import json
import struct
import time

import pytest
import torch
from edited_checkpoint import PACKED, PREFIX, SCALE, Edited, only
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from day0check.audit import audit, inspect
from day0check.audit.exempt import _rule
from day0check.errors import InputError
from reference.presets import preset_dir, preset_names
from reference.published import published
from reference.weights import INDEX, SINGLE


@pytest.fixture
def tiny(tmp_path):
    return Edited("tiny", tmp_path / "tiny")


@pytest.mark.parametrize("name", preset_names())
def test_a_good_checkpoint_has_no_finding(name):
    """Catches a false alarm on any form that a release has: packed, block FP8, padded, 1-based lists, towers."""
    audited = inspect(preset_dir(name))
    assert audited.findings == ()
    assert audited.tensors > 100
    assert audited.files > 1


def test_a_missing_shard(tiny):
    """Catches S-59: a shard that is not there leaves its parameters as they were initialised."""
    file = sorted(set(tiny.index.values()))[1]
    (tiny.directory / file).unlink()
    held = [name for name, f in tiny.index.items() if f == file]
    finding = only(audit(tiny.directory), "shard missing", file, min(held), str(len(held)))
    assert finding.evidence["files"] == [file]


def test_a_damaged_shard(tiny):
    """Catches a file cut off while it was fetched."""
    file = sorted(set(tiny.index.values()))[0]
    data = (tiny.directory / file).read_bytes()
    (tiny.directory / file).write_bytes(data[: len(data) // 2])
    only(audit(tiny.directory), "shard damaged", file, "bytes")


def test_a_stale_duplicate_in_another_shard(tiny):
    """Catches S-58: an old copy in a shard that the index lists for other tensors overwrites the indexed one."""
    own = tiny.index[PACKED]
    other = next(f for f in sorted(set(tiny.index.values())) if f != own)
    tiny.shard(other, lambda t: t.update({PACKED: torch.zeros_like(tiny.read(PACKED))}))
    finding = only(audit(tiny.directory), "stale duplicate", PACKED, own, other)
    assert finding.layer == 1
    assert finding.evidence["files"] == sorted((own, other))


def test_a_file_that_the_index_does_not_name(tiny):
    """Catches an old shard left beside the new ones; software that follows the index never opens it."""
    save_file({PACKED: tiny.read(PACKED), "old": torch.ones(1)}, tiny.directory / "model-old.safetensors")
    only(audit(tiny.directory), "file not in the index", "model-old.safetensors", "2 tensors", severity="warning")


def test_an_index_that_points_to_the_wrong_shard(tiny):
    """Catches an index of another release: a loader that follows it does not find what is there."""
    own = tiny.index[PACKED]
    other = next(f for f in sorted(set(tiny.index.values())) if f != own)
    tiny.index[PACKED] = other
    tiny.write_index()
    only(audit(tiny.directory), "not in its shard", PACKED, f"places {PACKED} in {other}", f"lies in {own}")


def test_a_tensor_that_the_index_forgot(tiny):
    """Catches a parameter that is in a file and in no index: it would never be written."""
    name = f"{PREFIX}layers.0.mlp.up_proj.weight"
    del tiny.index[name]
    tiny.write_index()
    findings = audit(tiny.directory)
    assert [f.evidence["pattern"] for f in findings] == ["not in the index", "never written"]
    assert all(name in f.message for f in findings)


def test_two_names_of_one_tensor(tiny):
    """Catches a stale copy under an older spelling."""
    gate, old = (f"{PREFIX}layers.1.{part}.gate.weight" for part in ("block_sparse_moe", "mlp"))
    tiny.put(old, tiny.read(gate))
    only(audit(tiny.directory), "two names", gate, old)


def test_a_parameter_that_is_never_written(tmp_path):
    """Catches S-61 from the side of the files: the indexer of a layer whose selection is its own is not there."""
    edited = Edited("tiny-glm-5", tmp_path / "m")
    names = [name for name in edited.index if name.endswith("indexer.wk.weight")]
    assert len(names) == 4  # one of the draft layer
    for name in names:
        edited.drop(name)
    only(audit(edited.directory), "never written", min(names), "the same of 3 more", count=4)


def test_a_tensor_that_is_never_consumed(tmp_path):
    """Catches the indexer of a layer that shares another's selection, and any tensor the model has no use for."""
    edited = Edited("tiny-glm-5", tmp_path / "m")
    name = "model.layers.2.self_attn.indexer.wk.weight"
    assert name not in edited.index
    file = edited.put(name, torch.ones(32, 128, dtype=torch.bfloat16))
    finding = only(audit(edited.directory), "never consumed", name, file)
    assert finding.layer == 2


def test_calibrated_cache_scales(tiny):
    """Catches S-13: k_scale and v_scale that nothing applies, so that an FP8 cache runs uncalibrated."""
    for which in ("k_scale", "v_scale"):
        tiny.put(f"{PREFIX}layers.3.self_attn.{which}", torch.tensor(0.04))
    findings = audit(tiny.directory)
    assert [f.evidence["pattern"] for f in findings] == ["cache scale never consumed"] * 2
    assert ["k_scale" in findings[0].message, "v_scale" in findings[1].message] == [True, True]


def test_draft_layers_and_rotary_buffers_are_no_blockers(tmp_path):
    """Catches a false alarm on a release with layers that draft, and a stray layer beyond those that are declared."""
    edited = Edited("tiny-deepseek-v3.2", tmp_path / "m")
    edited.put("model.layers.5.eh_proj.weight", torch.ones(128, 256, dtype=torch.bfloat16))
    edited.put("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))
    assert {f.severity for f in audit(edited.directory)} == {"blocker", "note"}
    edited.config(lambda c: c.update(num_nextn_predict_layers=2))
    assert {f.severity for f in audit(edited.directory)} == {"warning", "note"}  # two of them have no reader
    edited.put("model.layers.7.eh_proj.weight", torch.ones(128, 256, dtype=torch.bfloat16))
    assert audit(edited.directory)[0].severity == "blocker"


def test_a_draft_layer_of_which_a_part_is_gone(tmp_path):
    """Catches a draft layer that is loaded with a parameter that was never written, or with one of another shape."""
    edited = Edited("tiny-glm-5", tmp_path / "m")
    projection = edited.read("model.layers.5.eh_proj.weight")
    edited.drop("model.layers.5.eh_proj.weight")
    only(audit(edited.directory), "never written", "model.layers.5.eh_proj.weight")
    edited.put("model.layers.5.eh_proj.weight", projection[:, :128].contiguous())
    only(audit(edited.directory), "shape", "model.layers.5.eh_proj.weight", "[128, 256]")


def test_a_draft_layer_that_is_left_out(tmp_path):
    """Catches a blocker on the many checkpoints that keep the key and drop the layer, and silence about it."""
    edited = Edited("tiny-glm-5", tmp_path / "m")
    for name in [n for n in edited.index if n.startswith("model.layers.5.")]:
        edited.drop(name)
    only(audit(edited.directory), "draft layer left out", "layers.5", severity="note")


def test_what_a_draft_layer_stores_again(tmp_path):
    """Catches a false alarm on DeepSeek's copies of embedding and head, and a copy that is another tensor."""
    edited = Edited("tiny-glm-5", tmp_path / "m")
    name = "model.layers.5.shared_head.head.weight"
    edited.put(name, edited.read("lm_head.weight"))
    edited.put("model.layers.5.embed_tokens.weight", edited.read("model.embed_tokens.weight"))
    assert audit(edited.directory) == ()
    edited.put(name, edited.read("lm_head.weight") * 2)
    only(audit(edited.directory), "draft copy differs", name, "lm_head.weight", severity="warning")


@pytest.mark.parametrize(
    ("name", "tensor", "pattern", "severity", "word"),
    [
        ("model.norm.weight", torch.ones(64, dtype=torch.bfloat16), "shape", "blocker", "[128]"),
        ("model.layers.0.self_attn.A_log", torch.ones(3), "shape", "blocker", "[4]"),
        ("model.norm.weight", torch.ones(128, dtype=torch.int32), "dtype", "blocker", "I32"),
        ("model.norm.weight", torch.ones(128).to(torch.float8_e5m2), "dtype", "blocker", "F8_E5M2"),
        ("model.norm.weight", torch.ones(128).half(), "other float", "warning", "F16"),
        ("model.norm.weight", torch.ones(128), "other float", "note", "F32"),
        ("model.layers.0.self_attn.dt_bias", torch.ones(64).bfloat16(), "other float", "warning", "F32"),
    ],
)
def test_shape_and_dtype(tiny, name, tensor, pattern, severity, word):
    """Catches a tensor of another model, integers as weights, and single tensors rounded on the way."""
    stored = f"language_model.{name}"
    file = tiny.put(stored, tensor)
    only(audit(tiny.directory), pattern, stored, file, word, severity=severity)


def test_packed_widths(tiny):
    """Catches codes packed for groups of another size, or one nibble a byte."""
    codes = tiny.read(PACKED)
    file = tiny.put(PACKED, codes.repeat(1, 2))
    only(audit(tiny.directory), "packed width", PACKED, file, f"[64, {2 * codes.shape[1]}]", f"[64, {codes.shape[1]}]")
    tiny.put(PACKED, codes)
    tiny.put(SCALE, tiny.read(SCALE).float())
    only(audit(tiny.directory), "dtype", SCALE, "F32", "U8")


def test_scale_255(tiny):
    """Catches E8M0's NaN, which decodes to infinity in some software and to NaN in other."""
    scales = tiny.read(SCALE)
    scales[3, 1] = scales[5, 0] = 255
    file = tiny.put(SCALE, scales)
    only(audit(tiny.directory), "scale is no number", SCALE, file, "255", "[3, 1]", f"2 of {scales.numel()}")
    scales[3, 1] = scales[5, 0] = 254
    tiny.put(SCALE, scales)
    assert audit(tiny.directory) == ()


def test_lists_of_what_is_not_quantised(tmp_path):
    """Catches codes of a module that config.json exempts, and, as a note, linears that the list forgets, as Kimi K3's
    forgets those around its expert latent: no alarm may come of them."""
    edited = Edited("tiny-kimi-k3", tmp_path / "m")
    kimi = copy.deepcopy(published("kimi-k3").config_json["text_config"]["quantization_config"])
    edited.config(lambda c: c["text_config"].update(quantization_config=kimi))
    finding = only(audit(edited.directory), "plain though not exempt", "whoever follows", severity="note", count=43)
    assert not any("self_attn.q_proj" in t or "shared_experts" in t for t in finding.evidence["tensors"])
    kimi["ignore"].append("layers.2.block_sparse_moe.experts")
    edited.config(lambda c: c["text_config"].update(quantization_config=kimi))
    findings = audit(edited.directory)
    assert [f.evidence["pattern"] for f in findings] == ["quantised though exempt", "plain though not exempt"]
    assert {f.severity for f in findings} == {"warning", "note"}
    assert findings[0].evidence["count"] == 48


@pytest.mark.parametrize(
    ("entry", "module", "exempt"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.*.self_attn", "model.layers.12.self_attn.q_proj", True),
        ("model.layers.*.self_attn", "model.layers.12.mlp.gate", False),
        ("model.layers.1", "model.layers.12.mlp.gate", False),
        ("re:.*self_attn.*", "language_model.model.layers.0.self_attn.q_proj", True),
        ("re:layers", "model.layers.0.mlp", False),
        ("re:(", "model.layers.0.mlp", False),
    ],
)
def test_entries_of_such_lists(entry, module, exempt):
    """Catches a prefix that exempts layer 12 with layer 1, and an expression that is searched anywhere."""
    assert (_rule(entry).search(module) is not None) == exempt


@pytest.mark.parametrize(("more", "pattern", "severity"), [(8, "fewer bytes", "warning"), (-8, "more bytes", "note")])
def test_the_size_that_the_index_states(tiny, more, pattern, severity):
    """Catches an index of another state of the files: a tensor was taken out, or put in, and the total left."""
    data = json.loads((tiny.directory / INDEX).read_text())
    data["metadata"]["total_size"] += more
    (tiny.directory / INDEX).write_text(json.dumps(data))
    only(audit(tiny.directory), f"{pattern} than stated", str(data["metadata"]["total_size"]), severity=severity)


def test_scales_are_read_in_blocks(tmp_path, monkeypatch):
    """Catches a place that is counted from the begin of its block, and a block of rows that is passed over."""
    monkeypatch.setattr("reference.inventory.BLOCK_ELEMENTS", 40)
    edited = Edited("tiny", tmp_path / "m")
    scales = edited.read(SCALE)
    width = scales.shape[1]
    scales[17, 1] = scales[63, 0] = scales[63, width - 1] = 255
    edited.put(SCALE, scales)
    only(audit(edited.directory), "scale is no number", SCALE, "[17, 1]", f"3 of {scales.numel()}")


def test_an_untied_head_without_weights(tiny):
    """Catches S-60: the flag stands in the nested configuration alone, the head is not in the files."""
    tiny.drop("language_model.lm_head.weight")
    only(audit(tiny.directory), "head never written", "lm_head.weight", "tie_word_embeddings")
    tiny.config(lambda c: c["text_config"].update(tie_word_embeddings=True))
    findings = audit(tiny.directory)
    assert [f.evidence["pattern"] for f in findings] == ["head never written", "tie flags disagree"]
    tiny.config(lambda c: c.pop("tie_word_embeddings"))
    finding = only(audit(tiny.directory), "tie flags disagree", severity="warning")
    assert "absent at the top of config.json and true in text_config" in finding.message


def test_a_tied_head_of_its_own(tiny):
    """Catches a head that is stored, differs from the embedding and is dropped because the flag ties it."""
    tiny.config(lambda c: c.update(tie_word_embeddings=True))
    only(audit(tiny.directory), "tied head differs", "lm_head.weight", "embed_tokens.weight")
    tiny.put("language_model.lm_head.weight", tiny.read(f"{PREFIX}embed_tokens.weight"))
    only(audit(tiny.directory), "head stored twice", "lm_head.weight", severity="note")


def test_unknown_keys_of_the_configuration(tiny):
    """Catches a switch of the mathematics that the reference would ignore in silence."""
    tiny.config(lambda c: c["text_config"].update(attention_sink=4))
    only(audit(tiny.directory), "unknown key", "text_config.attention_sink", severity="warning")


def test_findings_keep_their_id_over_layers_and_are_apart_by_kind(tiny):
    """Catches a waiver that stops holding when another layer is first, or that holds for another kind of tensor."""
    ids = []
    for layer, which in ((1, "k_scale"), (3, "k_scale"), (3, "v_scale")):
        name = f"{PREFIX}layers.{layer}.self_attn.{which}"
        tiny.put(name, torch.tensor(1.0))
        ids += [f.id for f in audit(tiny.directory)]
        tiny.drop(name)
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [("config.json", "{", "JSON"), (INDEX, "[]", "object"), (INDEX, '{"weight_map": 5}', "weight_map")],
)
def test_what_cannot_be_audited_is_the_users_input(tiny, file, content, word):
    """Catches a traceback, or a verdict on a directory that is no checkpoint."""
    (tiny.directory / file).write_text(content)
    with pytest.raises(InputError) as caught:
        audit(tiny.directory)
    assert file in str(caught.value)
    assert word in str(caught.value)


def test_no_directory_and_no_weights(tmp_path, tiny):
    """Catches an empty directory that passes as a checkpoint without faults."""
    for directory, word in ((tmp_path / "nowhere", "no such directory"), (tmp_path, "config.json")):
        with pytest.raises(InputError, match=word):
            audit(directory)
    for file in (*tiny.directory.glob("*.safetensors"), tiny.directory / INDEX):
        file.unlink()
    with pytest.raises(InputError, match="neither"):
        audit(tiny.directory)


def test_a_checkpoint_of_one_file(tmp_path):
    """Catches an audit that needs an index, and a file beside the single one that nobody notices."""
    edited = Edited("tiny-deepseek-v3.2", tmp_path / "m")
    tensors = {}
    for file in sorted(set(edited.index.values())):
        tensors |= load_file(edited.directory / file)
        (edited.directory / file).unlink()
    (edited.directory / INDEX).unlink()
    save_file(tensors, edited.directory / SINGLE)
    assert audit(edited.directory) == ()
    save_file({"model.norm.weight": torch.ones(128)}, edited.directory / "other.safetensors")
    only(audit(edited.directory), "file not in the index", "other.safetensors", severity="warning")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Edited("tiny-deepseek-v3.2", tmp_path_factory.mktemp("audit") / "m")


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_tensor_left_out_or_renamed_is_named(plain, data):
    """Catches a tensor that the table or the audit passes over: each single one must be missed when it is gone."""
    name = data.draw(st.sampled_from(sorted(plain.index)))
    renamed = data.draw(st.booleans())
    file = plain.directory / plain.index[name]
    whole, index = file.read_bytes(), dict(plain.index)
    try:
        new = f"{name}.old"
        length = struct.unpack("<Q", whole[:8])[0]
        header = json.loads(whole[8 : 8 + length])
        header[new] = header.pop(name)
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
        del plain.index[name]
        if renamed:
            plain.index[new] = file.name
        plain.write_index()
        findings = audit(plain.directory)
        told = {t for f in findings if f.severity == "blocker" for t in f.evidence["tensors"]}
        assert new in told
        assert name in told or (name == "lm_head.weight" and "lm_head.weight" in told)
    finally:
        file.write_bytes(whole)
        plain.index = index
        plain.write_index()


def test_the_audit_of_tiny_is_quick():
    """Catches an audit that reads weights, or that walks its table again for every tensor. The best of three, in time
    of this process: other work on the machine does not count."""
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        audit(preset_dir("tiny"))
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 1.0
