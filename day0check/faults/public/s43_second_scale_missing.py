"""The square of the magnitude scale is missing in the softmax scale."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-43",
    title="the softmax scale lacks the square of YaRN's magnitude scale",
    kind="rope",
    source="onnxruntime/mobius PR 548",
    visible="rows that see more than one key; position 0 is exact",
    expected=Address("dsa.attention", 0, "prefill"),
    model="tiny-deepseek-v3.2",
)


class Candidate(Accelerated):
    """The engine with a configuration whose softmax scale knows no YaRN."""

    def load(self, model_dir, profile, device, layout):
        super().load(model_dir, profile, device, layout)
        config = self._engine.config
        plain = type("Plain", (type(config),), {"softmax_scale": lambda c: (c.mla.nope + c.mla.rope) ** -0.5})
        self._engine.config = plain(**vars(config))
