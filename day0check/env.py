"""The environment of a run: what could change a result or a time, taken once, in a fraction of a second and torch-free.

Only the variables in `VARIABLES` are read: the environment of a CI job holds secrets, and a report is published.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import day0check

PACKAGES = (
    "torch",
    "numpy",
    "scipy",
    "pandas",
    "safetensors",
    "pillow",
    "scikit-image",
    "matplotlib",
    "triton",
    "transformers",
    "vllm",
    "sglang",
    "flashinfer-python",
    "flash-attn",
)
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_CBWR",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "HIP_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "PYTHONHASHSEED",
)
# What can change a result; times also depend on the machine, which `difference` names as well.
_RESULT = ("python", "torch", "torch_flags", "packages", "cpu", "accelerators", "variables", "code")
TORCH_FLAGS = "torch.json"  # written by the candidate's worker into the output directory
TOPOLOGY = "topology.json"  # where each rank of a sharded candidate ran
_TIMEOUT_S = 1.0


def capture(root: Path | None = None) -> dict[str, Any]:
    """The environment as JSON values; facts that cannot be had are absent or "". Never raises, takes under 3 s.

    `root`: the checkout whose commit is recorded (this package's own by default). Bytes are in names.
    """
    code = root if root is not None else Path(day0check.__file__).resolve().parent.parent
    return {
        "day0check": day0check.__version__,
        "python": {"version": platform.python_version(), "implementation": platform.python_implementation()},
        "torch": _torch(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "system": {"name": platform.system(), "release": platform.release(), "libc": "-".join(platform.libc_ver())},
        "cpu": _cpu(),
        "memory_bytes": _memory_bytes(),
        "accelerators": _accelerators(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "code": _commit(code),
    }


def with_torch_flags(environment: dict[str, Any], out: Path) -> dict[str, Any]:
    """The environment with what the candidate's worker told of its torch (`torch_flags`), where there was a run."""
    try:
        return {**environment, "torch_flags": json.loads((out / TORCH_FLAGS).read_text(encoding="utf-8"))}
    except (OSError, ValueError):
        return environment  # the worker never got that far, and the cases say so


def with_told(environment: dict[str, Any], out: Path) -> dict[str, Any]:
    """The environment with all that the candidate told: the flags of its torch, and where its ranks ran."""
    environment = with_torch_flags(environment, out)
    try:
        return {**environment, "topology": json.loads((out / TOPOLOGY).read_text(encoding="utf-8"))}
    except (OSError, ValueError):
        return environment  # one device, or ranks that were ended


def fingerprint(environment: dict[str, Any]) -> str:
    """12 digits over what can change a result: interpreter, torch, packages, processor, accelerators, variables, code.

    The same commit with uncommitted changes is another fingerprint; a version of day0check alone is not.
    """
    text = json.dumps({key: environment.get(key) for key in _RESULT}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def difference(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One sentence per fact that differs, by dotted name, in order of the names; empty for the same environment.

    Facts that change from run to run by nature (a free amount, a time) are not in an environment.
    """
    a, b = _flat(before), _flat(after)
    facts = []
    for name in sorted({*a, *b}):
        if name not in a:
            facts.append(f"{name} is new: {b[name]}")
        elif name not in b:
            facts.append(f"{name} is gone: it was {a[name]}")
        elif a[name] != b[name]:
            facts.append(f"{name}: {a[name]} -> {b[name]}")
    return facts


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        items = [(str(key), v) for key, v in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {prefix: str(value)}
    found: dict[str, str] = {}
    for key, inner in items:
        found |= _flat(inner, f"{prefix}.{key}" if prefix else key)
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _torch() -> dict[str, Any]:
    """What the installed torch was built for, from its version file: importing torch takes longer than all the rest."""
    facts: dict[str, Any] = {"version": _version("torch")}
    try:
        file = Path(str(importlib.metadata.distribution("torch").locate_file("torch/version.py")))
        text = file.read_text(encoding="utf-8")
    except (importlib.metadata.PackageNotFoundError, OSError):
        return facts
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        name = name.partition(":")[0].strip()
        if equals and name in ("__version__", "debug", "cuda", "git_version", "hip", "xpu"):
            key = {"__version__": "version", "git_version": "commit"}.get(name, name)
            facts[key] = value.strip().strip("'\"")
    return facts


def _cpu() -> dict[str, Any]:
    model, flags = platform.processor() or platform.machine(), set()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    except OSError:
        pass  # not Linux: the name that Python knows is what there is
    vector = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16") if f in flags]
    return {
        "model": model,
        "machine": platform.machine(),
        "cores": _usable_cores(),
        "vector": vector,
    }


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _accelerators() -> list[dict[str, str]]:
    """Name, driver and memory of each NVIDIA GPU by its driver's own tool; a torch that runs elsewhere adds its own."""
    fields = ("name", "driver_version", "memory.total")
    text = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    names = ("name", "driver", "memory")
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(fields)]


def _commit(root: Path) -> dict[str, Any]:
    """Commit of the checkout at `root`, and whether tracked files differ from it; empty outside a checkout."""
    if not (root / ".git").exists():
        return {}
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD").strip()
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no").strip()
    return {"commit": commit, "dirty": bool(changed)} if commit else {}


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


if __name__ == "__main__":
    json.dump(capture(), sys.stdout, indent=1)
