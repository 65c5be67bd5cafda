"""Never returns, in the case whose prompt has PROMPT_ROWS rows and in no other."""

import time

import day0check

PROMPT_ROWS = 47


@day0check.operator.wrap("dsa.attention", phase="prefill")
def attention(inner, q, **kwargs):
    while q.shape[0] == PROMPT_ROWS:
        time.sleep(1)
    return inner(q, **kwargs)
