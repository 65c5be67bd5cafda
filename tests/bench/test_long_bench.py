"""The bench of long prompts, on a short one: it is green on the engine as it is and red on a wrong choice."""

from __future__ import annotations

import pytest

from bench import long

SHORT = ("--tokens", "160", "--chunk", "80", "--context", "512", "--threads", "1")


def run(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = long.main(list(SHORT))
    return code, capsys.readouterr().out


def test_a_healthy_prompt_is_met_with_all_choices_judged(capsys):
    """Catches a bench that judges nothing, or that raises a false alarm."""
    code, out = run(capsys)
    assert (code, out.splitlines()[-1]) == (0, "met")
    assert "324 rows of chosen keys judged, 0 wrong" in out  # two layers with an index, 162 rows


def test_one_wrong_key_in_one_row_is_not_met(capsys, monkeypatch):
    """Catches a bench that samples the choices: the second best key is left out in a single row of a middle chunk."""
    select = long.TABLE["dsa.select"]

    def careless(scores, *, k, visible, threshold=None):
        picked = select(scores, k=k, visible=visible, threshold=threshold)
        if int(visible[0]) == 81:
            order = scores[7, : int(visible[7])].argsort(descending=True)
            picked[7, picked[7] == order[1]] = order[k].to(picked.dtype)
        return picked

    monkeypatch.setitem(long.TABLE, "dsa.select", careless)
    code, out = run(capsys)
    assert (code, out.splitlines()[-1]) == (1, "NOT MET")
    assert "2 wrong" in out


def test_a_wrong_expert_is_not_met(capsys, monkeypatch):
    """Catches experts that are judged in some steps only: the worst one is taken for one row of the second chunk."""
    route, calls = long.TABLE["moe.route"], []

    def careless(scores, **settings):
        ids, weights = route(scores, **settings)
        calls.append(None)
        if len(calls) == 10:
            lowest = (scores if settings["bias"] is None else scores + settings["bias"])[3].argmin()
            ids[3, 0] = lowest
        return ids, weights

    monkeypatch.setitem(long.TABLE, "moe.route", careless)
    code, out = run(capsys)
    assert (code, out.splitlines()[-1]) == (1, "NOT MET")
    assert "moe.route (prefill)" in out
