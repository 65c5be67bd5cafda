"""Allocates without end, in the case whose prompt has PROMPT_ROWS rows and in no other."""

import time

import day0check

PROMPT_ROWS = 47
HOARD = []


@day0check.operator.wrap("dsa.attention", phase="prefill")
def attention(inner, q, **kwargs):
    while q.shape[0] == PROMPT_ROWS:
        HOARD.append(b"x" * 2**24)
        time.sleep(0.01)
    return inner(q, **kwargs)
