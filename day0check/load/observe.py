"""Asks an endpoint everything, part by part, within bounds of number and time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from day0check.errors import UsageError
from day0check.load.client import Client, Limits, Target
from day0check.load.interference import interference
from day0check.load.kept import Keeper
from day0check.load.needle import needle
from day0check.load.observed import Observed
from day0check.load.records import Answer, Exchange
from day0check.load.scenario import Asker, GivenUp, Wish, discover, follow, parameters, wire
from day0check.load.scripted import tools
from day0check.load.soak import Soaked, soak
from day0check.load.speed import Phase, SpeedPlan, run_speed
from day0check.load.stream_loop import run_streams

HEALTH = "health"
_STEPS = {"parameters": parameters, "wire": wire, "tools": tools, "interference": interference, "needle": needle}


@dataclass(frozen=True)
class Seen:
    """What a run saw: the record for the checks, and the load phases with their raw samples."""

    observed: Observed
    phases: tuple[Phase, ...] = ()


def observe(
    target: Target,
    wish: Wish,
    *,
    limits: Limits,
    speed: SpeedPlan,
    tell: Callable[[str], None] = lambda _: None,
    keeper: Keeper | None = None,
) -> Seen:
    """Runs the wished parts against `target`; `tell` hears the name of each as it begins, `keeper` keeps what came of
    each, whatever ends it.

    Raises UsageError when nothing listens there or a key is missing; whatever else a server does is in the record.
    """
    return run_streams(_observe(target, wish, limits, speed, tell, keeper))


async def _observe(
    target: Target, wish: Wish, limits: Limits, speed: SpeedPlan, tell: Callable[[str], None], keeper: Keeper | None
) -> Seen:
    done: list[str] = []
    phases: list[Phase] = []
    stopped, soaked = "", Soaked()
    async with Client(target, limits) as client:
        asker = Asker(client, wish)
        try:
            tell("hello")
            await discover(asker)
            if wish.followed:
                await follow(asker)
            for part in wish.parts:
                if keeper is not None:
                    keeper.exchanges(asker.exchanges)
                tell(part)
                if part == "speed":
                    ended = (lambda _: None) if keeper is None else keeper.phase
                    phases = await run_speed(client, asker.dialect, _able(speed, asker), ended=ended)
                    _check_answered(phases)
                elif part == "soak":
                    await soak(asker, wish.soak, soaked)
                else:
                    await _STEPS[part](asker)
                done.append(part)
        except UsageError:
            asker.exchanges.clear()  # nobody is judged, and the folder may be given again
            raise
        except GivenUp as why:
            stopped = str(why)
            await _is_it_healthy(asker)
        finally:
            if keeper is not None:
                keeper.exchanges(asker.exchanges)
    observed = Observed(
        model=asker.dialect.model if asker.dialect else wish.model or "",
        api=asker.dialect.api if asker.dialect else "",
        parts=wish.parts,
        done=tuple(done),
        stopped=stopped,
        exchanges=tuple(asker.exchanges),
        counters=tuple(asker.counters),
        seed=wish.seed,
        context=asker.context,
        soak=dict(soaked.counts),
        speed={phase.name: phase.figures for phase in phases},
        slos=speed.slos,
    )
    return Seen(observed, tuple(phases))


async def _is_it_healthy(asker: Asker) -> None:
    """What /health says of an endpoint that was given up."""
    health = await asker.client.get("/health")
    if health.fault != "unsent":
        asker.exchanges.append(Exchange(HEALTH, "/health", {}, health, Answer()))


def _able(speed: SpeedPlan, asker: Asker) -> SpeedPlan:
    """Answers of fixed length where the endpoint takes `ignore_eos`."""
    probe = next((e for e in asker.exchanges if e.label == "ignore_eos"), None)
    return replace(speed, ignore_eos=probe is not None and probe.good)


def _check_answered(phases: list[Phase]) -> None:
    replies = [r for phase in phases for r in phase.load.replies]
    if any(r.fault == "unsent" for r in replies):
        raise GivenUp("the bounds of this run were reached")
