"""The writer against the official reader, for every dtype and layout of memory."""

import errno
import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors import safe_open

from day0check.probe import records
from day0check.probe.records import Lines, RecordError, replace_json
from day0check.probe.safetensors_writer import DTYPES, tensor_bytes, write

NAMES = sorted(name for name in DTYPES if hasattr(torch, name))


def read_back(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(str(path), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def some(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = 1
    for n in shape:
        count *= n
    raw = torch.arange(count * torch.empty(0, dtype=dtype).element_size(), dtype=torch.int64) * 37 % 251
    data = raw.to(torch.uint8)
    return (data % 2).bool().reshape(shape) if dtype == torch.bool else data.view(dtype).reshape(shape)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.lists(st.integers(0, 4), max_size=3)), max_size=5),
    st.booleans(),
)
def test_what_is_written_is_read_by_the_official_reader(tmp_path_factory, tensors, with_metadata):
    """Catches wrong offsets, a dtype under another's name, lost empty tensors and scalars, a header of odd length."""
    path = tmp_path_factory.mktemp("s") / "x.safetensors"
    given_tensors = {f"{i}.é{name}": some(getattr(torch, name), tuple(s)) for i, (name, s) in enumerate(tensors)}
    size = write(path, given_tensors, metadata={"a": "b"} if with_metadata else None)
    assert path.stat().st_size == size
    found = read_back(path)
    assert found.keys() == given_tensors.keys()
    for name, tensor in given_tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert tensor_bytes(found[name]) == tensor_bytes(tensor)


def test_views_are_written_as_they_read():
    """Catches bytes taken from the storage of a transposed, strided or offset view."""
    base = torch.arange(24, dtype=torch.int16).reshape(4, 6)
    for view in (base.T, base[1:, ::2], base[:, 3], base[2:2]):
        assert tensor_bytes(view) == tensor_bytes(view.clone(memory_format=torch.contiguous_format))


def test_a_dtype_without_a_name_is_refused(tmp_path):
    """Catches a file that no reader can open."""
    with pytest.raises(ValueError, match="complex64"):
        write(tmp_path / "x", {"a": torch.zeros(1, dtype=torch.complex64)})
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_and_names_it(tmp_path, monkeypatch):
    """Catches a cut file under the final name, and a full disk that looks like the candidate's own error."""
    path = tmp_path / "x.json"
    replace_json(path, {"a": 1})

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    real = Path.open
    monkeypatch.setattr(records.Path, "open", lambda self, mode="r", **k: Full(real(self, mode, **k)))
    with pytest.raises(RecordError) as raised:
        replace_json(path, {"a": 2})
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(path)
    monkeypatch.undo()
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_lines_are_there_before_write_returns_and_a_full_disk_is_told():
    """Catches buffered lines, which an abort would lose, and lines that a full disk swallows."""
    lines = Lines("/dev/full")
    with pytest.raises(RecordError) as raised:
        lines.write({"a": 1})
    lines.close()
    assert raised.value.errno == errno.ENOSPC
    with pytest.raises(RecordError):
        Lines("/absent/directory/file")


def test_lines_append(tmp_path):
    lines = Lines(tmp_path / "l")
    lines.write({"a": 1}, {"b": 2})
    assert (tmp_path / "l").read_text() == '{"a": 1}\n{"b": 2}\n'
    lines.close()
