"""Between two operators the engine scales what one gave the other."""

from day0check.accelerated import layers
from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-38",
    title="the engine changes a result between two operators",
    kind="residual",
    visible="every row",
    expected=Address("residual.add", 0, "prefill"),
)


class Candidate(Accelerated):
    """The engine with a feed-forward sublayer whose result is scaled on its way to the residual sum."""

    def run(self, requests, schedule, recorder):
        plain = layers.feed_forward
        layers.feed_forward = lambda *args: plain(*args) * 1.01
        try:
            return super().run(requests, schedule, recorder)
        finally:
            layers.feed_forward = plain
