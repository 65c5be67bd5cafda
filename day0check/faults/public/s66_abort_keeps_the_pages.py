"""A request that is aborted is forgotten, and the pages that it held are forgotten with it."""

from day0check.accelerated.server.live import Live
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-66",
    title="the pages of an aborted request never come back",
    kind="serving",
    source="vllm-ascend issue 16662",
    visible="after clients left in the middle of an answer",
    expected=Address("serve.abort", None, "serve"),
    model="tiny-deepseek-v3.2",
    case="service/embedded",
    differs="any abort keeps them, not only one during an asynchronous load",
)


class Candidate(Live):
    def abort(self, name):
        for running in [r for r in self.active if r.request.id == name]:
            running.tenancy.table.clear()  # what is not in the table is not given back
        super().abort(name)
