"""Attention and MLPs of the vision tower in their eager forms, under the profile that claims them."""

import functools

import day0check
from day0check.faults.entry import Entry
from day0check.faults.forms import in_form_of

ENTRY = Entry(
    id="B-87",
    title="the vision tower in its eager forms, under eager-bf16",
    kind="vision",
    visible="last bits of image features",
    expected=None,
    case="two_images",
    profile="eager-bf16",
)

for NAME in ("vision.attention", "vision.mlp"):
    day0check.operator(NAME)(functools.partial(in_form_of, "eager-bf16", NAME))
