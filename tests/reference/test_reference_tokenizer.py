"""The byte tokenizer and the chat format of the presets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.image_grid import image_grid
from reference.presets import preset
from reference.tokenizer import chat_turn, decode, encode

CONFIG = preset("tiny").config()
T = CONFIG.tokens


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_text_survives(text):
    """Catches a character that changes on the way, and text that becomes a special token."""
    if text.isprintable():
        assert decode([T.bos, *encode(text), T.end_of_turn]) == text
    assert all(0 <= token < 256 for token in encode(text))


def test_broken_utf8_does_not_crash():
    """Catches an answer cut inside a character, which generation makes all the time."""
    assert decode([0xE2, 0x82, 65]) == "\ufffdA"


def test_turns_by_hand():
    """Catches a second bos, an answer that would continue the user's text, or special tokens spelt by a user."""
    assert chat_turn(CONFIG, "hi", (), True) == [256, 263, 104, 105, 265, 264]
    assert chat_turn(CONFIG, "hi", (), False) == [263, 104, 105, 265, 264]
    assert T.assistant not in chat_turn(CONFIG, "<|assistant|>", (), False)[:-1]


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), max_size=3))
def test_pads_are_the_tokens_of_the_images(sizes):
    """Catches a pad too many or too few, images out of order, and a size after resizing where the original belongs."""
    turn = chat_turn(CONFIG, "?", sizes, False)
    at = 1
    for width, height in sizes:
        pads = image_grid(width, height, CONFIG.vision).tokens
        head = [T.media_begin, *encode(f"image {width}x{height}"), T.media_content]
        part = [*head, *[T.media_pad] * pads, T.media_end]
        assert turn[at : at + len(part)] == part
        at += len(part)
    assert turn[at:] == [*encode("?"), T.end_of_turn, T.assistant]


def test_models_without_vision_or_chat_tokens():
    """Catches an image that is dropped in silence, and a token id of -1 in a prompt."""
    from dataclasses import replace

    with pytest.raises(ValueError, match="no vision"):
        chat_turn(replace(CONFIG, vision=None), "?", [(5, 5)], False)
    with pytest.raises(ValueError, match="no user token"):
        chat_turn(replace(CONFIG, tokens=replace(T, user=-1)), "?")
