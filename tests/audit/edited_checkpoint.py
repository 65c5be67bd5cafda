"""A copy of a preset that a test damages, and the one finding that the damage must make."""

import json
import shutil

from safetensors.torch import load_file, save_file

from reference.presets import preset_dir
from reference.weights import INDEX

PREFIX = "language_model.model."
SCALE = f"{PREFIX}layers.1.block_sparse_moe.experts.2.w1.weight_scale"
PACKED = f"{PREFIX}layers.1.block_sparse_moe.experts.2.w3.weight_packed"


class Edited:
    """A copy of a preset whose shards, index and configuration can be changed."""

    def __init__(self, name, directory):
        self.directory = shutil.copytree(preset_dir(name), directory)
        self.index = json.loads((self.directory / INDEX).read_text())["weight_map"]

    def write_index(self):
        (self.directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": self.index}))

    def config(self, change):
        file = self.directory / "config.json"
        data = json.loads(file.read_text())
        change(data)
        file.write_text(json.dumps(data))

    def shard(self, file, change):
        tensors = load_file(self.directory / file)
        change(tensors)
        save_file(tensors, self.directory / file)

    def put(self, name, tensor, *, listed=True):
        """Stores `tensor` where the index has it, or in the first shard; `listed`: and in the index."""
        file = self.index.get(name, min(self.index.values()))
        self.shard(file, lambda t: t.update({name: tensor}))
        if listed:
            self.index[name] = file
            self.write_index()
        return file

    def drop(self, name):
        self.shard(self.index.pop(name), lambda t: t.pop(name))
        self.write_index()

    def read(self, name):
        return load_file(self.directory / self.index[name])[name]


def only(findings, pattern, *words, severity="blocker", count=1):
    """There is one finding, of this pattern and severity, with all the words in its message."""
    assert [f.evidence["pattern"] for f in findings] == [pattern], [f.message for f in findings]
    (finding,) = findings
    assert (finding.severity, finding.evidence["count"]) == (severity, count), finding.message
    assert (finding.check, finding.operator, finding.phase, finding.stack_layer) == (
        "weights",
        "weights.read",
        "load",
        "model",
    )
    for word in words:
        assert word in finding.message, finding.message
    return finding
