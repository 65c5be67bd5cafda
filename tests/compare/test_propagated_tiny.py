"""The net on the preset `tiny`: the composition's own taps, with the reference as a candidate that rounds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from net_fakes import Fault, candidate_call, fake_case, fake_tokens, write_snapshot

from day0check.compare.propagated import compare_case
from day0check.types import Measure
from reference.model import Model
from reference.presets import preset_dir
from reference.weights import Checkpoint

LENGTH, PROMPT = 72, 48


@functools.cache
def models() -> tuple[Model, Model]:
    checkpoint = Checkpoint(preset_dir("tiny"))
    return Model(checkpoint, dtype=torch.float64), Model(checkpoint, dtype=torch.float32)


def pair() -> tuple[Callable, Callable]:
    return tuple(lambda tokens, images, call, m=m: m.forward(list(tokens), call=call) for m in models())


def judge(directory: Path, *, seed: int = 0, fault: Fault | None = None, mode: str = "nearest") -> list[Measure]:
    tokens, keep = [256, *fake_tokens(LENGTH - 1, seed, vocab=256)], []
    with torch.inference_mode():
        models()[1].forward(tokens, call=candidate_call(keep, fault=fault, seed=seed, mode=mode))
    snapshot = write_snapshot(directory, keep, tokens, prompt=PROMPT)
    return compare_case(pair(), "bf16", fake_case(tokens, prompt=PROMPT), snapshot, seed=seed)


def failing(measures: list[Measure]) -> list[Measure]:
    return [m for m in measures if not m.passed]


def test_healthy_rounding_raises_no_alarm(tmp_path):
    """Would catch a net that cries wolf on the whole composition, or whose errors stay far from their noise."""
    for seed in range(3):
        measures = judge(tmp_path / str(seed), seed=seed)
        assert failing(measures) == []
        deep = [m for m in measures if m.layer == 7 and m.operator == "residual.add"]
        assert deep
        assert all(0.4 < m.statistics["whole"] < 1.0 for m in deep)
        assert all(m.statistics["noise_relative_l2"] < 0.5 for m in deep)
        assert sum(m.rows for m in measures if m.tap == "head.logits") == LENGTH


def scaled(tap: str, factor: float, rows: slice) -> Fault:
    def fault(name: str, operator: str, result: Any, kwargs: dict) -> Any:
        if name != tap:
            return result
        first, *rest = result if isinstance(result, tuple) else (result,)
        first = first.clone()
        first[rows] *= factor
        return (first, *rest) if rest else first

    return fault


@pytest.mark.parametrize(
    ("tap", "seen", "layer"),
    [
        ("layers.02.kda.output", "layers.02.residual.add.attention", 2),
        ("layers.03.dsa.attention", "layers.03.residual.mix.mlp", 3),
        ("layers.05.moe.up", "layers.05.residual.add", 5),
    ],
)
def test_a_fault_of_decode_alone_is_named_decode(tmp_path, tap, seen, layer):
    """Would catch decode rows that disappear among those of the prompt, and a fault placed in another layer."""
    found = failing(judge(tmp_path, fault=scaled(tap, 1.5, slice(PROMPT, None))))
    assert {m.phase for m in found} == {"decode"}
    assert found[0].layer == layer
    assert found[0].tap.startswith(seen)


def test_sharing_a_model_over_cases_gives_the_same(tmp_path):
    """Would catch a comparison by directory that differs from one by functions, and weights kept from another model."""
    tokens, keep = [256, *fake_tokens(23, 1, vocab=256)], []
    with torch.inference_mode():
        models()[1].forward(tokens, call=candidate_call(keep))
    snapshot = write_snapshot(tmp_path, keep, tokens, prompt=20)
    case = fake_case(tokens, prompt=20)
    by_functions = compare_case(pair(), "bf16", case, snapshot)
    assert compare_case(str(preset_dir("tiny")), "bf16", case, snapshot) == by_functions
    assert compare_case(Checkpoint(preset_dir("tiny")), "bf16", case, snapshot) == by_functions
