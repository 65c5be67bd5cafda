"""Output: V vocabulary.

Benign column of sampling: 0 alarms in 1,000 healthy runs, draws at a temperature and exact ties among them; every
choice is judged by its own logits.
"""

from day0check.contracts.contract import Contract, Result, linear, rows

CONTRACTS = (
    linear("draft.project", "draft layer: normed embedding of the next token beside the normed hidden row, as one row"),
    linear("head.logits", "logits, float32", dtype="float32", net=True),
    Contract(
        "sample.token",
        "choose",
        "temperature 0: the largest logit, the lowest id among equal ones; otherwise a draw from "
        "softmax(logits/temperature) by inverse transform of a counter-based uniform number of (seed, position)",
        (
            rows("logits", "rows V", "float32"),
            rows("temperature", "rows", "float32"),
            rows("seed", "rows", "int64"),
            rows("positions", "rows", "int64"),
        ),
        (Result("ids", "rows", "int64"),),
        "reference.sampling:sample",
        ties="the lowest id wins",
        hard_inputs=("plain", "ties", "all_negative", "sampled"),
        net=True,
    ),
)
