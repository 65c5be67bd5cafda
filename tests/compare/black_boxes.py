"""Backends that show their logits and nothing else, as an engine of which nobody has the source would.

Healthy: the reference in float32, rounded to nearest where bf16 rounds. The others have one parameter wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from day0check.compare.rounding import Rounder
from day0check.contracts.profiles import PROFILES
from day0check.probe.recorder import Recorder
from day0check.probe.rows import RowMap
from day0check.types import Outputs, Request, Schedule
from reference.model import Model
from reference.weights import Checkpoint

BF16 = PROFILES["bf16"]


class Healthy:
    """`wrong`: operator, argument, factor, and the place that has it ("" for all)."""

    wrong: ClassVar[tuple[str, str, float, str] | None] = None

    def capabilities(self) -> set[str]:
        return {"batch", "forced_tokens"}

    def operators(self) -> None:
        return None

    def load(self, model_dir: str, profile: str, device: str, layout: dict[str, Any]) -> None:
        self.model = Model(Checkpoint(model_dir), dtype=torch.float32, device=device)

    def run(self, requests: tuple[Request, ...], schedule: Schedule, recorder: Recorder) -> Outputs:
        sequences, spans, finish = {}, {}, {}
        for step, request in enumerate(requests):
            tokens = list(request.turns[0].tokens)
            logits = self.model.forward(tokens, call=self.call)
            rows = RowMap((request.id,), (0,) * len(tokens), tuple(range(len(tokens))))
            with recorder.step("prefill", rows, step):
                recorder.show("head.logits", logits)
            sequences[request.id] = (*tokens, int(logits[-1].argmax()))
            spans[request.id], finish[request.id] = ((len(tokens), len(tokens) + 1),), "length"
        return Outputs(sequences, spans, finish)

    def call(self, place: str, operator: str, function: Callable, *args: Any, site: str = "", **kwargs: Any) -> Any:
        if self.wrong is not None and operator == self.wrong[0] and place.startswith(self.wrong[3]):
            kwargs[self.wrong[1]] = kwargs[self.wrong[1]] * self.wrong[2]
        points = BF16.points_of(operator)
        return function(*args, **kwargs, **({"round": Rounder(points)} if points else {}))

    def pools(self) -> None:
        return None

    def close(self) -> None:
        pass


class Routed(Healthy):
    wrong = ("moe.route", "scale", 1.01, "")


class Softmax(Healthy):
    wrong = ("mla.attention", "scale", 1.05, "")


class SoftmaxOfOneLayer(Healthy):
    wrong = ("mla.attention", "scale", 1.1, "layers.01")


class Theta(Healthy):
    wrong = ("rope.apply", "theta", 1.2, "")


class Epsilon(Healthy):
    wrong = ("norm.rms", "eps", 10.0, "")
