"""The operators of the serve family: what is due to the client now, found from the end of what it already has.

Contracts in `contracts/serve.py`. Each function is pure: an answer's state is its tokens or text so far and `sent`.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
KEY_OPEN, KEY_CLOSE = "<arg_key>", "</arg_key>"
VALUE_OPEN, VALUE_CLOSE = "<arg_value>", "</arg_value>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
LONGEST_PARTIAL_BYTES = 3  # of a UTF-8 character that is not complete


def held(text: str, tags: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a tag: the most that any tag can claim."""
    longest = 0
    for tag in tags:
        for count in range(min(len(tag) - 1, len(text)), longest, -1):
            if text.endswith(tag[:count]):
                longest = count
                break
    return longest


def detokenise(tokens: Sequence[int], *, pieces: Sequence[bytes], sent: int, final: bool) -> str:
    """Text that tokens[sent:] complete. `pieces[token]`: the bytes of a token.

    What an incomplete character needs to go on lies in the last three bytes before `sent`, since no valid lead byte
    ever continues another character (RFC 3629).
    """
    before, first = b"", sent
    while first and len(before) < LONGEST_PARTIAL_BYTES:
        first -= 1
        before = pieces[tokens[first]] + before
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(before)
    return decoder.decode(b"".join(pieces[token] for token in tokens[sent:]), final)


def stop(
    text: str, *, sent: int, strings: Sequence[str], token: int, ends: Sequence[int], final: bool
) -> tuple[str, str]:
    """Text to hand out and the reason to end: the first stop string to be completed behind `sent`, "token", or ""."""
    reach = max(map(len, strings), default=1) - 1
    given = sent - held(text[max(0, sent - reach) : sent], strings)
    hits = [(at + len(s), -len(s), s) for s in strings if (at := text.find(s, max(0, sent - len(s) + 1))) >= 0]
    if hits:
        end, minus_length, string = min(hits)
        return text[given : end + minus_length], string
    keep = 0 if final else held(text[-reach:] if reach else "", strings)
    return text[given : len(text) - keep], "token" if token in ends else ""


def reasoning(text: str, *, sent: int, final: bool) -> tuple[str, str]:
    """More thoughts and more of the answer. The thoughts' end is a tag, which is in neither, or the first tool call."""
    if not text.startswith(THINK_OPEN):
        undecided = len(text) < len(THINK_OPEN) and THINK_OPEN.startswith(text) and not final
        given = 0 if THINK_OPEN.startswith(text[:sent]) else sent
        return "", "" if undecided else text[given:]
    begin, tags = len(THINK_OPEN), (THINK_CLOSE, CALL_OPEN)
    closed, called = (text.find(tag, begin) for tag in tags)
    ended = closed if called < 0 or 0 <= closed < called else called
    resume = ended + (len(THINK_CLOSE) if ended == closed else 0)

    def thought(upto: int, whole: bool) -> int:
        """Where the thoughts end that are certain in the first `upto` characters."""
        if 0 <= ended and upto >= ended + len(THINK_CLOSE if ended == closed else CALL_OPEN):
            return ended
        return max(begin, upto - (0 if whole else held(text[begin:upto], tags)))

    thoughts = text[thought(sent, False) : thought(len(text), final)]
    if ended < 0:
        return thoughts, ""
    tag_end = ended + len(THINK_CLOSE if ended == closed else CALL_OPEN)
    return thoughts, text[resume if sent < tag_end else max(resume, sent) :]


@dataclass(frozen=True)
class _Step:
    """One thing that a tool-call text says, and the character with whose arrival it became certain."""

    known_at: int
    call: int  # -1: text outside of calls
    name: str = ""
    text: str = ""
    grows_from: int = -1  # `text` is text[grows_from : known_at]'s growing part, quoted when inside a call


def tool_call(
    text: str, *, sent: int, schemas: Mapping[str, Mapping[str, str]], final: bool
) -> tuple[str, tuple[tuple[int, str, str], ...]]:
    """More text outside of calls, and (number, name when new, more JSON arguments) of calls that went on.

    The text is read once from the front; whatever was certain at `sent` characters is dropped, growing runs are cut.
    """
    content: list[str] = []
    calls: dict[int, list[str]] = {}
    for step in _read(text, schemas, final):
        piece = step.text
        if step.grows_from >= 0:
            begin = step.grows_from
            stops = (VALUE_CLOSE,) if step.call >= 0 else (CALL_OPEN,)
            had = max(begin, min(step.known_at, sent - held(text[begin:sent], stops))) if sent > begin else begin
            piece = text[had : step.known_at]
            if step.call >= 0:
                piece = json.dumps(piece, ensure_ascii=False)[1:-1]
            if not piece:
                continue
        elif step.known_at <= sent:
            continue
        if step.call < 0:
            content.append(piece)
        else:
            name, *arguments = calls.setdefault(step.call, [""])
            calls[step.call] = [step.name or name, *arguments, piece]
    return "".join(content), tuple((n, c[0], "".join(c[1:])) for n, c in calls.items())


