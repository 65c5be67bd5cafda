"""The scale of FP8 activations is taken from the first half of each block: the rest saturates."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-83",
    title="FP8 scales from half a block, the other half saturates",
    kind="quantisation",
    visible="blocks whose largest value lies in the second half",
    expected=Address("quantise.rows", 0, "prefill"),
    profile="fp8-activations",
)


@day0check.operator("quantise.rows")
def rows(x):
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    amax = blocks[..., :64].abs().amax(-1)
    scale = torch.where(amax > 0, amax / 448, 1.0)
    codes = (blocks / scale.unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
    return codes[:, : x.shape[1]].contiguous(), scale
