"""The contracts of the operators, one file per family. `CONTRACTS[name]` is public API, as the names are.

Torch is imported only by the functions that need it: `day0check list` reads this room without torch.
"""

from day0check.contracts import (
    batch,
    cache,
    comm,
    dsa,
    kda,
    load,
    mla,
    moe,
    output,
    pools,
    quantise,
    serve,
    spine,
    towers,
    variants,
    vision,
)
from day0check.contracts.contract import Arg, Contract, Cost, Direction, Form, Result

FAMILIES = (
    load,
    batch,
    vision,
    towers,
    spine,
    mla,
    dsa,
    pools,
    cache,
    kda,
    moe,
    quantise,
    output,
    serve,
    comm,
    variants,
)
CONTRACTS: dict[str, Contract] = {c.name: c for family in FAMILIES for c in family.CONTRACTS}

__all__ = ["CONTRACTS", "FAMILIES", "Arg", "Contract", "Cost", "Direction", "Form", "Result"]
