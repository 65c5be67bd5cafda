"""Compares what an operator gave with what is right for the same arguments. Needs torch and safetensors alone.

    python repro.py                        the recorded result of the candidate
    python repro.py FILE.py:FUNCTION       a function of yours, called with the recorded arguments
    python repro.py FILE.py:FUNCTION cuda  ... on a device

The first argument is positional, every other a keyword. Prints each statistic beside its limit and ends with 1 when one
is beyond it, with 0 otherwise. `noise` and `bound` of each element come from the rounding that the profile allows.
"""

import importlib.util
import json
import sys
from collections import namedtuple
from pathlib import Path

import torch

WHOLE, GROUP, SLOPE, ELEMENT, MISMATCHES = 1.1, 2.0, 10.0, 1.0, 0.0
SMALLEST_WHOLE, SMALLEST_GROUP = 64, 16  # elements that a whole result, a row or a column is judged by


def statistics(result, expected, noise, bound):
    """{name: (value, limit)} of a floating-point result; error in units of its noise, and of its bound."""
    expected, noise, bound = (t.double() for t in (expected, noise, bound))
    error = result.double() - expected
    wrong_kind = int((~torch.isfinite(error) & ~_same(result.double(), expected)).sum())
    error = torch.nan_to_num(error, nan=0.0, posinf=0.0, neginf=0.0).reshape(_rows(error))
    z = error / noise.reshape(error.shape)
    aimed = expected.nan_to_num(0, 0, 0).reshape(error.shape) / noise.reshape(error.shape)
    slope = (z * aimed).sum(0).abs() / aimed.square().sum(0).sqrt().clamp(min=1e-30)
    whole_slope = (z * aimed).sum().abs() / aimed.square().sum().sqrt().clamp(min=1e-30)
    return {
        "not a number": (float(wrong_kind), MISMATCHES),
        "whole": (_rms(z, (0, 1)) if z.numel() >= SMALLEST_WHOLE else 0.0, WHOLE),
        "row": (_rms(z, 1) if z.shape[1] >= SMALLEST_GROUP else 0.0, GROUP),
        "column": (_rms(z, 0) if len(z) >= SMALLEST_GROUP else 0.0, GROUP),
        "slope": (max(float(slope.max()), float(whole_slope)) if z.numel() else 0.0, SLOPE),
        "element": (float((error.abs() / bound.reshape(error.shape)).max()) if z.numel() else 0.0, ELEMENT),
    }


def mismatches(result, expected, tolerance=0.0):
    """{name: (value, limit)} of a result with a single right answer, up to a relative tolerance."""
    if result.shape != expected.shape:
        return {"shape": (1.0, MISMATCHES)}
    if result.element_size() == 1:
        result, expected = result.view(torch.uint8), expected.view(torch.uint8)
    same = _same(result, expected)
    if tolerance:
        same |= (result.double() - expected.double()).abs() <= tolerance * expected.double().abs()
    return {"different elements": (float((~same).sum()), MISMATCHES)}


def judge(call, tensors, results):
    """[(result name, statistics)] of the results of a call."""
    found = []
    for spec, result in zip(call["results"], results, strict=True):
        key, result = spec["name"], result.cpu()
        expected = tensors[f"expected.{key}"]
        if spec["free_order"]:
            result, expected = result.sort(-1).values, expected.sort(-1).values
        if f"noise.{key}" in tensors and result.shape == expected.shape:
            found.append((key, statistics(result, expected, tensors[f"noise.{key}"], tensors[f"bound.{key}"])))
        else:
            found.append((key, mismatches(result, expected.to(result.dtype), spec["tolerance"])))
    return found


def failing(judged):
    """Whether a statistic is beyond its limit."""
    return any(not value <= limit for _, found in judged for value, limit in found.values())


def arguments(call, tensors, device="cpu"):
    """(first, keywords) of the call."""
    named = {}
    for name, told in call["arguments"].items():
        if "tensor" in told:
            named[name] = tensors[told["tensor"]].to(device)
        elif "record" in told:
            kind, fields = told["record"]
            named[name] = namedtuple(kind, fields)(**fields)
        else:
            named[name] = _tuples(told["value"])
    return named.pop(call["first"]), named


def recompute(call, tensors, source, device):
    """The results of a function FILE.py:FUNCTION on the recorded arguments, and what it wrote in place."""
    file, _, name = source.rpartition(":")
    spec = importlib.util.spec_from_file_location("operators_under_test", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    first, keywords = arguments(call, tensors, device)
    result = getattr(module, name)(first, **keywords)
    if call["written"]:
        return [first if name == call["first"] else keywords[name] for name in call["written"]]
    return list(result) if isinstance(result, tuple) else [result]


def _same(a, b):
    return (a == b) | (a != a) & (b != b)  # a NaN is right where a NaN is due


def _rows(value):
    return (value.shape[0], -1) if value.dim() and value.numel() else (1, value.numel())


def _rms(z, axes):
    return float(z.square().mean(axes).sqrt().max()) if z.numel() else 0.0


def _tuples(value):
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def main(argv):
    from safetensors.torch import load_file

    here = Path(__file__).resolve().parent
    call, tensors = json.loads((here / "call.json").read_text()), load_file(here / "tensors.safetensors")
    print(f"{call['operator']} at {call['tap']} ({call['phase']})")
    if len(argv) > 1:
        results = recompute(call, tensors, argv[1], argv[2] if len(argv) > 2 else "cpu")
    else:
        results = [tensors[f"candidate.{spec['name']}"] for spec in call["results"]]
    judged = judge(call, tensors, results)
    for name, found in judged:
        for statistic, (value, limit) in found.items():
            mark = "  <-- beyond its limit" if not value <= limit else ""
            print(f"  {name}: {statistic} {value:.4g} (limit {limit:g}){mark}")
    return 1 if failing(judged) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
