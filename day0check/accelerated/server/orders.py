"""What the HTTP side hands to the engine's thread and what comes back: frozen records, free of JSON and of torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from day0check.types import Request, Turn


@dataclass(frozen=True)
class Order:
    """One prompt to be answered. `images`: files, in the order of the media pads of `prompt`.

    `forced`: tokens that stand in for the model's own choices, from the first on. `ends`: tokens that end the answer;
    `strings`: texts that do, and are cut off. `top`: how many best tokens to tell beside the log-probability of each
    token of the answer, `prompt_top` of the prompt; None: no log-probabilities.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    images: tuple[str, ...] = ()
    temperature: float = 0.0
    seed: int = 0
    forced: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    top: int | None = None
    prompt_top: int | None = None

    def request(self) -> Request:
        """As the scheduler takes it; what ends the answer is decided outside of it."""
        return Request(
            id=self.id,
            turns=(Turn(self.prompt, self.images),),
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=self.seed,
            forced=(self.forced,) if self.forced else (),
        )


@dataclass(frozen=True)
class TokenLogprob:
    """`rank` counts from 1; `top`: (token, log-probability), best first. A log-probability of -inf is possible."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """More of an answer: text may be "" while a character or a stop string is not complete."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class PromptLogprobs:
    """Of the prompt's tokens 1, 2, ...: nothing precedes token 0."""

    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Done:
    """The end of an answer. `finish`: "stop" or "length"; `stop_reason`: the string or token that ended it."""

    finish: str
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class Failed:
    """The answer cannot go on. `message` is for the client; `shutting_down`: it was ended from outside."""

    message: str
    shutting_down: bool = False


Event = Piece | PromptLogprobs | Done | Failed


@dataclass
class Times:
    """Monotonic seconds of one request's life, 0.0 for what has not happened."""

    arrived: float
    admitted: float = 0.0
    first_token: float = 0.0
    latest_token: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between tokens
