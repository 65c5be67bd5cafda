"""Guards the claim that KDA states are kept in bfloat16: what it allows, what it catches, what is told without it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from day0check.compare import kept_states
from day0check.compare.compute import judge_compute
from day0check.compare.forms import beside_other_forms
from day0check.compare.local import Judge
from day0check.compare.propagated import rounded, seeded
from day0check.compare.replay import Replay
from day0check.compare.rounding import Rounder, round_nearest
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import generate
from day0check.contracts.profiles import PROFILES
from day0check.probe.recorder import Call
from day0check.probe.rows import RowMap
from day0check.types import Measure
from reference.kda import attention

BF16, STATES = PROFILES["bf16"], PROFILES["bf16-states"]
CONTRACT = CONTRACTS["kda.attention"]


def call(name: str, seed: int = 0, **changed):
    hard = generate(CONTRACT, name, seed, torch.bfloat16)
    return Replay(CONTRACT, {"q": hard.args[0], **hard.kwargs, **changed})


def kernel(replay: Replay, narrow) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 inside, y in bfloat16, the state through `narrow`."""
    y, state = replay.wide(torch.float32).run()
    return y.bfloat16(), narrow(state)


def judged(replay: Replay, results, profile):
    found = judge_compute(replay, results, profile, seed=1)
    return beside_other_forms(found, replay, results, profile, seed=1)


@pytest.mark.parametrize("name", ["plain", "long_state", "ragged", "strong_decay"])
def test_a_state_in_bfloat16_passes_where_it_is_claimed_and_is_named_where_not(name):
    """Catches a claim that does not reach the state, and a narrower state that nobody has to claim."""
    replay = call(name)
    own = kernel(replay, lambda s: s.bfloat16())
    assert all(j.passed for j in judged(replay, own, STATES))
    y, state = judged(replay, own, BF16)
    assert y.passed
    assert not state.passed
    assert "consistent with the looser form 'kept_bf16' of profile bf16-states" in state.message


def test_what_the_claim_still_catches():
    """Catches a claim under which the state, or what was read from it, may be anything: truncation where the profile
    rounds, one element off by one ulp, one head's state left as it was, beta half a percent too large."""
    replay = call("plain")
    y, state = kernel(replay, lambda s: s.bfloat16())
    truncated = kernel(replay, lambda s: (s.view(torch.int32) & -65536).view(torch.float32).bfloat16())[1]
    off = state.clone()
    off.view(torch.int16)[0, 1, 2, 3] += 1
    stale = state.clone()
    stale[:, 1] = replay.arguments["state"][:, 1].bfloat16()
    for wrong in (truncated, off, stale):
        assert [j.passed for j in judged(replay, (y, wrong), STATES)] == [True, False]
    strong = replay.wide(torch.float32).changed(beta=replay.arguments["beta"].float() * 1.005)
    found = judged(replay, kernel(strong, lambda s: s.bfloat16()), STATES)
    assert not all(j.passed for j in found)
    assert not any("consistent" in j.message for j in found)


def test_unrounded_states_undercut_the_claim():
    """Catches slack in silence: a state in float32 is told the form to claim."""
    replay = call("plain")
    found = judged(replay, kernel(replay, lambda s: s), STATES)
    assert all(j.passed for j in found)
    assert found[1].statistics["misfit_recurrent"] == 0.0
    narrow = judged(replay, kernel(replay, lambda s: s.bfloat16()), STATES)
    assert narrow[1].statistics["misfit_recurrent"] == 1.0


