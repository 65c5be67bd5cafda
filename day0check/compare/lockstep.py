"""Runs several passes over one model side by side, so that they can meet at chosen calls and be compared there.

Nothing of a pass is kept: at a meeting the values of all passes exist together, and after it they are gone. The result
does not depend on the order in which the threads run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

Action = Callable[[str, list[Any]], Any]


class Meeting:
    """Where `members` passes meet: each hands in a value under the same name and gets the answer of `action`.

    `action(name, values)` runs once, in one of the threads; `values[i]` is that of member i. Raises RuntimeError when
    the passes meet under different names: then they did not make the same calls.
    """

    def __init__(self, members: int, action: Action) -> None:
        self._action = action
        self._names: list[str] = [""] * members
        self._values: list[Any] = [None] * members
        self._answer: Any = None
        self._barrier = threading.Barrier(members, self._act)

    def meet(self, member: int, name: str, value: Any) -> Any:
        self._names[member], self._values[member] = name, value
        self._barrier.wait()
        return self._answer  # the next meeting cannot begin before every member has read it

    def abort(self) -> None:
        self._barrier.abort()

    def _act(self) -> None:
        if len(set(self._names)) != 1:
            raise RuntimeError(f"the passes do not make the same calls: {' / '.join(self._names)}")
        with torch.inference_mode():
            self._answer = self._action(self._names[0], self._values)
        self._values = [None] * len(self._values)


def run_together(bodies: Sequence[Callable[[Callable[[str, Any], Any]], Any]], action: Action) -> list[Any]:
    """The results of the bodies. Body i is called with `meet(name, value) -> answer`, in a thread of its own.

    The first exception of a body or of `action` ends all of them and is raised here.
    """
    meeting = Meeting(len(bodies), action)
    results: list[Any] = [None] * len(bodies)
    errors: list[BaseException] = []

    def run(member: int) -> None:
        try:
            with torch.inference_mode():  # the mode of a thread is its own
                results[member] = bodies[member](lambda name, value: meeting.meet(member, name, value))
        except threading.BrokenBarrierError:
            pass  # another one's exception is the reason
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(i,), name=f"pass-{i}") for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
