"""Guards profiles from files: what a file may claim, and that it never claims more silently."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.compare.rounding import BLOCK_FORMATS
from day0check.contracts import CONTRACTS
from day0check.contracts.profiles import PROFILES, ROW_FORMATS, other_forms, profile_named, with_form
from day0check.errors import InputError

GOOD = """
name = "flash in e4m3"
base = "bf16"
[forms]
"norm.rms" = "cast_first"
[points."mla.attention"]
p = "float8_e4m3fn"
[points."mlp.dense"]
h = "float32"
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_a_file_changes_what_it_names_and_nothing_else(tmp_path):
    """Catches a point that a file cannot tighten, and operators that it never mentioned."""
    profile, base = profile_named(written(tmp_path, GOOD)), PROFILES["bf16"]
    assert (profile.name, profile.base, profile.act_dtype) == ("flash in e4m3", "bf16", "bfloat16")
    assert dict(profile.points_of("norm.rms")) == {"normalised": "bfloat16", "out": "bfloat16"}
    assert dict(profile.points_of("mla.attention")) == {"p": "float8_e4m3fn", "out": "bfloat16"}
    assert dict(profile.points_of("mlp.dense")) == {"out": "bfloat16"}
    changed = {"norm.rms", "mla.attention", "mlp.dense"}
    assert all(profile.points_of(o) == base.points_of(o) for o in CONTRACTS if o not in changed)
    assert profile_named(written(tmp_path, "")).name == "mine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = ", "is no TOML"),
        ("speed = 1", "speed: is not a key"),
        ("base = 'bf17'", "base: 'bf17' is no built-in profile"),
        ("name = 'bf16'", "name: 'bf16' must be a name"),
        ("forms = 3", "forms: must be a table"),
        ("[forms]\n'norm.rms' = 'fast'", "has no form 'fast'"),
        ("[forms]\n'norm.rmz' = 'fused'", "is no operator that rounds"),
        ("[points.'mla.attention']\nq = 'bfloat16'", "has no such point"),
        ("[points.'mla.attention']\nout = 'float32'", "rounded to its own type"),
        ("[points.'mla.attention']\np = 'fp4'", "'fp4' is no dtype"),
        ("[points]\n'mla.attention' = 'bfloat16'", "must be a table of point = dtype"),
        ("[inputs]\n'norm.rms' = 'plain'", "no operator whose rows may be quantised"),
        ("[inputs]\n'mla.query' = 'fp8'", "'fp8' is no format of rows"),
    ],
)
def test_a_file_that_means_nothing_is_refused_by_key(tmp_path, text, words):
    """Catches a claim that is dropped in silence, or a traceback."""
    with pytest.raises(InputError) as told:
        profile_named(written(tmp_path, text))
    assert words in str(told.value)
    assert "mine.toml" in str(told.value)


def test_a_file_that_is_not_there_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        profile_named(str(tmp_path / "none.toml"))


@given(st.sampled_from([(c, f.name) for c in CONTRACTS.values() for f in c.forms]), st.sampled_from(sorted(PROFILES)))
@settings(max_examples=60, deadline=None)
def test_other_forms_are_strictly_looser_or_tighter(form, name):
    """Catches a search for the tightest profile that goes the wrong way, or touches another operator."""
    contract, own = form
    profile = with_form(PROFILES[name], contract, own)

    def roundings(p):
        points = p.points_of(contract.name)
        in_blocks = {f"{point} in blocks" for point, dtype in points.items() if dtype in BLOCK_FORMATS}
        return {*points, *in_blocks, *(["quantised rows"] if contract.name in p.inputs else [])}

    for looser in (True, False):
        for _, other in other_forms(profile, contract, looser=looser):
            assert (roundings(other) > roundings(profile)) if looser else (roundings(other) < roundings(profile))
            assert all(other.points_of(o) == profile.points_of(o) for o in CONTRACTS if o != contract.name)


def test_a_file_may_name_what_is_quantised_and_how(tmp_path):
    """Catches scales of powers of two judged as float32 ones, and an exception from a base profile that is lost."""
    text = "base = 'fp8-activations'\n[inputs]\n'mla.query' = 'float8_e4m3fn/128/powers_of_two'\n'mla.gate' = 'plain'"
    inputs = profile_named(written(tmp_path, text)).inputs
    assert inputs["mla.query"] == "float8_e4m3fn/128/powers_of_two"
    assert "mla.gate" not in inputs
    assert inputs["moe.experts"] == "float8_e4m3fn/128"
    assert set(ROW_FORMATS) == set(BLOCK_FORMATS)
