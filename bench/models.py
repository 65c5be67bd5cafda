"""Models of the size that a measurement needs, as presets: `tiny` with some of its sizes changed."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from reference.presets import Preset, kimi_k3_preset, preset
from reference.weights import write_checkpoint


def enlarged(name: str, *, layers: int, positions: int = 8192, **sizes: Any) -> Preset:
    """`tiny` without its vision tower, with `layers` decoder layers and other `sizes` (keys of its text_config).

    The pattern of KDA, dense and sparse attention layers goes on as it is; no other size changes.
    """
    text = copy.deepcopy(preset("tiny").json_files["config.json"]["text_config"])
    kinds, period = text["indexer_types"], text["num_hidden_layers"]
    linear = text["linear_attn_config"]
    text |= {
        "num_hidden_layers": layers,
        "max_position_embeddings": positions,
        "indexer_types": [kinds[n % period] for n in range(layers)],
        "linear_attn_config": linear
        | {
            key: [n + 1 for n in range(layers) if n % period + 1 in linear[key]]
            for key in ("kda_layers", "full_attn_layers")
        },
        **sizes,
    }
    return kimi_k3_preset(name, text, vision=None, media=None)


def directory_of(chosen: Preset) -> Path:
    """The model directory of a preset, written on first use beside the packaged ones; its name carries the digest."""
    cache = os.environ.get("DAY0CHECK_CACHE")
    root = Path(cache) if cache else Path.home() / ".cache" / "day0check"
    directory = root / "bench" / f"{chosen.name}-{chosen.digest()}"
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(directory, chosen.tensors(), json_files=chosen.json_files)
    return directory
