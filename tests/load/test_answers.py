"""From bytes to answers: the forms of both APIs, cut anywhere, and everything that is no answer."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.load.answers import read_answer, read_tokens
from day0check.load.records import Reply


def reply(*pieces: bytes, status: int = 200, streamed: bool = True) -> Reply:
    return Reply(status, 0, 0, 9, tuple((i, p) for i, p in enumerate(pieces)), streamed=streamed)


def chunk(**choice: Any) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, **choice}]}, ensure_ascii=False)}\n\n".encode()


ROLE = chunk(delta={"role": "assistant", "content": ""})
END = chunk(delta={}, finish_reason="length")
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}}\n\n'
DONE = b"data: [DONE]\n\n"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=5), st.data())
def test_a_stream_reads_the_same_however_it_is_cut(texts: list[str], data: st.DataObject) -> None:
    """Would catch content that is lost or doubled where a read ends, and two chunks of one read taken for one."""
    raw = ROLE + b"".join(chunk(delta={"content": t}) for t in texts) + END + USAGE + DONE
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    answer = read_answer(reply(*(raw[a:b] for a, b in itertools.pairwise([0, *cuts, len(raw)]))))
    whole = "".join(texts).encode(errors="surrogatepass").decode(errors="replace")
    assert answer.text == whole
    assert (answer.finish, answer.usage.completion_tokens, len(answer.pieces)) == ("length", 2, sum(map(bool, texts)))
    assert answer.flaws == (() if whole else ("no_chunk",))


def test_the_first_content_is_not_the_role_chunk() -> None:
    """Would catch a first-token time that is only the time of admission."""
    answer = read_answer(
        reply(ROLE, chunk(delta={"reasoning_content": "hm"}), chunk(delta={"content": "a"}), END, DONE)
    )
    assert (answer.role_ns, answer.pieces[0].at_ns, answer.last_ns) == (0, 1, 3)
    assert (answer.reasoning, answer.text) == ("hm", "a")


def test_token_ids_of_prompt_and_answer_are_read_where_servers_put_them() -> None:
    """Would catch ids that are looked for in one API's place alone: a reference could follow no answer of the other."""
    choice = {"message": {"content": "a"}, "finish_reason": "stop", "token_ids": [7]}
    for body in (
        {"choices": [choice], "prompt_token_ids": [1, 2]},
        {"choices": [choice | {"prompt_token_ids": [1, 2]}]},
    ):
        answer = read_answer(reply(json.dumps(body).encode(), streamed=False))
        assert (answer.prompt_ids, answer.token_ids) == ((1, 2), (7,))
    first = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant"}}], "prompt_token_ids": [1, 2]}\n\n'
    answer = read_answer(reply(first, chunk(delta={"content": "a"}, token_ids=[7]), END, DONE))
    assert (answer.prompt_ids, answer.token_ids) == ((1, 2), (7,))


def test_flaws_of_a_stream_are_named() -> None:
    """Would catch a broken stream that passes for an answer."""
    a = chunk(delta={"content": "a"})
    for pieces, flaw in (
        ((a, END), "no_done"),
        ((a, DONE), "no_finish"),
        ((END, DONE), "no_chunk"),
        ((a, END, a, DONE), "after_finish"),
        ((a, END, DONE, a), "after_done"),
        ((a, b"data: {\n\n", END, DONE), "garbage"),
        ((a, b"data: 7\n\n", END, DONE), "garbage"),
        ((a, b'data: {"error": {"message": "no"}}\n\n', DONE), "error_after_200"),
        ((a, b"data: \xff\n\n", END, DONE), "broken_utf8"),
        ((a, b'data: {"choices": [{"delta": {"content": "\\ud83d"}}]}\n\n', END, DONE), "broken_utf8"),
        ((a, END, DONE, b"data: x"), "cut_event"),
    ):
        assert flaw in read_answer(reply(*pieces)).flaws, flaw
    assert read_answer(reply(a, END, DONE)).flaws == ()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=80), st.booleans(), st.sampled_from([200, 400, 500]))
def test_no_bytes_raise(raw: bytes, streamed: bool, status: int) -> None:
    """Would catch a traceback where a finding belongs."""
    read_answer(reply(raw, streamed=streamed, status=status))
    read_answer(reply(b"data: " + raw + b"\n\n"))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "message", "delta", "usage", "logprobs", "content", "index"]), inner
        )
    ),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None)
@given(_JSON)
def test_no_json_raises(data: Any) -> None:
    """Would catch a server's unexpected types ending the run."""
    raw = json.dumps(data).encode()
    read_answer(reply(raw, streamed=False))
    read_answer(reply(b"data: " + raw + b"\n\n"))
    read_tokens(data)


def test_logprobs_of_both_apis() -> None:
    """Would catch alternatives in the wrong order, and completions' parallel lists read as chat's."""
    chat = {
        "content": [{"token": "a", "logprob": -1, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -0.5}]}]
    }
    (token,) = read_tokens(chat)
    assert (token.text, token.logprob, token.top, token.raw) == ("a", -1.0, (("b", -0.5),), (97,))
    flat = {"tokens": ["a", "b"], "token_logprobs": [-2, None], "top_logprobs": [{"x": -3, "a": -2}, None]}
    first, second = read_tokens(flat)
    assert (first.top, second.logprob) == ((("a", -2.0), ("x", -3.0)), None)


def test_errors_in_their_usual_forms() -> None:
    """Would catch an error whose message is lost."""
    for body, status in (
        ({"error": {"message": "too long"}}, 400),
        ({"detail": "too long"}, 422),
        ({"error": "too long"}, 200),
    ):
        answer = read_answer(reply(json.dumps(body).encode(), streamed=False, status=status))
        assert "too long" in answer.error
        assert not answer.good
