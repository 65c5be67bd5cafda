"""The engine's memory: packed weights and one workspace; decode steps that take nothing which stays or grows."""

import math
from concurrent.futures import ThreadPoolExecutor

import torch

from day0check.accelerated.batch import Part, make_batch
from day0check.accelerated.engine import Engine
from day0check.accelerated.memory import storages
from day0check.accelerated.ops import TABLE, WEIGHTS
from day0check.accelerated.ops.arithmetic import per_head, product
from day0check.accelerated.weights import Reader
from day0check.probe.memory import Allocations
from day0check.probe.recorder import Caller, Recorder
from day0check.probe.registry import Operators
from reference.presets import preset_dir
from reference.tensors import expected_tensors
from reference.weights import Checkpoint

CPU, PAGE = torch.device("cpu"), 16


def test_an_engine_holds_its_tensors_as_stored_and_the_workspace_once():
    """Catches experts that are unpacked at load, a second copy of a weight, and a workspace for each layer."""
    checkpoint = Checkpoint(preset_dir("tiny"))
    engine = Engine(checkpoint, dtype=torch.bfloat16, device=CPU)
    stored = sum(
        math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize
        for tensor in expected_tensors(checkpoint.config).values()
    )
    held = storages(engine) - engine.workspace.bytes
    assert abs(held / stored - 1) < 0.01


def test_experts_are_stacked_without_a_second_copy_of_them():
    """Catches a loader that reads all experts of a layer before it puts them together: that holds a layer twice."""

    class Drawn:
        """A checkpoint whose tensors are made when they are read."""

        config = Checkpoint(preset_dir("tiny")).config

        def tensor(self, name: str) -> torch.Tensor:
            return torch.full((64, 2 if name.endswith("scale") else 32), 120, dtype=torch.uint8)

    with Allocations() as taken:
        stack = Reader(Drawn(), torch.bfloat16, CPU).stack("layers.1", "w1", Drawn.config)
    kept = stack.weight.numel() + stack.scale.numel()
    assert stack.weight.shape[0] == Drawn.config.moe.experts > 8
    assert taken.peak_bytes < 1.25 * kept


def test_a_decode_step_keeps_nothing_and_takes_no_large_memory():
    """Catches memory that stays behind after a step, and a workspace or a copy of experts that each step makes anew.

    A CPU multiplies in float32. Weights are widened in memory that stays: nothing that a warm step makes is as large as
    the copy of one matrix of the dense layer.
    """
    engine = Engine(Checkpoint(preset_dir("tiny")), dtype=torch.bfloat16, device=CPU)
    caller = Caller(Operators(TABLE, weights=WEIGHTS, pools=("kv", "index", "state")), Recorder())
    caches = engine.caches(pages=8, page=PAGE, slots=1)

    def step(tokens: tuple[int, ...], start: int) -> None:
        part = Part("a", tokens, start, tuple(range(8)), 0, wants_logits=True)
        phase = "decode" if start else "prefill"
        batch = make_batch(phase, [part], page=PAGE, device=CPU)
        with caller.recorder.step(phase, batch.rows, start):
            (engine.decode if start else engine.prefill)(caller, caches, batch)

    with Allocations() as taken:
        step(tuple(range(40)), 0)
        step((41,), 40)
        live = taken.live_bytes
        for position in range(41, 60):
            taken.restart_peak()
            taken.largest_bytes = 0
            step((position,), position)
            assert taken.live_bytes == live
            assert taken.peak_bytes - live < engine.workspace.bytes
            assert taken.largest_bytes < 4 * engine.model.layers[0].mlp.gate.numel() < 4 * engine.model.head.numel()


def test_a_cpu_widens_weights_in_the_same_memory_again_and_again():
    """Catches copies that are kept for each weight, one that a product allocates anew, and parts that are lost, or
    overwritten before they are multiplied, where a weight is larger than that memory."""
    x = torch.randn(3, 1 << 12).bfloat16()
    weights = [torch.randn(1100, 1 << 12).bfloat16() for _ in range(2)]  # a little more than BLOCK_ELEMENTS each
    product(x, weights[0])
    with Allocations() as taken:
        found = [product(x, weight) for weight in weights]
        assert taken.peak_bytes < 4 * x.numel() + 3 * sum(y.numel() * 4 for y in found)
    for y, weight in zip(found, weights, strict=True):
        assert torch.allclose(y.double(), x.double() @ weight.double().T, rtol=0, atol=1e-3)
    assert product(x, weights[0][:0]).shape == (3, 0)
    stacked = torch.randn(5, 64, 1 << 14).bfloat16()
    x = torch.randn(3, 5, 64).bfloat16()
    whole = torch.einsum("rhi,hio->rho", x.float(), stacked.float())
    assert torch.allclose(per_head(x, weight=stacked).float(), whole, rtol=2.0**-7, atol=1e-3)


def test_two_threads_widen_in_memory_of_their_own():
    """Catches a part of one thread's weight that another thread overwrites before it is multiplied."""
    weights = [torch.full((512, 512), float(value)).bfloat16() for value in (1, 2, 3, 4)]
    ones = torch.ones(1, 512)

    def right(weight: torch.Tensor) -> bool:
        return all(torch.equal(product(ones, weight), 512 * weight[:, :1].float().T) for _ in range(200))

    with ThreadPoolExecutor(len(weights)) as pool:
        assert all(pool.map(right, weights))
