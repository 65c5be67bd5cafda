"""Dies like a failed assertion in native code, in the case whose prompt has PROMPT_ROWS rows and in no other."""

import os

import day0check

PROMPT_ROWS = 47


@day0check.operator.wrap("dsa.attention", phase="prefill")
def attention(inner, q, **kwargs):
    if q.shape[0] == PROMPT_ROWS:
        os.abort()
    return inner(q, **kwargs)
