"""What is refused: every bad field by its name, bodies that are no JSON, keys, sizes, and too much at once."""

import base64
import io
import json
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from serve_client import make_engine, running, served, until

from day0check.accelerated.server import openapi
from day0check.accelerated.server.images import ImageLimits
from day0check.accelerated.server.listening import ListenOptions
from day0check.accelerated.server.parsing import parse
from day0check.accelerated.server.planning import Refused
from day0check.accelerated.server.schema import ChatRequest, CompletionRequest

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {{}}\r\n\r\n"


def image(url, **more):
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url, **more}}]}]


def data_uri(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def encoded(size=(20, 20), form="PNG", **more):
    stream = io.BytesIO()
    Image.new("RGB", size).save(stream, form, **more)
    return stream.getvalue()


BAD_COMPLETIONS = [
    ({"prompt": "x", "foo": 1}, 400, "foo"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, None),
    ({"prompt": "x", "stream": True, "stream_options": {"bar": 1}}, 400, "stream_options.bar"),
    ({"prompt": "x", "stream": True, "prompt_logprobs": 1}, 400, None),
    ({"prompt": "x", "stream": "yes"}, 400, "stream"),
    ({}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [1, "a"]}, 400, "prompt.1"),
    ({"prompt": [1, 320]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": ["x"] * 65}, 400, "prompt"),
    ({"prompt": "x" * 500}, 400, "prompt"),
    ({"prompt": "x", "max_tokens": 500}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, 400, "max_tokens"),
    ({"prompt": "x", "temperature": -3}, 400, "temperature"),
    ({"prompt": "x", "temperature": 2.1}, 400, "temperature"),
    ({"prompt": "x", "temperature": "0"}, 400, "temperature"),
    ({"prompt": "x", "seed": 2**63}, 400, "seed"),
    ({"prompt": "x", "stop": ""}, 400, "stop"),
    ({"prompt": "x", "stop": ["a", ""]}, 400, "stop.1"),
    ({"prompt": "x", "stop": ["a"] * 17}, 400, "stop"),
    ({"prompt": "x", "stop_token_ids": [320]}, 400, "stop_token_ids"),
    ({"prompt": "x", "logprobs": 21}, 400, "logprobs"),
    ({"prompt": "x", "logprobs": True}, 400, "logprobs"),
    ({"prompt": "x", "n": 2}, 400, "n"),
    ({"prompt": "x", "best_of": 2}, 400, "best_of"),
    ({"prompt": "x", "top_p": 0.5}, 400, "top_p"),
    ({"prompt": "x", "top_k": 5}, 400, "top_k"),
    ({"prompt": "x", "min_p": 0.1}, 400, "min_p"),
    ({"prompt": "x", "presence_penalty": 1}, 400, "presence_penalty"),
    ({"prompt": "x", "frequency_penalty": 1}, 400, "frequency_penalty"),
    ({"prompt": "x", "repetition_penalty": 1.1}, 400, "repetition_penalty"),
    ({"prompt": "x", "logit_bias": {"5": 1}}, 400, "logit_bias"),
    ({"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ({"prompt": "x", "skip_special_tokens": False}, 400, "skip_special_tokens"),
    ({"prompt": "x", "forced_token_ids": [1, 2], "max_tokens": 1}, 400, "forced_token_ids"),
    ({"prompt": "x", "model": "other"}, 404, "model"),
    ({"prompt": "x", "model": None}, 400, "model"),
]
BAD_CHATS = [
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0"),
    ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, 400, "messages.0.name"),
    ({"messages": [{"role": "user"}]}, 400, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "audio", "data": "x"}]}]}, 400, "messages.0.content.0"),
    ({"messages": [*HI, {"role": "assistant", "content": "x"}]}, 400, None),
    ({"messages": [*HI, {"role": "tool", "content": "x", "tool_call_id": "c"}]}, 400, None),
    ({"messages": HI, "top_logprobs": 2}, 400, None),
    ({"messages": HI, "tool_choice": "auto"}, 400, None),
    ({"messages": HI, "tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools.0.function.name"),
    ({"messages": HI, "tools": [TOOL], "tool_choice": "required"}, 400, "tool_choice"),
    ({"messages": HI, "response_format": {"type": "json_object"}}, 400, "response_format.type"),
    ({"messages": HI, "parallel_tool_calls": False}, 400, "parallel_tool_calls"),
    ({"messages": HI, "max_tokens": 1, "max_completion_tokens": 2}, 400, None),
    ({"messages": HI, "user": "me"}, 400, "user"),
    ({"messages": image("http://127.0.0.1/a.png")}, 400, "messages.0.content.0.image_url.url"),
    ({"messages": image("file:///etc/passwd")}, 400, "messages.0.content.0.image_url.url"),
    ({"messages": image(data_uri(encoded()), detail="high")}, 400, "messages.0.content.0.image_url.detail"),
    ({"messages": image("data:image/png;base64,!!!!")}, 400, "messages.0.content.0.image_url.url"),
    ({"messages": image(data_uri(b"no image"))}, 400, "messages.0.content.0.image_url.url"),
    ({"messages": image(data_uri(encoded()[:-20]))}, 400, "messages.0.content.0.image_url.url"),
    ({"messages": image(data_uri(encoded(form="TIFF")))}, 400, "messages.0.content.0.image_url.url"),
]  # fmt: skip
BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
    b'{"model": "tiny", "prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
    b'{"model": "tiny", "prompt": "x", "model": "tiny"}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": ' + b"[" * 100_000,
]


