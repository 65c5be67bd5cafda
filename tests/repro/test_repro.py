"""Guards the reproducers: what they keep, that they need nothing of ours, and that they tell right from wrong."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check import runner
from day0check.cli.app import cli
from day0check.contracts.profiles import PROFILES
from day0check.errors import Unavailable
from day0check.probe.recorder import Recorder
from day0check.probe.rows import RowMap
from day0check.probe.witness import CALL, TENSORS, Witness
from day0check.repro import make, script
from day0check.repro.make import make_repro
from day0check.repro.run import reproduce_finding, witness_of
from day0check.types import Finding, RunCase

RIGHT = """
import torch
from day0check.accelerated.ops.kda import gates
from day0check.accelerated.ops.arithmetic import linear
from day0check.accelerated.ops.index import select


def twice(f, **kwargs):
    g, beta = gates(f, **kwargs)
    return g, torch.sigmoid(beta)
"""


def finding(operator: str, tap: str, check: str = "compute", **changed) -> Finding:
    fields = {"phase": "prefill", "evidence": {"tap": tap, "case": "c"}} | changed
    return Finding("0" * 12, "blocker", check, operator, "it is wrong", **fields)


def record(directory: Path, operator: str, function, x, *, positions=None, **kwargs) -> None:
    """One call through a recorder that a witness watches."""
    rows = RowMap(("a", "b"), (0,) * len(x), tuple(positions or range(len(x))))
    recorder = Recorder([Witness(directory, tap=f"layers.03.{operator}", phase="prefill")])
    with recorder.step("prefill", rows, 0):
        recorder.call("layers.03", operator, function, (x,), kwargs)


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(folder / "repro.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder.parent)


# ------------------------------------------------------------------------------------------------------- the witness


def test_the_witness_keeps_the_call_as_it_was(tmp_path):
    """Catches arguments that are kept after the call has changed them, another call, and one that is kept twice."""
    pool, other = torch.zeros(4), torch.ones(4)

    def write(memory, *, value):
        memory.copy_(value)

    wanted = {"tap": "layers.03.kv.write", "phase": "decode", "request": "b", "position": 9, "written": ["0"]}
    recorder = Recorder([Witness(tmp_path / "w", **wanted)])
    for phase, owner, position in (("prefill", 1, 9), ("decode", 0, 9), ("decode", 1, 8), ("decode", 1, 9)):
        with recorder.step(phase, RowMap(("a", "b"), (owner,), (position,)), position):
            recorder.call("layers.03", "kv.write", write, (pool,), {"value": other})
        if (phase, owner, position) != ("decode", 1, 9):
            assert not (tmp_path / "w").exists()
            pool.zero_()
    with recorder.step("decode", RowMap(("b",), (0,), (9,)), 10):
        recorder.call("layers.03", "kv.write", write, (pool,), {"value": other * 5})
    from safetensors.torch import load_file

    call, tensors = json.loads((tmp_path / "w" / CALL).read_text()), load_file(tmp_path / "w" / TENSORS)
    assert (call["step"], call["phase"], call["position"]) == (9, "decode", [9])
    assert tensors["argument.0"].tolist() == [0, 0, 0, 0]
    assert tensors["written.0"].tolist() == [1, 1, 1, 1]
    assert tensors["argument.value"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("check", "tap"), [("propagated", "layers.03.residual.mix"), ("move", "layers.03.kv.write.link")]
)
def test_a_finding_without_a_call_has_no_reproducer(check, tap):
    """Catches a reproducer of an operator that was not accused."""
    with pytest.raises(Unavailable, match="single call"):
        witness_of(finding("residual.mix", tap, check))


# -------------------------------------------------------------------------------------------------------- the script


def test_the_script_needs_nothing_of_ours():
    """Catches an import that the author of a kernel does not have."""
    tree = ast.parse(Path(script.__file__).read_text(encoding="utf-8"))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) == {"torch", "safetensors"}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(-4, 4), st.integers(1, 40), st.integers(1, 40))
def test_rounding_to_nearest_is_within_every_limit(seed, exponent, rows, columns):
    """Catches statistics that cry wolf at a result that was rounded once, whatever its size and shape."""
    exact = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).double() * 10.0**exponent
    step = torch.exp2(exact.abs().log2().floor() - 7)
    # the cast goes through float32, which may put a value on the wrong side of a tie
    bound = step / 2 + 2.0**-23 * exact.abs()
    found = script.statistics(exact.to(torch.bfloat16), exact, step / 6**0.5, bound)
    assert not script.failing([("y", found)]), found


def test_what_is_wrong_is_beyond_a_limit():
    """Catches a script that lets one wrong element, one wrong row, a factor or a NaN pass."""
    exact = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).double()
    step = torch.exp2(exact.abs().log2().floor() - 7)
    healthy = exact.to(torch.bfloat16)
    row, element, missing = healthy.clone(), healthy.clone(), healthy.clone()
    row[3] *= 1.02
    element.view(torch.int16)[5, 6] += 2
    missing[7, 8] = float("nan")
    factor = (exact * 1.001).to(torch.bfloat16)
    for name, wrong in (("row", row), ("element", element), ("not a number", missing), ("slope", factor)):
        found = script.statistics(wrong, exact, step / 6**0.5, step / 2 * 1.001)
        assert found[name][0] > found[name][1], name
    due = exact.clone()
    due[7, 8] = float("nan")
    assert not script.failing([("y", script.statistics(missing, due, step / 6**0.5, step / 2 * 1.001))])


def test_mismatches_are_counted_and_the_order_of_a_choice_is_free():
    """Catches a choice that is called wrong for its order, and bytes of a format that compare by value."""
    call = {"results": [{"name": "ids", "free_order": True, "tolerance": 0.0}]}
    tensors = {"expected.ids": torch.tensor([[3, 1, 2], [4, 5, -1]])}
    assert not script.failing(script.judge(call, tensors, [torch.tensor([[1, 2, 3], [-1, 4, 5]])]))
    assert script.failing(script.judge(call, tensors, [torch.tensor([[1, 2, 4], [-1, 4, 5]])]))
    codes = torch.tensor([0, 128], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert script.mismatches(codes, codes.view(torch.uint8).flip(0).view(codes.dtype))["different elements"] == (
        2.0,
        0.0,
    )


# -------------------------------------------------------------------------------------------------------- the folder


def linear_call(tmp_path: Path, *, rows: int = 300, wrong_row: int = 211):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 48, generator=generator).bfloat16() for n in (rows, 32))

    def function(x, *, weight):
        y = (x.float() @ weight.float().T).bfloat16()
        y[wrong_row] *= 1.25
        return y

    record(tmp_path / "witness", "mla.latent", function, x, weight=weight)
    return finding("mla.latent", "layers.03.mla.latent")


def test_a_reproducer_keeps_the_failing_rows_alone(tmp_path):
    """Catches a folder of a whole batch, the wrong rows, and one that is right by itself."""
    accused = linear_call(tmp_path)
    folder = make_repro(tmp_path / "witness", tmp_path / "r", accused, PROFILES["bf16"], {"device": "cpu"})
    assert sorted(p.name for p in folder.iterdir()) == [CALL, "issue.md", "repro.py", TENSORS]
    call = json.loads((folder / CALL).read_text())
    assert (call["position"], call["rows_of_the_call"]) == ([211], 300)
    ended = run_script(folder)
    assert ended.returncode == 1, ended.stderr
    assert "beyond its limit" in ended.stdout
    right = tmp_path / "ops.py"
    right.write_text(RIGHT)
    ended = run_script(folder, f"{right}:linear")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "beyond its limit" not in ended.stdout
    issue = (folder / "issue.md").read_text()
    assert "a position 211" in issue
    assert "| `weight` | bfloat16 [32, 48] |" in issue


def test_memory_of_the_candidate_and_fused_kernels_are_refused(tmp_path):
    """Catches a reproducer that leaves an argument out without a word."""

    class Memory:
        pass

    record(tmp_path / "own", "kv.write", lambda x, **_: None, torch.zeros(2, 2), pool=Memory())
    with pytest.raises(Unavailable, match="own memory"):
        make_repro(tmp_path / "own", tmp_path / "r", finding("kv.write", "t"), PROFILES["bf16"], {})
    record(tmp_path / "fused", "dsa.attention", lambda q, **_: q, torch.zeros(2, 2), indices=torch.zeros(2))
    with pytest.raises(Unavailable, match="fused kernel"):
        make_repro(tmp_path / "fused", tmp_path / "r", finding("dsa.attention", "t"), PROFILES["bf16"], {})
    with pytest.raises(Unavailable, match="no such call"):
        make_repro(tmp_path / "none", tmp_path / "r", finding("dsa.attention", "t"), PROFILES["bf16"], {})


def test_results_of_another_shape_are_shown_and_of_another_number_refused(tmp_path):
    """Catches a crash of ours at a candidate whose results do not even fit."""
    x, weight = torch.ones(3, 4).bfloat16(), torch.ones(5, 4).bfloat16()
    record(tmp_path / "narrow", "mla.latent", lambda x, *, weight: x @ weight[:4].T, x, weight=weight)
    accused = finding("mla.latent", "layers.03.mla.latent")
    folder = make_repro(tmp_path / "narrow", tmp_path / "r", accused, PROFILES["bf16"], {})
    ended = run_script(folder)
    assert ended.returncode == 1, ended.stderr
    assert "shape 1 (limit 0)" in ended.stdout
    record(tmp_path / "two", "mla.latent", lambda x, *, weight: (x @ weight.T, x), x, weight=weight)
    with pytest.raises(Unavailable, match="2 results where 1"):
        make_repro(tmp_path / "two", tmp_path / "r2", accused, PROFILES["bf16"], {})


def test_a_call_that_cannot_be_repeated_costs_no_verdict(tmp_path, monkeypatch):
    """Catches an exception of the reference on a candidate's odd arguments that ends the run without its verdict."""

    def odd(*_):
        raise ValueError("shapes do not fit")

    monkeypatch.setattr(runner, "run", lambda plan: [])
    monkeypatch.setattr(make, "make_repro", odd)
    case = RunCase("c", ())
    plan = runner.RunPlan(cases=(case,), out=tmp_path / "out")
    accused = finding("mla.latent", "layers.03.mla.latent")
    assert reproduce_finding(accused, plan, tmp_path / "r", {}) is False
    assert "ValueError: shapes do not fit" in (tmp_path / "r" / "issue.md").read_text()


