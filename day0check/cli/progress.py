"""Progress of a run on a terminal: one bar, the case of each role. Nothing is printed when stderr is no terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from day0check.report.console import console

_WORDS = {
    "begin": "",
    "load": "loading the model",
    "loaded": "",
    "repeat": "timing",
    "extra": "further runs",
    "end": "",
}


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[Any], None]]:
    """Gives the callback that `runner.run` tells about each case."""
    out = console()
    if not out.is_terminal:
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bars:
        tasks = {role: bars.add_task(role, total=total) for role in ("candidate", "reference")}

        def tell(said: Any) -> None:
            note = _WORDS.get(said.what, said.what)
            text = f"{said.role}: {said.case}" + (f" ({note})" if note else "")
            bars.update(tasks[said.role], completed=said.done, description=text.replace("[", "\\["))

        yield tell
