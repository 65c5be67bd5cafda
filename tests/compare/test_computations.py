"""Guards which rows of a request that was computed again are judged together, and with which choices."""

from __future__ import annotations

import torch

from day0check.compare.computations import computations
from day0check.compare.lent_rows import LentRows
from day0check.probe.capture import Capture
from day0check.probe.recorder import Call
from day0check.probe.rows import RowMap
from day0check.snapshot import Snapshot

EMBED, MIXED, LOGITS = ("", "embed.tokens", ""), ("layers.00", "residual.add", "mlp"), ("", "head.logits", "")


def recorded(directory, steps, tokens=None) -> Snapshot:
    """`steps`: positions of each step of request "a"; a row's value is 100 * step + position, that of an embedding the
    token of the step and position, the position by default. Logits are those of the last row of a step."""
    capture, order = Capture(directory), 0
    for step, positions in enumerate(steps):
        wanted = [positions[-1]]
        for where, rows in ((EMBED, positions), (MIXED, positions), (LOGITS, wanted)):
            values = [100.0 * step + p for p in rows]
            if where is EMBED:
                values = [float((tokens or {}).get((step, p), p)) for p in rows]
            row_map = RowMap(("a",), (0,) * len(rows), tuple(rows))
            call = Call(*where, "prefill", step, order, row_map, (), {})
            capture.after(call, None, (torch.tensor(values)[:, None],))
            order += 1
        capture.end_step(step)
    capture.end_case()
    return Snapshot(directory)


def judged(found, tap):
    rows = found.judged(found.view.recorded(tap, "a"))
    return dict(zip(rows.positions, rows.values.flatten().tolist(), strict=True))


def test_a_request_that_is_computed_once_is_one_computation(tmp_path):
    """Catches a second pass of the oracle where nothing was computed again, also in chunks and decode steps."""
    snapshot = recorded(tmp_path, [range(4), range(4, 7), [7], [8]])
    (only,) = computations(snapshot, "a")
    assert only.view is snapshot
    assert only.tokens("a") is None
    assert judged(only, "layers.00.residual.add.mlp") == {
        **{p: p for p in range(4)},
        **{p: 100 + p for p in range(4, 7)},
        7: 207,
        8: 308,
    }


def test_every_computation_of_a_row_is_judged_once_with_its_own_choices(tmp_path):
    """Catches outputs of the time before a preemption that are held against the choices of the time after it, and rows
    of that time that nobody judges."""
    steps = [range(4), [4], [5], range(6), [6]]
    first, last = computations(recorded(tmp_path, steps), "a")
    assert judged(first, "layers.00.residual.add.mlp") == {0: 0, 1: 1, 2: 2, 3: 3, 4: 104, 5: 205}
    assert judged(first, "head.logits") == {3: 3, 4: 104, 5: 205}
    assert first.tokens("a") == {3, 4, 5}
    assert judged(last, "layers.00.residual.add.mlp") == {**{p: 300 + p for p in range(6)}, 6: 406}
    assert judged(last, "head.logits") == {5: 305, 6: 406}
    assert not first.last
    assert last.last


def test_rows_behind_a_prefix_are_judged_again_and_those_of_the_prefix_once(tmp_path):
    """Catches rows of a prefix that was not computed again and counts twice, and one that counts never."""
    first, second, last = computations(recorded(tmp_path, [range(6), range(4, 7), range(2, 8)]), "a")
    tap = "layers.00.residual.add.mlp"
    assert judged(first, tap) == {4: 4, 5: 5}
    assert judged(second, tap) == {2: 2, 3: 3, 4: 104, 5: 105, 6: 106}
    assert judged(last, tap) == {0: 0, 1: 1, **{p: 200 + p for p in range(2, 8)}}
    assert sorted(second.view.recorded(tap, "a").positions) == list(range(7))


def test_a_draft_that_was_rolled_back_is_no_computation(tmp_path):
    """Catches an oracle that is fed the final tokens and compared with what became of others."""
    (only,) = computations(recorded(tmp_path, [range(4), range(4, 7), range(5, 8)], tokens={(1, 5): 77}), "a")
    assert only.last
    assert judged(only, "layers.00.residual.add.mlp")[5] == 205


def test_rows_that_were_lent_are_one_computation(tmp_path):
    """Catches a further run, whose rows are those of two requests, that is taken apart by the lender's steps."""
    recorded(tmp_path, [range(4), range(4)])
    lent = LentRows(tmp_path, {})
    (only,) = computations(lent, "a")
    assert only.view is lent
