"""Index keys pooled over P tokens (GLM-5.3): dI index dim, k pools selected. Scores and selection are in dsa.py."""

from day0check.contracts.contract import Arg, Contract, Result, linear, rows, static

CONTRACTS = (
    linear("dsa.pool_gate", "gate of each token's index key in its pool"),
    Contract(
        "dsa.expand",
        "exact",
        "selected pools as the positions of their tokens, then the tail: the visible tokens behind the last whole pool",
        (
            rows("indices", "rows k", "int32"),
            Arg("visible", "rows", "rows", "int64"),
            static("pool"),
            static("tail"),
        ),
        (Result("indices", "rows k*P+P-1", "int32"),),
        "reference.attention:expand_pools",
        hard_inputs=("plain", "no_tail", "whole_pools", "fewer_than_k", "all_minus_one"),
    ),
)
