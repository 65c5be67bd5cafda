"""How much memory the engine takes as layers are added, beside two other ways to keep experts.

    python -m bench.memory [--megabytes 200] [--layers 1,2,3] [--device cpu]

Every figure comes from a process of its own that loads a model of that many expert layers, runs a prompt and decode
steps, and counts every byte that tensor operations take (`probe/memory.py`; on a device also its allocator). A line
`constant + layers x bytes` is fitted. The engine keeps packed experts and one FP8 workspace: its line must rise by what
a layer holds packed, and its constant holds the workspace once. The others are built here: experts as FP8 at load, and
a workspace for each layer. Then decode steps are counted one by one: they keep nothing (`bench/decode_memory.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.decode_memory import decode_steps
from bench.models import enlarged
from day0check.accelerated.engine import Engine
from day0check.accelerated.memory import storages
from day0check.accelerated.ops import TABLE, WEIGHTS
from day0check.accelerated.ops.experts import convert
from day0check.accelerated.scheduler import Scheduler
from day0check.accelerated.weights import Moe
from day0check.accelerated.workspace import PARTS, Workspace
from day0check.probe.memory import Allocations
from day0check.probe.recorder import Caller
from day0check.probe.registry import Operators
from day0check.types import Request, Schedule, Turn
from reference.config import ModelConfig
from reference.tensors import expected_tensors

FORMS = {
    "engine": "packed experts, one FP8 workspace",
    "scratch": "packed experts, an FP8 workspace a layer",
    "loaded": "experts as FP8 from loading on",
}
WIDTH, LATENT = 1024, 1024
PROMPT = 64  # tokens: enough for a whole tile of experts to be decoded at a time in every layer
WITHIN, RESIDENT_WITHIN = 0.01, 0.03
EVEN = ("norm.weight", "layernorm.weight", "e_score_correction_bias")  # of ones, and of zeros


class MadeUp:
    """A checkpoint without files: tensors are drawn when they are read; its routers spread rows over all experts, so
    that what a layer needs beside its weights is the same for all layers."""

    directory = Path("made-up")

    def __init__(self, config: ModelConfig) -> None:
        self.config, self._expected = config, expected_tensors(config)

    def __contains__(self, name: str) -> bool:
        return name in self._expected

    def names(self) -> tuple[str, ...]:
        return tuple(self._expected)

    def tensor(self, name: str) -> Tensor:
        stored = self._expected[name]
        dtype = getattr(torch, stored.dtype)
        if dtype == torch.uint8:
            return torch.randint(118, 122, stored.shape, dtype=dtype)
        if name.endswith(EVEN):
            return torch.full(stored.shape, float("norm" in name), dtype=dtype)
        return torch.randn(stored.shape).mul_(0.02).to(dtype)


def config_of(layers: int, megabytes: int) -> ModelConfig:
    """`layers` expert layers of about `megabytes` packed bytes each, behind a dense one."""
    packed = 3 * WIDTH * LATENT * 17 / 32
    experts = 16 * max(1, round(megabytes * 1e6 / packed / 16))
    sizes = {
        "num_experts": experts,
        "moe_intermediate_size": WIDTH,
        "routed_expert_hidden_size": LATENT,
        "hidden_size": 256,
        "attn_res_block_size": 1 << 10,
    }
    return enlarged("memory", layers=layers + 1, **sizes).config()


def layer_bytes(config: ModelConfig) -> float:
    """Bytes of the tensors of one expert layer as the engine keeps them: as stored, bfloat16 for the rest."""
    layers: dict[str, float] = {}
    for name, stored in expected_tensors(config).items():
        if name.startswith("layers.") and not name.startswith("layers.0."):
            number = name.split(".")[1]
            size = math.prod(stored.shape) * getattr(torch, stored.dtype).itemsize
            layers[number] = layers.get(number, 0.0) + size
    return sum(layers.values()) / len(layers)


def resident_bytes() -> int:
    """Bytes of this process's own memory that are in use now, files left out; 0 where the system does not tell.

    A C library that keeps freed memory for later is asked to give it back first: up to 50 MB here, other in each run.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def changed(engine: Engine, form: str) -> list[Any]:
    """What another way to keep experts holds beside the engine, or in place of what it holds."""
    layers = [layer.mlp for layer in engine.model.layers if isinstance(layer.mlp, Moe)]
    if form == "scratch":
        return [Workspace(engine.model, engine.device) for _ in layers[1:]]
    kept = []
    for moe in layers if form == "loaded" else ():
        for part in PARTS:
            stack = getattr(moe, part)
            every = torch.arange(stack.weight.shape[0], device=engine.device)
            kept.append(convert(stack.weight, scale=stack.scale, experts=every)[:2])
            object.__setattr__(stack, "weight", stack.weight[:0].clone())  # given back
            object.__setattr__(stack, "scale", stack.scale[:0].clone())
    if form == "loaded":
        engine.workspace = None
    return kept