@pytest.mark.parametrize(("body", "status", "param"), BAD_COMPLETIONS)
def test_bad_completions_are_refused(client, body, status, param):
    """Catches a field that is taken and ignored, and a refusal that does not say which field."""
    found, answer = client.ask(COMPLETIONS, **body)
    assert found == status, answer
    assert answer["error"]["param"] == param
    assert answer["error"]["message"]


@pytest.mark.parametrize(("body", "status", "param"), BAD_CHATS)
def test_bad_chats_are_refused(full, body, status, param):
    """Catches a field or part of a message that is taken and ignored."""
    found, answer = full.ask(CHAT, **body)
    assert found == status, answer
    assert answer["error"]["param"] == param


@pytest.mark.parametrize("body", BAD_BODIES, ids=lambda body: str(body[:20]))
def test_bodies_that_are_no_request(client, body):
    """Catches a 500 for broken JSON, doubled keys, numbers and strings that JSON cannot say."""
    status, _, data = client.call(COMPLETIONS, body)
    assert status == 400
    assert json.loads(data)["error"]["type"] == "invalid_request_error"


def test_values_that_change_nothing_are_taken(client):
    """Catches a refusal of what common clients always send."""
    neutral = {
        "n": 1,
        "top_p": 1,
        "top_k": -1,
        "min_p": 0,
        "stop": None,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
    }
    neutral |= {"repetition_penalty": 1.0, "logit_bias": {}, "best_of": 1, "suffix": None, "skip_special_tokens": True}
    assert client.complete(**neutral)["choices"] == client.complete()["choices"]
    status, _ = client.ask(CHAT, messages=HI, max_tokens=1, max_completion_tokens=1, response_format={"type": "text"})
    assert status == 200


def test_routes_methods_and_types(client):
    """Catches an answer that is no JSON error for what is not there."""
    for path, body, headers, status in (
        ("/v1/nothing", None, {}, 404),
        (COMPLETIONS, None, {}, 405),
        ("/health", b"{}", {}, 405),
        (COMPLETIONS, b"{}", {"Content-Type": "text/plain"}, 415),
    ):
        found, _, data = client.call(path, body, **headers)
        assert found == status
        assert json.loads(data)["error"]["message"]


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([CompletionRequest, ChatRequest]), st.data())
def test_any_json_is_parsed_or_refused(kind, data):
    """Catches a body for which parsing itself fails: a 500 that a stranger can cause."""
    fields = st.sampled_from([*kind.model_fields, "foo"])
    body = {"model": "tiny", "prompt": "x", "messages": HI} | data.draw(st.dictionaries(fields, values, max_size=4))
    body.pop("messages" if kind is CompletionRequest else "prompt", None)
    asked = refused = None
    try:
        asked = parse(json.dumps(body).encode(), kind)
    except Refused as error:
        refused = error
    if refused is not None:
        assert refused.status == 400
        assert refused.message
    else:
        assert {name for name in body if getattr(asked, name, None) is None} <= {
            n for n, v in body.items() if v is None
        }


def test_the_description_has_every_field():
    """Catches a description that lags behind the records that check."""
    document = openapi.document()
    for kind in (CompletionRequest, ChatRequest):
        schema = document["components"]["schemas"][kind.__name__]
        assert set(schema["properties"]) == set(kind.model_fields)
        assert schema["additionalProperties"] is False
    references = {r.split('"')[0] for r in json.dumps(document).split('"#/components/schemas/')[1:]}
    assert references <= set(document["components"]["schemas"])


# ------------------------------------------------------------------------------------------------------- limits


