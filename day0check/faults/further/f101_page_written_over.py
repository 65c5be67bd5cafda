"""Something that is no operator writes into a page between two steps."""

from day0check.accelerated.engine import Engine
from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-101",
    title="a row of a page is written over between two steps",
    kind="cache",
    visible="from the second decode step on",
    expected=Address("kv.write", 5, "decode", position=2),
)


class Candidate(Accelerated):
    """The engine whose latent of position 2 in layer 5 is doubled before every decode step."""

    def run(self, requests, schedule, recorder):
        plain = Engine.decode

        def decode(engine, caller, caches, batch):
            caches.kv[5][int(batch.table[0, 0]), 2] *= 2
            return plain(engine, caller, caches, batch)

        Engine.decode = decode
        try:
            return super().run(requests, schedule, recorder)
        finally:
            Engine.decode = plain
