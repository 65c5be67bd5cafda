"""A small causal model made of real operators, and a candidate's snapshot written from any forward pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from day0check.compare.rounding import Rounder
from day0check.contracts import CONTRACTS
from day0check.contracts.profiles import PROFILES
from day0check.probe.capture import Capture
from day0check.probe.recorder import Call
from day0check.probe.rows import RowMap
from day0check.snapshot import Snapshot
from day0check.types import Outputs, Request, RunCase, Turn, to_json
from reference import attention, linear, moe, norm, residual

WIDTH, VOCAB, LAYERS, EXPERTS, TOPK, KEYS = 32, 48, 3, 8, 2, 6
REQUEST = "text/fake/a#1"


def bf16(*shape: int, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=generator) * scale).bfloat16()


@dataclass(frozen=True)
class MiniModel:
    """Embedding, then layers of sparse attention and routed experts on a plain residual, then logits."""

    weights: dict[str, torch.Tensor]

    @staticmethod
    def seeded(seed: int = 0) -> MiniModel:
        generator = torch.Generator().manual_seed(seed)
        weights = {"embed": bf16(VOCAB, WIDTH, generator=generator), "norm": bf16(WIDTH, generator=generator) + 2}
        weights["head"] = bf16(VOCAB, WIDTH, generator=generator, scale=WIDTH**-0.5)
        for layer in range(LAYERS):
            for name, out in (
                ("q", WIDTH),
                ("wi", 16),
                ("ki", 8),
                ("qi", 16 * 8),
                ("latent", WIDTH),
                ("router", EXPERTS),
            ):
                weights[f"{layer}.{name}"] = bf16(out, WIDTH, generator=generator, scale=WIDTH**-0.5)
            for expert in range(EXPERTS):
                weights[f"{layer}.{expert}"] = bf16(WIDTH, WIDTH, generator=generator, scale=WIDTH**-0.5)
        return MiniModel(weights)

    def forward(self, tokens: list[int], dtype: torch.dtype, call: Callable[..., Any]) -> torch.Tensor:
        w = {name: value.to(dtype) for name, value in self.weights.items()}
        ids = torch.tensor(tokens)
        x = call("", "embed.tokens", linear.embed, ids, weight=w["embed"])
        for layer in range(LAYERS):
            place = f"layers.{layer:02d}"
            h = call(place, "norm.rms", norm.rms_norm, x, weight=w["norm"], eps=1e-5, site="input")
            y = self._attention(h, place, layer, w, call)
            x = call(place, "residual.add", residual.add, x, y=y, site="attention")
            h = call(place, "norm.rms", norm.rms_norm, x, weight=w["norm"], eps=1e-5, site="post_attention")
            y = self._experts(h, place, layer, w, call)
            x = call(place, "residual.add", residual.add, x, y=y, site="mlp")
        x = call("", "norm.rms", norm.rms_norm, x, weight=w["norm"], eps=1e-5, site="final")
        return call("", "head.logits", linear.linear_float32, x, weight=w["head"])

    def _attention(self, h: torch.Tensor, place: str, layer: int, w: dict, call: Callable[..., Any]) -> torch.Tensor:
        n = len(h)
        latent = call(place, "mla.latent", linear.linear, h, weight=w[f"{layer}.latent"])
        qi = call(place, "dsa.index_query", linear.linear, h, weight=w[f"{layer}.qi"]).view(n, 16, 8)
        wi = call(place, "dsa.index_weights", attention.index_weights, h, weight=w[f"{layer}.wi"])
        key = call(place, "kda.project", linear.linear, h, weight=w[f"{layer}.ki"], site="k")
        owner, visible = torch.zeros(n, dtype=torch.int64), torch.arange(1, n + 1)
        scores = call(
            place, "dsa.score", attention.index_scores, qi, weights=wi, keys=key[None], owner=owner, scale=0.3
        )
        chosen = call(place, "dsa.select", attention.select, scores, k=KEYS, visible=visible)
        q = call(place, "mla.query", linear.linear, h, weight=w[f"{layer}.q"], site="up")
        keys = latent[chosen.long().clamp(min=0)]
        values = {"valid": chosen >= 0, "value_width": WIDTH, "scale": WIDTH**-0.5}
        return call(place, "dsa.attention", attention.sparse_attention, q[:, None], keys=keys, **values).flatten(1)

    def _experts(self, h: torch.Tensor, place: str, layer: int, w: dict, call: Callable[..., Any]) -> torch.Tensor:
        scores = call(place, "moe.scores", moe.router_scores, h, weight=w[f"{layer}.router"], scoring="sigmoid")
        options = {"k": TOPK, "groups": 4, "kept_groups": 2, "renormalise": True, "scale": 2.0, "bias": None}
        ids, weights = call(place, "moe.route", moe.route, scores, **options)
        stacked = torch.stack([w[f"{layer}.{e}"] for e in range(EXPERTS)])[ids]
        y = torch.einsum("nkod,nd->nko", stacked, h).flatten(0, 1)
        order = torch.arange(len(h) * TOPK)
        return call(place, "moe.combine", moe.combine, y, order=order, weights=weights)

    def pair(self) -> tuple[Callable, Callable]:
        return (
            lambda tokens, images, call: self.forward(list(tokens), torch.float64, call),
            lambda tokens, images, call: self.forward(list(tokens), torch.float32, call),
        )


Fault = Callable[[str, str, Any, Any], Any]  # (tap, operator, result, kwargs) -> result


def candidate_call(
    keep: list, *, fault: Fault | None = None, mode: str = "nearest", seed: int = 0, profile: str = "bf16"
) -> Callable[..., Any]:
    """A `call` that rounds as the profile does and appends (tap, operator, results) of travelling taps to `keep`."""
    generator = torch.Generator().manual_seed(seed)

    def call(place: str, operator: str, function: Callable, *args: Any, site: str = "", **kwargs: Any) -> Any:
        tap = ".".join(p for p in (place, operator, site) if p)
        points = PROFILES[profile].points_of(operator)
        extra = {"round": Rounder(points, mode, generator)} if points else {}
        result = function(*args, **kwargs, **extra)
        if fault is not None:
            result = fault(tap, operator, result, kwargs)
        if CONTRACTS[operator].net:
            keep.append((place, operator, site, result if isinstance(result, tuple) else (result,)))
        return result

    return call


def write_snapshot(
    directory: Path,
    keep: list,
    tokens: list[int],
    *,
    prompt: int,
    request: str = REQUEST,
    generated: tuple[tuple[int, int], ...] = (),
    logits_from: int = 0,
) -> Snapshot:
    """Files as a worker writes them: one prefill step of `prompt` rows, then a decode step for each further row."""
    directory.mkdir(parents=True, exist_ok=True)
    capture, order = Capture(directory), 0
    steps = [("prefill", 0, prompt)] + [("decode", p, p + 1) for p in range(prompt, len(tokens))]
    for step, (phase, start, stop) in enumerate(steps):
        rows = RowMap((request,), (0,) * (stop - start), tuple(range(start, stop)))
        for place, operator, site, results in keep:
            if results[0].shape[0] == len(tokens):
                sliced = tuple(r[start:stop] for r in results)
                used = rows
                if operator == "head.logits":
                    first = max(start, logits_from)
                    sliced = tuple(r[first:stop] for r in results)
                    used = RowMap((request,), (0,) * max(stop - first, 0), tuple(range(first, stop)))
                if len(used):
                    capture.after(Call(place, operator, site, phase, step, order, used, (), {}), None, sliced)
            order += 1
        capture.end_step(step)
    capture.end_case()
    outputs = Outputs({request: (*tokens, 0)}, {request: generated}, {request: "length"})
    (directory / "outputs.json").write_text(json.dumps(to_json(outputs)))
    (directory / "run.json").write_text(json.dumps({"status": "finished", "message": "", "seconds": 1.0}))
    return Snapshot(directory)


def fake_case(tokens: list[int], *, prompt: int, request: str = REQUEST) -> RunCase:
    return RunCase("text/fake", (Request(request, (Turn(tuple(tokens[:prompt])),), len(tokens) - prompt + 1),))


def fake_tokens(count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
