"""The switches that only the `fault-*` presets turn, added to the per-token derivation: one token, head and pair at a
time, from lists of what came before."""

import math

import numpy as np
import per_token_model
from per_token_model import PerToken


def rotate_by(x, three, layout, config):
    """`rotate` with a position for each pair: the first pairs turn by time, the next by height, the last by width."""
    axes = [axis for axis, count in enumerate(config.rope.sections) for _ in range(count)]
    y = np.array(x)
    d = len(x)
    for pair, axis in enumerate(axes):
        a, b = (pair, pair + d // 2) if layout == "half" else (2 * pair, 2 * pair + 1)
        speed = np.float32(1 / np.float32(config.rope.theta ** np.float32(2 * pair / d)))
        angle = float(np.float32(three[axis]) * speed)
        y[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        y[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return y


class Switched(PerToken):
    """`three[position]`: the three positions of a token, written down by whoever made the sequence."""

    def __init__(self, config, tensors, three=None):
        super().__init__(config, tensors)
        self.three = three

    def logits(self, tokens):
        if self.three is None:
            return super().logits(tokens)
        plain = per_token_model.rotate
        per_token_model.rotate = lambda x, position, theta, layout: rotate_by(x, self.three[position], layout, self.c)
        try:
            return super().logits(tokens)
        finally:
            per_token_model.rotate = plain
