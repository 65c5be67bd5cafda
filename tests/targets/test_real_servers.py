"""What is known of real servers is found on them and told in a sentence; on those without known faults nothing is.

Each server is installed into `.targets` when it is not there (`make targets`), started, asked and stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("DAY0CHECK_TARGETS", ROOT / ".targets"))
REPEATS = int(os.environ.get("DAY0CHECK_REPEATS", "10"))
PARTS = ("parameters", "wire", "tools", "interference")
pytestmark = [pytest.mark.slow, pytest.mark.targets, pytest.mark.timeout(3600)]


@contextlib.contextmanager
def started(target: str, model: str) -> Iterator[str]:
    """The address of a server that is stopped again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = [sys.executable, str(ROOT / "servers" / "targets.py")]
    command = [*script, "start", target, model, "--port", str(port), "--at", str(FOLDER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = next((line.strip() for line in server.stdout if line.startswith("http://")), "")
            assert url, f"{target} did not start: its log is in {FOLDER}"
            yield url
        finally:
            server.terminate()


def ask(url: str, out: Path, *options: str, parts: tuple[str, ...] = PARTS) -> dict[str, Any]:
    """The verdict of `day0check endpoint`; waiting is generous, since the machine may be busy."""
    chosen = [option for part in parts for option in ("--part", part)]
    command = [sys.executable, "-m", "day0check.cli", "endpoint", "--url", url, "--profile", "fp32", "--json", *chosen]
    command += ["--out", str(out), "--stall", "100s", "--time-limit", "200s", "--budget", "20m", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert done.returncode in (0, 1, 4), done.returncode
    return json.loads(done.stdout)


def found(verdict: dict[str, Any]) -> dict[tuple[str, str], str]:
    """(check, pattern) of every blocker and warning, with its sentence."""
    return {
        (f["check"].removeprefix("endpoint."), f["evidence"]["pattern"]): f["message"]
        for f in verdict["findings"]
        if f["severity"] != "note"
    }


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_vllm_without_known_faults_raises_nothing(model: str, tmp_path: Path) -> None:
    """Would catch a check that cries wolf on a sound server: no finding in ten repeats."""
    with started("vllm", model) as url:
        for number in range(REPEATS):
            verdict = ask(url, tmp_path / str(number), "--seed", str(number))
            assert found(verdict) == {}, number
            assert verdict["status"] in ("ready", "inconclusive")


def test_vllm_answers_about_the_image_that_was_sent(tmp_path: Path) -> None:
    """Would catch an image check that a real vision model cannot pass."""
    with started("vllm", "qwen2_5_vl") as url:
        verdict = ask(url, tmp_path / "run")
    (images,) = [c for c in verdict["checks"] if c["name"] == "endpoint.images"]
    assert images["status"] == "passed", images


KNOWN = {
    ("vllm", "deepseek_v3"): {("interference", "changed")},
    ("vllm", "gpt_oss"): {("protocol", "error_after_200")},
    ("transformers", "deepseek_v32"): {
        ("parameters", "logprobs ignored"),
        ("parameters", "echo ignored"),
        ("parameters", "n ignored"),
        ("protocol", "no_done"),
    },
    ("transformers", "glm_moe_dsa"): {("parameters", "logprobs ignored"), ("protocol", "no_done")},
    ("transformers", "kimi_linear"): {("parameters", "logprobs ignored"), ("protocol", "no_done")},
    ("llama", "llama_gguf"): {("cancel", "hangs")},
}


@pytest.mark.parametrize(("target", "model"), KNOWN, ids=lambda v: v)
def test_what_is_known_is_found(target: str, model: str, tmp_path: Path) -> None:
    """Would catch a fault of a real server that goes by."""
    with started(target, model) as url:
        verdict = ask(url, tmp_path / "run")
    sentences = found(verdict)
    assert KNOWN[target, model] <= set(sentences), sentences
    assert verdict["status"] == "not_ready"
    assert all(" " in sentence and len(sentence) > 20 for sentence in sentences.values())
