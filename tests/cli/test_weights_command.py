"""`day0check weights`: the audit of a checkpoint as a command, with verdict, views and exit code."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from day0check.cli.app import cli
from reference.presets import preset_dir


@pytest.fixture
def model(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(preset_dir("tiny-deepseek-v3.2"), tmp_path / "model")


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["weights", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def stray(model: Path) -> Path:
    """Adds a tensor to a shard that the index does not name."""
    shard = min(model.glob("*.safetensors"))
    save_file({**load_file(shard), "model.stray": torch.ones(1)}, shard)
    return shard


def test_a_good_checkpoint_is_ready(model: Path) -> None:
    """Would catch a false alarm, a verdict without the check, and a page that needs a case."""
    result = call(str(model), "--json", "--out", "out")
    assert result.exit_code == 0, result.stderr
    verdict = json.loads(result.stdout)
    assert result.stdout == Path("out/verdict.json").read_text()
    assert (verdict["status"], verdict["findings"], verdict["cases"]) == ("ready", [], [])
    assert [(c["name"], c["status"], c["case"]) for c in verdict["checks"]] == [("weights", "passed", "")]
    assert "238 tensors" in verdict["checks"][0]["summary"]
    assert "weights" in Path("out/report.html").read_text()


def test_the_verdict_does_not_depend_on_the_run(model: Path) -> None:
    """Would catch a time, a path or an order of the file system in the verdict."""
    stray(model)
    kept = []
    for out in ("a", "b"):
        verdict = json.loads(call(str(model), "--json", "--out", out).stdout)
        kept.append({k: v for k, v in verdict.items() if k not in ("measured", "environment")})
    assert kept[0] == kept[1]


def test_a_fault_is_1_and_named_in_every_view(model: Path) -> None:
    """Would catch a fault of a checkpoint that is an error of usage, or that a view leaves out."""
    shard = max(model.glob("*.safetensors"))
    shard.unlink()
    result = call(str(model), "--out", "out")
    assert result.exit_code == 1, result.stderr
    verdict = json.loads(Path("out/verdict.json").read_text())
    assert (verdict["status"], verdict["first_fault"]["check"]) == ("not_ready", "weights")
    for text in (
        verdict["first_fault"]["message"],
        *(Path("out", f).read_text() for f in ("report.html", "junit.xml")),
    ):
        assert shard.name in text
    assert shard.name in " ".join(result.stderr.split())


def test_a_warning_is_told_and_does_not_fail(model: Path) -> None:
    """Would catch an unknown key that is ignored in silence, or that cries wolf."""
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attention_sink": 4}))
    result = call(str(model), "--json", "--out", "out")
    verdict = json.loads(result.stdout)
    assert (result.exit_code, verdict["status"]) == (0, "ready")
    assert [(f["severity"], f["evidence"]["tensors"]) for f in verdict["findings"]] == [("warning", ["attention_sink"])]
    assert "1 warning" in verdict["checks"][0]["summary"]


def test_a_waiver_holds_a_finding_back(model: Path) -> None:
    """Would catch an audit that a team cannot accept a known fault of, with a name and a date."""
    stray(model)
    found = json.loads(call(str(model), "--json", "--out", "a").stdout)["findings"]
    assert len(found) == 1
    entry = {"finding": found[0]["id"], "reason": "r", "owner": "o", "link": "https://example.org/1"}
    lines = [f'{key} = "{value}"' for key, value in entry.items()]
    soon = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=20)
    Path("waivers.toml").write_text("\n".join(["[[waiver]]", *lines, f"expires = {soon}"]) + "\n")
    result = call(str(model), "--json", "--out", "b")
    assert (result.exit_code, json.loads(result.stdout)["findings"][0]["waived"]) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere",), ("nowhere", "neither a preset nor a directory")),
        (("tinny",), ("did you mean 'tiny'",)),
        ((".",), ("config.json",)),
    ],
)
def test_what_is_no_checkpoint_is_2(model: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Would catch a verdict on nothing, and an output folder left behind by a refusal."""
    result = call(*arguments, "--out", "out")
    assert result.exit_code == 2
    assert not Path("out").exists()
    for word in words:
        assert word in result.stderr
