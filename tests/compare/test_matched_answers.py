"""The matched filter from answers alone: planted parameter faults of a served black box, and healthy ones."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from types import SimpleNamespace

import black_boxes
import pytest
import torch

from day0check.compare.matched_case import compare_logits_of_case, shows_logits_alone
from day0check.compare.propagated import compare_case
from day0check.compare.wire import WireAnswer, matched
from day0check.contracts.profiles import PROFILES
from day0check.probe.capture import Capture
from day0check.probe.recorder import Recorder
from day0check.snapshot import Snapshot
from day0check.types import Measure, Request, RunCase, Schedule, Turn, to_json
from day0check.worker.oracle import _matched
from reference.presets import preset_dir
from reference.weights import Checkpoint

MODEL, PROMPTS, LENGTH = "tiny-kimi-k2.5", 4, 96


@functools.cache
def requests(model: str, prompts: int, seed: int) -> tuple[Request, ...]:
    draw, vocab = random.Random(seed), min(400, Checkpoint(preset_dir(model)).config.vocab)
    texts = (tuple(draw.randrange(32, vocab) for _ in range(LENGTH)) for _ in range(prompts))
    return tuple(Request(f"text/box/{i}#1", (Turn(tokens),), 1) for i, tokens in enumerate(texts))


def ran(
    directory: Path, backend: type, *, model: str = MODEL, prompts: int = PROMPTS, seed: int = 0
) -> tuple[RunCase, Snapshot]:
    """A case as the worker leaves it behind a backend that shows its logits."""
    directory.mkdir()
    box, capture = backend(), Capture(directory)
    box.load(str(preset_dir(model)), "bf16", "cpu", {})
    case = RunCase("text/box", requests(model, prompts, seed))
    recorder = Recorder([capture])
    with torch.inference_mode():
        outputs = box.run(case.requests, Schedule(), recorder)
    recorder.end_case()
    (directory / "outputs.json").write_text(json.dumps(to_json(outputs)))
    (directory / "run.json").write_text(json.dumps({"status": "finished"}))
    return case, Snapshot(directory)


def told(directory: Path, backend: type, **options: int | str) -> Measure:
    case, snapshot = ran(directory, backend, **options)
    (measure,) = compare_logits_of_case(str(preset_dir(options.get("model", MODEL))), "bf16", case, snapshot)
    return measure


@pytest.mark.parametrize(
    ("backend", "operators", "layer", "size"),
    [
        ("Routed", ("moe.combine", "moe.experts"), None, 0.01),
        ("SoftmaxOfOneLayer", ("mla.attention",), 1, 0.10),
        ("Theta", ("rope.apply",), None, 0.20),
    ],
)
def test_a_planted_parameter_is_named_sized_and_placed(tmp_path, backend, operators, layer, size):
    """Catches a filter that needs inner taps, names another parameter or layer, or an error of another size."""
    measure = told(tmp_path / "box", getattr(black_boxes, backend))
    assert not measure.passed
    assert measure.operator in operators, measure.message
    assert measure.layer == layer
    low, high = measure.statistics["amplitude_low"], measure.statistics["amplitude_high"]
    assert low < measure.statistics["amplitude"] < high
    assert measure.statistics["amplitude"] == pytest.approx(size, rel=0.25)
    assert "95% interval" in measure.message
    if backend == "Routed":  # what is linear in the same product cannot be told apart, and is said
        assert "no number of prompts tells" in measure.message


def test_what_the_answers_cannot_show_is_said_and_accuses_nobody(tmp_path):
    """Catches an eps that is called right, or a guess at it: a tenfold one lies far below the noise here."""
    measure = told(tmp_path / "box", black_boxes.Epsilon)
    assert measure.passed
    assert "not even ten times the value shows of norm.rms.eps" in measure.message
    assert measure.statistics["sees_norm.rms.eps"] > 9
    assert 0 < measure.statistics["sees_moe.combine.weights"] < 0.01
    assert "one percent of it needs" in measure.message


def test_a_healthy_black_box_is_accused_of_nothing(tmp_path):
    """Catches a cry of wolf where choices fall otherwise: nobody shows them, so no pass can follow. With these prompts
    one key falls otherwise in the candidate and in no replicate, which is 61 noises of that row's logits."""
    case, snapshot = ran(tmp_path / "box", black_boxes.Healthy, model="tiny-deepseek-v3.2", seed=2)
    assert shows_logits_alone(snapshot)
    directory = str(preset_dir("tiny-deepseek-v3.2"))
    judged = [m for m in compare_case(directory, "bf16", case, snapshot) if not m.not_judged]
    assert {m.operator for m in judged} == {"head.logits", "sample.token"}
    assert all(m.passed for m in judged), judged
    (measure,) = compare_logits_of_case(directory, "bf16", case, snapshot)
    assert measure.passed
    assert measure.tap == "head.logits.matched"


