"""A candidate that reads another checkpoint than the one it was given: faults of loading and of configuration."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from day0check.backends.accelerated import Accelerated
from day0check.errors import Day0Error

Tensors = dict[str, torch.Tensor]


class Damaged(Accelerated):
    """The fast path on a damaged copy of the checkpoint; the reference reads the checkpoint as it is.

    A subclass overrides `config` (the content of config.json, changed in place) or `tensors` (all stored tensors by
    name, changed in place).
    """

    def load(self, model_dir: str, profile: str, device: str, layout: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory(prefix="day0check-fault-") as folder:
            copy = Path(folder) / "model"
            shutil.copytree(model_dir, copy)
            _edit_json(copy / "config.json", self.config)
            _edit_tensors(copy, self.tensors)
            super().load(str(copy), profile, device, layout)

    def config(self, config: dict[str, Any]) -> None:
        """Changes the content of config.json."""

    def tensors(self, tensors: Tensors) -> None:
        """Changes the stored tensors."""


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the language model."""
    return config.get("text_config", config)


def named(tensors: Tensors, ending: str) -> str:
    """The one stored name with this ending. Raises Day0Error when there is none, or several."""
    found = [name for name in tensors if name.endswith(ending)]
    if len(found) != 1:
        raise Day0Error(f"{len(found)} tensors end in {ending!r}", where="fault", todo="choose another preset or name")
    return found[0]


def noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Values of a parameter that nobody wrote after it was made: normal, as large as those of `like`."""
    generator = torch.Generator().manual_seed(seed)
    spread = like.float().std().clamp(min=1e-3)
    return (torch.randn(like.shape, generator=generator) * spread).to(like.dtype)


def _edit_json(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    edit(content)
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _edit_tensors(folder: Path, edit: Callable[[Tensors], None]) -> None:
    """Joins all tensors of the copy into one file after `edit` has seen them."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    edit(tensors)
    for file in (*files, *folder.glob("*.safetensors.index.json")):
        file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
