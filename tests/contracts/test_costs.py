"""Cost models on the hard inputs of their contracts: positive, of the right order, silent on what they cannot see."""

import pytest
import torch

from day0check.contracts import CONTRACTS
from day0check.contracts.costs import MODELS, cost_of
from day0check.contracts.hard_inputs import generate


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_reads_the_calls_of_its_contract(name):
    """Catches a model whose arguments are not those of the operator: then nothing of it would ever be checked."""
    contract = CONTRACTS[name]
    hard = generate(contract, contract.hard_inputs[0], 3, torch.float32)
    cost = cost_of(name, *hard.args, **hard.kwargs)
    assert cost is not None
    assert cost.bytes > 0
    assert cost.operations >= 0


def test_a_linear_layer_costs_its_multiplications():
    """Catches a factor of two, and rows that are counted as columns."""
    x, weight = torch.zeros(3, 5), torch.zeros(7, 5)
    cost = cost_of("mla.gate", x, weight=weight)
    assert cost.operations == 2 * 3 * 5 * 7
    assert cost.bytes == 4 * (15 + 35 + 21)


def test_a_kernel_with_other_arguments_has_no_model():
    """Catches a fused kernel that is judged by the model of another call."""
    assert cost_of("dsa.attention", torch.zeros(2, 3, 4), pool=torch.zeros(1, 2, 4)) is None
    assert cost_of("moe.experts", torch.zeros(2, 3), packed="mine") is None


def test_a_selection_compares_nothing_up_to_k_keys():
    """Catches a model without the step that every selection may have where k keys are passed: the check of costs then
    accuses a healthy one."""
    few, many = (cost_of("dsa.select", torch.zeros(4, n), k=64) for n in (64, 65))
    assert few.operations == 0
    assert many.operations == 4 * 65 * 6 * 7
    assert many.bytes - few.bytes == 4 * 4
