"""Holds the direction of imports between rooms, and that the probe runs on Python 3.9 with torch alone."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "day0check"

# Rooms from the bottom up; a room may import those below it and itself. A tuple holds rooms of one level that may not
# import each other; `ALLOWED` and `FORBIDDEN` hold what the order alone does not say.
ORDER: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("types",),
    ("env", "case", "case_format"),
    ("probe",),
    ("contracts",),
    ("snapshot",),
    ("compare",),
    ("accelerated",),
    ("backends",),
    ("faults", "load"),
    ("checks",),
    ("service",),
    ("worker",),
    ("runner",),
    ("plan", "statistics", "waivers", "audit"),
    ("gate",),
    ("verdict_rows",),
    ("baseline", "baseline_compare", "baseline_speed"),
    ("report",),
    ("selftest", "repro"),
    ("cli",),
)
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
TOGETHER = ({"case", "case_format"}, {"baseline", "baseline_compare", "baseline_speed"})
# These rooms are told apart from the ones below them more strictly than by order.
ONLY = {
    "errors": set(),
    "types": set(),
    "probe": set(),
    "accelerated": {"probe", "errors", "types"},
    "checks": {"errors", "types", "probe", "contracts", "compare", "snapshot", "load"},
    "report": {"errors", "types", "env", "verdict_rows", "gate", "statistics", "waivers"},
}
REFERENCE_FOR = {
    "backends",
    "contracts",
    "compare",
    "accelerated",
    "case",
    "case_format",
    "worker",
    "plan",
    "audit",
    "cli",
    "checks",
    "selftest",
}
REFERENCE_ONLY = {"accelerated": {"config", "weights", "errors"}, "checks": {"config"}, "plan": {"config"}}
NO_TORCH = ("errors", "types", "env", "case", "case_format", "contracts", "plan", "gate", "report", "runner", "waivers")
ENTRY_POINTS = (
    "day0check",
    "day0check.cli",
    "day0check.contracts",
    "day0check.runner",
    "day0check.env",
    "day0check.plan",
)


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def rooms() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "__init__.py" or path.parent != PACKAGE:
            found.setdefault(room_of(path), []).append(path)
    return found


def imports(path: Path, *, runtime_only: bool = False) -> list[tuple[str, int]]:
    """(dotted name, line) of every import, those inside functions too; relative ones made absolute."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if runtime_only and id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


def broken_rules(path: Path) -> list[str]:
    """Sentences on the imports of one file that go against the order of the rooms."""
    room, wrong = room_of(path), []
    for name, line in imports(path, runtime_only=True):
        parts = name.split(".")
        where = f"{path.relative_to(ROOT)}:{line}: {room} imports {name}"
        if parts[0] == "day0check" and len(parts) > 1:
            other = parts[1]
            if other not in LEVEL or other == room or any({room, other} <= group for group in TOGETHER):
                continue
            if LEVEL[other] >= LEVEL[room] or (room in ONLY and other not in ONLY[room]):
                wrong.append(where)
        elif parts[0] == "reference":
            allowed = REFERENCE_ONLY.get(room)
            if room not in REFERENCE_FOR or (allowed is not None and parts[1] not in allowed):
                wrong.append(where)
    return wrong


def test_every_room_has_its_place():
    """Catches a new room that no rule looks at."""
    assert sorted(set(rooms()) - set(LEVEL)) == []


def test_rooms_import_downwards_only():
    """Catches a lower room that reaches for a higher one, and independence that is given up in silence."""
    assert [sentence for paths in rooms().values() for path in paths for sentence in broken_rules(path)] == []


def test_the_rules_bite(tmp_path, monkeypatch):
    """Catches rules that let everything through: each of these imports is against one of them."""
    for room, line in (
        ("probe/x.py", "from day0check.types import Measure"),
        ("probe/x.py", "from ..types import Measure"),
        ("accelerated/x.py", "from reference.attention import attention"),
        ("accelerated/x.py", "def f():\n    from day0check.compare.local import Judge"),
        ("compare/x.py", "import day0check.checks.move"),
        ("report/x.py", "from day0check.runner import run"),
        ("types.py", "from day0check.contracts import CONTRACTS"),
        ("probe/x.py", "from reference.config import ModelConfig"),
    ):
        package = tmp_path / "day0check"
        path = package / room
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line)
        monkeypatch.setitem(globals(), "ROOT", tmp_path)
        monkeypatch.setitem(globals(), "PACKAGE", package)
        assert broken_rules(path), line


