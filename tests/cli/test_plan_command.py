"""`day0check plan`: numbers of published families and of directories, without weights and without torch."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from day0check.cli.app import cli
from reference.presets import preset_dir


def call(*arguments: str):
    return CliRunner().invoke(cli, ["plan", *arguments])


def test_kimi_k3_is_as_large_as_its_notes_say():
    """Would catch a form counted without its scales, a cache counted in layers that have none, and a bank without its
    last source: 2722 GiB with experts in FP8, 27 GiB of latents, 1.0 GiB of residuals for 8,192 rows."""
    done = call("kimi-k3", "--json")
    assert done.exit_code == 0, done.output
    numbers = json.loads(done.stdout)
    assert numbers["weight_bytes"]["as read"] == numbers["weight_bytes"]["experts in mxfp4"] == 1_560_860_316_032
    assert round(numbers["weight_bytes"]["experts in fp8"] / 2**30) == 2722
    assert numbers["cache_bytes_per_token"] * numbers["context_tokens"] == 27 * 2**30
    assert numbers["workspace_bytes"]["residual bank"] == 9 * 7168 * 2 * 8192


@pytest.mark.parametrize("family", ["glm-5.3", "gpt-oss-120b", "deepseek-v3.2"])
def test_people_read_a_table(family):
    """Would catch a family whose numbers cannot be printed, or a part that is left out of them."""
    done = call(family, "--requests", "4", "--context", "1000")
    assert done.exit_code == 0, done.output
    assert "at work for a token" in done.stdout
    assert ("not counted" in done.stdout) == (family == "gpt-oss-120b")
    assert ("draft layer" in done.stdout) == (family != "gpt-oss-120b")


def test_a_directory_is_planned_from_its_configuration_alone(tmp_path):
    """Would catch a plan that opens weights: there are none."""
    (tmp_path / "config.json").write_text((preset_dir("tiny-glm-5.3") / "config.json").read_text())
    done = call(str(tmp_path), "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["parameters"]["draft"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("kimi-k4",), ("kimi-k4", "kimi-k3")),
        (("kimi-k3", "--context", "2000000"), ("--context", "1048576")),
        (("{empty}",), ("config.json", "JSON")),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, words, tmp_path):
    """Would catch a traceback, or numbers of nothing."""
    done = call(*(str(tmp_path) if a == "{empty}" else a for a in arguments))
    assert done.exit_code == 2
    for word in words:
        assert word in done.stderr


def test_torch_is_not_imported():
    """Would catch a plan that takes seconds to start."""
    code = "import sys\nfrom day0check.cli.app import cli\ncli(['plan', 'glm-5'], standalone_mode=False)\n"
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