def test_a_pass_in_calls_is_the_whole_pass_and_rounds_where_the_calls_end():
    """Catches rows that are lost or a state that is not carried on where a sequence is cut, and a cut that does not
    round: then the net would call the legal roundings of decode an error."""
    replay = call("plain").wide(torch.float64)
    first = int(replay.arguments["offsets"][1])
    rows = {n: replay.arguments[n][:first] for n in ("q", "k", "v", "g", "beta")}
    arguments = replay.arguments | rows | {"state": replay.arguments["state"][:1], "offsets": torch.tensor([0, first])}
    del arguments["q"]
    whole = attention(rows["q"], **arguments)
    for ends in ((), (5,), (1, 2, first), (first + 7,)):
        y, state = kept_states.in_calls(attention, ends)(rows["q"], **arguments)
        assert torch.allclose(y, whole[0], rtol=0, atol=1e-12)
        assert torch.allclose(state, whole[1], rtol=0, atol=1e-12)
    errors = []
    for ends in ((first,), ()):
        cut = kept_states.in_calls(attention, ends)
        y, _ = rounded(STATES, "kda.attention", cut, (rows["q"],), arguments, seeded((1,), "cpu"))
        errors.append(float((y - whole[0]).square().mean()))
    assert errors[1] > 1.05 * errors[0]  # the last token reads a state that was rounded before it


def manifest(*steps: tuple[int, ...]) -> SimpleNamespace:
    """A snapshot with nothing but the rows of each step of request "a"."""
    entries = [SimpleNamespace(tap="t", owner=(0,) * len(p), position=p, requests=("a",)) for p in steps]
    return SimpleNamespace(entries=tuple(entries), taps=lambda: ("t",))


def test_the_calls_are_those_of_the_steps():
    """Catches ends that are taken from another request or from a schedule that was not kept."""
    snapshot = manifest((4, 5, 6), (7, 8), (9,))
    assert kept_states.ends_of_calls(snapshot, "a") == (4, 7, 9, 10)
    assert kept_states.ends_of_calls(snapshot, "b") == ()


def stored(memory: torch.dtype, site: str, profile) -> Measure:
    measures = []
    judge = Judge(profile, measures.append)
    rows = RowMap(("a",), (0,), (3,))
    pool, value = torch.zeros(2, 2, 4, 4, dtype=memory), torch.randn(1, 2, 4, 4)
    kwargs = {"value": value, "slots": torch.tensor([1])}
    seen = Call("layers.00", "state.store", site, "prefill", 0, 0, rows, (pool,), kwargs)
    token = judge.before(seen)
    pool[1] = value.to(memory)
    judge.after(seen, token, ())
    judge.end_case()
    return measures[-1]


def test_narrower_memory_of_states_is_a_finding_where_it_is_not_claimed():
    """Catches a cast into a narrow pool that passes as a write of the right bytes."""
    wide, narrow = stored(torch.float32, "kda", BF16), stored(torch.bfloat16, "kda", BF16)
    assert wide.passed
    assert not narrow.passed
    assert "consistent with profile bf16-states" in narrow.message
    claimed = stored(torch.bfloat16, "kda", STATES)
    assert claimed.passed
    assert (claimed.statistics["narrowed"], "narrowed" in wide.statistics) == (1.0, False)
    assert not stored(torch.float16, "kda", STATES).passed
    assert not stored(torch.bfloat16, "conv", STATES).passed


def test_an_inner_rounding_of_the_state_is_noise_of_the_whole_call():
    """Catches a form with bfloat16 states between chunks under which healthy results fail: its roundings come back."""
    profile = replace(STATES, points={**STATES.points, "kda.attention": dict.fromkeys(CONTRACT.points, "bfloat16")})
    for seed in range(3):
        replay = call("ragged", seed, chunk=16)
        y, state = replay.wide(torch.float32).run(Rounder(profile.points_of("kda.attention"), leave=("out", "kept")))
        results = round_nearest(y, "bfloat16").bfloat16(), round_nearest(state, "bfloat16").bfloat16()
        assert all(j.passed for j in judge_compute(replay, results, profile, seed=seed))
        assert not all(j.passed for j in judge_compute(replay, results, BF16, seed=seed))
    assert profile.inner_points("kda.attention") == ("operands", "state")