def test_reference_imports_nothing_of_ours():
    """Catches a truth that depends on what it is to judge."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "reference").rglob("*.py"))
        for name, line in imports(path)
        if name.split(".")[0] == "day0check"
    ]
    assert found == []


def test_probe_imports_only_the_standard_library_and_torch():
    """Catches an import that a vendor's interpreter does not have."""
    allowed = {*sys.stdlib_module_names, "torch", "__future__"}
    found = [
        f"{path.name}:{line}: {name}"
        for path in (PACKAGE / "probe").glob("*.py")
        for name, line in imports(path)
        if name.split(".")[0] not in allowed and not name.startswith("day0check.probe")
    ]
    assert found == []


def test_probe_is_python_39():
    """Catches syntax of later Pythons in what runs in a vendor's interpreter."""
    for path in (PACKAGE / "probe").glob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 9))


def interpreter_39() -> str | None:
    """A Python 3.9 of this machine, also one that is installed but not chosen."""
    candidates = ["python3.9", *sorted(map(str, Path.home().glob(".pyenv/versions/3.9*/bin/python3.9")))]
    for candidate in candidates:
        try:
            done = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.startswith("Python 3.9"):
            return candidate
    return None


FAKE_TORCH = """
import sys, types
class Anything:
    def __getattr__(self, name): return Anything()
    def __call__(self, *a, **k): return Anything()
names = ("torch", "torch.multiprocessing", "torch.multiprocessing.reductions", "torch.nn", "torch.nn.functional",
         "torch.utils", "torch.utils._python_dispatch", "torch.utils._pytree")
for name in names:
    module = types.ModuleType(name)
    module.__getattr__ = lambda attribute: type(attribute, (), {})
    sys.modules[name] = module
"""
EXERCISE = """
import importlib, pathlib, sys, typing
sys.path.insert(0, sys.argv[1])
for name in sorted(p.stem for p in pathlib.Path(sys.argv[1], "probe").glob("*.py") if p.stem != "__init__"):
    module = importlib.import_module("probe." + name)
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__:
            typing.get_type_hints(value, {**vars(module), **vars(typing)})
from probe.recorder import Caller, Recorder, Observer
from probe.registry import Operators
from probe.rows import RowMap
from probe.heartbeat import Heartbeat, read
seen = []
class See(Observer):
    def after(self, call, token, results): seen.append((call.tap, results))
path = sys.argv[2]
recorder = Recorder([See()], Heartbeat(path))
with recorder.step("prefill", RowMap(("r",), (0,), (0,)), 0):
    assert Caller(Operators({"a.b": lambda x: x + 1}), recorder).at("layers.01")("a.b", 1, site="s") == 2
assert seen == [("layers.01.a.b.s", (2,))] and read(path).tap == "layers.01.a.b.s"
assert sys.version_info[:2] == (3, 9)
"""


def test_probe_runs_on_python_39(tmp_path):
    """Catches what parses but does not run there: annotations that are evaluated, functions of later libraries."""
    python = interpreter_39()
    if python is None:
        pytest.skip("there is no Python 3.9 on this machine")
    command = [python, "-W", "error", "-c", FAKE_TORCH + EXERCISE, str(PACKAGE), str(tmp_path / "heartbeat")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ENTRY_POINTS)
def test_these_import_no_torch(module):
    """Catches a slow `--help`, `list`, `report` or `--dry-run`."""
    assert importlib.util.find_spec(module) is not None
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rooms_without_torch_import_it_only_in_functions():
    """Catches a torch import at the top of a file that the command line reads before it knows what to do."""
    found = []
    for room in NO_TORCH:
        for path in rooms().get(room, ()):
            if path.name.startswith("hard_inputs"):  # tensors themselves; nothing imports it before it runs operators
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in tree.body:
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                found += [f"{path.name}:{node.lineno}" for n in names if n.split(".")[0] == "torch"]
    assert found == []
