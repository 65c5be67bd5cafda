"""The loader of square expert weights leaves out their last transpose."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-22",
    title="square expert weights are loaded without their last transpose",
    kind="quantisation",
    source="unsloth-zoo PR 1114",
    visible="any token; without an error only because hidden and intermediate width are equal",
    expected=Address("moe.experts", 1, "prefill"),
)


@day0check.prepare("moe.experts")
def load(*, w1, w3, w2, w1_scale, w3_scale, w2_scale):
    def decoded(payload, scale):
        return payload.float() * scale.repeat_interleave(128, -1)[..., : payload.shape[-1]]

    return {"gate": decoded(w1, w1_scale).mT, "up": decoded(w3, w3_scale).mT, "down": decoded(w2, w2_scale)}


@day0check.operator("moe.experts")
def experts(x, *, offsets, gate, up, down, active, activation, beta, linear_beta, limit):
    expert = active.repeat_interleave(offsets.diff())
    g, u = (torch.einsum("pi,poi->po", x.float(), w[expert]) for w in (gate, up))
    h = beta * torch.tanh(g / beta) * torch.sigmoid(g) * linear_beta * torch.tanh(u / linear_beta)
    return torch.einsum("pi,poi->po", h.to(x.dtype).float(), down[expert]).to(x.dtype)
