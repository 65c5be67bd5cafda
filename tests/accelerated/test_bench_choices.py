"""The bench's comparison of answers: the reference follows the engine's choices, and says where it would not have."""

import pytest
import torch

from bench.choices import Choices, Following
from day0check.probe.recorder import Caller, Recorder
from day0check.probe.registry import Operators
from day0check.probe.rows import RowMap
from reference.attention import select
from reference.moe import route

SCORES = torch.tensor([[0.1, 0.9, 0.5, 0.2], [0.4, 0.3, 0.2, 0.1], [0.3, 0.1, 0.8, 0.7]])


def chosen(*tiles: torch.Tensor, operator: str, weights: bool = False) -> Choices:
    """Choices of an engine that gave `tiles`, one call each."""
    choices, results = Choices(), iter(tiles)
    operators = Operators({operator: lambda x: (next(results), x) if weights else next(results)})
    recorder = Recorder([choices])
    with recorder.step("prefill", RowMap(("a",), (0,), (0,)), 0):
        for tile in tiles:
            Caller(operators, recorder).at("layers.03")(operator, tile)
    return choices


def test_the_reference_attends_to_what_the_engine_picked():
    """Catches tiles that are mixed up, a choice that is not followed, and an order that is taken for another choice."""
    choices = chosen(torch.tensor([[2, 1], [0, 1]]), torch.tensor([[0, -1]]), operator="dsa.select")
    follow = Following(choices)
    visible = torch.tensor([4, 4, 4])
    found = follow("layers.03", "dsa.select", select, SCORES, k=2, visible=visible, threshold=None)
    assert found.tolist() == [[1, 2], [0, 1], [0, -1]]
    assert follow.otherwise == [("layers.03", "dsa.select", 2)]


def test_the_reference_routes_where_the_engine_did_with_weights_of_its_own():
    """Catches the engine's weights, or those of other experts, in place of its own of the same experts."""
    choices = chosen(torch.tensor([[2, 1], [0, 3], [3, 2]]), operator="moe.route", weights=True)
    follow = Following(choices)
    rest = {"k": 2, "groups": 1, "kept_groups": 1, "renormalise": True, "scale": 2.0}
    ids, weights = follow("layers.03", "moe.route", route, SCORES, **rest)
    assert ids.tolist() == [[1, 2], [0, 3], [2, 3]]
    torch.testing.assert_close(
        weights, 2 * torch.tensor([[0.9, 0.5], [0.4, 0.1], [0.8, 0.7]]) / torch.tensor([[1.4], [0.5], [1.5]])
    )
    assert follow.otherwise == [("layers.03", "moe.route", 1)]


def test_a_choice_that_the_engine_never_made_is_no_answer():
    """Catches a reference that quietly follows itself."""
    follow = Following(chosen(operator="moe.route"))
    with pytest.raises(KeyError):
        follow("layers.04", "dsa.select", select, SCORES, k=2, visible=torch.tensor([4, 4, 4]), threshold=None)
