"""The text operators of the server: any split of an answer, put together, is what the whole-text reference says."""

import json

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from day0check.accelerated.server import operators as served
from day0check.contracts import CONTRACTS
from reference import serve as truth

SOME = settings(max_examples=60, deadline=None)
PIECES = (*(bytes([i]) for i in range(256)), b"", "한".encode(), "🙂".encode()[:2], "🙂".encode()[2:])
TAGS = [
    "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>",
]  # fmt: skip
SCHEMAS = {"find": {"path": "string", "depth": "integer", "deep": "boolean"}}
GOOD = (
    "Well.<tool_call>find\n<arg_key>path</arg_key>\n<arg_value>/tmp/a_value</arg_value>\n"
    "<arg_key>depth</arg_key><arg_value>3</arg_value></tool_call> and <tool_call>stop</tool_call>!"
)
WORDS = st.lists(
    st.sampled_from([*TAGS, "find", "\n", " ", "x", '"', "\\", "depth", "12", "한", "<", "arg_", ">"]), max_size=24
)
TEXTS = st.one_of(
    WORDS.map("".join),
    st.builds(
        lambda key, value, more: (
            f"<tool_call>find<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>{more}"
        ),
        st.sampled_from(["path", "depth", "deep", "other"]),
        st.text(st.sampled_from('parmete>/<"\\12tru[]{} \n한'), max_size=12),
        st.sampled_from(["", "<tool_call>find", GOOD]),
    ),
)


def cuts(length, numbers):
    """Increasing places in 0..length, always ending with it."""
    return [*sorted({n % (length + 1) for n in numbers}), length]


def test_contracts_name_these_functions():
    """Catches a contract whose reference has gone elsewhere or takes other arguments."""
    for name, function in served.SERVING.items():
        assert CONTRACTS[name].function() is getattr(truth, function.__name__)


@SOME
@given(tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=16), numbers=st.lists(st.integers(0, 99), max_size=6))
@example(tokens=list("한글🙂".encode()), numbers=list(range(11)))
@example(tokens=[0xF0, 256, 0x9F, 256, 256, 256, 0x99, 0x82], numbers=[1, 2, 3, 4, 5, 6, 7])
@example(tokens=[0xE2, 0x82, 0xE2, 0x82, 0xAC, 0xF0], numbers=[1, 2, 3, 4, 5])
def test_detokenising_in_pieces_is_decoding_the_whole(tokens, numbers):
    """Catches a character cut in two, doubled or lost at any split, and bytes that are no UTF-8 (S-64)."""
    pieces, sent = [], 0
    for cut in cuts(len(tokens), numbers):
        arguments = {"pieces": PIECES, "sent": sent, "final": False}
        pieces.append(served.detokenise(tokens[:cut], **arguments))
        assert pieces[-1] == truth.detokenise(tokens[:cut], **arguments)
        sent = cut
    pieces.append(served.detokenise(tokens, pieces=PIECES, sent=sent, final=True))
    assert "".join(pieces) == b"".join(PIECES[t] for t in tokens).decode("utf-8", errors="replace")


def test_what_begins_a_character_is_held_back():
    """Catches a replacement character for bytes that were only on their way."""
    halves = [258, 259]
    assert served.detokenise(halves[:1], pieces=PIECES, sent=0, final=False) == ""
    assert served.detokenise(halves, pieces=PIECES, sent=1, final=False) == "🙂"
    assert served.detokenise(halves[:1], pieces=PIECES, sent=1, final=True) == "�"


@SOME
@given(
    text=st.text(st.sampled_from("abc한"), max_size=20),
    strings=st.lists(st.text(st.sampled_from("abc한"), min_size=1, max_size=4), max_size=3),
    numbers=st.lists(st.integers(0, 99), max_size=6),
)
@example(text="abcX", strings=["abcX", "bc"], numbers=[1, 2, 3])
@example(text="aab", strings=["ab"], numbers=[1, 2])
def test_stop_strings_over_any_split(text, strings, numbers):
    """Catches a stop string over several tokens that is missed, that leaks its beginning, or that takes too much."""
    out, sent, reason = "", 0, ""
    for cut in cuts(len(text), numbers):
        arguments = {"sent": sent, "strings": tuple(strings), "token": 1, "ends": (2,), "final": False}
        delta, reason = served.stop(text[:cut], **arguments)
        assert (delta, reason) == truth.stop(text[:cut], **arguments)
        out, sent = out + delta, cut
        if reason:
            break
    if not reason:
        out += served.stop(text, sent=sent, strings=tuple(strings), token=1, ends=(2,), final=True)[0]
    whole, why = truth.stop(text, sent=0, strings=tuple(strings), token=1, ends=(2,), final=True)
    assert (out, reason) == (whole, why)


