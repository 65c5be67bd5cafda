"""Two runs against each other in units of a noise that is known: what is legal passes, what is not has an address."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from day0check.compare.noise_book import NoiseBook, read_noise
from day0check.compare.pairing import Pairing
from day0check.compare.splice_law import splice_law
from day0check.compare.two_runs import compare_runs
from day0check.errors import InputError
from day0check.snapshot import Rows
from day0check.types import Outputs, Request, Turn

TAP, SELECT = "layers.00.residual.add.mlp", "layers.00.dsa.select"
PAIR = (Pairing("a", "a"),)
N, D, SIGMA = 200, 16, 0.01


@dataclass
class Run:
    """Enough of a snapshot: tap -> request -> rows."""

    rows: dict[str, dict[str, Rows]]
    outputs: Outputs | None = None
    cut: str = ""

    def taps(self):
        return tuple(self.rows)

    def recorded(self, tap, request, result=0, *, by_position=True):
        return self.rows.get(tap, {}).get(request, Rows((), (), (), torch.empty(0)))

    def dropped(self, tap):
        return self.cut

    def first_order(self, tap):
        return list(self.rows).index(tap)


def rows(values: torch.Tensor, *, phase: str = "prefill", first: int = 0) -> Rows:
    count = len(values)
    return Rows(tuple(range(first, first + count)), (phase,) * count, (5,) * count, values)


def run(values: torch.Tensor, chosen: torch.Tensor | None = None) -> Run:
    taps = {TAP: {"a": rows(values)}}
    return Run(taps if chosen is None else {SELECT: {"a": rows(chosen)}, **taps})


def oracle() -> torch.Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rounded(seed: int) -> torch.Tensor:
    """The oracle with one rounding error, as a replicate has it."""
    noise = torch.randn(N, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return oracle() + SIGMA * noise


@pytest.fixture
def book() -> NoiseBook:
    made = NoiseBook()
    made.add("a", TAP, oracle(), [rounded(100), rounded(101)])
    return made


def test_a_draft_has_seen_the_token_behind_it():
    """Would catch an accusation, or a row that is not compared, where two runs part: row p of a layer that drafts
    depends on token p + 1, that of any other on tokens up to p."""
    drafted = [f"layers.01.{name}" for name in ("embed.tokens", "residual.add.mlp")]
    made = NoiseBook()
    for tap in (TAP, *drafted):
        made.add("a", tap, oracle(), [rounded(100), rounded(101)])
    parted = rounded(2)
    parted[9:] += 1.0

    def both(values: torch.Tensor) -> Run:
        taps = {TAP: {"a": rows(rounded(1))}, **{tap: {"a": rows(values)} for tap in drafted}}
        return Run({"embed.tokens": {}, **taps})

    pairing = (Pairing("a", "a", until=10),)
    found = compare_runs(both(parted), both(rounded(1)), pairing, made)
    assert found.measures
    assert all(m.passed for m in found.measures)
    assert found.rows == 10 + 9 + 9
    parted[8:] += 1.0
    found = compare_runs(both(parted), both(rounded(1)), pairing, made)
    assert {m.tap for m in found.measures if not m.passed} == set(drafted)


def test_the_same_run_has_the_same_bytes(book):
    """Would catch a comparison that sees differences where there are none."""
    found = compare_runs(run(rounded(1)), run(rounded(1)), PAIR, book)
    assert (found.rows, found.different, found.missing, found.flips) == (N, 0, "", {})
    assert [m.passed for m in found.measures] == [True]


def test_two_legal_roundings_never_alarm(book):
    """Would catch limits that take other legal roundings for a fault: none of 150 pairs may be beyond them."""
    for seed in range(150):
        found = compare_runs(run(rounded(1000 + seed)), run(rounded(5000 + seed)), PAIR, book)
        assert all(m.passed for m in found.measures), found.measures
        assert found.different == N


@pytest.mark.parametrize(
    ("change", "failing", "position"),
    [
        (lambda x: x + 3 * SIGMA * torch.ones(1, D, dtype=torch.float64), "whole", None),
        (lambda x: x.index_add(0, torch.tensor([7]), torch.full((1, D), 60 * SIGMA, dtype=torch.float64)), "row", 7),
        (lambda x: x.index_fill(0, torch.tensor([9]), float("nan")), "non_finite", 9),
    ],
)
def test_what_is_beyond_the_noise_has_its_address(book, change, failing, position):
    """Would catch a fault of all rows, of one row and a NaN that pass, or that are accused at another position."""
    (measure,) = compare_runs(run(change(rounded(1))), run(rounded(2)), PAIR, book).measures
    assert (measure.passed, measure.failing, measure.request) == (False, failing, "a")
    assert position is None or measure.position == position
    assert measure.message


def test_only_the_rows_of_the_pairing_count(book):
    """Would catch a later change that is held against the rows before it, and the reverse."""
    later = rounded(1).index_fill(0, torch.arange(10, N), 5.0)
    assert all(
        m.passed for m in compare_runs(run(later), run(rounded(2)), (Pairing("a", "a", until=10),), book).measures
    )
    assert not all(m.passed for m in compare_runs(run(later), run(rounded(2)), (Pairing("a", "a", 11),), book).measures)


def test_choices_are_sets_and_their_first_flip_is_known(book):
    """Would catch an order that counts as another choice, and a flip that is not seen."""
    chosen = torch.arange(N * 4).view(N, 4)
    other = chosen.flip(-1).clone()
    assert compare_runs(run(rounded(1), chosen), run(rounded(1), other), PAIR, book).flips == {}
    other[5, 0], other[8, 0] = -1, -1
    assert compare_runs(run(rounded(1), chosen), run(rounded(1), other), PAIR, book).flips == {"a": 5}
    wrong = rounded(1).index_fill(0, torch.tensor([5]), 9.0)
    before = compare_runs(run(wrong, chosen), run(rounded(1), other), PAIR, book, before={"a": 5})
    assert all(m.passed for m in before.measures)
    assert before.measures[0].rows == 5


def test_what_cannot_be_compared_is_said(book):
    """Would catch a pass without a single row, or without noise to judge by."""
    assert "no row of request b" in compare_runs(run(rounded(1)), run(rounded(1)), (Pairing("b", "a"),), book).missing
    assert "no noise" in compare_runs(run(rounded(1)), run(rounded(1)), PAIR, NoiseBook()).missing
    wide = torch.zeros(N, D + 1)
    cut = run(rounded(1))
    cut.cut = "9 bytes beyond the cap"
    assert "9 bytes beyond the cap" in compare_runs(cut, run(rounded(1)), PAIR, book).missing
    assert "elements" in compare_runs(run(wide), run(rounded(1)), PAIR, book).missing


def test_the_noise_survives_its_file(book, tmp_path):
    """Would catch a limit that depends on whether the noise was read from disk; and a cut file."""
    book.write(tmp_path / "noise")
    pair = run(rounded(3)), run(rounded(4))
    assert (
        compare_runs(*pair, PAIR, book).measures == compare_runs(*pair, PAIR, read_noise(tmp_path / "noise")).measures
    )
    (tmp_path / "noise").write_bytes((tmp_path / "noise").read_bytes()[:40])
    with pytest.raises(InputError, match="no noise can be read"):
        read_noise(tmp_path / "noise")


# ------------------------------------------------------------------------------------------------------------- splice

PADS = (2, 3, 6)
SEQUENCE = tuple(99 if p in PADS else p for p in range(9))
PLAIN, FEATURES = torch.arange(18.0).view(9, 2), torch.full((3, 2), 50.0) + torch.arange(3).unsqueeze(1)


def spliced(merged: torch.Tensor, features: torch.Tensor = FEATURES) -> Run:
    positions = {
        "vision.vision.project": (2, 3, 6)[: len(features)],
        "embed.tokens": range(9),
        "splice.merge": range(9),
    }
    values = {"vision.vision.project": features, "embed.tokens": PLAIN, "splice.merge": merged}
    taps = {}
    for tap in ("embed.tokens", "vision.vision.project", "splice.merge"):
        at = tuple(positions[tap])
        taps[tap] = {"a": Rows(at, ("prefill",) * len(at), (1,) * len(at), values[tap])}
    return Run(taps, Outputs({"a": SEQUENCE}, {}))


def test_every_pad_has_its_feature_and_nothing_else_moves():
    """Would catch features shifted by one, a text row that was overwritten, and a tower that gives too few."""
    config = SimpleNamespace(tokens=SimpleNamespace(media_pad=99))
    asked = (Request("a", (Turn(SEQUENCE, ("p.png",)),)),)
    right = PLAIN.clone()
    right[list(PADS)] = FEATURES
    assert [m.passed for m in splice_law(spliced(right), config, asked)[0]] == [True]
    shifted = PLAIN.clone()
    shifted[list(PADS)] = FEATURES.roll(1, 0)
    (measure,), missing = splice_law(spliced(shifted), config, asked)
    assert (measure.passed, measure.position, missing) == (False, 2, "")
    touched = right.clone()
    touched[7] += 1
    assert splice_law(spliced(touched), config, asked)[0][0].position == 7
    few = splice_law(spliced(right, FEATURES[:2]), config, asked)[0][0]
    assert "2 features for 3 media pads" in few.message
    assert splice_law(run(rounded(1)), config, asked) == ([], "the tower, the embedding or the splice was not seen")
