"""Guards the seams: names, kinds and arguments of the operators, and that the tables stay free of torch."""

import subprocess
import sys

from day0check.contracts import CONTRACTS


def test_contract_table_imports_no_torch():
    """Catches a contract file that would make `day0check list` slow."""
    code = "import sys, day0check.contracts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_first_argument_is_the_only_positional_one_and_names_are_unique():
    for contract in CONTRACTS.values():
        names = [a.name for a in contract.args]
        assert len(names) == len(set(names)), contract.name


def test_points_end_with_out_and_forms_use_declared_points():
    """Catches a rounding point that a form names but the contract does not declare."""
    for contract in CONTRACTS.values():
        if contract.points:
            assert contract.points[-1] == "out", contract.name
        for form in contract.forms:
            assert set(form.points) <= set(contract.points), (contract.name, form.name)


def test_compute_and_choose_contracts_name_hard_inputs():
    for contract in CONTRACTS.values():
        if contract.kind in ("compute", "choose"):
            assert contract.hard_inputs, contract.name
        if contract.kind == "choose":
            assert contract.ties, contract.name
        if contract.mutates:
            assert contract.after, contract.name
