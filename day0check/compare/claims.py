"""What a profile claims of how an operator computes, beside the points where it rounds: its chunk size, split sums,
another implementation of a resampler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from day0check.compare.resample import preprocessed
from day0check.contracts.profiles import PARTIALS, Profile
from reference.rounding import exact


def as_claimed(function: Callable[..., Any], profile: Profile, operator: str) -> Callable[..., Any]:
    """The reference function of an operator in the chunks, with the partial sums and by the resampler that the profile
    claims; the same results in exact arithmetic, rounded where such an implementation rounds."""
    if operator in profile.resample:
        function = partial(preprocessed, function, operator)
    if operator in profile.parts:
        function = _in_parts(function, profile.parts[operator])
    if operator in profile.chunks:
        function = _in_chunks(function, profile.chunks[operator])
    return function


def _in_chunks(function: Callable[..., Any], chunk: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        own = {} if kwargs.get("chunk") is None else {"chunk": chunk}  # the recurrence has no chunks
        return function(*args, **kwargs | own)

    return run


def _in_parts(function: Callable[..., Any], parts: int) -> Callable[..., Any]:
    """A linear whose columns are summed in `parts` pieces, each rounded at the point "partials"."""

    def run(x: torch.Tensor, *, weight: torch.Tensor, bias: Any = None, round: Any = exact, **others: Any) -> Any:
        if others.pop("x_scale", None) is not None or not x.is_floating_point() or x.element_size() < 4:
            raise ValueError("partial sums of codes: decode the rows first")
        pieces = zip(x.tensor_split(parts, -1), weight.tensor_split(parts, -1), strict=True)
        y = sum(round(PARTIALS, function(a, weight=w, **others)) for a, w in pieces)
        return round("out", y if bias is None else y + bias)

    return run
