"""From tokens to text: one answer on its way, in the engine's thread, through the operators of the serve family."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from day0check.accelerated.server.orders import Done, Event, Failed, Order, Piece, PromptLogprobs, TokenLogprob
from day0check.probe.registry import Operators


class Answer:
    """Takes an order's tokens one by one and sends what may be handed out. The engine's thread owns it.

    `send` must not block. Whatever an operator raises ends this answer only, as `Failed`.
    """

    def __init__(
        self, order: Order, *, operators: Operators, pieces: Sequence[bytes], send: Callable[[Event], None]
    ) -> None:
        self.order, self._operators, self._pieces, self._send = order, operators, pieces, send
        self.tokens: list[int] = []
        self._text = ""
        self._stop_reason: str | int | None = None

    def take(self, token: int, logprob: TokenLogprob | None) -> bool:
        """Takes the next token; True when the answer ends with it."""
        self.tokens.append(token)
        text, reason = self._released(len(self.tokens) - 1, final=False)
        if reason:
            self._stop_reason = token if reason == "token" else reason
        self._send(Piece(text, (token,), () if logprob is None else (logprob,)))
        return bool(reason)

    def finish(self, reason: str) -> None:
        """Hands out what was held back, unless a stop string has cut it off, and ends the answer."""
        if not isinstance(self._stop_reason, str):
            text, found = self._released(len(self.tokens), final=True)
            if found not in ("", "token"):  # only the end of the bytes completed it
                self._stop_reason, reason = found, "stop"
            if text:
                self._send(Piece(text, ()))
        self._send(Done(reason, self._stop_reason))

    def prompt(self, logprobs: Sequence[TokenLogprob]) -> None:
        self._send(PromptLogprobs(tuple(logprobs)))

    def fail(self, message: str, *, shutting_down: bool = False) -> None:
        self._send(Failed(message, shutting_down))

    def _released(self, sent: int, *, final: bool) -> tuple[str, str]:
        detokenise, stop = (self._operators.get(f"serve.{name}", "serve") for name in ("detokenise", "stop"))
        known = len(self._text)
        self._text += detokenise(self.tokens, pieces=self._pieces, sent=sent, final=final)
        return stop(
            self._text,
            sent=known,
            strings=self.order.strings,
            token=self.tokens[-1] if self.tokens else -1,
            ends=self.order.ends,
            final=final,
        )
