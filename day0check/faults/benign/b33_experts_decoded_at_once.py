"""Expert weights are decoded and multiplied for all pairs at once."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-33",
    title="experts as one batched product",
    kind="experts",
    visible="last bits",
    expected=None,
)


def activated(g, u, activation, beta, linear_beta, limit):
    if activation == "situ":
        return beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)
    if activation == "clamped":
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return torch.nn.functional.silu(g) * u


@day0check.operator("moe.experts")
def experts(x, *, offsets, w1, w3, w2, activation, beta=None, linear_beta=None, limit=None, **scales):
    expert = torch.arange(len(w1), device=x.device).repeat_interleave(offsets.diff())
    weights = (("w1", w1), ("w3", w3), ("w2", w2))
    first, third, second = (_plain(w, scales.get(f"{name}_scale"))[expert] for name, w in weights)
    g, u = (torch.einsum("pi,poi->po", x.float(), w) for w in (first, third))
    h = activated(g, u, activation, beta, linear_beta, limit)
    return torch.einsum("pi,poi->po", h.to(x.dtype).float(), second).to(x.dtype)


def _plain(payload, scale):
    if scale is None:
        return payload.float()
    return payload.float() * scale.repeat_interleave(128, -1)[..., : payload.shape[-1]]
