"""The comparison of one pair of tensors by mindstudio-probe (msprobe), in a process of an interpreter that has it.

    PYTHON bench/peer_msprobe.py FOLDER     # compares the dumps in FOLDER/a and FOLDER/b, prints its figures as JSON

It gets dumps in the layout that it writes itself of a call's output: `dump.json` and a file of torch for each tensor.
Its tensor mode is timed from the files, as always; imports and the writing of the dumps are not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CALL = "Torch.compared.0.forward"
LIMIT_S = 300
RESULT = "day0check-peer "


class Refused(Exception):
    """Why there is no figure of this tool."""


@dataclass(frozen=True)
class Peer:
    """Wall-clock seconds of its comparison, and by how many bytes the largest of its processes grew meanwhile."""

    seconds: float
    peak_bytes: int


def compared_by_msprobe(a, b, python: Path | None) -> Peer:
    """What msprobe needs for a beside b. Raises Refused."""
    import torch

    if python is None or not python.is_file():
        raise Refused(
            f"not measured, {'no interpreter of it is given' if python is None else f'no {python}'} (--msprobe)"
        )
    paths = [str(Path(torch.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        for side, tensor in (("a", a), ("b", b)):
            _write(Path(folder) / side, tensor)
        command = [str(python), str(Path(__file__).resolve()), folder]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise Refused(f"not finished within {LIMIT_S} s") from error
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            return Peer(**json.loads(line.removeprefix(RESULT)))
    last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()][-1:]
    raise Refused(f"it ended with {done.returncode}: {''.join(last)[:120]}")


def _write(folder: Path, tensor) -> None:
    """The dump of one side, in the layout that msprobe reads."""
    import torch

    data = folder / "dump_tensor_data"
    data.mkdir(parents=True)
    name = f"{CALL}.output.0.pt"
    torch.save(tensor.clone(), data / name)
    wide = tensor.float()
    told = {"Max": wide.max(), "Min": wide.min(), "Mean": wide.mean(), "Norm": wide.norm()}
    output = {"type": "torch.Tensor", "dtype": str(tensor.dtype), "shape": list(tensor.shape), "requires_grad": False}
    output |= {key: float(value) for key, value in told.items()} | {"data_name": name}
    call = {"input_args": [], "input_kwargs": {}, "output": [output]}
    head = {"task": "tensor", "level": "L1", "framework": "pytorch", "dump_data_dir": str(data)}
    (folder / "dump.json").write_text(json.dumps(head | {"data": {CALL: call}}))
    (folder / "stack.json").write_text(json.dumps({}))
    (folder / "construct.json").write_text(json.dumps({CALL: None}))


def _measured(folder: Path) -> Peer:
    import time

    import torch
    from msprobe.pytorch.compare.pt_compare import pt_compare

    torch.set_num_threads(1)
    out = folder / "out"
    out.mkdir()
    before, begin = _peak_bytes(), time.perf_counter()
    pt_compare({"npu_path": str(folder / "a" / "dump.json"), "bench_path": str(folder / "b" / "dump.json")}, str(out))
    seconds = time.perf_counter() - begin
    if not any(out.iterdir()):
        raise SystemExit("it left no result")
    return Peer(seconds, _peak_bytes() - before)


def _peak_bytes() -> int:
    """The largest resident set so far, of this process or of one that it has ended."""
    import resource

    return 1024 * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    print(RESULT + json.dumps(vars(_measured(Path(sys.argv[1])))), flush=True)
