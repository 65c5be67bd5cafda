"""The norm adds 1e-6 where 1e-5 is due."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-07",
    title="eps 1e-6 for 1e-5 in a norm",
    kind="residual",
    visible="rows with a small norm",
    expected=Address("norm.rms", None, "prefill"),
    case="operators/contracts",
)


@day0check.operator.wrap("norm.rms")
def norm(inner, x, *, eps, **kwargs):
    return inner(x, eps=1e-6 if eps == 1e-5 else eps, **kwargs)
