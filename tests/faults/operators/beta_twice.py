"""A decode path that applies the sigmoid of beta once more; its prefill is right."""

import torch

import day0check


@day0check.operator.wrap("kda.gates", phase="decode")
def gates(inner, f, **kwargs):
    g, beta = inner(f, **kwargs)
    return g, torch.sigmoid(beta)
