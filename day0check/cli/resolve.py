"""Turns the names that a user gives into what they mean, before anything is started: model, device, profile."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from day0check.errors import InputError, UsageError

if TYPE_CHECKING:
    from reference.config import ModelConfig

WHOLE_BYTES = 256 << 20  # checkpoints up to this size are hashed whole
_SAMPLE_BYTES = 1 << 20
_HEADER_BYTES = 100_000_000  # the format's own limit; a damaged file may claim any length


@dataclass(frozen=True)
class Model:
    """A model directory that was opened and found complete. `name` as the user gave it; `digest` of its content."""

    name: str
    directory: Path
    config: ModelConfig
    digest: str


def find_model(model: str) -> Model:
    """The preset of that name, or the checkpoint directory. Imports torch.

    Raises UsageError for a name that is neither, InputError for a directory that cannot be read as a checkpoint.
    """
    from reference.errors import CheckpointError
    from reference.presets import preset_names
    from reference.weights import Checkpoint

    directory = model_directory(model)
    try:
        config = Checkpoint(directory).config
    except CheckpointError as cause:
        listed = f"day0check weights {model} lists all that is wrong with it"
        raise InputError(cause.what, where=cause.where, todo="; ".join(filter(None, (cause.todo, listed)))) from cause
    name = model if model in preset_names() else directory.name
    return Model(name, directory, config, content_digest(directory))


def model_directory(model: str, *, where: str = "--model") -> Path:
    """The directory of the preset of that name, written if need be, or the directory itself, resolved. Imports torch.

    Raises UsageError for a name that is neither, `where` being the option that holds it.
    """
    from reference.presets import preset_dir, preset_names
    from reference.published import published_names

    if model in preset_names():
        return preset_dir(model).resolve()
    if Path(model).is_dir():
        return Path(model).resolve()
    if model in published_names():
        small = f", or run its small preset: {where} tiny-{model}" if f"tiny-{model}" in preset_names() else ""
        raise UsageError(
            f"{model!r} is a published full size: its configuration is here, its weights are not",
            where=where,
            todo=f"give the directory of a checkpoint{small}",
        )
    near = difflib.get_close_matches(model, preset_names(), n=1)
    hint = f"did you mean {near[0]!r}? " if near else f"presets: {', '.join(preset_names())}; "
    raise UsageError(
        f"{model!r} is neither a preset nor a directory",
        where=where,
        todo=f"{hint.rstrip()} or give a directory with config.json and safetensors files",
    )


def content_digest(directory: Path) -> str:
    """12 digits of the SHA-256 over config.json, names, sizes and bytes of the weight files.

    Above 256 MiB in all, each weight file counts with its first and last MiB and every header byte, not whole.
    """
    files = sorted((*directory.glob("config.json"), *directory.glob("*.safetensors")))
    whole = sum(f.stat().st_size for f in files) <= WHOLE_BYTES
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            if whole or file.suffix == ".json":
                while block := stream.read(1 << 22):
                    digest.update(block)
            else:
                header = 8 + min(int.from_bytes(stream.read(8), "little"), _HEADER_BYTES)
                stream.seek(0)
                digest.update(stream.read(max(header, _SAMPLE_BYTES)))
                stream.seek(max(size - _SAMPLE_BYTES, 0))
                digest.update(stream.read())
    return digest.hexdigest()[:12]


def check_device(device: str) -> str:
    """The device as given, when torch knows it and it is there. Imports torch. Raises UsageError with what there is."""
    import torch

    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise _no_device(device, "torch does not know it") from None
    if wanted.type == "cpu":
        return device
    module = getattr(torch, wanted.type, None)
    if module is None or not hasattr(module, "is_available") or not module.is_available():
        raise _no_device(device, f"torch {torch.__version__} has no {wanted.type} here")
    count = module.device_count() if hasattr(module, "device_count") else 1
    if wanted.index is not None and wanted.index >= count:
        raise _no_device(device, f"there are {count} of its kind")
    return device


def _no_device(device: str, why: str) -> UsageError:
    return UsageError(f"no device {device!r}: {why}", where="--device", todo=f"here: {', '.join(_devices())}")


def _devices() -> list[str]:
    import torch

    found = ["cpu"]
    for kind in ("cuda", "xpu", "mps", "npu"):
        module = getattr(torch, kind, None)
        if module is not None and hasattr(module, "is_available") and module.is_available():
            found.append(kind)
    return found
