"""Serving, the host side of an answer: operators take the whole answer so far and how much of it they saw before.

Each gives what may be handed out now and was not handed out before, so that the pieces of any split, put together, are
the answer of the whole. Text and token ids are plain Python values; R requests of a step, V vocabulary, K columns.

A tool call is written as GLM-4.5 and later write it, `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>
...</tool_call>`; thoughts stand between `<think>` and `</think>` at the very start.
"""

from day0check.contracts.contract import Contract, Result, rows, static

CONTRACTS = (
    Contract(
        "serve.detokenise",
        "exact",
        "text of the tokens from `sent` on; bytes that begin a character are held back until it is complete or the end "
        "comes; bytes that are no UTF-8 become U+FFFD",
        (static("tokens"), static("pieces"), static("sent"), static("final")),
        (Result("text", "", "str", rows=""),),
        "reference.serve:detokenise",
    ),
    Contract(
        "serve.stop",
        "exact",
        "text that may be handed out and why the answer ends: a stop string (cut off; the first that is completed, of "
        "several the longest), 'token' for a token that ends it, or ''; text that may begin a stop string is held back",
        (static("text"), static("sent"), static("strings"), static("token"), static("ends"), static("final")),
        (Result("text", "", "str", rows=""), Result("reason", "", "str", rows="")),
        "reference.serve:stop",
    ),
    Contract(
        "serve.reasoning",
        "exact",
        "thoughts and answer apart: thoughts end with their tag, or without it where a tool call begins",
        (static("text"), static("sent"), static("final")),
        (Result("reasoning", "", "str", rows=""), Result("content", "", "str", rows="")),
        "reference.serve:reasoning",
    ),
    Contract(
        "serve.tool_call",
        "exact",
        "text outside tool calls, and for each call that goes on: number, name (where it becomes known) and more of "
        "its JSON arguments; `schemas`: parameter types by tool; of type string and unknown ones are JSON strings",
        (static("text"), static("sent"), static("schemas"), static("final")),
        (Result("content", "", "str", rows=""), Result("calls", "", "tuple", rows="")),
        "reference.serve:tool_call",
    ),
    Contract(
        "serve.logprobs",
        "exact",
        "log-probability and rank of a token of each row and the `top` best of that row, before any temperature: "
        "logits minus their log-sum-exp in float64; a row that asks for fewer than K has id -1 and NaN behind them",
        (rows("logits", "R V", "float32"), rows("chosen", "R", "int64"), static("top")),
        (
            Result("logprob", "R", "float32"),
            Result("rank", "R", "int64"),
            Result("ids", "R K", "int64"),
            Result("values", "R K", "float32"),
        ),
        "reference.serve:logprobs",
        ties="the lowest id comes first",
    ),
)
