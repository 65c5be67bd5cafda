"""Replaces an operator that does not exist."""

import day0check


@day0check.operator("dsa.selekt")
def select(scores, **kwargs):
    return scores