def _read(text: str, schemas: Mapping[str, Mapping[str, str]], final: bool) -> Iterator[_Step]:
    at, call = 0, 0
    while True:
        opened = text.find(CALL_OPEN, at)
        if opened < 0:
            end = len(text) - (0 if final else held(text[at:], (CALL_OPEN,)))
            yield _Step(end, -1, grows_from=at)
            return
        yield _Step(opened, -1, grows_from=at)
        inside = opened + len(CALL_OPEN)
        found = _name(text, inside)
        if found is None:
            if final:
                yield _Step(len(text) + 1, -1, text=text[opened:])
            return
        name, body, known = found
        yield _Step(known, call, name=name)
        after = yield from _arguments(text, body, call, schemas.get(name, {}), final)
        if after < 0:
            return
        at, call = after, call + 1


def _name(text: str, begin: int) -> tuple[str, int, int] | None:
    """(name, where the arguments begin, the character that ended it), or None while the name may go on."""
    while begin < len(text) and text[begin].isspace():
        begin += 1
    marks = [(at, tag) for tag in ("\n", KEY_OPEN, CALL_CLOSE) if (at := text.find(tag, begin)) >= 0]
    if not marks:
        return None
    at, tag = min(marks)
    return text[begin:at].strip(), at, at + len(tag)


def _arguments(text: str, at: int, call: int, types: Mapping[str, str], final: bool) -> Iterator[_Step]:
    """Steps of one call's arguments; the value of the generator is where the call ends, -1 while it has not."""
    lead = "{"
    while True:
        closed = text.find(CALL_CLOSE, at)
        key_at = text.find(KEY_OPEN, at)
        key_end = text.find(KEY_CLOSE, key_at + len(KEY_OPEN)) if key_at >= 0 else -1
        opened = text.find(VALUE_OPEN, key_end + len(KEY_CLOSE)) if key_end >= 0 else -1
        if closed >= 0 and (opened < 0 or closed < opened):
            after = closed + len(CALL_CLOSE)
            yield _Step(after, call, text=("{" if lead == "{" else "") + "}")
            return after
        if opened < 0:
            return -1
        begin = opened + len(VALUE_OPEN)
        key = text[key_at + len(KEY_OPEN) : key_end].strip()
        quoted = types.get(key, "string") == "string"
        yield _Step(begin, call, text=f"{lead}{json.dumps(key, ensure_ascii=False)}: " + '"' * quoted)
        lead, end = ", ", text.find(VALUE_CLOSE, begin)
        upto = end if end >= 0 else len(text) - (0 if final else held(text[begin:], (VALUE_CLOSE,)))
        if quoted:
            yield _Step(upto, call, grows_from=begin)
        if end < 0:
            return -1
        at = end + len(VALUE_CLOSE)
        yield _Step(at, call, text='"' if quoted else _as_json(text[begin:end]))


def _as_json(value: str) -> str:
    """`value` itself when it is JSON (RFC 8259), otherwise as a JSON string."""
    try:
        json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return value.strip()


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def logprobs(logits: Tensor, *, chosen: Tensor, top: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [R, V] float32: log-probability and rank [R] of chosen [R], the best K = max(top) of each row [R, K]."""
    width = max(top, default=0)
    wide = logits.double()
    normal = torch.log_softmax(wide, -1)
    own = wide.gather(1, chosen.unsqueeze(1))
    ids = torch.arange(logits.shape[1], device=logits.device)
    ahead = (wide > own) | ((wide == own) & (ids < chosen.unsqueeze(1)))
    best = torch.sort(wide, dim=1, descending=True, stable=True).indices[:, :width]
    asked = torch.arange(width, device=logits.device) < torch.tensor(top, device=logits.device).unsqueeze(1)
    return (
        normal.gather(1, chosen.unsqueeze(1)).squeeze(1).float(),
        ahead.sum(1) + 1,
        torch.where(asked, best, -1),
        torch.where(asked, normal.gather(1, best), float("nan")).float(),
    )


SERVING: dict[str, Callable[..., Any]] = {
    "serve.detokenise": detokenise,
    "serve.stop": stop,
    "serve.reasoning": reasoning,
    "serve.tool_call": tool_call,
    "serve.logprobs": logprobs,
}
