"""The observers of a candidate's run, and the guard that keeps our own errors apart from the candidate's."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from day0check.contracts import CONTRACTS
from day0check.errors import CaptureError, Day0Error
from day0check.probe.capture import Capture, Digests
from day0check.probe.exchanges import Exchanges
from day0check.probe.final_logits import FinalLogits
from day0check.probe.flow import Flow
from day0check.probe.fused_sums import FOLDER, FusedSums
from day0check.probe.provenance import Provenance
from day0check.probe.recorder import Call, Observer
from day0check.probe.records import Lines, RecordError
from day0check.probe.witness import Witness
from day0check.types import Measure, RunCase, to_json
from day0check.worker.job import Job, is_operator_case


class Guard(Observer):
    """Passes calls on to an observer of ours; what that raises is our fault, not the candidate's.

    The error is kept in `fault` as well: a candidate may catch what it does not understand.
    """

    def __init__(self, inner: Observer) -> None:
        self.inner, self.fault = inner, None

    def _guarded(self, method: Callable[..., Any], *args: Any) -> Any:
        if self.fault is not None:
            return None
        try:
            return method(*args)
        except Exception as error:
            self.fault = self._explain(error, args[0] if args else None)
            raise self.fault from error

    def _explain(self, error: Exception, subject: Any) -> Exception:
        if isinstance(error, (RecordError, Day0Error)):
            return error
        traceback.print_exc()
        at = f" at {subject.tap}" if isinstance(subject, Call) else ""
        return CaptureError(
            f"{type(self.inner).__name__} failed{at}: {type(error).__name__}: {error}",
            todo="this is a fault of day0check; the worker's log holds the traceback",
        )

    def before(self, call: Call) -> Any:
        return self._guarded(self.inner.before, call)

    def after(self, call: Call, token: Any, results: tuple[Any, ...]) -> None:
        self._guarded(self.inner.after, call, token, results)

    def shown(self, call: Call, results: tuple[Any, ...]) -> None:
        self._guarded(self.inner.shown, call, results)

    def end_step(self, step: int) -> None:
        self._guarded(self.inner.end_step, step)

    def end_case(self) -> None:
        self._guarded(self.inner.end_case)


def _arguments(role_or_mutates: Callable[[Any], frozenset[str]]) -> dict[str, frozenset[str]]:
    return {c.name: names for c in CONTRACTS.values() if (names := role_or_mutates(c))}


def _with_position(contract: Any, names: set[str]) -> frozenset[str]:
    """The positional argument answers to "0"."""
    return frozenset(names | ({"0"} if contract.args and contract.args[0].name in names else set()))


def memory_arguments() -> dict[str, frozenset[str]]:
    """Operator -> its arguments that are paged memory."""
    return _arguments(lambda c: _with_position(c, {a.name for a in c.args if a.role == "pool"}))


def written_arguments() -> dict[str, frozenset[str]]:
    """Operator -> its arguments that it writes in place."""
    return _arguments(lambda c: _with_position(c, set(c.mutates)))


@functools.lru_cache(maxsize=1)
def known_weights() -> Any:
    """The weights that this process has digested: a model is loaded once and runs many cases."""
    from day0check.compare.parameters import KnownWeights

    return KnownWeights()


class Observation:
    """The observers of one case and the files that they write into `directory`."""

    def __init__(self, job: Job, case: RunCase, directory: Path) -> None:
        self.measures = Lines(directory / "measures.jsonl")
        self.digests: Lines | None = None
        self.parameters: Lines | None = None
        self.exchanges: Lines | None = None
        self.capture: Capture | None = None
        self.final: FinalLogits | None = None
        self.provenance = Provenance(
            lambda line: self.measures.write(line), memory=memory_arguments(), mutates=written_arguments()
        )
        observers: list[Observer] = []
        if job.witness is not None:
            observers.append(Witness(directory / "witness", **job.witness))
        elif job.mode == "digest":
            self.digests = Lines(directory / "digests.jsonl")
            observers.append(Digests(lambda line: self.digests.write(line)))
        else:
            from day0check.compare.bank import BankMemory
            from day0check.compare.local import Judge
            from day0check.compare.merge import EXCHANGES
            from day0check.compare.parameters import ParametersRecorder
            from day0check.compare.shadow import Shadow
            from day0check.contracts.profiles import profile_named

            net = None if job.mode == "full" else {c.name for c in CONTRACTS.values() if c.net}
            self.capture = Capture(directory, net, byte_cap=job.byte_cap, mode=job.mode)
            self.parameters = Lines(directory / "parameters.jsonl")
            parameters = ParametersRecorder(lambda found: self.parameters.write(to_json(found)), known_weights())
            judge = Judge(profile_named(job.profile), self._measure, of_rank=job.gated)
            self.final = FinalLogits()
            observers += [self.provenance, parameters, judge, BankMemory(self._measure), self.capture, self.final]
            if not is_operator_case(case):  # operators alone have memory of no request
                observers.append(Shadow(self._measure, case.requests))
            if job.gated:
                self.exchanges = Lines(directory / EXCHANGES)
                sums = FusedSums(directory / FOLDER, byte_cap=job.byte_cap)
                observers += [Exchanges(lambda line: self.exchanges.write(line)), Flow(self.measures.write), sums]
        self.observers = tuple(Guard(observer) for observer in observers)

    def _measure(self, measure: Measure) -> None:
        self.measures.write(to_json(measure))

    def raise_faults(self) -> None:
        """Raises what an observer of ours raised, in case that the candidate caught it."""
        for guard in self.observers:
            if guard.fault is not None:
                raise guard.fault

    def close(self) -> None:
        self.measures.close()
        for lines in (self.digests, self.parameters, self.exchanges):
            if lines is not None:
                lines.close()
