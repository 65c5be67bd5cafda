"""The base of the rotary embedding is not found under its new name: the default is used."""

from day0check.faults.damage import Damaged, text_config
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-45",
    title="rope_theta falls back to 10000",
    kind="rope",
    source="vllm PR 56066, PR 44158",
    visible="grows with the position",
    expected=Address("rope.apply", 0, "prefill"),
    model="tiny-glm-5",
)


class Candidate(Damaged):
    def config(self, config):
        text = text_config(config)
        (text["rope_parameters"] if "rope_parameters" in text else text)["rope_theta"] = 10000.0
