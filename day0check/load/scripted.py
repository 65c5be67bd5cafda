"""Answers whose text is known beforehand: what a server's parsers must make of them, whole and streamed.

Only a server that lets a client prescribe an answer's tokens (`forced_token_ids`) and has a token for each byte can be
asked so; every other one is asked for tool calls in the ordinary way and compared with itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from day0check.load import asks
from day0check.load.asks import CHAT, COMPLETIONS
from day0check.load.records import Exchange
from day0check.load.scenario import Asker

PROBE = "day0check"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
LONGEST_STOP = 256  # characters that a stop string may have
PLAIN_PROMPT = "Look it up."
NATURAL_TOKENS = 64


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]

    def text(self) -> str:
        """The call as GLM-4.5 and later write it."""
        pairs = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>"
            for key, value in self.arguments.items()
        )
        return f"{OPEN}{self.name}{pairs}{CLOSE}"


@dataclass(frozen=True)
class Script:
    """An answer and its parts. `at_once`: a stop string that the answer nearly reaches holds all of it back to the end,
    so that the parsers get it in one piece."""

    name: str
    content: str = ""
    thoughts: str = ""
    calls: tuple[Call, ...] = ()
    ended: bool = True  # the thoughts end with their tag; a tool call ends them, too
    at_once: bool = False

    @property
    def text(self) -> str:
        before = f"<think>{self.thoughts}{'</think>' * self.ended}" if self.thoughts else ""
        return before + self.content + "".join(call.text() for call in self.calls)

    @property
    def stop(self) -> list[str]:
        return [self.text + "\n"] if self.at_once else []


SCRIPTS = (
    Script("characters", "Grüße, señor: 海は青い, 한국어 문장, 👩‍👩‍👧 🇩🇪 e\u0301."),
    Script("no_call", "a <tool b, <tool_cal1>, <think> and </tool_call> are text"),
    Script("one_call", "Let me look.", calls=(Call("find", {"path": "/tmp"}),)),
    Script("values", calls=(Call("weather", {"city": 'Mü "n"\n</b>parameter'}),)),
    Script("types", calls=(Call("weather", {"days": 3, "where": {"a": [1.5, None]}}),)),
    Script("calls_at_once", calls=(Call("now", {}), Call("find", {"path": "/"}), Call("now", {})), at_once=True),
    Script("thoughts", "The answer is 4.", thoughts="Two and two, <hm>."),
    Script("thoughts_then_call", thoughts="I need a tool. ", calls=(Call("find", {"path": "/srv"}),), ended=False),
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {k: {"type": t} for k, t in p.items()}},
        },
    }
    for name, p in {
        "find": {"path": "string"},
        "weather": {"city": "string", "days": "integer", "where": "object"},
        "now": {},
    }.items()
]


async def tools(asker: Asker) -> None:
    """Known answers where the server lets us prescribe them; tool calls by request everywhere else."""
    if await _forces(asker):
        ways = [(script, way) for script in SCRIPTS for way in ("whole", "stream")]
        jobs = {f"script/{s.name}/{way}": scripted(asker, s, stream=way == "stream") for s, way in ways}
        await asker.at_once(jobs, path=CHAT)
        if asker.wish.ends:
            await asker.at_once({f"end/{end}": _ended(asker, end) for end in asker.wish.ends}, path=COMPLETIONS)
    elif asker.dialect.api == "chat":
        await _natural(asker)


async def _forces(asker: Asker) -> bool:
    """Whether the server answers with the bytes that it is told to: a 200 alone says nothing."""
    if asker.dialect.api != "chat" or not any(e.label == "hello/completions" and e.good for e in asker.exchanges):
        return False
    body = {"model": asker.dialect.model, "prompt": "x", "temperature": 0, "max_tokens": len(PROBE)}
    probe = await asker("forced", body | {"forced_token_ids": list(PROBE.encode())}, path=COMPLETIONS)
    return forces(probe)


def forces(probe: Exchange | None) -> bool:
    return probe is not None and probe.good and probe.answer.text == PROBE


def scripted(asker: Asker, script: Script, *, stream: bool) -> dict[str, Any]:
    ids = list(script.text.encode())
    plain = asks.Dialect(asker.dialect.api, asker.dialect.model)  # log-probabilities are work of their own
    body = asks.ask(plain, PLAIN_PROMPT, max_tokens=len(ids), stream=stream, tools=TOOLS)
    body |= {"forced_token_ids": ids}
    return body | ({"stop": script.stop} if script.at_once else {})


def _ended(asker: Asker, end: int) -> dict[str, Any]:
    """An answer with a token that must end it in its middle."""
    ids = list(PROBE.encode())
    body = {"model": asker.dialect.model, "prompt": "x", "temperature": 0, "max_tokens": 2 * len(ids) + 1}
    return body | {"forced_token_ids": [*ids, end, *ids]}


async def _natural(asker: Asker) -> None:
    """The same request for a tool whole and streamed, left to the model and by name."""
    prompt = "What is the weather in Munich for three days? Use the tool."
    named = {"type": "function", "function": {"name": "weather"}}
    without = asks.ask(asker.dialect, prompt, max_tokens=1)
    await asker("tools/without", without)
    for choice, value in (("auto", "auto"), ("named", named)):
        for way in ("whole", "stream"):
            body = asks.ask(asker.dialect, prompt, max_tokens=NATURAL_TOKENS, stream=way == "stream")
            shown = await asker(f"tools/{choice}/{way}", body | {"tools": TOOLS, "tool_choice": value})
            if not shown.good:
                break
