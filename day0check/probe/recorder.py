"""The recorder: sees every operator call of a candidate, in order, with the row map of its step.

A backend makes its calls through `Caller`:

    at = caller.at("layers.03")
    y = at("norm.rms", x, weight=w, eps=1e-5, site="input")          # tap layers.03.norm.rms.input

The recorder adds what a call cannot know (phase, step, execution order) and shows it to its observers before and
after. Observers are the modes: the judge (given by the runner; replays in this process), `capture.Capture` (bytes of
chosen taps to disk) and `capture.Digests`. Standard library + torch >= 2.1, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from .registry import Function, Operators, Whole
from .rows import RowMap

NO_ROWS = RowMap((), (), ())


@dataclass(frozen=True)
class Call:
    """One operator call as it is about to happen. `args` and `kwargs` are the candidate's own objects, not copies."""

    place: str  # "layers.03", "vision.blocks.01", "vision" or ""
    operator: str
    site: str
    phase: str
    step: int
    order: int  # execution index within the case
    rows: RowMap  # of the first argument's rows
    args: Tuple[Any, ...]
    kwargs: Dict[str, Any]
    dims: str = ""  # how the results are cut over ranks (`probe/flow.py`), "" where they are whole

    @property
    def tap(self) -> str:
        return ".".join(part for part in (self.place, self.operator, self.site) if part)

    def dims_of(self, result: int) -> str:
        """The dims string of one result; "" where it is whole, or nothing is said of it."""
        each = self.dims.split(";")
        return each[result].strip() if 0 <= result < len(each) else ""

    @property
    def layer(self) -> Optional[int]:
        return int(self.place[len("layers.") :]) if self.place.startswith("layers.") else None


class Observer:
    """Sees calls. `before` may copy what the call could overwrite; what it returns is handed to `after`."""

    def before(self, call: Call) -> Any:
        return None

    def after(self, call: Call, token: Any, results: Tuple[Any, ...]) -> None:
        pass

    def shown(self, call: Call, results: Tuple[Any, ...]) -> None:
        """Results whose call nobody saw: `call` has no arguments."""

    def end_step(self, step: int) -> None:
        pass

    def end_case(self) -> None:
        pass


class Recorder:
    """Hands every call to the observers. Without observers a call costs one function call."""

    def __init__(self, observers: Sequence[Observer] = (), heartbeat: Optional[Any] = None) -> None:
        self.observers: List[Observer] = list(observers)
        # of (place, operator, site): set by a rank's backend
        self.dims: Optional[Callable[[str, str, str], str]] = None
        self.heartbeat = heartbeat  # `.beat(tap, phase, step, watched_s)`: where an abort happened is read from it
        self.watched_s = 0.0  # that the observers took so far; on a device also what they waited for its calls
        self.phase, self.rows, self.order, self.current_step = "start", NO_ROWS, 0, 0

    @contextlib.contextmanager
    def step(self, phase: str, rows: RowMap, step: int) -> Iterator[None]:
        """All calls inside belong to this step. Steps do not nest."""
        self.phase, self.rows, self.current_step = phase, rows, step
        yield
        with self._watching():
            for observer in self.observers:
                observer.end_step(step)

    @contextlib.contextmanager
    def between(self, phase: str, rows: RowMap, step: int) -> Iterator[None]:
        """Calls of the host side before or after the rows of a step are computed: of that step, but no step of their
        own. Inside a step they have their own rows, and what follows has the step's again."""
        before = self.phase, self.rows, self.current_step
        self.phase, self.rows, self.current_step = phase, rows, step
        try:
            yield
        finally:
            self.phase, self.rows, self.current_step = before

    def end_case(self) -> None:
        with self._watching():
            for observer in self.observers:
                observer.end_case()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.watched_s += time.perf_counter() - begin

    def call(
        self,
        place: str,
        operator: str,
        function: Function,
        args: Tuple[Any, ...],
        kwargs: Dict[str, Any],
        site: str = "",
        row_map: Optional[RowMap] = None,
    ) -> Any:
        if not self.observers and self.heartbeat is None:
            return function(*args, **kwargs)
        rows = self.rows if row_map is None else row_map
        dims = self.dims(place, operator, site) if self.dims is not None else ""
        call = Call(place, operator, site, self.phase, self.current_step, self.order, rows, args, kwargs, dims)
        self.order += 1
        if self.heartbeat is not None:
            self.heartbeat.beat(call.tap, call.phase, call.step, self.watched_s)
        with self._watching():
            tokens = [observer.before(call) for observer in self.observers]
        result = function(*args, **kwargs)
        results = result if isinstance(result, tuple) else (() if result is None else (result,))
        with self._watching():
            for observer, token in zip(self.observers, tokens):
                observer.after(call, token, results)
        return result

    def show(
        self, operator: str, *results: Any, place: str = "", site: str = "", row_map: Optional[RowMap] = None
    ) -> None:
        """Results of an operator whose call cannot be seen, inside a step: what a black box gives, its logits at least
        (`show("head.logits", logits)`). They are kept and compared with the oracle; nothing is replayed."""
        rows = self.rows if row_map is None else row_map
        call = Call(place, operator, site, self.phase, self.current_step, self.order, rows, (), {})
        self.order += 1
        if self.heartbeat is not None:
            self.heartbeat.beat(call.tap, call.phase, call.step, self.watched_s)
        with self._watching():
            for observer in self.observers:
                observer.shown(call, results)


class Caller:
    """Calls operators by name: looks the implementation up for the present phase, and goes through the recorder."""

    def __init__(self, operators: Operators, recorder: Optional[Recorder] = None) -> None:
        self.operators = operators
        self.recorder = recorder if recorder is not None else Recorder()

    def at(self, place: str) -> "Here":
        return Here(self, place)

    def covers(self, operator: str) -> Tuple[str, ...]:
        return self.operators.covers(operator, self.recorder.phase)


@dataclass(frozen=True)
class Here:
    """The caller at one place of the model: `here(operator, first, site=..., row_map=..., **keywords)`.

    Observers see the keywords as they are given; an implementation whose weights were prepared gets those in their
    place. `whole`: the weights that those of this call are a choice of.
    """

    caller: Caller
    place: str

    def __call__(
        self,
        operator: str,
        *args: Any,
        site: str = "",
        row_map: Optional[RowMap] = None,
        whole: Optional[Whole] = None,
        **kwargs: Any,
    ) -> Any:
        recorder, operators = self.caller.recorder, self.caller.operators
        function = operators.get(operator, recorder.phase)
        if operators.prepares(operator, recorder.phase):
            function = operators.with_prepared(function, operator, self.place, site, whole)
        return recorder.call(self.place, operator, function, args, kwargs, site, row_map)
