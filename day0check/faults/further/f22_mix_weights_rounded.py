"""The weights of the residual mix are rounded to eight bits."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-22",
    title="mixing weights with eight bits, unclaimed",
    kind="residual",
    visible="mixes of two or more sources",
    expected=Address("residual.mix", 0, "prefill"),
)


@day0check.operator("residual.mix")
def mix(sources, *, norm_weight, proj, eps):
    v = sources.float()
    normed = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) * norm_weight.float()
    share = torch.softmax(normed @ proj.float().reshape(-1), -1)
    share = (share * 256).round() / 256
    return torch.einsum("rn,rnd->rd", share, v).to(sources.dtype)
