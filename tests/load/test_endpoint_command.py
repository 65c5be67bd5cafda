"""`day0check endpoint` as users run it: exit codes, files, refusals. The reference is left to the long test."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
from click.testing import CliRunner, Result
from mock_endpoint import Endpoint, serving

import day0check
from day0check.cli.app import cli
from day0check.cli.endpoint import parts_of
from day0check.errors import ExitCode

QUICK = ("--budget", "60s", "--requests", "4", "--concurrency", "1,2", "--json")
IMPATIENT = ("--stall", "0.5s", "--time-limit", "3s")


def call(url: str, *options: str) -> Result:
    result = CliRunner().invoke(cli, ["endpoint", "--url", url, *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def correctness(*more: str) -> tuple[str, ...]:
    """The parts whose verdict does not depend on how busy this machine is."""
    return ("--part", "parameters", "--part", "wire", "--part", "interference", *QUICK, *more)


def test_a_sound_endpoint_is_ready(tmp_path: Path) -> None:
    """Would catch a false alarm, a verdict that is no verdict, and raw samples that are not kept."""
    with serving(Endpoint(delay_s=0.002)) as url:
        result = call(url, "--out", str(tmp_path / "run"), *QUICK)
    verdict = json.loads(result.stdout)
    schema = json.loads((Path(day0check.__file__).parent / "verdict.schema.json").read_text())
    jsonschema.validate(verdict, schema)
    assert [f["severity"] for f in verdict["findings"]] == ["note"]  # that there was no reference
    late = [n["reason"] for n in verdict["not_run"] if "the client" in n["reason"]]
    assert (result.exit_code, verdict["status"]) == ((4, "inconclusive") if late else (0, "ready"))
    assert {"verdict.json", "report.html", "junit.xml", "summary.md"} <= {p.name for p in (tmp_path / "run").iterdir()}
    exchanges = [json.loads(line) for line in (tmp_path / "run" / "exchanges.jsonl").read_text().splitlines()]
    assert {"plain", "stop", "stream/0", "together/1/0", "after_cancel/0"} <= {e["label"] for e in exchanges}
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {s["phase"] for s in samples} >= {"warmup", "closed/1", "open/poisson"}
    assert all(s["ok"] and s["read_ms"] for s in samples)
    assert verdict["measured"]["endpoint"]["load"]["closed/1"]["requests"] == 4


def test_two_runs_agree_but_for_what_is_measured(tmp_path: Path) -> None:
    """Would catch times, ports or counts of this run outside `measured` and `environment`."""
    with serving(Endpoint(delay_s=0.002)) as url:
        texts = [json.loads(call(url, "--out", str(tmp_path / n), *correctness()).stdout) for n in ("a", "b")]
    for verdict in texts:
        del verdict["measured"], verdict["environment"]
    assert texts[0] == texts[1]
    assert texts[0]["status"] == "ready"


@pytest.mark.parametrize("flag", ["stall", "html", "wrong_usage", "hangs_after_cancel"])
def test_a_misbehaving_endpoint_is_not_ready(flag: str, tmp_path: Path) -> None:
    """Would catch a traceback, a hang, or a green verdict on a server that stalls, drops, lies or leaks."""
    with serving(Endpoint(flag, delay_s=0.002)) as url:
        result = call(url, "--out", str(tmp_path / "run"), *correctness(*IMPATIENT))
    assert result.exit_code == ExitCode.NOT_READY
    assert json.loads(result.stdout)["first_fault"]["check"].startswith("endpoint.")
    assert "Traceback" not in result.stderr


def test_an_unreachable_address_is_a_usage_error(tmp_path: Path) -> None:
    """Would catch "not ready" where nobody is there to be judged."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = call(f"http://127.0.0.1:{port}", "--out", str(tmp_path / "run"), *QUICK)
    assert result.exit_code == ExitCode.USAGE
    assert "nothing answers" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--profile", "fp7"), "no profile"),
        (("--reference", "no-such-preset"), "neither a preset nor a directory"),
        (("--api-key-env", "NO_SUCH_VARIABLE_HERE"), "no variable"),
        (("--slo", "speed=3"), "ttft_ms"),
        (("--slo", "ttft_ms=-1"), "ttft_ms"),
        (("--concurrency", "0"), "numbers from 1"),
        (("--part", "everything"), "everything"),
        (("--context", "0"), "numbers from 1"),
        (("--trace", "no-such-trace.jsonl"), "No such file"),
        (("--soak", "-1"), "--soak"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_any_traffic(options: tuple[str, ...], says: str) -> None:
    """Would catch a bad option that is found out after minutes, or ignored."""
    endpoint = Endpoint()
    with serving(endpoint) as url:
        result = call(url, *options)
    assert result.exit_code == ExitCode.USAGE
    assert says in result.stderr
    assert endpoint.requests == 0


def test_needles_and_soak_join_the_parts_when_they_have_a_number() -> None:
    """Would catch an option that is taken and asks nothing, and a part that is judged without having been asked."""
    wanted = {"parts": ("speed", "wire"), "contexts": (), "soak": 0}
    assert parts_of(SimpleNamespace(**wanted)) == ("wire", "speed")
    assert parts_of(SimpleNamespace(**wanted | {"soak": 5})) == ("wire", "soak", "speed")
    every = parts_of(SimpleNamespace(parts=(), contexts=(4000,), soak=5))
    assert every == ("parameters", "wire", "tools", "interference", "needle", "soak", "speed")


def test_a_budget_that_ends_names_what_was_not_run(tmp_path: Path) -> None:
    """Would catch a run that was cut short and looks complete."""
    with serving(Endpoint(delay_s=0.02)) as url:
        result = call(url, "--out", str(tmp_path / "run"), *QUICK, "--budget", "1s")
    verdict = json.loads(result.stdout)
    assert result.exit_code == ExitCode.INCONCLUSIVE
    assert "part speed" in {n["check"] for n in verdict["not_run"]}


@pytest.mark.slow
def test_the_embedded_server_is_ready_beside_its_reference(tmp_path: Path) -> None:
    """Would catch limits that our own engine does not keep, and a wire that changes its answers."""
    command = [sys.executable, "-m", "day0check.cli", "serve", "--model", "tiny-deepseek-v3.2", "--profile", "fp32"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            url = re.search(r"http://\S+", server.stdout.readline())[0]
            options = (
                "--reference",
                "tiny-deepseek-v3.2",
                "--profile",
                "fp32",
                "--out",
                str(tmp_path / "run"),
                "--json",
            )
            result = call(
                url, *options, *(o for part in ("parameters", "wire", "interference") for o in ("--part", part))
            )
        finally:
            server.send_signal(signal.SIGTERM)
    verdict = json.loads(result.stdout)
    assert [f["message"] for f in verdict["findings"]] == []
    assert verdict["status"] == "ready"
