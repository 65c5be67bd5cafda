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


@day0check.operator("moe.experts")
def experts(x, *, offsets, w1, w3, w2, w1_scale, w3_scale, w2_scale, activation, beta, linear_beta, limit):
    expert = torch.arange(len(w1), device=x.device).repeat_interleave(offsets.diff())
    first, third, second = (_plain(w, s)[expert] for w, s in ((w1, w1_scale), (w3, w3_scale), (w2, w2_scale)))
    g, u = (torch.einsum("pi,poi->po", x.float(), w) for w in (first, third))
    h = beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)
    return torch.einsum("pi,poi->po", h.to(x.dtype).float(), second).to(x.dtype)


def _plain(payload, scale):
    return payload.float() * scale.repeat_interleave(128, -1)[..., : payload.shape[-1]]
