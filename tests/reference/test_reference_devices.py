"""Every operator on every hard input of its contract: result types, and GPU against CPU."""

import pytest
import torch

from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import generate

MODULES = {"linear", "norm", "rope", "attention", "kda", "moe", "residual", "cache", "sampling"}
CASES = [
    (name, hard)
    for name, contract in sorted(CONTRACTS.items())
    if contract.reference.split(":")[0].removeprefix("reference.") in MODULES
    for hard in contract.hard_inputs
]


def call(name, hard, dtype, device="cpu"):
    """Results of the reference function, with the pools it wrote behind them; and the types of its inputs."""
    contract = CONTRACTS[name]
    inputs = generate(contract, hard, 3, dtype)
    named = {contract.args[0].name: inputs.args[0]} | inputs.kwargs
    named = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in named.items()}
    first, *others = named
    results = contract.function()(named[first], **{n: named[n] for n in others})
    results = results if isinstance(results, tuple) else () if results is None else (results,)
    types = {v.dtype for v in named.values() if isinstance(v, torch.Tensor)}
    return [*results, *(named[m] for m in contract.mutates)], types


def widened(tensor):
    return tensor.to("cpu", torch.float64)


@pytest.mark.parametrize(("name", "hard"), CASES)
def test_results_have_the_contracts_types_and_no_nan(name, hard):
    """Catches a float32 result that is rounded to the activations' type, or an activation left in float32."""
    for dtype in (torch.bfloat16, torch.float64):
        results, inputs = call(name, hard, dtype)
        assert len(results) >= len(CONTRACTS[name].results)
        for spec, value in zip(CONTRACTS[name].results, results, strict=False):
            single = torch.float64 if torch.float64 in inputs else torch.float32
            wanted = {"act": dtype, "float32": single, "any": value.dtype}
            assert value.dtype == wanted.get(spec.dtype, getattr(torch, spec.dtype, None)), spec.name
            assert not bool(torch.isnan(value.to(torch.float64)).any()), spec.name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("name", "hard"), CASES)
def test_gpu_gives_what_the_cpu_gives(name, hard, dtype):
    """Catches a tensor made on the wrong device, an operation that CUDA lacks, a choice that depends on the device."""
    for here, there in zip(call(name, hard, dtype)[0], call(name, hard, dtype, "cuda")[0], strict=True):
        assert there.device.type == "cuda"
        assert here.dtype == there.dtype
        a, b = widened(here), widened(there)
        if CONTRACTS[name].kind in ("move", "choose") and not here.dtype.is_floating_point:
            assert torch.equal(a, b)
            continue
        step = 2.0**-7 if here.dtype == torch.bfloat16 else 1e-5 if here.dtype == torch.float32 else 1e-11
        largest = a[a.isfinite()].abs()  # moved bytes may be anything
        near = step * float(largest.max()) if largest.numel() else 0.0
        assert torch.allclose(a, b, rtol=step, atol=near, equal_nan=True)
