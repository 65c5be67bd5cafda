"""Host side of a step: the scheduler's own moves. Their contracts come with the scheduler."""

from day0check.contracts.contract import Contract

CONTRACTS: tuple[Contract, ...] = ()
