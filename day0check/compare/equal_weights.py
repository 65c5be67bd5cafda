"""Equal weights of a row round alike, so that their errors add up: attention to a blank image, or to one key again and
again, is far less exact than attention to keys that differ."""

from __future__ import annotations

import torch

from day0check.compare.rounding import leading_bits

BUCKETS = 1024  # least number, more than one for each weight of a row: different values seldom meet
OF_INDEPENDENT = 1.25  # together a group must make more error than this times what all weights make independently


def largest_alike(weights: torch.Tensor, variance: torch.Tensor, dtype: str) -> torch.Tensor:
    """Deviations of the weights that round alike and together make the largest error of their row; zero elsewhere.

    weights, variance [..., keys] float64: the latter of each rounded alone. Rows whose largest group makes no more
    error than their weights do independently are zero: the sum of variances says it all there.
    """
    deviation = variance.sqrt()
    buckets = max(BUCKETS, 1 << weights.shape[-1].bit_length())
    place = (leading_bits(weights, dtype) * 0x9E3779B1 >> 9) & (buckets - 1)
    together = deviation.new_zeros((*weights.shape[:-1], buckets)).scatter_add_(-1, place, deviation)
    most, at = together.max(-1, keepdim=True)
    counts = most.square() > OF_INDEPENDENT * variance.sum(-1, keepdim=True)
    return torch.where(counts & (place == at), deviation, 0.0)
