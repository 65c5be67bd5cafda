"""The draft projection takes the hidden half first: the paper writes it so, checkpoints hold it the other way round."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-91",
    title="hidden half before the embedding half",
    kind="residual",
    visible="the draft layer alone: no token of the model changes",
    expected=Address("draft.project", 5, "prefill"),
    model="tiny-glm-5",
)


@day0check.operator.wrap("draft.project")
def project(inner, x, **kwargs):
    return inner(x.roll(x.shape[-1] // 2, -1), **kwargs)
