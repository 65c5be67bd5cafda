"""What an answer must depend on: the earlier turns of a conversation, and the image that was really sent."""

from __future__ import annotations

from day0check.checks.endpoint.answer import answered, found
from day0check.checks.endpoint.compare import difference, full_text
from day0check.checks.evidence import Answer
from day0check.load.observed import Observed
from day0check.load.records import Exchange

TURNS = "endpoint.turns"
IMAGES = "endpoint.images"
TURNS_QUESTION = "Does an answer depend on the earlier turns of its conversation?"
IMAGES_QUESTION = "Does an answer depend on the image that was sent with it, and on no earlier one?"


def judge_turns(observed: Observed) -> Answer:
    """Two histories that differ in the first turn: equal log-probabilities can only mean that nobody read it."""
    a, b = observed.get("turns/a"), observed.get("turns/b")
    if a is None or b is None:
        why = "the endpoint has no chat" if observed.api == "completions" else "no conversation was sent"
        return answered(TURNS, (), why, not_run="" if observed.api == "completions" and _finished(observed) else why)
    if not a.good or not b.good:
        bad = b if a.good else a
        if bad.refused:
            text = f"the endpoint refuses a conversation of three turns: {bad.answer.error}"
            return answered(TURNS, [found(TURNS, "refused", text, label=bad.label)], text)
        return answered(TURNS, (), "", not_run="a conversation got no answer: see endpoint.protocol")
    equal = _equal(a, b)
    if equal:
        text = "the answer is the same to the last digit after two different histories: earlier turns are not read"
        return answered(TURNS, [found(TURNS, "history ignored", text, label="turns/b")], text)
    if equal is None:
        return answered(
            TURNS,
            (),
            "",
            not_run="both histories got one answer, which can be right: without log-probabilities nothing tells",
        )
    return answered(TURNS, (), "answers depend on the earlier turns")


def judge_images(observed: Observed, *, sees: bool | None = None) -> Answer:
    """`sees`: whether the reference says that the model has a vision tower; None when that is not known."""
    a, b, again = (observed.get(f"image/{name}") for name in ("a", "b", "a_again"))
    if a is None:
        why = "the endpoint has no chat" if observed.api == "completions" else "no image was sent"
        return answered(IMAGES, (), why, not_run="" if observed.api == "completions" and _finished(observed) else why)
    if a.refused:
        if sees:
            text = f"the model has a vision tower and the endpoint refuses an image: {a.answer.error}"
            return answered(IMAGES, [found(IMAGES, "refused", text, label=a.label)], text)
        return answered(IMAGES, (), "images are refused with a clear 4xx")
    if not a.good:
        said = a.answer.error or a.reply.detail
        text = f"an image gets no answer: {f'HTTP {a.reply.status}' if not a.reply.fault else a.reply.fault} ({said})"
        return answered(IMAGES, [found(IMAGES, "no answer", text, label=a.label)], text)
    if b is None or again is None or not b.good or not again.good:
        text = "the first image was answered and a later one was not"
        return answered(IMAGES, [found(IMAGES, "later image", text, label="image/b")], text)
    equal = _equal(a, b)
    if equal:
        text = (
            "two different images under one text get one answer to the last digit: an image is not read, or an old one"
        )
        return answered(IMAGES, [found(IMAGES, "same answer", text, label="image/b")], text)
    if equal is None:
        same = "both images got one answer, which can be right: without log-probabilities nothing tells"
        return answered(IMAGES, (), "", not_run=same)
    apart = difference(a.answer, again.answer)
    if not apart.same_text and full_text(again.answer) == full_text(b.answer):
        text = "the first image, sent again, gets the answer of the image between"
        return answered(IMAGES, [found(IMAGES, "image before", text, label="image/a_again")], text)
    return answered(IMAGES, (), "answers depend on the image that was sent")


def _equal(a: Exchange, b: Exchange) -> bool | None:
    """Whether two answers are one to the last digit; None when only their texts could be compared, and are equal."""
    if full_text(a.answer) != full_text(b.answer):
        return False
    if a.answer.logprobs is None or b.answer.logprobs is None:
        return None
    return a.answer.logprobs == b.answer.logprobs


def _finished(observed: Observed) -> bool:
    return "wire" in observed.done
