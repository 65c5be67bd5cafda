"""The draft layer on the fast path: beside the reference, and without a trace in the model's own answers."""

import copy
from dataclasses import replace

import pytest
import torch

from day0check.accelerated.draft import PAGE
from day0check.backends.accelerated import Accelerated
from day0check.probe.recorder import Observer, Recorder
from day0check.types import Request, Schedule, ScheduleEvent, Turn
from reference.model import Model
from reference.presets import preset, preset_dir
from reference.weights import Checkpoint, write_checkpoint

MODEL, PLACE = "tiny-glm-5", "layers.05"


class Seen(Observer):
    """Taps in order, and the rows of the draft logits by request and position."""

    place = PLACE

    def __init__(self):
        self.taps, self.rows = [], {}

    def after(self, call, token, results):
        self.taps.append(call.tap)
        if call.tap == f"{self.place}.head.logits":
            for i, row in enumerate(results[0].double()):
                self.rows[call.rows.address(i)] = row.clone()


def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


class Kept(Observer):
    """Bits of the rows behind the final norm and of those that the draft layer reads, by request and position."""

    def __init__(self):
        self.final, self.read = {}, {}

    def before(self, call):
        if call.tap == f"{PLACE}.norm.rms.draft_hidden":
            self._put(self.read, call, call.args[0])

    def after(self, call, token, results):
        if call.tap == "norm.rms.final":
            self._put(self.final, call, results[0])

    def _put(self, where, call, rows):
        where.update((call.rows.address(i), row.clone()) for i, row in enumerate(rows))


def run(requests, schedule, model=MODEL, *, seen=None, profile: str = "fp32"):
    backend, seen = Accelerated(), seen or Seen()
    backend.load(str(preset_dir(model) if isinstance(model, str) else model), profile, "cpu", {})
    return backend.run(requests, schedule, Recorder([seen])), seen


def test_drafts_are_those_of_the_reference():
    """Catches the token of the row itself, halves changed over, a hidden row of another position or request, and a page
    of one that another reads: two requests, chunks, several turns, more rows than a page holds."""
    requests = (
        Request("a", (Turn(tokens(1, PAGE + 30)), Turn(tokens(2, 9))), max_new_tokens=5),
        Request("b", (Turn(tokens(3, 21)),), max_new_tokens=3),
    )
    outputs, seen = run(requests, Schedule(chunk=40, page=16))
    model = Model(Checkpoint(preset_dir(MODEL)))
    for request in requests:
        sequence = list(outputs.sequences[request.id])[:-1]  # what was fed
        state = model.start()
        model.extend(state, sequence, drafts=True)
        found = torch.stack([seen.rows[request.id, p] for p in range(len(sequence) - 1)])
        assert float((found - state.drafted).abs().max() / state.drafted.abs().max()) < 2e-5
    assert len(seen.rows) == sum(len(s) - 2 for s in outputs.sequences.values())


def test_drafts_of_several_streams(tmp_path):
    """Catches a draft that reads one stream of several, or before they are brought together (GLM-5.3)."""
    chosen = preset("tiny-glm-5.3")
    files = copy.deepcopy(chosen.json_files)
    files["config.json"]["text_config"]["num_nextn_predict_layers"] = 1
    chosen = replace(chosen, json_files=files)
    model = write_checkpoint(tmp_path / "model", chosen.tensors(), json_files=files)
    reference = Model(Checkpoint(model))
    seen = Seen()
    seen.place = f"layers.{len(reference.config.layers):02d}"
    outputs, _ = run((Request("a", (Turn(tokens(1, 40)),), max_new_tokens=3),), Schedule(chunk=24), model, seen=seen)
    state, sequence = reference.start(), list(outputs.sequences["a"])[:-1]
    reference.extend(state, sequence, drafts=True)
    found = torch.stack([seen.rows["a", p] for p in range(len(sequence) - 1)])
    assert float((found - state.drafted).abs().max() / state.drafted.abs().max()) < 2e-5


def test_reads_the_rows_of_the_models_own_steps():
    """Catches rows of a second pass, whose experts and keys differ where two are close."""
    requests = (
        Request("a", (Turn(tokens(1, 150)),), max_new_tokens=6),
        Request("b", (Turn(tokens(3, 90)),), max_new_tokens=3),
    )
    _, kept = run(requests, Schedule(chunk=40, page=16), seen=Kept(), profile="bf16")
    assert len(kept.final) == 9
    assert len(kept.final.keys() & kept.read.keys()) == 7  # behind the last token fed there is none
    assert all(torch.equal(row, kept.final[address]) for address, row in kept.read.items() if address in kept.final)


def test_the_models_own_calls_come_first_and_are_the_same():
    """Catches a draft layer that runs between the steps of the model, or whose pass over the model is recorded."""
    request = (Request("a", (Turn(tokens(1, 40)),), max_new_tokens=2),)
    _, seen = run(request, Schedule())
    first = seen.taps.index(f"{PLACE}.embed.tokens")
    assert all(tap.startswith(PLACE) or tap == "kv.slots" for tap in seen.taps[first:])
    assert not any(tap.startswith(PLACE) for tap in seen.taps[:first])
    assert seen.taps.count("head.logits") == 2


@pytest.mark.parametrize(
    ("requests", "schedule"),
    [
        pytest.param((Request("a", (Turn((5,)),)),), Schedule(), id="one token"),
        pytest.param(
            (Request("a", (Turn(tokens(1, 20)),), max_new_tokens=9),),
            Schedule(events=(ScheduleEvent(3, "abort", "a"),)),
            id="aborted",
        ),
    ],
)
def test_what_has_nothing_to_draft_is_left_alone(requests, schedule):
    """Catches a pass over no rows, and one over a request that was given up."""
    _, seen = run(requests, schedule)
    assert not any(tap.startswith(PLACE) for tap in seen.taps)


def test_rows_of_another_request_are_not_made_up():
    """Catches drafts of a request that begins behind a prefix: its first rows were never computed for it."""
    prompt = tokens(1, 70)
    requests = (
        Request("a", (Turn(prompt),), max_new_tokens=2),
        Request("b", (Turn((*prompt, *tokens(2, 9))),), max_new_tokens=2, arrive_step=6),
    )
    outputs, seen = run(requests, Schedule(page=16, prefix_cache=True))
    assert outputs.finish.keys() == {"a", "b"}
    assert {request for request, _ in seen.rows} == {"a"}


def test_a_model_without_the_layer_drafts_nothing():
    """Catches a draft layer that is asked for where there is none."""
    _, seen = run((Request("a", (Turn(tokens(1, 20)),), max_new_tokens=2),), Schedule(), model="tiny-deepseek-v3.2")
    assert not any("draft" in tap for tap in seen.taps)
