"""Guards the page of a self-test: what needs attention comes first and is not coloured as good."""

from __future__ import annotations

import re

from day0check.report.selftest import selftest_page


def entry(name: str, **changed) -> dict:
    fields = {
        "id": name,
        "kind": "rope",
        "title": f"title of {name}",
        "benign": name.startswith("B"),
        "status": "ready" if name.startswith("B") else "not_ready",
        "caught": not name.startswith("B"),
        "placed": not name.startswith("B"),
        "expected": "rope.apply / 3 / prefill",
        "found": "rope.apply / 3 / prefill",
        "message": "<b>the message</b>",
        "seconds": 1.5,
    }
    return fields | changed


def page(*entries: dict) -> str:
    public = {"faults": 3, "caught": 2, "placed": 1}
    counts = public | {"further": 1, "further_caught": 1, "further_placed": 1, "legal": 2, "false_alarms": 1}
    return selftest_page({"counts": counts, "seconds": 12.3, "entries": list(entries)})


def states(text: str) -> dict[str, tuple[str, str]]:
    found = re.findall(r'<tr id="([^"]+)">.*?<span class="state (\w+)">([^<]+)</span>', text)
    return {name: (state, word) for name, state, word in found}


def test_each_outcome_has_its_own_word_and_colour():
    """Catches a missed fault or a false alarm in green, and a fault that was placed wrongly among the good ones."""
    text = page(
        entry("S-01"),
        entry("S-02", placed=False),
        entry("S-03", caught=False, placed=False, status="ready"),
        entry("S-04", caught=False, placed=False, status="crashed"),
        entry("B-01"),
        entry("B-02", status="not_ready"),
    )
    assert states(text) == {
        "S-01": ("passed", "caught, placed"),
        "S-02": ("not_run", "caught elsewhere"),
        "S-03": ("failed", "missed"),
        "S-04": ("failed", "crashed"),
        "B-01": ("passed", "let through"),
        "B-02": ("failed", "false alarm"),
    }
    assert list(states(text))[-2:] == ["B-01", "S-01"]
    assert 'class="banner not_ready"' in text
    assert "2 of 3 public faults were caught" in text
    assert "of 1 further ones 1 were caught" in text
    assert 'class="banner ready"' in page(entry("S-01"), entry("S-02", placed=False), entry("B-01"))


def test_nothing_reaches_the_page_unescaped_or_from_outside():
    """Catches a message that becomes markup, and a page that asks the network for something."""
    text = page(entry("S-03", caught=False, placed=False, status="ready"))
    assert "&lt;b&gt;the message&lt;/b&gt;" in text
    assert not re.search(r'(?:src|href)="(?:https?:)?//', text)


def test_the_map_shows_each_entry_under_its_model_and_case():
    """Catches an entry in the row of another model or case, and a page of an older file that falls."""
    text = page(
        entry("S-01", model="tiny", case="short"),
        entry("S-02", model="tiny-glm-5", case="pages", placed=False),
        entry("B-01", model="tiny", case="pages"),
    )
    places = text[text.index('id="places"') : text.index('id="entries"')]
    assert re.findall(r'scope="col">([^<]+)<', places) == ["Model", "Case", "Entries"]
    rows = re.findall(r'<tr><th scope="row">([^<]+)</th><td>([^<]+)</td>(.*)</tr>', places)
    found = {(model, case): re.findall(r">([SB]-\d\d)<", cells) for model, case, cells in rows}
    assert found == {("tiny", "short"): ["S-01"], ("tiny", "pages"): ["B-01"], ("tiny-glm-5", "pages"): ["S-02"]}
    assert 'id="places"' not in page(entry("S-01"))
