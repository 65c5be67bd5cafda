"""A sparse attention that leaves one row of a prefill a quarter too large."""

import day0check


@day0check.operator.wrap("dsa.attention", phase="prefill")
def attention(inner, q, **kwargs):
    y = inner(q, **kwargs).clone()
    y[y.shape[0] // 2] *= 1.25
    return y
