"""Guards amplitudes, spreads, and what can be told apart, on errors that are made up."""

from __future__ import annotations

import pytest
import torch

from day0check.compare.free_choices import FreeLimits, error_of_a_difference, given_up
from day0check.compare.matched_guesses import Guess, Parameter
from day0check.compare.matched_statistics import Projections, ranked
from day0check.compare.matched_verdict import in_words, measure, smallest_errors, verdict

PROMPTS, REPLICATES, VALUES = 5, 8, 400
SCALE = Parameter("mla.attention", "scale", "softmax scale", ("layers.00.mla.attention", "layers.01.mla.attention"))
GUESSES = (Guess(SCALE, None), Guess(SCALE, 0), Guess(SCALE, 1))


def made(amplitude: float, *, of: int, seed: int = 0, alike: float = 0.3, other: float = 0.0, outliers: int = 0):
    """Errors with `amplitude` times the change of guess `of` in them; layers whose changes share `alike` of theirs."""
    g = torch.Generator().manual_seed(seed)
    errors, changes = [], []
    for _ in range(PROMPTS):
        common, first, second = (torch.randn(VALUES, generator=g) * 0.5 for _ in range(3))
        zero, one = first + alike * common, second + alike * common
        own = torch.stack([zero + one, zero, one])
        noise = torch.randn(2 + REPLICATES, VALUES, generator=g)
        noise[0] = 0.7 * noise[0] + amplitude * own[of] + other * torch.randn(VALUES, generator=g)
        noise[0, :outliers] += 1e3
        noise[1] *= 0.1
        errors.append(noise.double().unsqueeze(-1))
        changes.append(own.double().unsqueeze(-1))
    variance = [torch.ones(VALUES, 1, dtype=torch.float64)] * PROMPTS
    return Projections.of(errors, variance, clip=4.0).with_changes(changes, variance)


@pytest.mark.parametrize("of", [0, 1, 2])
def test_the_guess_that_was_planted_is_found_with_its_size(of):
    """Catches a layer named for another, an interval that leaves the truth out, and layers told apart that are not."""
    found = made(2.0, of=of)
    said = verdict(found, GUESSES)
    assert said.found
    assert said.guess == GUESSES[of]
    assert said.low < 0.02 < said.high
    assert said.size == pytest.approx(0.02, rel=0.2)
    assert said.rivals == ()
    assert said.layers == ((0, 1), (0,), (1,))[of]


def test_layers_that_change_the_same_are_not_told_apart():
    """Catches an address that the data do not give: then every layer that may have it is said, and what would tell."""
    said = verdict(made(2.0, of=1, alike=20.0), GUESSES)
    assert said.found
    assert said.layers == (0, 1)
    assert said.prompts_to_tell is None or said.prompts_to_tell > PROMPTS
    assert measure(made(2.0, of=1, alike=20.0), GUESSES, order=3).layer is None
    assert "prompts would tell" in in_words(said, made(2.0, of=1, alike=20.0))


def test_noise_and_errors_of_another_kind_name_nothing():
    """Catches a guess at an error that no parameter makes, however large, and a limit that noise passes."""
    for seed in range(20):
        assert measure(made(0.0, of=0, seed=seed), GUESSES, order=0).passed
        assert measure(made(0.0, of=0, seed=seed, other=8.0), GUESSES, order=0).passed


def test_a_few_values_far_off_do_not_decide():
    """Catches an amplitude that one expert chosen otherwise moves: eight values in 400 a thousand noises off."""
    clean, dirty = (ranked(made(2.0, of=0, outliers=n))[0].told for n in (0, 8))
    assert dirty.amplitude == pytest.approx(clean.amplitude, rel=0.3)
    assert dirty.significance > 6


def test_an_amplitude_that_no_parameter_has_is_not_told():
    """Catches a step of one percent taken for an error of a hundred."""
    assert not GUESSES[0].possible(60.0)
    assert GUESSES[0].possible(-30.0)
    eps = Guess(Parameter("norm.rms", "eps", "eps", ("norm.rms.final",)), None)
    assert eps.possible(1.0)
    assert not eps.possible(-0.2)  # less than none


def test_more_prompts_see_smaller_errors():
    """Catches a power that does not follow the spread: it falls with the square root of the prompts."""
    found = made(0.0, of=0)
    half = Projections(found.errors[:2], tuple(c for c in found.changes[:2]), found.clip)
    assert (
        smallest_errors(half, GUESSES)["mla.attention.scale"]
        > 1.2 * smallest_errors(found, GUESSES)["mla.attention.scale"]
    )


def test_limits_without_choices_come_from_rows_that_strayed():
    """Catches a limit that one row of a replicate does not raise, and a token outside the vocabulary that has none."""
    g = torch.Generator().manual_seed(0)
    oracle = torch.randn(64, 50, generator=g).double()
    replicates = oracle + 0.01 * torch.randn(8, 64, 50, generator=g)
    calm = FreeLimits()
    calm.see_rows("t", oracle, replicates)
    assert calm.row_limit("t", 30.0) == 30.0
    replicates[3, 7] += 3 * torch.randn(50, generator=g)
    strayed = FreeLimits()
    strayed.see_rows("t", oracle, replicates)
    strayed.see_logits(oracle, replicates)
    assert strayed.row_limit("t", 30.0) > 60.0
    assert strayed.margin_limit(8.0) > 8.0
    size = error_of_a_difference(oracle, replicates)
    assert given_up(oracle, oracle.argmax(-1), size).max() == 0
    assert torch.isinf(given_up(oracle, torch.full((64,), 50), size)).all()


def test_a_parameter_beside_a_larger_error_of_another_kind_is_not_named():
    """Catches an address taken from a part of the error, where most of it is something else."""
    said = verdict(made(20.0, of=0, other=20.0), GUESSES)
    assert said.ranked.told.significance > 6
    assert said.ranked.told.unexplained > 2.5
    assert not said.found