def test_an_error_that_is_no_parameter_names_none(tmp_path):
    """Catches a filter that lays every error along some parameter: experts of a router whose rows are exchanged."""

    class Exchanged(black_boxes.Healthy):
        def call(self, place, operator, function, *args, site="", **kwargs):
            if operator == "moe.scores":
                kwargs["weight"] = kwargs["weight"].roll(1, 0)
            return super().call(place, operator, function, *args, site=site, **kwargs)

    case, snapshot = ran(tmp_path / "box", Exchanged, prompts=2)
    (measure,) = compare_logits_of_case(str(preset_dir(MODEL)), "bf16", case, snapshot)
    assert measure.passed
    assert measure.statistics["unexplained"] > 3
    assert any(
        not m.passed and m.operator == "head.logits"
        for m in compare_case(str(preset_dir(MODEL)), "bf16", case, snapshot)
    )


def test_the_worker_asks_the_filter_of_a_black_box(tmp_path):
    """Catches a filter that no run ever reaches: of a candidate whose calls nobody saw, and of no other."""
    _, snapshot = ran(tmp_path / "box", black_boxes.Routed, prompts=2)
    case = RunCase("text/box", requests(MODEL, 2, 0))
    job = SimpleNamespace(model_dir=str(preset_dir(MODEL)), profile="bf16")
    (measure,) = _matched(job, case, snapshot)
    assert measure.failing == "matched"
    snapshot.measures = (measure,)
    assert not shows_logits_alone(
        snapshot
    )  # a model without choices, whose calls were replayed, keeps the net's limits
    assert _matched(job, case, snapshot) == []


def test_log_probabilities_of_an_endpoint_name_a_parameter():
    """Catches an endpoint whose answers are compared one by one, where only together they show a wrong parameter."""
    answers = {}
    for name, wrong in (("healthy", None), ("routed", ("moe.route", "scale", 1.05, ""))):
        box = type("Box", (black_boxes.Healthy,), {"wrong": wrong})()
        box.load(str(preset_dir(MODEL)), "bf16", "cpu", {})
        answers[name] = tuple(answer_of(box, r.turns[0].tokens) for r in requests(MODEL, 6, 0))
    assert matched(str(preset_dir(MODEL)), "bf16", answers["healthy"]).passed
    found = matched(str(preset_dir(MODEL)), "bf16", answers["routed"])
    assert not found.passed
    assert found.operator in ("moe.combine", "moe.experts"), found.message
    assert found.statistics["amplitude"] == pytest.approx(0.05, rel=0.5)
    assert matched(str(preset_dir(MODEL)), "bf16", [WireAnswer("a", (40, 41), (42,))]) is None


def answer_of(box: black_boxes.Healthy, tokens: tuple[int, ...]) -> WireAnswer:
    """The last 24 of `tokens` as an answer to the others, with the log-probabilities that the box gives them."""
    with torch.inference_mode():
        logprobs = box.model.forward(tokens, call=box.call).double().log_softmax(-1)
    given = tokens[-24:]
    said = tuple(float(logprobs[len(tokens) - 25 + i, t]) for i, t in enumerate(given))
    return WireAnswer("a", tokens[:-24], given, said)


@pytest.mark.slow
def test_one_percent_of_the_softmax_scale_shows_in_as_many_prompts_as_were_foretold(tmp_path):
    """The figure behind "needs N prompts": four prompts do not show one percent, those that it names do."""

    class OnePercent(black_boxes.Healthy):
        wrong = ("mla.attention", "scale", 1.01, "")

    few = told(tmp_path / "few", OnePercent)
    assert few.passed
    needed = int(PROMPTS * (few.statistics["sees_mla.attention.scale"] / 0.01) ** 2) + 1
    many = told(tmp_path / "many", OnePercent, prompts=2 * needed)
    print(f"needed {needed}, {many.message}")
    assert many.operator == "mla.attention"
    assert many.statistics["amplitude"] == pytest.approx(0.01, rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "tiny-deepseek-v3.2", "tiny-kimi-linear", "tiny-kimi-k2.5"])
def test_healthy_black_boxes_of_several_families_are_accused_of_nothing(tmp_path, model):
    """The false alarms of the filter and of the net without choices: none in 12 cases of each family."""
    for seed in range(12):
        case, snapshot = ran(tmp_path / str(seed), black_boxes.Healthy, model=model, seed=seed)
        assert all(m.passed for m in compare_case(str(preset_dir(model)), "bf16", case, snapshot) if not m.not_judged)
        (measure,) = compare_logits_of_case(str(preset_dir(model)), PROFILES["bf16"], case, snapshot)
        assert measure.passed, measure.message
