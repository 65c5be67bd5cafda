"""The final state that is shown is the running sum before the last mix, which is not what the head reads."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry
from day0check.probe.recorder import Recorder

ENTRY = Entry(
    id="S-40",
    title="the captured final state is not the one that the logits come from",
    kind="output",
    source="vllm PR 50815",
    visible="models whose output is a mix of residuals; the model is right, the capture is wrong",
    expected=Address("capture.tap", None, "prefill"),
)


class Candidate(Accelerated):
    """The engine as it is, with a hook that shows another tensor."""

    def run(self, requests, schedule, recorder):
        return super().run(requests, schedule, Elsewhere(recorder.observers, recorder.heartbeat))


class Elsewhere(Recorder):
    """Shows the last source of the output's mix, and gives the engine the mix itself."""

    def call(self, place, operator, function, args, kwargs, site="", row_map=None, **more):
        if (operator, site) != ("residual.mix", "output"):
            return super().call(place, operator, function, args, kwargs, site, row_map, **more)
        super().call(place, operator, lambda sources, **_: sources[:, -1].clone(), args, kwargs, site, row_map, **more)
        return function(*args, **kwargs)
