"""How ranks find each other: a store that one process holds, links tried a bounded number of times, and what is where.

The launcher of a run, or torchrun, holds the store. An attempt to which a rank does not come is over for all of them,
so that they begin the next one together.
"""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from day0check.accelerated.parallel.group import ProcessTransport
from day0check.errors import Unavailable

HOST, PORT, RANK, WORLD = "store_host", "store_port", "rank", "world"
ATTEMPTS, ATTEMPT_S, STEP_S = "start_attempts", "start_attempt_s", "collective_limit_s"
DEFAULTS = {ATTEMPTS: 3, ATTEMPT_S: 20.0, STEP_S: 600.0}


@dataclass(frozen=True)
class Place:
    """Where a rank runs: host, process, device and its name, and the ranks whose device memory it can reach."""

    rank: int
    host: str
    process: int
    device: str
    name: str
    reaches: tuple[int, ...] = ()


def connect(layout: Mapping[str, Any]) -> ProcessTransport:
    """The transport of this rank, when every other one has answered over it.

    `layout`: `store_host`, `store_port`, `rank`, `world`; without them the variables that torchrun sets. Optional:
    `device` ("cpu"), `start_attempts`, `start_attempt_s` seconds for each, `collective_limit_s`.
    Raises Unavailable, which names the ranks that did not answer in any attempt.
    """
    import torch.distributed as dist

    rank, world, store = _store(layout)
    device = torch.device(layout.get("device", "cpu"))
    attempts, limit_s = int(layout.get(ATTEMPTS, DEFAULTS[ATTEMPTS])), float(layout.get(ATTEMPT_S, DEFAULTS[ATTEMPT_S]))
    steps_s = float(layout.get(STEP_S, DEFAULTS[STEP_S]))
    reason = ""
    for attempt in range(1, attempts + 1):
        missing = _gathered(store, attempt, rank, world, limit_s)
        if missing:
            reason = f"{_ranks_in_words(missing)} did not come"
            continue
        try:
            return _linked(dist.PrefixStore(f"links-{attempt}", store), rank, world, device, limit_s, steps_s)
        except (RuntimeError, ConnectionError) as error:
            reason = f"a link of rank {rank} broke: {str(error).splitlines()[0]}"
            if dist.is_initialized():
                dist.destroy_process_group()
    raise Unavailable(
        f"rank {rank} of {world} gave up after {attempts} attempts: {reason}",
        where="start-up of the ranks",
        todo="look into the log of the rank that is named; more time: start_attempt_s",
    )


def _store(layout: Mapping[str, Any]) -> tuple[int, int, Any]:
    import torch.distributed as dist

    env = os.environ
    rank, world = int(layout.get(RANK, env.get("RANK", 0))), int(layout.get(WORLD, env.get("WORLD_SIZE", 1)))
    host = layout.get(HOST, env.get("MASTER_ADDR", "127.0.0.1"))
    port = int(layout.get(PORT, env.get("MASTER_PORT", 0)))
    if not port:
        todo = "start the ranks with `day0check run --tp N` or with torchrun"
        raise Unavailable("nobody says where the other ranks are", where="start-up of the ranks", todo=todo)
    limit = datetime.timedelta(seconds=float(layout.get(ATTEMPT_S, DEFAULTS[ATTEMPT_S])))
    try:
        return rank, world, dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
    except (RuntimeError, ConnectionError) as error:
        what = f"rank {rank} of {world} cannot reach the store: {str(error).splitlines()[0]}"
        raise Unavailable(what, where=f"{host}:{port}", todo="start the ranks together") from error


def _gathered(store: Any, attempt: int, rank: int, world: int, limit_s: float) -> list[int]:
    """The ranks that did not come to this attempt; none when all came in time, which all of them then know.

    Whether an attempt goes on is decided once, by the last rank to come or by the first whose time is over: a rank that
    comes later finds it closed and goes on to the next.
    """
    place, decision = f"attempt-{attempt}", f"attempt-{attempt}/decision"
    store.set(f"{place}/{rank}", "here")
    if store.add(f"{place}/count", 1) == world:
        store.compare_set(decision, "", "go")
    until = time.monotonic() + limit_s
    while not store.check([decision]):
        if time.monotonic() > until:
            store.compare_set(decision, "", "closed")
        time.sleep(0.01)
    if store.get(decision) == b"go":
        return []
    missing = [r for r in range(world) if not store.check([f"{place}/{r}"])]
    return missing or [r for r in range(world) if r != rank]  # all came, the last of them too late


def _linked(
    store: Any, rank: int, world: int, device: torch.device, limit_s: float, steps_s: float
) -> ProcessTransport:
    """A process group in which every rank has heard every other one."""
    import torch.distributed as dist

    backend = "gloo" if device.type == "cpu" else dist.get_default_backend_for_device(device.type)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    limits = [datetime.timedelta(seconds=s) for s in (limit_s, max(limit_s, steps_s))]
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limits[0])
    # links are made within the time of an attempt; a step may then take longer, while a rank judges
    transport = ProcessTransport(dist.new_group(timeout=limits[1], backend=backend), device=device)
    heard = [int(part[0]) for part in transport.gather(torch.tensor([rank], dtype=torch.uint8))]
    if heard != list(range(world)):
        raise RuntimeError(f"the ranks that answered are {heard}")
    return transport


def _ranks_in_words(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def place_of(rank: int, device: torch.device) -> dict[str, Any]:
    """Where this rank runs, as JSON."""
    name, reaches = platform.processor() or platform.machine(), ()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        here = device.index or 0
        count = torch.cuda.device_count()
        reaches = tuple(n for n in range(count) if n == here or torch.cuda.can_device_access_peer(here, n))
    return asdict(Place(rank, platform.node(), os.getpid(), str(device), name, reaches))
