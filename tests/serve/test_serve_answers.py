"""Answers over a real socket: the same tokens as the engine gives alone, whole or in pieces, alone or together."""

import base64
import io

import pytest
from PIL import Image
from serve_client import until

from day0check.backends.accelerated import Accelerated
from day0check.probe.recorder import Recorder
from day0check.types import Request, Schedule, Turn
from reference.presets import preset_dir
from reference.tokenizer import chat_turn, encode

PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
CALLS = (
    "<think>t</think>Ok<tool_call>f<arg_key>p</arg_key><arg_value>/tm</arg_value></tool_call><tool_call>g\n</tool_call>"
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {key: {"type": kind}}}}}
    for name, key, kind in (("f", "p", "string"), ("g", "n", "integer"))
]
END_OF_TURN = 265


@pytest.fixture(scope="module")
def backend():
    backend = Accelerated()
    backend.load(str(preset_dir("tiny")), "fp32", "cpu", {})
    return backend


def alone(backend, tokens, count, images=()):
    request = Request("a", (Turn(tuple(tokens), tuple(images)),), max_new_tokens=count)
    return list(backend.run((request,), Schedule(), Recorder()).sequences["a"][len(tokens) :])


def user(*parts):
    return {"role": "user", "content": parts[0] if len(parts) == 1 and isinstance(parts[0], str) else list(parts)}


def picture(color, size=(40, 30), form="PNG"):
    stream = io.BytesIO()
    Image.new("RGB", size, color).save(stream, form)
    return stream.getvalue()


def image_part(data):
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}


def forced(text, *more):
    return {"forced_token_ids": [*text.encode(), *more], "max_tokens": None}


