"""The heartbeat is read after its process died, at any moment of a beat."""

import subprocess
import sys

import hypothesis.strategies as st
from hypothesis import given, settings

from day0check.probe.heartbeat import SIZE, SLOT, Beat, Heartbeat, parse, read


def test_last_beat_survives_an_abort(tmp_path):
    """Catches beats that wait in a buffer of the process."""
    path = tmp_path / "heartbeat"
    code = (
        "import os, sys\nfrom day0check.probe.heartbeat import Heartbeat\n"
        f"h = Heartbeat({str(path)!r})\nh.beat('a', 'prefill', 0)\n"
        "h.beat('layers.03.dsa.select', 'decode', 9, 2.5)\nos.abort()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL).returncode != 0
    assert read(path) == Beat("layers.03.dsa.select", "decode", 9, 2, 2.5)


def test_nothing_and_no_beat(tmp_path):
    assert read(tmp_path / "absent") is None
    Heartbeat(tmp_path / "new").close()
    assert read(tmp_path / "new") is None
    (tmp_path / "short").write_bytes(b"\1" * 10)
    assert read(tmp_path / "short") is None


@settings(max_examples=8, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=300), min_size=2, max_size=5))
def test_a_beat_cut_anywhere_leaves_a_whole_one(tmp_path_factory, taps):
    """Catches a torn beat that is read as a call which never happened."""
    path = tmp_path_factory.mktemp("h") / "heartbeat"
    heartbeat = Heartbeat(path)
    states = [path.read_bytes()]
    for step, tap in enumerate(taps):
        heartbeat.beat(tap, "prefill", step)
        states.append(path.read_bytes())
    heartbeat.close()
    before, after = states[-2], states[-1]
    begin = (len(taps) & 1) * SLOT.size
    for cut in range(begin, begin + SLOT.size):
        torn = before[:begin] + after[begin:cut] + before[cut:]
        assert len(torn) == SIZE
        found = parse(torn)
        assert found.step in (len(taps) - 1, len(taps) - 2)
        assert found.tap == taps[found.step].encode()[:400].decode(errors="replace")
