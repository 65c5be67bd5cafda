"""Allocates without end, in the case whose prompt has PROMPT_ROWS rows and in no other."""

import day0check

PROMPT_ROWS = 47
PIECE_BYTES = 2**26
HOARD = []


@day0check.operator.wrap("dsa.attention", phase="prefill")
def attention(inner, q, **kwargs):
    while q.shape[0] == PROMPT_ROWS:
        HOARD.append(b"x" * PIECE_BYTES)
    return inner(q, **kwargs)
