"""The host side of an answer in whole-text form: what is due of the whole so far, less what was due before."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

CALL, CALL_END = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"
_NAME = re.compile(r"\s*(?=\S)(.*?)\s*(?=\n|<arg_key>|</tool_call>)", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>.*?<arg_value>", re.DOTALL)

Call = tuple[str, str]  # name, JSON arguments as far as they are known


def _more(whole: str, known: str) -> str:
    if not whole.startswith(known):
        raise ValueError(f"what was handed out, {known!r}, is no beginning of {whole!r}")
    return whole[len(known) :]


def _without_beginning_of(text: str, tags: Sequence[str]) -> str:
    """`text` without the longest ending that may become one of `tags`."""
    for begin in range(max(0, len(text) - max(map(len, tags), default=0)), len(text)):
        if any(tag != text[begin:] and tag.startswith(text[begin:]) for tag in tags):
            return text[:begin]
    return text


# ------------------------------------------------------------------------------------------------------- tokens


def detokenise(tokens: Sequence[int], *, pieces: Sequence[bytes], sent: int, final: bool) -> str:
    """Text of `tokens` less the text of their first `sent`. `pieces[token]` are the bytes of a token.

    The bytes of an incomplete last character belong to no text until `final`; then they become U+FFFD, as all bytes
    that are no UTF-8 do (Unicode 15, 3.9, "maximal subparts").
    """
    whole = _text(b"".join(pieces[t] for t in tokens), final)
    return _more(whole, _text(b"".join(pieces[t] for t in tokens[:sent]), False))


def _text(data: bytes, final: bool) -> str:
    for count in range(min(3, len(data)), 0, -1):
        if not final and _begins_a_character(data[-count:]):
            data = data[:-count]
            break
    return data.decode("utf-8", errors="replace")


def _begins_a_character(data: bytes) -> bool:
    """Whether a valid character of more bytes starts with `data`: the decoder then asks for more, and only then."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start == 0 and error.end == len(data) and error.reason == "unexpected end of data"
    return False


# --------------------------------------------------------------------------------------------------------- text


def stop(
    text: str, *, sent: int, strings: Sequence[str], token: int, ends: Sequence[int], final: bool
) -> tuple[str, str]:
    """What may be handed out of `text` less what could be of its first `sent` characters, and why the answer ends."""
    known = _without_beginning_of(text[:sent], strings)
    for length in range(1, len(text) + 1):
        ending = [s for s in strings if text[:length].endswith(s)]
        if ending:
            hit = max(ending, key=len)
            return _more(text[: length - len(hit)], known), hit
    whole = text if final else _without_beginning_of(text, strings)
    return _more(whole, known), "token" if token in ends else ""


def reasoning(text: str, *, sent: int, final: bool) -> tuple[str, str]:
    """Thoughts and answer of `text`, each less that of its first `sent` characters."""
    now, before = _thoughts(text, final), _thoughts(text[:sent], False)
    return _more(now[0], before[0]), _more(now[1], before[1])


def _thoughts(text: str, final: bool) -> tuple[str, str]:
    if not text.startswith(THINK):
        undecided = not final and THINK.startswith(text)
        return "", "" if undecided else text
    inner = text[len(THINK) :]
    marks = [(inner.find(mark), mark) for mark in (THINK_END, CALL) if mark in inner]
    if not marks:
        return (inner if final else _without_beginning_of(inner, (THINK_END, CALL))), ""
    at, mark = min(marks)
    return inner[:at], inner[at + len(THINK_END) :] if mark == THINK_END else inner[at:]


def tool_call(
    text: str, *, sent: int, schemas: Mapping[str, Mapping[str, str]], final: bool
) -> tuple[str, tuple[tuple[int, str, str], ...]]:
    """Text outside of calls, and (number, name, arguments) of each call that went on since `sent` characters.

    `schemas[tool][parameter]` is a JSON type. The name comes once, "" afterwards. A name ends at a line's end or a tag;
    a call ends at the first closing tag outside a value. Between the tags of a call nothing counts. A call whose name
    never ends is text.
    """
    content, calls = _parsed(text, schemas, final)
    known_content, known = _parsed(text[:sent], schemas, False)
    deltas = []
    for number, (name, arguments) in enumerate(calls):
        old = known[number][1] if number < len(known) else ""
        delta = (number, "" if number < len(known) else name, _more(arguments, old))
        if number >= len(known) or delta[2]:
            deltas.append(delta)
    return _more(content, known_content), tuple(deltas)


def _parsed(text: str, schemas: Mapping[str, Mapping[str, str]], final: bool) -> tuple[str, list[Call]]:
    content, calls = "", []
    while CALL in text:
        outside, text = text.split(CALL, 1)
        content += outside
        name = _NAME.match(text)
        if name is None:
            return content + (CALL + text if final else ""), calls
        arguments, text = _arguments(text[name.end() :], schemas.get(name[1], {}), final)
        calls.append((name[1], arguments))
    return content + (text if final else _without_beginning_of(text, (CALL,))), calls


def _arguments(text: str, types: Mapping[str, str], final: bool) -> tuple[str, str]:
    """The arguments of a call as far as they are known, and the text behind the call."""
    made = ""
    while True:
        end, argument = text.find(CALL_END), _ARGUMENT.search(text)
        if end >= 0 and (argument is None or end < argument.end()):
            return (made or "{") + "}", text[end + len(CALL_END) :]
        if argument is None:
            return made, ""
        key = argument[1].strip()
        text = text[argument.end() :]
        value, closed, rest = text.partition("</arg_value>")
        made += ("{" if not made else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        plain = types.get(key, "string") == "string"
        if not closed:
            shown = value if final else _without_beginning_of(value, ("</arg_value>",))
            return made + (json.dumps(shown, ensure_ascii=False)[:-1] if plain else ""), ""
        made += json.dumps(value, ensure_ascii=False) if plain else _literal(value)
        text = rest


def _literal(value: str) -> str:
    """A JSON value as it is written, or what is none as a JSON string."""
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return value.strip()


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


# ----------------------------------------------------------------------------------------------------- logprobs


def logprobs(logits: Tensor, *, chosen: Tensor, top: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row by row: log-probability of `chosen`, its rank (1 = largest; equal logits by id), the `top[row]` best tokens.

    logits [R, V] -> float32 [R], int64 [R], int64 [R, K], float32 [R, K] with K = max(top); sums in float64.
    """
    width = max(top, default=0)
    values, ranks, ids, best = [], [], [], []
    for row, token, count in zip(logits.double(), chosen.tolist(), top, strict=True):
        normal = row - torch.logsumexp(row, 0)
        order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))
        values.append(float(normal[token]))
        ranks.append(order.index(token) + 1)
        ids.append(order[:count] + [-1] * (width - count))
        best.append([float(normal[i]) for i in order[:count]] + [float("nan")] * (width - count))
    device = logits.device
    return (
        torch.tensor(values, dtype=torch.float64, device=device).float(),
        torch.tensor(ranks, dtype=torch.int64, device=device),
        torch.tensor(ids, dtype=torch.int64, device=device).view(len(values), width),
        torch.tensor(best, dtype=torch.float64, device=device).float().view(len(values), width),
    )