def joined(events):
    """The whole answer of a stream: text, thoughts, calls, tokens, log-probabilities, end, usage; deltas put together
    here and not by the server's own function."""
    whole = {"text": "", "thoughts": "", "calls": {}, "tokens": [], "logprobs": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice.get("delta", choice)
            whole["text"] += delta.get("text", "") + (delta.get("content") or "")
            whole["thoughts"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                mine = whole["calls"].setdefault(call["index"], ["", "", ""])
                mine[0] += call.get("id", "")
                mine[1] += call["function"].get("name", "")
                mine[2] += call["function"]["arguments"]
            whole["tokens"] += choice["token_ids"]
            logprobs = choice["logprobs"] or {}
            whole["logprobs"] += logprobs.get("content", []) or logprobs.get("token_logprobs", [])
            if choice["finish_reason"]:
                assert "finish" not in whole
                whole["finish"] = choice["finish_reason"]
    whole["usage"] = events[-1]["usage"]
    return whole


def as_joined(answer):
    (choice,) = answer["choices"]
    message = choice.get("message", {"content": choice.get("text")})
    logprobs = choice["logprobs"] or {}
    return {
        "text": message["content"] or "",
        "thoughts": message.get("reasoning_content", ""),
        "calls": {
            n: [call["id"], call["function"]["name"], call["function"]["arguments"]]
            for n, call in enumerate(message.get("tool_calls", ()))
        },
        "tokens": choice["token_ids"],
        "logprobs": logprobs.get("content", []) or logprobs.get("token_logprobs", []),
        "finish": choice["finish_reason"],
        "usage": answer["usage"],
    }


# ---------------------------------------------------------------------------------------------- the same tokens


def test_greedy_completions_are_the_engines(full, backend):
    """Catches a prompt, position or choice that the server changes on its way to the engine."""
    expected = alone(backend, encode("The snow"), 8)
    for prompt in ("The snow", encode("The snow")):
        answer = full.complete(prompt, max_tokens=8, return_token_ids=True)
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["choices"][0]["prompt_token_ids"] == encode("The snow")
        assert answer["choices"][0]["text"] == bytes(t for t in expected if t < 256).decode("utf-8", "replace")
        assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16}


def test_greedy_chat_is_the_engines(full, backend):
    """Catches a chat format that is not the presets', over several turns."""
    config = backend._engine.config
    tokens = chat_turn(config, "Hello.")
    answer = full.chat(user("Hello."), return_token_ids=True)
    assert answer["prompt_token_ids"] == tokens
    assert answer["choices"][0]["token_ids"] == alone(backend, tokens, 6)
    history = [user("Hello."), {"role": "assistant", "content": "Hi."}, user("More?")]
    whole = [*tokens, *encode("Hi."), END_OF_TURN, *chat_turn(config, "More?", first=False)]
    assert full.chat(*history, return_token_ids=True)["prompt_token_ids"] == whole


def test_images_are_the_engines(full, backend, tmp_path):
    """Catches an image that is not looked at, is another request's, or fills other pads."""
    answers = {}
    for color in ("red", "blue"):
        data = picture(color)
        path = tmp_path / f"{color}.png"
        path.write_bytes(data)
        tokens = chat_turn(backend._engine.config, "What is it?", [(40, 30)])
        answer = full.chat(
            user(image_part(data), {"type": "text", "text": "What is it?"}), return_token_ids=True, logprobs=True
        )
        assert answer["prompt_token_ids"] == tokens
        assert answer["choices"][0]["token_ids"] == alone(backend, tokens, 6, [str(path)])
        answers[color] = answer["choices"][0]["logprobs"]
    assert answers["red"] != answers["blue"]


def test_eight_together_are_each_alone(full):
    """Catches rows, pages, states, images or wishes of one request that reach another (S-65 among them)."""
    calls = [
        lambda n=n: full.complete(
            "abcdefgh"[n] * (5 + 17 * n), logprobs=n % 4, seed=n, temperature=n % 2, return_token_ids=True
        )
        for n in range(7)
    ]
    calls.append(lambda: full.chat(user(image_part(picture("green"))), return_token_ids=True, logprobs=True))
    before = [call() for call in calls]
    for one, other in zip(before, full.together(calls), strict=True):
        one, other = one["choices"][0], other["choices"][0]
        assert one["token_ids"] == other["token_ids"]
        found = [
            c["logprobs"].get("token_logprobs") or [e["logprob"] for e in c["logprobs"]["content"]]
            for c in (one, other)
        ]
        assert found[0] == pytest.approx(found[1], abs=1e-3)
    until(full.all_is_free, "pages and slots are free")


# ---------------------------------------------------------------------------------------------- whole and pieces


WHOLE_AND_STREAMED = [
    ("completion", {"prompt": "The snow", "logprobs": 2, "max_tokens": 10}),
    ("completion", {"prompt": "The snow", "echo": True, "logprobs": 0}),
    ("completion", {"prompt": "x", **forced("한글🙂 and more")}),
    ("completion", {"prompt": "x", "stop": ["lo w", "zz"], **forced("Hello world")}),
    ("completion", {"prompt": "x", "max_tokens": 0, "echo": True, "logprobs": 1}),
    ("chat", {"messages": [user("Hi")], "logprobs": True, "top_logprobs": 2}),
    ("chat", {"messages": [user("Hi")], "tools": TOOLS, **forced(CALLS, END_OF_TURN)}),
    ("chat", {"messages": [user("Hi")], **forced(CALLS, END_OF_TURN)}),
    ("chat", {"messages": [user("Hi")], "tools": TOOLS, **forced(CALLS[:60])}),
    ("chat", {"messages": [user("Hi")], "seed": 5, "temperature": 1.0}),
]


def comparable(whole):
    """Without the ids of calls, which two requests never share; log-probabilities apart, which batches may change."""
    values = [e["logprob"] if isinstance(e, dict) else e or 0.0 for e in whole["logprobs"]]
    return whole | {"calls": {n: call[1:] for n, call in whole["calls"].items()}, "logprobs": len(values)}, values


@pytest.fixture(scope="module")
def both_ways(client):
    """(path, events of the stream, whole answer) of each of `WHOLE_AND_STREAMED`, all asked together."""
    bodies = [
        (PATHS[kind], {"temperature": 0, "max_tokens": 6, **body, "return_token_ids": True})
        for kind, body in WHOLE_AND_STREAMED
    ]
    calls = [lambda path=path, body=body: client.stream(path, **body) for path, body in bodies]
    calls += [lambda path=path, body=body: client.ask(path, **body)[1] for path, body in bodies]
    found = client.together(calls)
    return [(path, *pair) for (path, _), *pair in zip(bodies, found, found[len(bodies) :], strict=False)]


@pytest.mark.parametrize("number", range(len(WHOLE_AND_STREAMED)))
def test_a_stream_is_the_whole_answer(both_ways, number):
    """Catches chunks lost, doubled or reordered, and text, calls or log-probabilities that depend on streaming."""
    path, events, answer = both_ways[number]
    (streamed, values), (whole, due) = comparable(joined(events)), comparable(as_joined(answer))
    assert streamed == whole
    assert values == pytest.approx(due, abs=1e-3)
    assert len({event["id"] for event in events}) == 1
    assert events[-1]["choices"] == []
    kind = "text_completion" if path == PATHS["completion"] else "chat.completion.chunk"
    assert {event["object"] for event in events} == {kind}


def test_characters_of_several_tokens_arrive_whole(client):
    """Catches U+FFFD in a stream where a character was cut (S-64)."""
    events = client.stream("/v1/completions", prompt="x", **forced("한글🙂é"))
    texts = [choice["text"] for event in events for choice in event["choices"]]
    assert [text for text in texts if text] == ["한", "글", "🙂", "é"]
    cut = client.complete("x", forced_token_ids=list("🙂".encode()[:3]), max_tokens=3)
    assert cut["choices"][0]["text"] == "�"


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["lo w"], "Hel", "lo w"),
        ("world", "Hello ", "world"),
        (["rld!", "wor"], "Hello ", "wor"),
        (["never"], "Hello world", None),
        (["worldwide"], "Hello world", None),
    ],
)
def test_stop_strings_over_tokens(client, stop, text, reason):
    """Catches a stop string cut in two by tokens, one that leaks, and held back text that is never handed out."""
    answer = client.complete("x", stop=stop, **forced("Hello world"))
    (choice,) = answer["choices"]
    assert (choice["text"], choice["stop_reason"]) == (text, reason)
    assert choice["finish_reason"] == ("stop" if reason else "length")
    if reason == "wor":
        assert answer["usage"]["completion_tokens"] == len("Hello wor")  # nothing is computed beyond


