"""The invariants around images, on the healthy engine and on broken towers and splices."""

from __future__ import annotations

import pytest
import torch
from invariant_stage import Stage

from day0check.accelerated.ops.prefix import ENTRY, HEAD, PARENT, SNAPSHOT


@pytest.mark.parametrize("check", ["images_alone", "spliced", "warm_prefix"])
def test_the_healthy_engine_passes_with_images(pictures: Stage, tmp_path, check):
    """Would catch an alarm over pictures on grids that are not the native one."""
    answer = pictures.judge(check, tmp_path)
    assert answer.outcome.status == "passed", answer.outcome.summary


def images_see_each_other(inner, q, *, offsets, **kwargs):
    return inner(q, offsets=offsets[[0, -1]], **kwargs)


def features_one_on(inner, x, *, features, **kwargs):
    return inner(x, features=features.roll(1, 0), **kwargs)


def first_token_overwritten(inner, x, **kwargs):
    y = inner(x, **kwargs).clone()
    y[0] = y[-1]
    return y


@pytest.mark.parametrize(
    ("check", "broken", "tap", "label"),
    [
        ("images_alone", ("vision.attention", images_see_each_other), "vision.", "image-two-3"),
        ("spliced", ("splice.merge", features_one_on), "splice.merge", "splice-whole"),
        ("spliced", ("splice.merge", first_token_overwritten), "splice.merge", "splice-whole"),
    ],
)
def test_a_broken_path_of_images_is_found(pictures: Stage, tmp_path, check, broken, tap, label):
    """Would catch pictures that see each other, features shifted by one and text that the splice overwrites."""
    answer = pictures.judge(check, tmp_path, broken, base=True, only=(label,))
    assert answer.outcome.status == "failed", answer.outcome.summary
    assert answer.findings[0].evidence["tap"].startswith(tap)


def test_a_cache_that_forgets_the_picture_is_found(pictures: Stage, tmp_path):
    """Would catch a prefix cache keyed by tokens alone: the same words about another picture get its answer."""

    def by_tokens_alone(inner, tokens, *, salts, held):
        page, found, parent = (held.shape[1] - HEAD) // 3, [], 0
        for first in range(0, len(tokens) - page + 1, page):
            same = (held[:, ENTRY] > 0) & (held[:, PARENT] == parent) & (held[:, SNAPSHOT] >= 0)
            same &= (held[:, HEAD : HEAD + page] == tokens[first : first + page]).all(1)
            if not bool(same.any()):
                break
            found.append(int(same.nonzero()[0]))
            parent = int(held[found[-1], ENTRY])
        return torch.tensor(found, dtype=torch.int64)

    answer = pictures.judge("warm_prefix", tmp_path, ("prefix.match", by_tokens_alone), only=("warm-in-turn",))
    assert answer.outcome.status == "failed", answer.outcome.summary
    assert answer.findings[0].request == "invariants/y/one#1"
