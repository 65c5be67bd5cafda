"""Guards the profiles: a point too many hides faults, a point too few cries wolf."""

import subprocess
import sys

import pytest

from day0check.contracts import CONTRACTS
from day0check.contracts.profiles import PROFILES, profile_named
from day0check.errors import UsageError


def test_profiles_import_no_torch():
    """Catches a torch import that would slow `list profiles`."""
    code = "import sys, day0check.contracts.profiles; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda p: p.name)
def test_points_are_declared_by_the_contract_and_float32_results_have_none(profile):
    """Catches a point that no reference function calls, and float32 results judged as if they were bf16."""
    for operator, points in profile.points.items():
        contract = CONTRACTS[operator]
        assert set(points) <= set(contract.points)
        fixed = any(r.dtype == "bfloat16" for r in contract.results)  # whatever is claimed
        assert ("out" in points) == (fixed or any(r.dtype == "act" for r in contract.results))
        assert set(points.values()) == {"bfloat16" if fixed else profile.act_dtype}
    for operator, form in profile.forms.items():
        assert form in [f.name for f in CONTRACTS[operator].forms], operator


def test_the_fused_profile_rounds_where_the_method_says():
    """Catches a default form that grants more rounding than the fast path needs."""
    bf16, fp32 = PROFILES["bf16"], PROFILES["fp32"]
    assert bf16.inner_points("norm.rms") == ()
    assert bf16.inner_points("dsa.attention") == ("p",)
    assert bf16.inner_points("moe.experts") == ("h",)
    assert bf16.inner_points("mla.output") == ("gated",)
    assert bf16.points_of("moe.scores") == {}
    assert set(fp32.points) == {"kv.dequantise", "kv.unpack"}  # records of an FP8 cache hold bfloat16
    assert bf16.dtype_of("act") == "bfloat16"
    assert bf16.dtype_of("float32") == "float32"


def test_an_unknown_profile_is_a_usage_error_that_lists_the_known_ones():
    with pytest.raises(UsageError, match="eager-bf16"):
        profile_named("bf17")
