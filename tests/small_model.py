"""A model of three layers, cut out of preset tiny, for tests that run the engine many times."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from reference.presets import preset_dir

KEPT = {"0": "0", "1": "1", "3": "2"}  # layers of preset tiny: delta rule, the same with experts, DSA with experts
DENSE = {"0": "0", "1": "1", "5": "2"}  # the last with attention to every latent in place of DSA
LAYER = re.compile(r"(?<=language_model\.model\.layers\.)\d+")


def small_model(directory: Path, *, dense: bool = False) -> Path:
    """Written into `directory`, which must not be there. Its top-k is 16, so that short prompts already select; a
    `dense` one does not."""
    kept = DENSE if dense else KEPT
    source = preset_dir("tiny")
    config = json.loads((source / "config.json").read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": 3, "index_topk": 16, "indexer_types": ["none", "none", "none" if dense else "full"]}
    text["linear_attn_config"] |= {"kda_layers": [1, 2], "full_attn_layers": [3]}
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, value in load_file(str(file)).items():
            layer = LAYER.search(name)
            if layer is None or layer[0] in kept:
                new = name if layer is None else name[: layer.start()] + kept[layer[0]] + name[layer.end() :]
                tensors[new] = value
    directory.mkdir(parents=True)
    for other in ("generation_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        shutil.copy(source / other, directory / other)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(directory / "model.safetensors"))
    return directory
