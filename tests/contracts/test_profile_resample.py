"""A profile file that claims the rule of a resampler, and nothing that is no rule."""

import pytest

from day0check.contracts.profiles import PROFILES, profile_named
from day0check.errors import InputError


def test_a_rule_is_claimed_for_the_operator_that_it_names(tmp_path):
    """Catches a claim that is lost on its way, and one that loosens another operator."""
    path = tmp_path / "mine.toml"
    path.write_text("[resample]\n'image.preprocess' = 'bicubic-antialias'")
    profile = profile_named(str(path))
    assert dict(profile.resample) == {"image.preprocess": "bicubic-antialias"}
    assert set(profile.inner_points("image.preprocess")) == {"pass", "level"}
    assert profile.points_of("image.preprocess_in_budget") == PROFILES["bf16"].points_of("image.preprocess_in_budget")
    assert not PROFILES["bf16"].resample


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[resample]\n'vision.patch' = 'bicubic-antialias'", "is no operator that resizes an image"),
        ("[resample]\n'image.preprocess' = 'bilinear'", "'bilinear' is no rule of a resampler"),
        ("resample = 3", "must be a table"),
    ],
)
def test_what_is_no_rule_is_refused(tmp_path, text, words):
    """Catches a claim that is not understood and therefore allows anything."""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        profile_named(str(path))
