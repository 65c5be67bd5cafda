"""Full-size configurations as their releases state them, as data: `<family>.json` beside this file.

They are for planning and for counting; a model to run is a preset or a checkpoint directory. Standard library only.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reference.config import ModelConfig
from reference.families import read_config_and_rest

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Published:
    """One release. `config_json` and `preprocessor` are what its files hold; `unread` keys of config.json that have no
    reader here, which `config_json` leaves out; `published` what its authors say of its size."""

    name: str
    title: str
    source: str
    config_json: dict[str, Any]
    preprocessor: dict[str, Any] = field(default_factory=dict)
    published: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, Any] = field(default_factory=dict)

    def config(self) -> ModelConfig:
        """The ModelConfig as the family's reader gives it for a checkpoint. Raises CheckpointError without a reader."""
        return self.config_and_rest()[0]

    def config_and_rest(self) -> tuple[ModelConfig, tuple[str, ...]]:
        """As `config`, with the keys that no reader asked for."""
        return read_config_and_rest(self.config_json | {"name": self.name}, preprocessor=self.preprocessor)


@functools.cache
def published_names() -> tuple[str, ...]:
    """The families of which a full-size configuration is here, sorted."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.json")))


@functools.cache
def published(name: str) -> Published:
    """The release of that name. Raises KeyError(name)."""
    if name not in published_names():
        raise KeyError(name)
    data = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return Published(
        name,
        data["title"],
        data["source"],
        data["config"],
        data.get("preprocessor", {}),
        data["published"],
        data.get("unread", {}),
    )
