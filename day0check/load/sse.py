"""An incremental decoder of server-sent events (WHATWG HTML, 9.2.6), indifferent to where the bytes are cut."""

from __future__ import annotations

from dataclasses import dataclass

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class SseEvent:
    """One dispatched event. `intact` is False when its bytes were no UTF-8; they are U+FFFD in `data` then."""

    data: str
    event: str = ""
    intact: bool = True


class SseDecoder:
    """`feed` gives the events that the bytes so far complete. An event without its closing blank line is never given:
    `leftover` tells that the stream ended inside one."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._at_start = True
        self._data: list[bytes] = []
        self._event = b""

    @property
    def leftover(self) -> bool:
        return bool(self._rest or self._data)

    def feed(self, data: bytes) -> list[SseEvent]:
        event = self._usual(data)
        if event is not None:
            return [event]
        if self._after_cr and data:
            data = data.removeprefix(b"\n")  # the line end was cut between its two bytes
            self._after_cr = False
        data = self._rest + data
        if self._at_start:
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._rest = data
                return []
            data, self._at_start = data.removeprefix(_BOM), False
        lines = data.splitlines(keepends=True)
        self._rest = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        self._after_cr = bool(lines) and not self._rest and lines[-1].endswith(b"\r")
        events = (self._line(line.rstrip(b"\r\n")) for line in lines)
        return [event for event in events if event is not None]

    def _usual(self, data: bytes) -> SseEvent | None:
        """The event where `data` is exactly one of one line, which nearly every read of a token is; else None."""
        if self._rest or self._data or self._event or self._after_cr or self._at_start:
            return None
        if not data.startswith(b"data: ") or data.find(b"\n") != len(data) - 2 or not data.endswith(b"\n\n"):
            return None
        try:
            return None if b"\r" in data else SseEvent(data[6:-2].decode())
        except UnicodeDecodeError:
            return None

    def _line(self, line: bytes) -> SseEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value
        return None  # comments, `id`, `retry` and unknown fields say nothing about an answer

    def _dispatch(self) -> SseEvent | None:
        data, event, empty = b"\n".join(self._data), self._event, not self._data
        self._data, self._event = [], b""
        if empty:
            return None
        try:
            return SseEvent(data.decode(), event.decode(errors="replace"))
        except UnicodeDecodeError:
            return SseEvent(data.decode(errors="replace"), event.decode(errors="replace"), intact=False)
