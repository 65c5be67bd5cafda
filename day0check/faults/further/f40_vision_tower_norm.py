"""The projector of the images norms with the epsilon of another norm."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-40",
    title="the projector norms with eps 1e-1",
    kind="vision",
    visible="every image",
    expected=Address("vision.project", None, "prefill"),
    case="image",
)


@day0check.operator.wrap("vision.project")
def project(inner, x, *, eps, **kwargs):
    return inner(x, eps=1e-1, **kwargs)
