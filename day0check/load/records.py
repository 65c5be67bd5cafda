"""What the client saw and what an answer says: frozen records without judgement. Times are perf_counter nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# refused: no connection; silent: no byte of an answer in time; stalled: no byte for too long inside one; late: the
# whole request took too long; dropped: the connection ended inside the answer; garbage: no JSON or no HTTP; flood: more
# bytes than any answer may have; cut: we left on purpose; unsent: the bounds of the run were reached
Fault = Literal["", "refused", "silent", "stalled", "late", "dropped", "garbage", "flood", "cut", "unsent"]


@dataclass(frozen=True)
class Reply:
    """One request on the wire. `status` 0: no status line came. `reads`: (time, bytes) of every read of the body.

    `scheduled_ns` is when the plan wanted it sent, `sent_ns` when it was; both are the same outside an open loop.
    `retry_after_s`: when the endpoint says one should come again, None where it does not say.
    """

    status: int
    scheduled_ns: int
    sent_ns: int
    end_ns: int
    reads: tuple[tuple[int, bytes], ...] = ()
    fault: Fault = ""
    detail: str = ""
    streamed: bool = False
    retry_after_s: float | None = None

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.reads)


@dataclass(frozen=True)
class Token:
    """One generated token as the endpoint names it. `top`: its alternatives, best first; `raw`: its bytes if given."""

    text: str
    logprob: float | None
    top: tuple[tuple[str, float], ...] = ()
    raw: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ToolCall:
    """One call of an answer, its pieces joined. `arguments`: text, which should be a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Piece:
    """One chunk with content: when it came, and how many tokens it says it holds (0: it does not say)."""

    at_ns: int
    text: str
    tokens: int = 0


@dataclass(frozen=True)
class Answer:
    """The content of a reply, streamed or whole. `flaws`: what the form of the reply itself breaks, by name;
    `prompt_ids`: tokens of the prompt, where the endpoint names them."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: str | None = None
    usage: Usage | None = None
    tokens: tuple[Token, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: bool = False
    choices: int = 0
    error: str = ""
    flaws: tuple[str, ...] = ()
    pieces: tuple[Piece, ...] = ()
    role_ns: int | None = None
    last_ns: int | None = None

    @property
    def good(self) -> bool:
        return not self.error and self.choices > 0

    @property
    def tool_calls(self) -> str:
        """The calls as one text, the same whichever way they came."""
        return "".join(f"{call.name}({call.arguments})" for call in self.calls)

    @property
    def logprobs(self) -> tuple[float, ...] | None:
        """Log-probabilities of the generated tokens, None where the endpoint gave none."""
        values = tuple(t.logprob for t in self.tokens)
        return values if values and all(v is not None for v in values) else None  # type: ignore[return-value]


@dataclass(frozen=True)
class Exchange:
    """A labelled request and what came back. The label says which question it belongs to: "stop", "together/1/3"."""

    label: str
    path: str
    asked: dict[str, Any]
    reply: Reply
    answer: Answer

    @property
    def good(self) -> bool:
        """Whether there is an answer to compare: status 200, nothing lost, at least one choice."""
        return self.reply.status == 200 and not self.reply.fault and self.answer.good

    @property
    def refused(self) -> bool:
        """Whether the endpoint said no in the way it should: a 4xx."""
        return 400 <= self.reply.status < 500


@dataclass(frozen=True)
class Counters:
    """The endpoint's own numbers at one moment, from /metrics; empty where it has none."""

    label: str
    values: dict[str, float] = field(default_factory=dict)
