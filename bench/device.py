"""What holds of the engine on a device alone: the ring on two streams, and no new device memory inside decode steps.

    python -m bench.device --device cuda

The ring of expert tiles must give what the whole workspace gives, with decoding beside the computation. After the first
steps the allocator must not ask the device for memory again: its counters must not move over the decode steps.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from bench.models import directory_of, enlarged
from day0check.accelerated.batch import Part, make_batch
from day0check.accelerated.engine import Engine
from day0check.accelerated.ops import TABLE, WEIGHTS
from day0check.accelerated.workspace import Workspace
from day0check.probe.recorder import Caller, Recorder
from day0check.probe.registry import Operators
from reference.weights import Checkpoint

PAGE, PROMPT, WARM, STEPS = 64, 256, 8, 48
COUNTERS = ("num_device_alloc", "num_alloc_retries", "reserved_bytes.all.current", "segment.all.allocated")


def decode(engine: Engine, steps: int) -> tuple[Tensor, dict[str, int]]:
    """Logits of all decode steps of a batch of four, and how far the allocator's counters moved after the first."""
    caller = Caller(Operators(TABLE, weights=WEIGHTS, pools=("kv", "index", "state")), Recorder())
    pages = -(-(PROMPT + steps) // PAGE)
    caches = engine.caches(pages=4 * pages, page=PAGE, slots=4)
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 256, (4, PROMPT + steps), generator=draw).tolist()
    logits, before = [], {}
    for step in range(steps + 1):
        start, count = (0, PROMPT) if step == 0 else (PROMPT + step - 1, 1)
        parts = [
            Part(
                str(b),
                tuple(prompts[b][start : start + count]),
                start,
                tuple(range(b * pages, (b + 1) * pages)),
                b,
                True,
            )
            for b in range(4)
        ]
        phase = "decode" if step else "prefill"
        batch = make_batch(phase, parts, page=PAGE, device=engine.device)
        with caller.recorder.step(phase, batch.rows, step):
            (engine.decode if step else engine.prefill)(caller, caches, batch)
        logits.append(engine.wanted_logits.cpu())
        if step == WARM:
            before = counters(engine.device)
    after = counters(engine.device)
    return torch.stack(logits), {name: after[name] - before[name] for name in before}


def counters(device: torch.device) -> dict[str, int]:
    torch.accelerator.synchronize(device)
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    return {name: int(stats.get(name, 0)) for name in COUNTERS}


def main(argv: list[str] | None = None) -> int:
    ask = argparse.ArgumentParser(prog="bench.device", description=__doc__.split("\n", 1)[0])
    ask.add_argument("--device", default="cuda")
    given = ask.parse_args(argv)
    device = torch.device(given.device)
    model = enlarged(
        "device",
        layers=8,
        hidden_size=512,
        num_experts=64,
        num_experts_per_tok=8,
        num_experts_per_token=8,
        moe_intermediate_size=512,
        routed_expert_hidden_size=512,
    )
    engine = Engine(Checkpoint(directory_of(model)), dtype=torch.bfloat16, device=device)
    whole, moved = decode(engine, STEPS)
    engine.workspace = Workspace(engine.model, device, ring_bytes=1 << 21)
    ring, ring_moved = decode(engine, STEPS)
    same = bool(torch.equal(whole, ring))
    far = float((whole - ring).norm() / whole.norm())
    print(f"{device}: logits of the ring of tiles beside the whole workspace: {'the same bytes' if same else far}")
    print(f"allocator over decode steps {WARM + 1} to {STEPS}: {moved or 'no counters on this device'}")
    print(f"the same with the ring: {ring_moved or 'no counters on this device'}")
    still = not any(moved.values()) and not any(ring_moved.values())
    met = far < 1e-2 and bool(torch.isfinite(whole).all()) and still
    print("met" if met else "NOT MET")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
