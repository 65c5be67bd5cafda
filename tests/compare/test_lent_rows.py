"""Rows below a cached prefix come from the request that computed them, but for those that have seen what follows."""

from __future__ import annotations

import torch

from day0check.compare.lent_rows import LentRows
from day0check.probe.capture import Capture
from day0check.probe.recorder import Call
from day0check.probe.rows import RowMap

PREFIX, LENGTH = 4, 7  # the borrower begins at PREFIX; both sequences are equal below it
EMBED, MIXED = ("", "embed.tokens", ""), ("layers.00", "residual.add", "mlp")
DRAFT_EMBED, DRAFT_MIXED = ("layers.01", "embed.tokens", ""), ("layers.01", "residual.add", "mlp")


def recorded(directory, calls) -> LentRows:
    """`calls`: (place, operator, site), request, positions; a row's value is its position, plus 100 of the lender."""
    capture = Capture(directory)
    for order, (where, request, positions) in enumerate(calls):
        rows = RowMap((request,), (0,) * len(positions), tuple(positions))
        values = torch.tensor([[100.0 * (request == "lender") + p] for p in positions])
        capture.after(Call(*where, "prefill", 0, order, rows, (), {}), None, (values,))
    capture.end_step(0)
    capture.end_case()
    return LentRows(directory, {"borrower": "lender"})


def test_rows_of_the_prefix_are_lent_and_drafts_are_not(tmp_path):
    """Would catch a draft of the lender taken for one of the borrower, whose next token is another, and any other row
    of the prefix that is missing or taken from behind it."""
    own, lent = range(PREFIX, LENGTH), range(LENGTH)
    calls = [(where, "lender", lent) for where in (EMBED, MIXED, DRAFT_EMBED, DRAFT_MIXED)]
    calls += [(where, "borrower", own) for where in (EMBED, MIXED)]
    found = recorded(tmp_path, calls)
    positions, values = found.rows("layers.00.residual.add.mlp", "borrower")
    assert positions == tuple(range(LENGTH))
    assert values.flatten().tolist() == [100, 101, 102, 103, 4, 5, 6]
    for tap in ("layers.01.embed.tokens", "layers.01.residual.add.mlp"):
        assert found.rows(tap, "lender")[0] == tuple(lent)
        assert found.rows(tap, "borrower")[0] == ()
