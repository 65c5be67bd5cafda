"""What the audit of a checkpoint finds belongs to the verdict of every run on it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from command_line import case_file, command
from safetensors.torch import load_file, save_file

from reference.presets import preset_dir


def test_a_stale_duplicate_makes_a_run_not_ready(tmp_path: Path) -> None:
    """Would catch an audit that only its own command asks: the candidate follows the index here and all else passes."""
    model = shutil.copytree(preset_dir("tiny"), tmp_path / "model")
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    name = "language_model.model.norm.weight"
    other = next(file for file in sorted(set(index.values())) if file != index[name])
    save_file({**load_file(model / other), name: torch.zeros(128)}, model / other)
    ended = command("run", case_file("short"), "--model", str(model), cwd=tmp_path)
    assert ended.code == 1, ended.stderr
    assert (ended.first["check"], ended.first["phase"]) == ("weights", "load")
    for word in (name, other, index[name]):
        assert word in ended.first["message"]
    failed = [(c["name"], c["case"]) for c in ended.verdict["checks"] if c["status"] != "passed"]
    assert failed == [("weights", "")]
