"""Records of the caches: their bytes, what they give back, and how the judge sees a cache that keeps them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.accelerated.ops import TABLE, quantise, records
from day0check.accelerated.records import Formats
from day0check.backends.accelerated import Accelerated
from day0check.compare.local import Judge
from day0check.contracts.profiles import PROFILES
from day0check.errors import UsageError
from day0check.probe.recorder import Caller, Recorder
from day0check.probe.registry import Operators, Registration
from day0check.probe.rows import RowMap
from day0check.types import Request, Schedule, Turn
from reference.presets import preset, preset_dir

PROMPT = tuple(torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(3)).tolist())


def test_the_bytes_of_a_latent_record():
    """Catches another order of codes, scales and rope part, and scales that stand at the wrong block."""
    x = torch.randn(3, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:, 128:256] *= 16
    codes, scale = quantise.rows(x[:, :512].contiguous())
    record = records.pack(codes, scale=scale, rest=x[:, 512:])
    assert (record.dtype, tuple(record.shape)) == (torch.uint8, (3, 656))
    for row in range(3):
        raw = bytes(record[row].tolist())
        scales = torch.frombuffer(bytearray(raw[512:528]), dtype=torch.float32)
        for block in range(4):
            part = torch.frombuffer(bytearray(raw[128 * block : 128 * block + 128]), dtype=torch.float8_e4m3fn)
            value = x[row, 128 * block : 128 * block + 128].double()
            assert float((part.double() * scales[block].double() - value).abs().max()) < float(value.abs().max()) / 16
        assert torch.equal(torch.frombuffer(bytearray(raw[528:]), dtype=torch.bfloat16), x[row, 512:])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(0, 9), st.integers(0, 2**31))
def test_what_is_unpacked_is_every_code_times_its_scale(width, rest, seed):
    """Catches a scale of the neighbouring block, a last block that is not whole, and a double rounding."""
    g = torch.Generator().manual_seed(seed)
    codes = (torch.randn(2, 3, width, generator=g) * 100).to(torch.float8_e4m3fn)
    scale, tail = (
        torch.rand(2, 3, -(-width // 128), generator=g) + 1e-3,
        torch.randn(2, 3, rest, generator=g).bfloat16(),
    )
    flat = records.pack(codes.flatten(0, 1), scale=scale.flatten(0, 1), rest=tail.flatten(0, 1))
    found = records.unpack(flat.unflatten(0, (2, 3)), width=width)
    blocks = torch.arange(width) // 128
    expected = torch.cat(((codes.float() * scale[..., blocks]).bfloat16(), tail), -1)
    assert torch.equal(found, expected)


def judged(profile, formats, *registrations):
    backend, measures = Accelerated(), []
    backend.formats = formats
    backend.operators().apply(registrations)
    backend.load(str(preset_dir("tiny-deepseek-v3.2")), "bf16", "cpu", {})
    recorder = Recorder([Judge(PROFILES[profile], measures.append)])
    backend.run((Request("a", (Turn(PROMPT),), max_new_tokens=2, forced=((5, 6),)),), Schedule(page=16), recorder)
    recorder.end_case()
    return [m for m in measures if not m.passed]


FP8 = Formats(kv="fp8", index="fp8")


@pytest.mark.slow
def test_a_claimed_fp8_cache_passes_and_an_unclaimed_one_is_told_which_profile_fits():
    """Catches a quantised cache that passes for bfloat16, and one that no profile allows."""
    assert not judged("fp8-cache", FP8)
    failed = judged("bf16", FP8)
    assert {m.operator for m in failed} == {"quantise.rows"}
    assert all("consistent with profile fp8-cache" in m.message for m in failed)


@pytest.mark.slow
def test_a_record_whose_scales_are_exchanged_is_found_at_its_unpacking():
    """Catches a judge that looks away where rows are bytes."""

    def wrong(record, *, width):
        return records.unpack(torch.cat((record[:1], record[:-1])), width=width)

    failed = judged("fp8-cache", FP8, Registration("replace", "kv.unpack", wrong))
    assert {m.operator for m in failed} >= {"kv.unpack"}
    assert min(failed, key=lambda m: m.order).operator == "kv.unpack"


def calls(profile, *made):
    """The measures of operator calls (operator, site, arguments, keywords) in layer 0; of a tap the last counts."""
    measures, table = [], Operators(TABLE)
    recorder = Recorder([Judge(PROFILES[profile], measures.append)])
    rows = RowMap(("a",), (0,) * 8, tuple(range(8)))
    with recorder.step("prefill", rows, 0):
        for operator, site, args, kwargs in made:
            Caller(table, recorder).at("layers.00")(operator, *args, site=site, **kwargs)
    recorder.end_case()
    return measures


@pytest.mark.parametrize(
    ("profile", "site", "fitting"),
    [
        ("bf16", "kv.record", "fp8-cache"),
        ("fp8-activations", "index.record", "fp8-cache"),
        ("fp8-cache", "mla.query.down", "fp8-activations"),
        ("fp8-cache", "kv.record", ""),
        ("fp8-activations", "mla.query.down", ""),
    ],
)
def test_a_quantiser_is_held_against_the_claim_for_what_it_quantises(profile, site, fitting):
    """Catches one claim that covers every quantiser, and a message that names the wrong profile."""
    x = torch.randn(8, 130, generator=torch.Generator().manual_seed(1)).bfloat16()
    *_, measure = calls(profile, ("quantise.rows", site, (x,), {}))
    assert measure.passed == (not fitting)
    assert fitting in measure.message


def test_calibrated_codes_are_judged_at_the_scale_of_the_call():
    """Catches codes of another scale, and saturation that is taken for a fault where calibration chose it."""
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(2)).bfloat16() * 10
    scale = torch.tensor([0.01])  # the largest values lie beyond 448 scales
    (healthy,) = calls("fp8-cache", ("kv.quantise", "", (x,), {"scale": scale}))
    assert healthy.passed
    assert float(x.abs().max()) > 4.48
    off = {"kv.quantise": lambda x, *, scale: records.quantise(x, scale=scale * 1.5)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TABLE, "kv.quantise", off["kv.quantise"])
        *_, wrong = calls("fp8-cache", ("kv.quantise", "", (x,), {"scale": scale}))
    assert not wrong.passed
    assert wrong.pattern == "wrong code"


def test_formats_that_cannot_be_are_refused():
    """Catches a claim that is silently not kept."""
    config = preset("tiny").config()
    with pytest.raises(UsageError, match="no format"):
        Formats(kv="fp7").check(config, torch.bfloat16)
    with pytest.raises(UsageError, match="narrower"):
        FP8.check(config, torch.float32)
    Formats().check(config, torch.float32)
