"""The linear bound of the activation is 24 where 25 is due."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-14",
    title="linear_beta 24 for 25",
    kind="experts",
    visible="large values of up",
    expected=Address("mlp.dense", None, "prefill"),
    case="operators/contracts",
)


@day0check.operator.wrap("mlp.dense")
def mlp(inner, x, *, linear_beta, **kwargs):
    return inner(x, linear_beta=24.0, **kwargs)