def test_a_token_ends_an_answer():
    """Catches an end-of-turn token that is not looked at (S-67)."""
    for ends, reason in (((1, 7), "token"), ((1,), "")):
        assert served.stop("ab", sent=1, strings=("bc",), token=7, ends=ends, final=False) == ("", reason)


@SOME
@given(text=st.one_of(TEXTS, TEXTS.map("<think>".__add__)), numbers=st.lists(st.integers(0, 200), max_size=8))
@example(text="<think>a</think>b", numbers=list(range(18)))
@example(text="<think>go<tool_call>find</tool_call>", numbers=list(range(40)))
@example(text="<thin", numbers=[2])
def test_reasoning_over_any_split(text, numbers):
    """Catches thoughts in the answer or the other way round, at any split."""
    got, sent = ["", ""], 0
    for cut, final in [*((c, False) for c in cuts(len(text), numbers)), (len(text), True)]:
        piece = served.reasoning(text[:cut], sent=sent, final=final)
        assert piece == truth.reasoning(text[:cut], sent=sent, final=final)
        got, sent = [a + b for a, b in zip(got, piece, strict=True)], cut
    assert tuple(got) == truth.reasoning(text, sent=0, final=True)


def test_a_tool_call_ends_the_thoughts():
    """Catches a splitter that waits for a closing tag which never comes (S-68)."""
    thoughts, answer = served.reasoning("<think>look<tool_call>find</tool_call>", sent=0, final=True)
    assert (thoughts, answer) == ("look", "<tool_call>find</tool_call>")


@SOME
@given(text=TEXTS, numbers=st.lists(st.integers(0, 200), max_size=8))
@example(text=GOOD, numbers=list(range(len(GOOD))))
@example(text=GOOD * 2, numbers=[30, 190])
@example(text="<tool_call>\nfind\n</tool_call>", numbers=list(range(40)))
@example(text="<tool_call>f<arg_key>k</arg_key></tool_call><tool_call>g<arg_key>a</arg_key><arg_value>b", numbers=[50])
def test_tool_calls_over_any_split(text, numbers):
    """Catches calls lost when several come at once (S-62), and text or arguments that depend on the split."""
    content, calls, sent = "", {}, 0
    for cut, final in [*((c, False) for c in cuts(len(text), numbers)), (len(text), True)]:
        piece = served.tool_call(text[:cut], sent=sent, schemas=SCHEMAS, final=final)
        assert piece == truth.tool_call(text[:cut], sent=sent, schemas=SCHEMAS, final=final)
        content, sent = content + piece[0], cut
        for number, name, arguments in piece[1]:
            old = calls.get(number, ("", ""))
            calls[number] = (old[0] + name, old[1] + arguments)
    whole, all_calls = truth.tool_call(text, sent=0, schemas=SCHEMAS, final=True)
    assert content == whole
    assert calls == {number: (name, arguments) for number, name, arguments in all_calls}


@pytest.mark.parametrize("value", ["/tmp", "parameter", "a_value>", " x ", '"\\\n', "</arg", "12"])
def test_argument_values_are_kept_whole(value):
    """Catches values stripped by a set of characters, or escaped wrongly (S-63)."""
    text = f"<tool_call>find<arg_key>path</arg_key><arg_value>{value}</arg_value></tool_call>"
    _, ((number, name, arguments),) = served.tool_call(text, sent=0, schemas=SCHEMAS, final=True)
    assert (number, name, json.loads(arguments)) == (0, "find", {"path": value})


def test_types_of_arguments_come_from_the_schema():
    """Catches numbers as strings, strings as numbers, and text that is no JSON passed on as JSON."""
    for key, value, expected in (
        ("depth", "3", 3),
        ("deep", "true", True),
        ("depth", "NaN", "NaN"),
        ("path", "3", "3"),
    ):
        text = f"<tool_call>find<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
        _, ((_, _, arguments),) = served.tool_call(text, sent=0, schemas=SCHEMAS, final=True)
        assert json.loads(arguments) == {key: expected}


@SOME
@given(
    seed=st.integers(0, 2**31),
    top=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    levels=st.sampled_from([2, 5000]),
)
def test_logprobs_of_each_row_are_its_own(seed, top, levels):
    """Catches one row's wish that changes another's answer (S-65), wrong ranks and a wrong order of equal logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels, (len(top), 9), generator=generator) / 700.0
    chosen = torch.randint(0, 9, (len(top),), generator=generator)
    found = served.logprobs(logits, chosen=chosen, top=top)
    for mine, due in zip(found, truth.logprobs(logits, chosen=chosen, top=top), strict=True):
        assert mine.dtype == due.dtype
        assert torch.equal(torch.nan_to_num(mine, nan=9.0), torch.nan_to_num(due, nan=9.0))
    for row, count in enumerate(top):
        alone = served.logprobs(logits[row : row + 1], chosen=chosen[row : row + 1], top=[count])
        assert torch.equal(alone[2][0], found[2][row, :count])
        assert torch.equal(alone[3][0], found[3][row, :count])
