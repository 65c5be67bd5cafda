"""FP8 activations with scales rounded to bfloat16: the largest value of a block may lie a little above 448."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-10",
    title="a scale rounded down in bfloat16, its largest value saturates within half a step",
    kind="quantisation",
    visible="the largest value of a block",
    expected=None,
    profile="fp8-activations",
)


@day0check.operator("quantise.rows")
def rows(x):
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    amax = blocks.abs().amax(-1)
    scale = torch.where(amax > 0, amax / 448, 1.0).bfloat16().float()
    codes = (blocks / scale.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
    return codes[:, : x.shape[1]].contiguous(), scale
