"""Linear layers cut their sums elsewhere in every call, as kernels beside other streams do."""

import itertools

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-04",
    title="sums of linear layers in another order from call to call",
    kind="experts",
    visible="last bits, and not the same ones when a case is run again",
    expected=None,
)

CALLS = itertools.count()


@day0check.operator("mla.query")
@day0check.operator("mla.latent")
@day0check.operator("mla.gate")
@day0check.operator("dsa.index_query")
@day0check.operator("kda.project")
@day0check.operator("moe.down")
@day0check.operator("moe.up")
def linear(x, *, weight):
    cut = 1 + (next(CALLS) * 37) % (x.shape[1] - 1)
    early = x[:, :cut].float() @ weight[:, :cut].float().T
    return (x[:, cut:].float() @ weight[:, cut:].float().T + early).to(x.dtype)
