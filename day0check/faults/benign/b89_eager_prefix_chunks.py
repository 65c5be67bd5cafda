"""Attention to a prefix chunk by chunk in its eager form, under the profile that claims it."""

import functools

import day0check
from day0check.faults.entry import Entry
from day0check.faults.forms import in_form_of

ENTRY = Entry(
    id="B-89",
    title="parts of a long prefix in their eager form, under eager-bf16",
    kind="attention",
    visible="last bits of merged attention",
    expected=None,
    case="prefix_chunks",
    profile="eager-bf16",
)

day0check.operator("mla.partial")(functools.partial(in_form_of, "eager-bf16", "mla.partial"))
