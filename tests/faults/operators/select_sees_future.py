"""A selection without the causal limit: every key of the request is a candidate."""

import torch

import day0check


@day0check.operator.wrap("dsa.select")
def select(inner, scores, *, k, visible, **kwargs):
    return inner(scores, k=k, visible=torch.full_like(visible, scores.shape[-1]), **kwargs)
