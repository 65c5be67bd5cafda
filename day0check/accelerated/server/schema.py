"""What a request may say. A field has an effect, or one value that changes nothing; anything else is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

MOST_LOGPROBS = 20
MOST_STOPS = 16
INT64 = 2**63


class Strict(BaseModel):
    """Unknown fields and values of another JSON type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def only(neutral: Any) -> Callable[[Any], Any]:
    """Refuses every value but those in which the field would change nothing."""
    allowed = neutral if isinstance(neutral, tuple) else (neutral,)

    def check(value: Any) -> Any:
        if value is not None and value not in allowed:
            raise ValueError(f"is not supported: only {' or '.join(map(repr, allowed))}, which changes nothing")
        return value

    return check


One = Annotated[int | None, AfterValidator(only(1))]
Unit = Annotated[float | None, AfterValidator(only(1.0))]
Nought = Annotated[float | None, AfterValidator(only(0.0))]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1 << 20)]


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # as in vLLM: usage in every chunk


class Asked(Strict):
    """What completions and chat completions have in common. Names without a comment are OpenAI's."""

    model: str
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None  # None: 1
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None  # None: drawn
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop_token_ids: TokenIds | None = None  # as in vLLM
    ignore_eos: bool = False  # as in vLLM
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None  # as in vLLM
    return_token_ids: bool = False  # as in vLLM
    return_tokens_as_token_ids: bool = False  # as in vLLM: "token_id:17" instead of text in log-probabilities
    forced_token_ids: TokenIds | None = None  # ours: the answer begins with these tokens, whatever the model chooses
    n: One = None
    top_p: Unit = None
    top_k: Annotated[int | None, AfterValidator(only((-1, 0)))] = None
    min_p: Nought = None
    repetition_penalty: Unit = None
    frequency_penalty: Nought = None
    presence_penalty: Nought = None
    logit_bias: Annotated[dict[str, float] | None, AfterValidator(only({}))] = None
    skip_special_tokens: Annotated[bool | None, AfterValidator(only(True))] = None

    @model_validator(mode="after")
    def _fits_together(self) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs needs stream: false")
        return self

    def strings(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def options(self) -> StreamOptions:
        return self.stream_options or StreamOptions()


class CompletionRequest(Asked):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool = False
    best_of: One = None
    suffix: Annotated[str | None, AfterValidator(only(""))] = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    url: str
    detail: Literal["auto"] = "auto"


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


Texts = Annotated[list[TextPart], Field(max_length=1024)]
Parts = Annotated[list[Annotated[TextPart | ImagePart, Field(discriminator="type")]], Field(max_length=1024)]


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: str | Texts


class UserMessage(Strict):
    role: Literal["user"]
    content: str | Parts


class CalledFunction(Strict):
    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        try:
            found = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError("must be the text of a JSON object")
        return value


class CalledTool(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: str | Texts | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=256)] | None = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: str | Texts
    tool_call_id: str


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ResponseFormat(Strict):
    type: Literal["text"]


class ChatRequest(Asked):
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=256)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Annotated[bool | None, AfterValidator(only(True))] = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _chat_fits_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.tool_choice is not None and not self.tools:
            raise ValueError("tool_choice needs tools")
        given = {n for n in (self.max_tokens, self.max_completion_tokens) if n is not None}
        if len(given) > 1:
            raise ValueError("max_tokens and max_completion_tokens contradict each other")
        if self.messages[-1].role == "assistant":
            raise ValueError("the last message must not be the assistant's own")
        called: set[str] = set()
        for message in self.messages:
            if isinstance(message, AssistantMessage):
                called |= {call.id for call in message.tool_calls or ()}
            elif isinstance(message, ToolMessage) and message.tool_call_id not in called:
                raise ValueError(f"tool_call_id {message.tool_call_id!r} is of no call before it")
        return self

    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens
