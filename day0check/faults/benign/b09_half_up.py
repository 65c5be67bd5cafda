"""FP8 activations rounded half away from zero, by the reciprocal of the scale."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-09",
    title="ties of FP8 codes away from zero, the reciprocal of the scale multiplied",
    kind="quantisation",
    visible="codes at ties",
    expected=None,
    profile="fp8-activations",
)


@day0check.operator("quantise.rows")
def rows(x):
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    amax = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(amax > 0, 448 / amax, 1.0)
    nudged = blocks * inverse * (1 + 2.0**-22)
    codes = nudged.clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
    return codes[:, : x.shape[1]].contiguous(), (1 / inverse).squeeze(-1)
