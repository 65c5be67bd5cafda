"""Every contract names a reference function that takes exactly its arguments."""

import importlib
import inspect

import pytest

from day0check.contracts import CONTRACTS
from reference.rounding import exact

NAMES = sorted(CONTRACTS)


@pytest.mark.parametrize("name", NAMES)
def test_reference_function_takes_exactly_the_contracts_arguments(name):
    """Catches a missing function, a renamed or forgotten argument, an optional one without default, and a missing
    `round`."""
    contract = CONTRACTS[name]
    parameters = inspect.signature(contract.function()).parameters
    wanted = [a.name for a in contract.args] + (["round"] if contract.points else [])
    assert list(parameters) == wanted
    first, *others = parameters.values()
    assert first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    for parameter in others:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter.name
    for arg in contract.args:
        has_default = parameters[arg.name].default is not inspect.Parameter.empty
        assert has_default == arg.optional, arg.name
    if contract.points:
        assert parameters["round"].default is exact


@pytest.mark.parametrize("name", [n for n in NAMES if CONTRACTS[n].mutates])
def test_read_back_function_takes_the_same_arguments(name):
    """Catches an `after` function that cannot be called as the operator was."""
    contract = CONTRACTS[name]
    module, function = contract.after.split(":")
    after = getattr(importlib.import_module(module), function)
    assert list(inspect.signature(after).parameters) == [a.name for a in contract.args]