def test_tokens_that_end_an_answer(client):
    """Catches an end-of-turn token that does not end the answer (S-67), ignore_eos and stop_token_ids ignored."""
    tokens = [*encode("Hi"), END_OF_TURN, *encode("no")]
    for body, text, finish, reason in (
        ({}, "Hi", "stop", END_OF_TURN),
        ({"ignore_eos": True}, "Hino", "length", None),
        ({"ignore_eos": True, "stop_token_ids": [ord("i")]}, "Hi", "stop", ord("i")),
    ):
        (choice,) = client.complete("x", forced_token_ids=tokens, max_tokens=5, **body)["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, finish, reason)


def test_tool_calls_and_thoughts(client, both_ways):
    """Catches calls or thoughts taken for text, wrong arguments, and a wrong reason to finish (S-62, S-68)."""
    numbers = [n for n, (_, body) in enumerate(WHOLE_AND_STREAMED) if END_OF_TURN in body.get("forced_token_ids", ())]
    choice, plain = (both_ways[n][2]["choices"][0] for n in numbers)
    message = choice["message"]
    assert (message["content"], message["reasoning_content"], choice["finish_reason"]) == ("Ok", "t", "tool_calls")
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": "f", "arguments": '{"p": "/tm"}'}, {"name": "g", "arguments": "{}"}]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert plain["message"]["content"] == CALLS.partition("</think>")[2]
    assert plain["finish_reason"] == "stop"
    reply = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a.txt"}
    again = client.chat(user("Hi"), message, reply, max_tokens=1, return_token_ids=True)
    prompt = bytes(t for t in again["prompt_token_ids"] if t < 256)
    assert b"<tool_response>a.txt</tool_response>" in prompt
    assert CALLS.split("<tool_call>g")[0].encode() in prompt


# ------------------------------------------------------------------------------------------ numbers and choices


def test_logprobs_of_a_prompt_are_those_of_the_same_answer(client):
    """Catches log-probabilities shifted by one, of another token, or of the prompt's path but not the answer's."""
    text = "The snow fell on the pass for the whole night, and"
    told = client.complete(text[0], logprobs=3, forced_token_ids=encode(text[1:]), max_tokens=len(text) - 1)
    answer = told["choices"][0]["logprobs"]
    echoed = client.complete(text, echo=True, logprobs=3, max_tokens=0)["choices"][0]
    assert echoed["text"] == text
    assert echoed["logprobs"]["token_logprobs"][0] is None
    assert echoed["logprobs"]["token_logprobs"][1:] == pytest.approx(answer["token_logprobs"], abs=1e-3)
    assert echoed["logprobs"]["tokens"][1:] == answer["tokens"]
    assert echoed["logprobs"]["text_offset"] == list(range(len(text)))
    listed = client.complete(text, prompt_logprobs=0, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert [entry[str(t)]["logprob"] for entry, t in zip(listed[1:], encode(text)[1:], strict=True)] == pytest.approx(
        answer["token_logprobs"], abs=1e-3
    )


def test_the_best_tokens_are_sorted_and_the_greedy_one_is_first(client):
    """Catches top_logprobs of another row, and a rank that does not fit."""
    answer = client.chat(user("Hi"), logprobs=True, top_logprobs=4)
    for entry in answer["choices"][0]["logprobs"]["content"]:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]


def test_seed_and_temperature(client):
    """Catches a seed or a temperature that is taken and not used."""

    def draw(**body):
        return lambda: client.complete("x", return_token_ids=True, **body)["choices"][0]["token_ids"]

    wishes = [{"temperature": 1.5, "seed": seed} for seed in (1, 1, 2)] + [{"seed": 1}, {"seed": 2}]
    one, same, other, greedy, unmoved, *free = client.together(
        [draw(**wish) for wish in (*wishes, *[{"temperature": 2}] * 3)]
    )
    assert one == same != other
    assert greedy == unmoved != one
    assert len({tuple(tokens) for tokens in free}) > 1


def test_several_prompts_in_one_request(client):
    """Catches answers given to another prompt of the same request, whole and streamed."""
    prompts = ["One", "Two and more", "Three"]
    each = [client.complete(prompt)["choices"][0]["text"] for prompt in prompts]
    answer = client.complete(prompts)
    assert [choice["text"] for choice in answer["choices"]] == each
    texts = ["", "", ""]
    for event in client.stream("/v1/completions", prompt=prompts):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == each
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
