"""How records reach the disk: whole files by rename, lines flushed as they are written, and our own write errors apart.

Standard library only (Python >= 3.9).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, Union


class RecordError(OSError):
    """A record could not be written. Kept apart from `OSError`, which the candidate itself may raise."""


def record_error(error: OSError, path: Union[str, Path]) -> RecordError:
    """The same failure as a RecordError that names the file."""
    return RecordError(error.errno, error.strerror or str(error), str(path))


def replace_bytes(path: Union[str, Path], *parts: Any) -> None:
    """Writes `parts` (bytes-like) as the whole content of `path`, or leaves what was there. Raises RecordError."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            for part in parts:
                file.write(part)
        temporary.replace(path)
    except OSError as error:
        try:
            temporary.unlink()
        except OSError:
            pass  # it was never made, or the disk is gone: the first error is the one to tell
        raise record_error(error, path) from error


def replace_json(path: Union[str, Path], value: Any) -> None:
    """Writes one JSON value as the whole content of `path`. Raises RecordError."""
    replace_bytes(path, (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


class Lines:
    """A file of JSON lines; each is with the system before `write` returns, so that a crash loses none before it."""

    def __init__(self, path: Union[str, Path]) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise record_error(error, self.path) from error

    def write(self, *values: Dict[str, Any]) -> None:
        """Appends one line per value. Raises RecordError, also when the disk took only a part."""
        data = b"".join(json.dumps(value, allow_nan=False).encode() + b"\n" for value in values)
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            raise record_error(error, self.path) from error

    def close(self) -> None:
        self._file.close()
