"""What the user gave and nobody can read: exit code 2, one message with the place and what to do, no traceback."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Ended, case_file, command, command_here, operators_file

from reference.presets import preset_dir


def assert_refused(ended: Ended, *words: str) -> None:
    assert ended.code == 2, ended.stderr
    assert ended.verdict == {}
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    flat = " ".join(ended.stderr.split())
    for word in words:
        assert word in flat, ended.stderr
    assert len(ended.stderr.strip().splitlines()) <= 8, ended.stderr


def test_a_bad_case_file(tmp_path: Path) -> None:
    """Would catch a traceback of the format's reader, and a message without file or key."""
    path = tmp_path / "mine.toml"
    path.write_text('id = "mine"\ntime_limit = 3\n[[request]]\nid = "a"\nturns = [{ user = "x" }]\n')
    assert_refused(command("run", str(path), cwd=tmp_path), "mine.toml", "time_limit: unknown key", "'time_limit_s'")


def test_an_absent_case_file(tmp_path: Path) -> None:
    """Would catch a traceback of open()."""
    assert_refused(command_here("run", "nowhere.toml", cwd=tmp_path), "nowhere.toml", "No such file")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("text/one_tern",), ("text/one_tern", "did you mean 'text/one_turn'")),
        (("--model", "tinny"), ("tinny", "tiny")),
        (("--device", "nosuch"), ("nosuch",)),
        (("--backend", "acelerated"), ("acelerated", "accelerated")),
        (("--backend", "absent.py:Engine"), ("absent.py",)),
        (("--profile", "bf61"), ("bf61", "bf16")),
        (("--stage", "t9"), ("t9", "t0")),
        (("--ops", "absent_operators.py"), ("absent_operators.py",)),
        (("--ops", operators_file("unknown_name")), ("unknown_name.py", "dsa.selekt", "dsa.select")),
        (("--ops", operators_file("broken")), ("broken.py", "a_module_that_nobody_has")),
    ],
    ids=lambda value: "-".join(Path(v).name for v in value) if isinstance(value, tuple) else None,
)
def test_names_that_mean_nothing(tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Would catch a name that is passed on until something deep inside breaks on it."""
    given = arguments if not arguments[0].startswith("--") else (case_file("short"), *arguments)
    assert_refused(command_here("run", *given, cwd=tmp_path), *words)


def _no_config(model: Path) -> tuple[str, ...]:
    (model / "config.json").unlink()
    return ("config.json",)


def _broken_config(model: Path) -> tuple[str, ...]:
    (model / "config.json").write_text('{"model_type": ')
    return ("config.json",)


def _unknown_family(model: Path) -> tuple[str, ...]:
    (model / "config.json").write_text('{"model_type": "nobody_knows"}')
    return ("config.json", "nobody_knows")


def _missing_shard(model: Path) -> tuple[str, ...]:
    shard = max(model.glob("*.safetensors"))
    shard.unlink()
    return (shard.name,)


def _truncated_shard(model: Path) -> tuple[str, ...]:
    shard = max(model.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    return (shard.name,)


def _lying_header(model: Path) -> tuple[str, ...]:
    shard = max(model.glob("*.safetensors"))
    data = shard.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    name = min(key for key in header if key != "__metadata__")
    header[name]["shape"] = [7, *header[name]["shape"]]
    head = json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(head)) + head + data[8 + size :])
    return (shard.name,)


def _missing_tensor(model: Path) -> tuple[str, ...]:
    index = model / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(key for key in content["weight_map"] if "layers.3" in key and "q_a_proj" in key)
    del content["weight_map"][name]
    index.write_text(json.dumps(content))
    return ("layers.3.self_attn.q_a_proj.weight",)


@pytest.mark.parametrize(
    "damage",
    [
        _no_config,
        _broken_config,
        _unknown_family,
        _missing_shard,
        _truncated_shard,
        _lying_header,
        _missing_tensor,
    ],
    ids=lambda damage: damage.__name__.strip("_"),
)
def test_a_checkpoint_that_cannot_be_read(tmp_path: Path, damage: Callable[[Path], tuple[str, ...]]) -> None:
    """Would catch a damaged checkpoint that ends in a traceback, or in a finding against the candidate."""
    model = tmp_path / "model"
    shutil.copytree(preset_dir("tiny"), model)
    words = damage(model)
    assert_refused(command_here("run", case_file("short"), "--model", str(model), cwd=tmp_path), *words)


def test_nothing_selected_has_its_own_code(tmp_path: Path) -> None:
    """Would catch an empty selection that counts as ready."""
    ended = command_here("run", "text/two_turns", "--stage", "smoke", cwd=tmp_path)
    assert ended.code == 5, ended.stderr
    assert "text/two_turns" in ended.stderr
    assert "Traceback" not in ended.stderr