def measure(layers: int, megabytes: int, form: str, device: torch.device, *, counting_steps: bool) -> dict[str, Any]:
    """Bytes of one process: counted, resident, and what its parts hold."""
    torch.set_num_threads(1)
    config = config_of(layers, megabytes)
    before = resident_bytes()
    with Allocations() as taken:
        engine = Engine(MadeUp(config), dtype=torch.bfloat16, device=device)
        workspace = engine.workspace.bytes
        held = changed(engine, form)
        for space in (engine.workspace, *(h for h in held if isinstance(h, Workspace))):
            if space is not None:  # pages that nobody has touched are not resident, whatever was reserved
                space.payload.view(torch.uint8).zero_()
        taken.restart_peak()
        if form != "loaded":
            serve(engine)
    found = {"layers": layers, "counted": taken.peak_bytes, "workspace": workspace, "held": len(held)}
    found |= {"storages": storages(engine), "resident": resident_bytes() - before, "layer": layer_bytes(config)}
    if counting_steps:
        steps = decode_steps(engine, operators())
        found |= {"decode": str(steps), "decode_met": steps.met}
    return found | (_of_allocator(engine, device) if device.type == "cuda" and form != "loaded" else {})


def serve(engine: Engine) -> None:
    """A prompt and four decode steps."""
    requests = (Request("a", (Turn(tuple(range(PROMPT))),), max_new_tokens=4),)
    Scheduler(engine, requests, Schedule(), Caller(operators())).run()


def operators() -> Operators:
    return Operators(TABLE, weights=WEIGHTS, pools=("kv", "index", "state"))


def _of_allocator(engine: Engine, device: torch.device) -> dict[str, float]:
    """What the device's allocator says of the process so far, and how often a second run asks the device for more."""
    stats = torch.cuda.memory_stats(device)
    serve(engine)
    return {
        "allocated": stats["allocated_bytes.all.peak"],
        "requested": stats["requested_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "taken_later": torch.cuda.memory_stats(device)["num_device_alloc"] - stats["num_device_alloc"],
    }


def in_a_process(layers: int, form: str, given: argparse.Namespace, *, counting_steps: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.memory", "--one", str(layers), "--form", form]
    command += ["--megabytes", str(given.megabytes), "--device", given.device]
    command += ["--steps"] if counting_steps else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the process of {layers} layers, form {form}, ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def line_through(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(constant, slope) of the least-squares line through (layers, bytes)."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


def report(rows: dict[str, list[dict[str, Any]]]) -> bool:
    """Prints the lines of all forms; whether the engine's is what it should be."""
    first = rows["engine"][0]
    print(
        f"a layer holds {first['layer'] / 1e6:.1f} MB as packed, the FP8 workspace {first['workspace'] / 1e6:.1f} MB\n"
    )
    print(f"{'':44} {'constant MB':>12} {'MB a layer':>11} {'of packed':>10}")
    for form, found in rows.items():
        constant, slope = line_through([(row["layers"], row["counted"]) for row in found])
        share = slope / first["layer"]
        print(f"{FORMS[form]:44} {constant / 1e6:12.1f} {slope / 1e6:11.2f} {share:10.3f}")
    counted = line_through([(r["layers"], r["counted"]) for r in rows["engine"]])
    key = "allocated" if "allocated" in first else "resident"
    resident = line_through([(r["layers"], r[key]) for r in rows["engine"]])
    name = "the same, the device's allocator" if key == "allocated" else "the same, resident set"
    print(f"{name:44} {resident[0] / 1e6:12.1f} {resident[1] / 1e6:11.2f} {resident[1] / first['layer']:10.3f}")
    once = first["workspace"] <= counted[0] < 2 * first["workspace"]
    print(f"\nthe constant holds the workspace {'once' if once else 'NOT once'}")
    for row in rows["engine"]:
        if "reserved" in row:
            print(
                f"{row['layers']} layers: reserved over allocated {row['reserved'] / row['allocated']:.3f}, "
                f"allocated over requested {row['allocated'] / row['requested']:.4f}, "
                f"a second run takes {row['taken_later']:.0f} segments more"
            )
    met = abs(counted[1] / first["layer"] - 1) <= WITHIN and once
    near = abs(resident[1] / first["layer"] - 1) <= RESIDENT_WITHIN or not resident[1]
    print(
        f"counted within {WITHIN:.0%}: {'met' if met else 'NOT MET'}; "
        f"resident within {RESIDENT_WITHIN:.0%}: {'met' if near else 'NOT MET'}"
    )
    print(first["decode"])
    return met and near and first["decode_met"]


def main(argv: list[str] | None = None) -> int:
    ask = argparse.ArgumentParser(prog="bench.memory", description=__doc__.split("\n", 1)[0])
    ask.add_argument("--megabytes", type=int, default=200)
    ask.add_argument("--layers", default="1,2,3")
    ask.add_argument("--device", default="cpu")
    ask.add_argument("--form", choices=tuple(FORMS), default="engine")
    ask.add_argument("--one", type=int, help="measure this process alone and print it as JSON")
    ask.add_argument("--steps", action="store_true", help="with --one: count the decode steps, too")
    given = ask.parse_args(argv)
    if given.one is not None:
        found = measure(given.one, given.megabytes, given.form, torch.device(given.device), counting_steps=given.steps)
        print(json.dumps(found))
        return 0
    layers = [int(n) for n in given.layers.split(",")]
    rows = {
        form: [in_a_process(n, form, given, counting_steps=form == "engine" and n == layers[0]) for n in layers]
        for form in FORMS
    }
    return 0 if report(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
