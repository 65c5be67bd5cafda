"""Hard inputs of the mixture of experts and of the MXFP4 conversion."""

from __future__ import annotations

from typing import Any

import torch

from day0check.contracts.hard_inputs import Draw, Generator
from day0check.contracts.hard_inputs_spine import activation

ROWS, EXPERTS, CHOICES, LATENT, HIDDEN = 37, 16, 4, 64, 64
Arguments = tuple[Any, dict[str, Any]]


def _convert(d: Draw, name: str) -> Arguments:
    """Four experts of [32 rows, 160 columns]: one whole block of 128 columns and one cut short."""
    experts, rows, columns = 4, 32, 160
    packed = d.integers(0, 256, experts, rows, columns // 2).to(torch.uint8)
    exponent = torch.full((experts, rows, columns // 32), 120)
    if name == "every_code":
        packed = torch.arange(experts * rows * columns // 2, device=d.device).reshape(packed.shape).to(torch.uint8)
    elif name == "every_scale":
        # one code for the four groups of the whole block, another for the one after it: each code 0 .. 254 occurs
        number = torch.arange(experts * rows).reshape(experts, rows, 1)
        exponent = torch.cat((number.expand(-1, -1, 4), 255 - number - 1), -1)
    elif name in ("spread_14", "spread_15"):
        exponent[..., 0] = 120 - int(name[-2:])
    chosen = {"one_expert": [3], "every_scale": [0, 1, 2, 3]}.get(name, [0, 1, 3])
    return packed, {"scale": exponent.to(torch.uint8).to(d.device), "experts": d.whole(chosen)}


def _scores(d: Draw, name: str) -> Arguments:
    x = d.rows(name, ROWS, 64, scale=40.0 if name == "saturated" else 1.0)
    if name == "biased_logits":  # biases as large as the logits
        return x, {"weight": d.weight(EXPERTS, 64), "scoring": "logit", "router_bias": d.act(EXPERTS)}
    return x, {"weight": d.weight(EXPERTS, 64), "scoring": "sigmoid"}


def _route(d: Draw, name: str) -> Arguments:
    if name == "softmax_of_logits":  # no bias, no groups: both signs, several of a kind at the cut
        scores = torch.round(d.raw(ROWS, EXPERTS, scale=6.0) * 4) / 4
        plain = {"groups": 1, "kept_groups": 1, "renormalise": False, "scale": 1.0}
        return scores.to(d.device), {"bias": None, "k": CHOICES, **plain, "weighting": "softmax"}
    scores, bias = torch.sigmoid(d.raw(ROWS, EXPERTS)), d.raw(EXPERTS, scale=0.05)
    if name == "ties":
        scores, bias = torch.round(scores * 8) / 8, torch.zeros(EXPERTS)
    elif name == "negative_biased":
        bias = bias - 2
    elif name == "large_bias":
        bias = bias * 100
    elif name == "saturated":
        scores = torch.where(scores > 0.5, 1 - 2.0**-24, 2.0**-30)
    return scores.to(d.device), {
        "bias": bias.to(d.device),
        "k": CHOICES,
        "groups": 4,
        "kept_groups": 2,
        "renormalise": True,
        "scale": 2.5,
    }


def _ids(d: Draw, name: str) -> torch.Tensor:
    ids = torch.stack([d.shuffled(EXPERTS)[:CHOICES] for _ in range(ROWS)])
    if name == "one_expert":
        return torch.full((ROWS, 1), 3, device=d.device)
    if name == "empty_experts":
        return ids % 4 + 4 * torch.arange(CHOICES, device=d.device) // 2 * 2 % EXPERTS
    if name == "padding":
        ids[-5:] = -1
    return ids


def _dispatch(d: Draw, name: str) -> Arguments:
    return d.act(ROWS, LATENT), {"ids": _ids(d, name), "experts": EXPERTS}


def _payload(d: Draw, name: str, out: int, width: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 payload [A, out, width] and its power-of-two scales per 128 columns."""
    if name == "extreme_codes":
        codes = d.integers(0, 256, experts, out, width).to(torch.uint8)
        codes = torch.where(codes & 0x7F == 0x7F, codes - 1, codes)  # no NaN
        exponent = torch.full((experts, out, 1), -11.0)
    else:
        values = d.raw(experts, out, width, scale=16.0)
        codes = values.to(torch.float8_e4m3fn).view(torch.uint8)
        exponent = d.integers(-9, -5, experts, out, 1).float()
    return codes.to(d.device).view(torch.float8_e4m3fn), torch.exp2(exponent).to(d.device)


def _experts(d: Draw, name: str) -> Arguments:
    if name == "biased_clamped":
        return _biased(d)
    counts = [1] if name == "one_pair" else [5, 1, 20, 7]
    offsets = d.whole([0, *torch.tensor(counts).cumsum(0).tolist()])
    active, pairs = len(counts), sum(counts)
    x = d.rows(name, pairs, LATENT, scale=20.0 if name == "large_gate" else 1.0)
    kwargs: dict[str, Any] = {"offsets": offsets, **activation(name)}
    for weight, out, width in (("w1", HIDDEN, LATENT), ("w3", HIDDEN, LATENT), ("w2", LATENT, HIDDEN)):
        if name == "large_gate":
            kwargs[weight] = d.act(active, out, width, scale=width**-0.5)
        else:
            kwargs[weight], kwargs[f"{weight}_scale"] = _payload(d, name, out, width, active)
    return x, kwargs


def _biased(d: Draw) -> Arguments:
    """Experts with biases whose gates and ups lie on both sides of the limit (gpt-oss), weights as FP8 payloads."""
    counts = [4, 9, 1]
    kwargs: dict[str, Any] = {"offsets": d.whole([0, *torch.tensor(counts).cumsum(0).tolist()])}
    for weight, out, width in (("w1", HIDDEN, LATENT), ("w3", HIDDEN, LATENT), ("w2", LATENT, HIDDEN)):
        kwargs[weight], kwargs[f"{weight}_scale"] = _payload(d, "plain", out, width, len(counts))
        kwargs[f"b{weight[1]}"] = d.act(len(counts), out, scale=2.0)
    return d.act(sum(counts), LATENT, scale=4.0), {
        **kwargs,
        "activation": "clamped_plus_one",
        "limit": 7.0,
        "alpha": 1.702,
    }


def _combine(d: Draw, name: str) -> Arguments:
    pairs = ROWS * CHOICES
    order = d.shuffled(pairs)
    y, weights = d.raw(pairs, LATENT), torch.softmax(d.raw(ROWS, CHOICES), -1) * 2.5
    if name == "cancellation":
        weights = weights[:, :1].expand(-1, CHOICES).contiguous()
        by_pair = d.raw(ROWS, 1, LATENT) * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
        y = (by_pair * (1 + 2.0**-6 * d.raw(ROWS, CHOICES, 1))).reshape(pairs, LATENT)[order.cpu()]
    elif name == "padding":
        order = order[: pairs - 9]
        y = y[: len(order)]
    return d.to(y), {"order": order, "weights": weights.to(d.device)}


GENERATORS: dict[str, Generator] = {
    "moe.convert": _convert,
    "moe.scores": _scores,
    "moe.route": _route,
    "moe.dispatch": _dispatch,
    "moe.experts": _experts,
    "moe.combine": _combine,
}
