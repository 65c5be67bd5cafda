"""A projection quantises its rows to FP8 inside, under a profile that does not claim it."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-84",
    title="FP8 inside a projection that claims bf16",
    kind="quantisation",
    visible="every projection",
    expected=Address("kda.project", 0, "prefill"),
)


@day0check.operator.wrap("kda.project")
def project(inner, x, **kwargs):
    scale = (x.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return inner((codes.float() * scale).to(x.dtype), **kwargs)
