"""A replacement that changes nothing: it must not change the verdict."""

import day0check


@day0check.operator.wrap("dsa.select")
def select(inner, scores, **kwargs):
    return inner(scores, **kwargs)