def test_limits_of_size_and_time(full):
    """Catches a body, an image or a client's patience that has no end; other requests are answered meanwhile."""
    small = ImageLimits(images=1, image_bytes=2000, image_pixels=900)
    with served(full.service.engine, body_bytes=20_000, body_seconds=0.5, images=small) as client:
        with socket.create_connection(client.address.split(":")) as slow:
            slow.sendall(HEAD.format(1000).encode() + b"{")
            assert client.call(COMPLETIONS, b"x" * 20_001)[0] == 413
            client.complete(max_tokens=1)
            assert slow.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
        for size, form in (((31, 31), "PNG"), ((29, 29), "BMP")):
            status, answer = client.ask(CHAT, messages=image(data_uri(encoded(size, form))))
            assert (status, answer["error"]["code"]) == (400, "bad_image")
        assert client.ask(CHAT, messages=image(data_uri(encoded())) * 2)[0] == 400
        assert client.ask(CHAT, messages=image(data_uri(encoded())), max_tokens=1)[0] == 200
        with socket.create_connection(client.address.split(":")) as large:
            large.sendall(HEAD.format(1 << 30).encode())
            assert large.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_connections(engine):
    """Catches connections without end, and one that says nothing and is kept."""
    listen = ListenOptions(port=0, connections=3, first_request_seconds=0.3)
    with served(engine, listen) as client:
        address = client.address.split(":")
        silent = [socket.create_connection(address) for _ in range(3)]
        until(lambda: len(client.service.silent) == 3, "the server has all of them")
        with socket.create_connection(address) as more:
            assert more.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
        for connection in silent:
            with connection:
                assert connection.recv(100) == b""
        until(lambda: client.call("/health")[0] == 200, "room again")


def test_an_api_key_is_asked_for(engine):
    """Catches a key that is not looked at, or asked for where no secret is."""
    with served(engine, api_key="sésame") as client:
        for given_key, status in (({}, 401), ({"Authorization": "Bearer no"}, 401)):
            found, _, data = client.call("/v1/models", **given_key)
            assert found == status
            assert json.loads(data)["error"]["type"] == "authentication_error"
        assert client.call("/health")[0] == 200
    with served(engine, api_key="sesame") as client:
        status, _, data = client.call("/v1/models", Authorization="Bearer sesame")
        assert status == 200
        assert [entry["id"] for entry in json.loads(data)["data"]] == ["tiny"]


def test_before_it_is_ready_nothing_is_answered():
    """Catches a health that is green before the weights are there, and a request that waits for them."""
    with served(make_engine()) as client:
        status, headers, data = client.call("/health")
        assert (status, json.loads(data)["status"], headers["Retry-After"]) == (503, "starting", "1")
        status, answer = client.ask(COMPLETIONS, prompt="x")
        assert (status, answer["error"]["code"]) == (503, "starting")


def test_health_tells_the_steps_of_the_start(client):
    """Catches a step that is not measured, and a start that calls itself ready without one of them."""
    status, _, data = client.call("/health")
    body = json.loads(data)
    assert (status, body["status"]) == (200, "ready")
    names = ["read headers", "load weights", "verify weights", "partition pools", "warm up operators"]
    assert [step["name"] for step in body["steps"]] == names
    assert all(step["seconds"] > 0 for step in body["steps"])
    assert client.metric("day0check:start_up_seconds") == pytest.approx(
        sum(s["seconds"] for s in body["steps"]), abs=1e-3
    )


def test_back_pressure_and_preemption():
    """Catches a queue without end, and answers that change when pages run out and requests are computed again."""
    with (
        running(make_engine(model="tiny", max_batch=4, max_waiting=0, pages=4, max_model_len=64)) as small,
        served(small) as client,
    ):
        prompts = ["abc"[n] * 15 for n in range(3)]
        calls = [lambda p=p: client.complete(p, max_tokens=20, return_token_ids=True, logprobs=0) for p in prompts]
        before = [client.complete(p, max_tokens=20, return_token_ids=True) for p in prompts]
        assert client.metric("vllm:num_preemptions_total") == 0
        together = client.together(calls)
        assert client.metric("vllm:num_preemptions_total") > 0
        for one, other in zip(before, together, strict=True):
            assert one["choices"][0]["token_ids"] == other["choices"][0]["token_ids"]
        busy = [lambda: client.call(COMPLETIONS, {"model": "tiny", "prompt": ["x"] * 2, "max_tokens": 10})] * 4
        found = client.together(busy)
        assert sorted(status for status, _, _ in found) == [200, 200, 429, 429]
        assert {h.get("Retry-After") for s, h, _ in found if s == 429} == {"1"}
        until(client.all_is_free, "pages and slots are free")


def test_images_and_their_tokens_come_together(client, full):
    """Catches an image that is dropped without a word, and the token of an image without one."""
    status, answer = full.ask(COMPLETIONS, prompt=[259])
    assert (status, answer["error"]["param"]) == (400, "prompt")
    status, answer = client.ask(CHAT, messages=image(data_uri(encoded())))
    assert (status, answer["error"]["code"]) == (400, "unsupported")
