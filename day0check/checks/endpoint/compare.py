"""Two answers to one prompt: where they part, how clear the choice was there, how far log-probabilities moved before.

A near-tie may fall either way when sums are taken in another order; a clear choice may not. What is near is said by
the claimed precision: logits in bfloat16 have steps of an eighth at 16 to 32, so a margin of two steps is still a tie.
"""

from __future__ import annotations

from dataclasses import dataclass

from day0check.load.records import Answer

MARGIN_LIMITS = {"fp32": 0.01}  # nats between the chosen token and the other one
DELTA_LIMITS = {"fp32": 0.01}  # nats that a token's log-probability may move
OTHER_MARGIN, OTHER_DELTA = 0.25, 0.5
_SHOWN = 24


@dataclass(frozen=True)
class Difference:
    """`at`: first token that differs (None: none does, or tokens are unknown); `margin`: nats by which the first
    answer's token led there; `delta`: largest |change of log-probability| over the common tokens; `text_at`: first
    character that differs, None where the texts are equal. None stands for what is unknown."""

    at: int | None
    margin: float | None
    delta: float | None
    text_at: int | None

    @property
    def same_text(self) -> bool:
        return self.text_at is None

    def beyond(self, profile: str) -> bool | None:
        """Whether rounding in the claimed precision cannot explain it; None when nothing tells."""
        if self.delta is not None and self.delta > DELTA_LIMITS.get(profile, OTHER_DELTA):
            return True
        if self.same_text:
            return False
        if self.delta is not None and self.at is None:
            return True  # the same tokens cannot have two texts
        return None if self.margin is None else self.margin > MARGIN_LIMITS.get(profile, OTHER_MARGIN)


def difference(one: Answer, other: Answer) -> Difference:
    """`other` against `one`; texts with their thoughts and tool calls."""
    text_at = first_difference(full_text(one), full_text(other))
    a, b = one.tokens, other.tokens
    if one.logprobs is None or other.logprobs is None:
        return Difference(None, None, None, text_at)
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x.text != y.text), None)
    common = min(len(a), len(b)) if at is None else at
    if at is None and len(a) != len(b):
        at = common  # one goes on where the other ends
    delta = max((abs(x - y) for x, y in zip(one.logprobs[:common], other.logprobs[:common], strict=True)), default=0.0)
    margin = None
    if at is not None and at < min(len(a), len(b)):
        known = dict(a[at].top)
        lead = [a[at].logprob - known[b[at].text]] if b[at].text in known else []
        lead += [a[at].top[0][1] - a[at].top[1][1]] if not lead and len(a[at].top) > 1 else []
        margin = abs(lead[0]) if lead else None
    return Difference(at, margin, delta, text_at)


def full_text(answer: Answer) -> str:
    return "".join((answer.reasoning, answer.text, answer.tool_calls))


def first_difference(one: str, other: str) -> int | None:
    """Index of the first character that differs; the shorter length when one begins the other; None when equal."""
    if one == other:
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def shown(text: str, at: int = 0) -> str:
    """A piece of `text` from `at` on, quoted, in printable characters."""
    return ascii(text[at : at + _SHOWN]) if text[at:] else "nothing"
