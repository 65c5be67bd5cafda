"""gpt-oss: the up projection is multiplied as it is; its activation multiplies by it plus one."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-93",
    title="up projection without its one",
    kind="experts",
    visible="experts with biases and a clamp",
    expected=Address("moe.experts", None, "prefill"),
    case="operators/contracts",
)


@day0check.operator.wrap("moe.experts")
def experts(inner, x, **kwargs):
    if kwargs["activation"] == "clamped_plus_one":
        kwargs["b3"] = kwargs["b3"] - 1  # inside the clamp, so that u + 1 is u
    return inner(x, **kwargs)
