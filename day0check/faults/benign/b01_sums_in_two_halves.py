"""Linear layers add the two halves of their columns one after the other, the later half first."""

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-01",
    title="another order of summation in linear layers",
    kind="experts",
    visible="last bits",
    expected=None,
)


@day0check.operator("mla.query")
@day0check.operator("mla.latent")
@day0check.operator("mla.gate")
@day0check.operator("dsa.index_query")
@day0check.operator("kda.project")
@day0check.operator("moe.down")
@day0check.operator("moe.up")
def linear(x, *, weight):
    half = x.shape[1] // 2
    first = x[:, :half].float() @ weight[:, :half].float().T
    return (x[:, half:].float() @ weight[:, half:].float().T + first).to(x.dtype)
