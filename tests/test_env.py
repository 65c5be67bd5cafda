"""The environment record: fast, without secrets, and a fingerprint that moves with what can change a result."""

import copy
import json
import subprocess
import sys
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from day0check import env

BASE = {
    "day0check": "0.1.0",
    "python": {"version": "3.11.7"},
    "torch": {"version": "2.13.0"},
    "packages": {"numpy": "2.0"},
    "system": {"release": "6.1"},
    "cpu": {"model": "x", "vector": ["avx2", "avx512f"]},
    "memory_bytes": 1,
    "accelerators": [{"name": "a", "driver": "1"}],
    "variables": {"OMP_NUM_THREADS": "1"},
    "code": {"commit": "c", "dirty": False},
}


def test_capture_is_fast_json_and_the_same_twice():
    """Catches a probe that hangs, values that JSON has no form for, and facts that change by themselves."""
    begin = time.monotonic()
    first = env.capture()
    assert time.monotonic() - begin < 3
    assert json.loads(json.dumps(first, allow_nan=False)) == first
    assert env.difference(first, env.capture()) == []
    assert first["torch"]["version"].startswith("2.")
    assert first["cpu"]["model"]
    assert first["cpu"]["cores"] >= 1
    assert first["memory_bytes"] > 1 << 28
    assert first["packages"]["numpy"]


def test_no_variable_outside_the_list_is_recorded(monkeypatch):
    """Catches a secret of a CI job in a published report."""
    monkeypatch.setenv("GITHUB_TOKEN", "hunter2-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    record = env.capture()
    assert "hunter2-secret" not in json.dumps(record)
    assert record["variables"]["OMP_NUM_THREADS"] == "7"
    assert set(record["variables"]) <= set(env.VARIABLES)


def test_commit_and_uncommitted_changes(tmp_path):
    """Catches a run of changed code that carries the name of the commit alone."""

    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert env.capture(tmp_path)["code"] == {}
    git("init")
    assert env.capture(tmp_path)["code"] == {}  # no commit yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    clean = env.capture(tmp_path)["code"]
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert env.capture(tmp_path)["code"] == {**clean, "dirty": True}


def test_a_machine_without_the_tools_gives_what_there_is(monkeypatch, tmp_path):
    """Catches a run that ends because git or nvidia-smi is absent, fails or hangs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert env.capture()["code"] == {}
    assert env.capture()["accelerators"] == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n/bin/sleep 30\n")
    tool.chmod(0o755)
    begin = time.monotonic()
    assert env.capture()["accelerators"] == []
    assert time.monotonic() - begin < 3
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 570.1, 143771 MiB'\necho nonsense\n")
    assert env.capture()["accelerators"] == [{"name": "NVIDIA H200", "driver": "570.1", "memory": "143771 MiB"}]


@pytest.mark.parametrize(
    ("path", "value", "moves"),
    [
        (("torch", "version"), "2.14.0", True),
        (("packages", "numpy"), "2.1", True),
        (("cpu", "vector"), ["avx2"], True),
        (("accelerators", 0, "driver"), "2", True),
        (("variables", "OMP_NUM_THREADS"), "2", True),
        (("code", "dirty"), True, True),
        (("system", "release"), "6.2", False),
        (("memory_bytes",), 2, False),
    ],
)
def test_fingerprint_and_difference(path, value, moves):
    """Catches an upgrade that leaves the fingerprint as it was, a kernel update that moves it, and changes untold."""
    changed = copy.deepcopy(BASE)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert (env.fingerprint(changed) != env.fingerprint(BASE)) == moves
    told = env.difference(BASE, changed)
    assert len(told) == 1
    assert told[0].startswith(".".join(map(str, path)))


def test_difference_names_what_is_new_and_gone():
    assert env.difference({"a": 1, "c": [1]}, {"b": 2, "c": [1]}) == ["a is gone: it was 1", "b is new: 2"]
    assert env.difference(BASE, BASE) == []


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=5), _JSON, max_size=4), st.dictionaries(st.text(max_size=5), _JSON, max_size=4))
def test_difference_of_anything(a, b):
    """Catches a crash on records of other versions, and an order that is not stable."""
    assert env.difference(a, a) == []
    told = env.difference(a, b)
    assert told == env.difference(a, b)
    assert len(told) == len(env.difference(b, a))


def test_torch_flags_of_the_worker(tmp_path):
    """Catches flags that are asked for but lost, and a run without them that ends in an error."""
    assert env.with_torch_flags(BASE, tmp_path) == BASE
    (tmp_path / env.TORCH_FLAGS).write_text('{"threads": 1}')
    with_flags = env.with_torch_flags(BASE, tmp_path)
    assert with_flags["torch_flags"] == {"threads": 1}
    assert env.fingerprint(with_flags) != env.fingerprint(BASE)


def test_it_imports_no_torch():
    code = "import sys; from day0check import env; env.capture(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
