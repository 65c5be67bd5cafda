"""The commands without a model: help, list, report, gate, baseline, and every error as one message with its code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from baseline_runs import Knobs, write_run
from click.testing import CliRunner, Result

from day0check.cli.app import COMMANDS, cli
from day0check.cli.listing import KINDS
from day0check.errors import ExitCode


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def fresh(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; its last line on stderr says which heavy modules were imported."""
    code = (
        "import sys, atexit\n"
        "heavy = ('torch', 'pandas', 'matplotlib', 'pydantic', 'scipy', 'numpy')\n"
        "atexit.register(lambda: print('heavy:', *[m for m in heavy if m in sys.modules], file=sys.stderr))\n"
        "from day0check.cli import main\nmain()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def heavy(done: subprocess.CompletedProcess[str]) -> set[str]:
    return set(done.stderr.splitlines()[-1].removeprefix("heavy:").split())


def test_help_is_light_and_names_every_command(tmp_path: Path) -> None:
    """Would catch a heavy import on the way to --help; its time is held in tests/faults/test_first_second.py."""
    done = fresh("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert heavy(done) == set()
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_without_torch(name: str, tmp_path: Path) -> None:
    """Would catch a command that cannot be loaded, and one whose help waits for torch."""
    done = fresh(name, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert heavy(done) == set()


@pytest.mark.parametrize("what", KINDS)
def test_lists_are_light_and_not_empty(what: str, tmp_path: Path) -> None:
    """Would catch a list that imports torch, that is empty, or whose two forms disagree."""
    done = fresh("list", what, "--json", cwd=tmp_path)
    assert "torch" not in heavy(done)
    rows = json.loads(done.stdout)
    assert rows
    assert all(set(row) == {"name", "about"} and row["about"] for row in rows)
    assert [line.split("  ")[0] for line in call("list", what).stdout.splitlines()] == [row["name"] for row in rows]


def test_listed_presets_are_the_presets() -> None:
    """Would catch the list, which is read without importing torch, falling behind the table; full sizes come last."""
    from reference.presets import preset_names
    from reference.published import published_names

    rows = json.loads(call("list", "presets", "--json").stdout)
    apart = [row["name"] for row in rows if row["about"].startswith("published full size")]
    assert tuple(row["name"] for row in rows) == (*preset_names(), *apart)
    assert tuple(apart) == published_names()


@pytest.mark.parametrize(("model", "word"), [("kimi-k3", "tiny-kimi-k3"), ("gpt-oss-120b", "directory")])
def test_a_published_size_without_a_checkpoint_is_refused(model: str, word: str, tmp_path: Path) -> None:
    """Would catch a run that starts on nothing, or that calls a known family a misspelled preset."""
    done = call("run", "--model", model, "--out", str(tmp_path / "run"))
    assert done.exit_code == 2
    assert "its weights are not" in done.stderr
    assert word in done.stderr
    assert not (tmp_path / "run").exists()


def test_report_makes_the_views_again_without_torch(tmp_path: Path) -> None:
    """Would catch a report that needs torch or the snapshots, or whose exit code is the verdict's."""
    folder = write_run(tmp_path / "run")
    done = fresh("report", str(folder), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torch" not in heavy(done)
    assert (folder / "report.html").is_file()
    assert (folder / "junit.xml").is_file()
    assert done.stdout == ""


def test_json_on_stdout_is_the_file_and_nothing_else(tmp_path: Path) -> None:
    """Would catch a line of progress or a note inside what a script parses."""
    folder = write_run(tmp_path / "run")
    assert call("report", str(folder), "--json").stdout == (folder / "verdict.json").read_text()
    result = call("gate", str(folder), "--json")
    assert json.loads(result.stdout)["status"] == "ready"
    assert result.exit_code == 0


# ---------------------------------------------------------------------------------------------- baseline and gate


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[str, ...]:
    first = write_run(tmp_path / "first", Knobs(torch="2.12.0"), seed=1)
    result = call("baseline", "record", "a", str(first), "--baselines", str(tmp_path / "kept"))
    assert result.exit_code == 0, result.output
    return ("--baseline", "a", "--baselines", str(tmp_path / "kept"))


def test_unchanged_is_ready_and_says_what_changed_around_it(tmp_path: Path, recorded: tuple[str, ...]) -> None:
    """Would catch a gate that fails on an upgrade by itself, or does not name it."""
    run = write_run(tmp_path / "run", seed=2)
    before = (run / "verdict.json").read_bytes()
    result = call("gate", str(run), *recorded)
    assert result.exit_code == 0, result.output
    assert "torch.version: 2.12.0 -> 2.13.0" in result.stderr
    assert (run / "verdict.json").read_bytes() == before
    assert json.loads((run / "gate" / "a" / "verdict.json").read_text())["status"] == "ready"


@pytest.mark.parametrize(
    ("knobs", "check"), [(Knobs(slow=1.3), "baseline.speed"), (Knobs(rule=True), "baseline.choices")]
)
def test_slower_or_another_tie_rule_exits_1(
    tmp_path: Path, recorded: tuple[str, ...], knobs: Knobs, check: str
) -> None:
    """Would catch the gate's findings not reaching the exit code."""
    run = write_run(tmp_path / "run", knobs, seed=2)
    assert call("gate", str(run), *recorded).exit_code == ExitCode.NOT_READY
    verdict = json.loads((run / "gate" / "a" / "verdict.json").read_text())
    assert verdict["first_fault"]["check"] == check


def test_gating_twice_gives_the_same_and_gating_a_gate_adds_nothing(tmp_path: Path, recorded: tuple[str, ...]) -> None:
    """Would catch findings of an earlier gate piling up."""
    run = write_run(tmp_path / "run", Knobs(slow=1.3), seed=2)
    texts = []
    for _ in range(2):
        call("gate", str(run), *recorded)
        texts.append((run / "gate" / "a" / "verdict.json").read_text())
    assert texts[0] == texts[1]
    (run / "verdict.json").write_text(texts[0])
    call("gate", str(run), *recorded)
    assert (run / "gate" / "a" / "verdict.json").read_text() == texts[0]


def test_a_waiver_holds_in_the_gate_until_its_day(tmp_path: Path, recorded: tuple[str, ...], monkeypatch) -> None:
    """Would catch a waivers file that is found but not used, or used and not named."""
    import datetime

    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run", Knobs(rule=True), seed=2)
    call("gate", str(run), *recorded)
    found = json.loads((run / "gate" / "a" / "verdict.json").read_text())["first_fault"]["id"]
    day = (datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=30)).isoformat()
    text = f'[[waiver]]\nfinding = "{found}"\nreason = "r"\nowner = "o"\nlink = "l"\nexpires = {day}\n'
    (tmp_path / "waivers.toml").write_text(text)
    assert call("gate", str(run), *recorded).exit_code == 0
    verdict = json.loads((run / "gate" / "a" / "verdict.json").read_text())
    assert verdict["environment"]["run"]["waivers"] == "waivers.toml"
    assert [f["waived"] for f in verdict["findings"] if f["id"] == found] == [True]
    (tmp_path / "waivers.toml").write_text(text.replace(day, "2020-01-01"))
    assert call("gate", str(run), *recorded).exit_code == 1


@pytest.mark.parametrize("damage", ["truncated", "newer"])
def test_a_damaged_baseline_is_told_and_left(tmp_path: Path, recorded: tuple[str, ...], damage: str) -> None:
    """Would catch a traceback, or a gate that passes because its baseline could not be read."""
    (file,) = (tmp_path / "kept" / "a").iterdir()
    text = file.read_text()
    file.write_text(text[:100] if damage == "truncated" else text.replace('"schema_version": 1', '"schema_version": 9'))
    before = file.read_bytes()
    run = write_run(tmp_path / "run", seed=2)
    result = call("gate", str(run), *recorded)
    assert result.exit_code == 2
    assert str(file) in result.stderr
    assert "Traceback" not in result.output
    assert file.read_bytes() == before


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rnu",), ("no command 'rnu'", "'run'")),
        (("list", "casse"), ("casse",)),
        (("report", "nowhere"), ("nowhere", "no such folder")),
        (("report", "."), ("verdict.json",)),
        (("gate", ".", "--baseline", "a"), ("verdict.json",)),
        (("baseline", "record", "a"), ("reports", "no run")),
        (("run", "--budget", "soon"), ("soon", "10m")),
        (("run", "--waivers"), ("--waivers",)),
    ],
)
def test_what_means_nothing_is_2_and_one_message(tmp_path: Path, monkeypatch, arguments, words) -> None:
    """Would catch a traceback, a silent exit, or a message without what to do."""
    monkeypatch.chdir(tmp_path)
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr


def test_a_fault_of_our_own_is_3_with_the_traceback_in_a_file(tmp_path: Path, monkeypatch) -> None:
    """Would catch a bug of ours that looks like a verdict, or buries the user in a traceback."""
    import day0check.cli.report as module

    folder = write_run(tmp_path / "run")

    def broken(path: Path) -> None:
        raise ZeroDivisionError("our own mistake")

    monkeypatch.setattr(module, "read_verdict", broken)
    result = call("report", str(folder))
    assert result.exit_code == ExitCode.HARNESS
    assert "our own mistake" in result.stderr
    assert "Traceback" not in result.output
    file = Path(result.stderr.split("the traceback is in ")[1].strip())
    assert "our own mistake" in file.read_text()


def test_durations() -> None:
    """Would catch minutes read as seconds."""
    from day0check.cli.options import Duration

    read = [Duration().convert(text, None, None) for text in ("90", "90s", "1.5m", "2h")]
    assert read == [90.0, 90.0, 90.0, 7200.0]