def test_a_run_leaves_a_reproducer_that_tells_right_from_wrong(tmp_path):
    """Catches a run without a reproducer, one of another call, and a command that is content with either answer."""
    out = tmp_path / "out"
    assert CliRunner().invoke(cli, ["run", "--fault", "S-38", "--out", str(out)]).exit_code == 1
    (folder,) = (out / "repro").iterdir()
    assert json.loads((folder / CALL).read_text())["tap"] == "layers.00.kda.gates"
    operators = tmp_path / "ops.py"
    operators.write_text(RIGHT)
    assert CliRunner().invoke(cli, ["repro", str(out)]).exit_code == 1
    assert CliRunner().invoke(cli, ["repro", str(folder), "--with", f"{operators}:gates"]).exit_code == 0
    assert CliRunner().invoke(cli, ["repro", str(folder), "--with", f"{operators}:twice"]).exit_code == 1
    absent = CliRunner().invoke(cli, ["repro", str(tmp_path)])
    assert absent.exit_code == 2
    assert "no reproducer" in absent.stderr


def test_a_fault_of_loading_says_why_it_has_no_reproducer(tmp_path):
    """Catches a folder without a word where there is no operator call to repeat."""
    out = tmp_path / "out"
    assert CliRunner().invoke(cli, ["run", "--fault", "S-60", "--out", str(out)]).exit_code == 1
    (folder,) = (out / "repro").iterdir()
    assert [p.name for p in folder.iterdir()] == ["issue.md"]
    assert "There is no reproducer: " in (folder / "issue.md").read_text()
