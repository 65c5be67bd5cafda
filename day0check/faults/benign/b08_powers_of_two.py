"""FP8 activations whose scales are powers of two, quantised at those scales."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-08",
    title="scales of FP8 rows rounded up to powers of two, codes of those scales",
    kind="quantisation",
    visible="every code",
    expected=None,
    profile="fp8-activations",
)


@day0check.operator("quantise.rows")
def rows(x):
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    amax = blocks.abs().amax(-1).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    codes = (blocks / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).flatten(1)
    return codes[:, : x.shape[1]].contiguous(), scale
