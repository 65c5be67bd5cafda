"""Every operator with an eager form in that form, under the profile that claims it: each intermediate is rounded."""

import functools

import day0check
from day0check.contracts.profiles import EAGER_FORMS
from day0check.faults.entry import Entry
from day0check.faults.forms import in_form_of

ENTRY = Entry(
    id="B-85",
    title="every operator of the decoder in its eager form, under eager-bf16",
    kind="attention",
    visible="last bits of every operator",
    expected=None,
    profile="eager-bf16",
)

for NAME in EAGER_FORMS:
    if not NAME.startswith(("comm.", "vision.", "gqa.", "mla.partial")):  # which this prompt does not call: B-87, B-89
        day0check.operator(NAME)(functools.partial(in_form_of, "eager-bf16", NAME))
