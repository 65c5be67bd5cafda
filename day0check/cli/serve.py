"""`day0check serve`: the accelerated engine behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from day0check.cli.options import Bytes, Duration
from day0check.errors import Day0Error, UsageError

if TYPE_CHECKING:
    from day0check.compare.serving import ServingJudge

MIB = 1 << 20


@click.command()
@click.option("--model", default="tiny", show_default=True, metavar="PRESET|DIR", help="What to serve.")
@click.option("--served-model-name", metavar="NAME", help="What requests call it.  [default: the model's name]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Beyond this machine only when you say so.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--api-key", envvar="DAY0CHECK_API_KEY", metavar="KEY", help="Asked for on /v1, as a bearer token.")
@click.option("--device", default="cpu", show_default=True, help="As torch names it.")
@click.option("--profile", default="bf16", show_default=True, help="bf16, fp8-cache, bf16-states or fp32.")
@click.option("--ops", metavar="FILE.py", help="Operators that replace those of the engine.")
@click.option("--scheduler", metavar="FILE.py:NAME", help="A subclass of the server's scheduler, in its place.")
@click.option("--judge", type=click.Path(path_type=Path), metavar="FILE", help="Replay the serve operators; kept here.")
@click.option("--failure", type=click.Path(path_type=Path), metavar="FILE", help="What ended it is kept here, as JSON.")
@click.option("--max-batch", type=click.IntRange(1), default=8, show_default=True, help="Requests in a step.")
@click.option("--max-waiting", type=click.IntRange(0), default=64, show_default=True, help="Beyond: 429.")
@click.option("--chunk", type=click.IntRange(1), default=512, show_default=True, help="Prompt rows in a step.")
@click.option("--page", type=click.IntRange(1), default=64, show_default=True, help="Positions of a cache page.")
@click.option("--pages", type=click.IntRange(1), help="Pages of the cache.  [default: enough for all]")
@click.option("--cache-bytes", type=Bytes(), help="For pages and states, as 512M or 8G.  [default: enough for all]")
@click.option("--prefix-workspace", type=click.IntRange(1), metavar="ROWS", help="Of prefix chunks.  [default: 16384]")
@click.option("--host-bytes", type=Bytes(), help="Of the host tier, for requests that must give way.  [default: none]")
@click.option("--prefix-cache", is_flag=True, help="Begin behind prefixes that earlier requests have computed.")
@click.option("--snapshot-blocks", type=click.IntRange(1), default=1, show_default=True, help="Pages between states.")
@click.option("--mixed", is_flag=True, help="Single tokens ride along in steps of prompts.")
@click.option("--max-model-len", type=click.IntRange(2), help="Positions of a request.  [default: the model's]")
@click.option("--max-body-mib", type=click.IntRange(1), default=64, show_default=True, help="Of a request.")
@click.option("--max-image-mib", type=click.IntRange(1), default=20, show_default=True, help="Of an image file.")
@click.option("--max-images", type=click.IntRange(0), default=8, show_default=True, help="In a request.")
@click.option("--max-connections", type=click.IntRange(1), default=1024, show_default=True, help="Beyond: 503.")
@click.option("--drain", type=Duration(), default="30s", show_default=True, help="For open answers after SIGTERM.")
def serve(**given: Any) -> None:
    """Answer /v1/completions and /v1/chat/completions with the accelerated engine.

    The first line on stdout is the address; /health answers 200 once weights are verified, pools partitioned and
    operators warmed up, and tells the time of each step. SIGTERM lets open answers end.
    """
    check_open(given["host"], given["api_key"])
    from day0check.accelerated.server.listening import ListenOptions
    from day0check.accelerated.server.listening import serve as serve_until_told

    listen = ListenOptions(
        host=given["host"],
        port=given["port"],
        connections=given["max_connections"],
        drain_seconds=given["drain"],
    )
    service = make_service(given)
    judge = _judge(service) if given["judge"] is not None else None
    try:
        asyncio.run(serve_until_told(service, listen, tell=_Tell()))
    except Day0Error as error:
        if given["failure"] is not None:
            told = json.dumps({"error": str(error), "operator": error.operator})
            with contextlib.suppress(OSError):  # a full disk is no reason to hide the error
                given["failure"].write_text(told, encoding="utf-8")
        raise
    finally:
        if judge is not None:
            judge.write(given["judge"])


def _judge(service: Any) -> ServingJudge:
    from day0check.compare.serving import ServingJudge

    judge = ServingJudge()
    judge.lay_over(service.engine.operators)
    return judge


def make_service(given: dict[str, Any]) -> Any:
    """The service of these options; nothing is loaded yet. Raises UsageError and InputError for bad names."""
    from day0check.accelerated.ops import TABLE, WEIGHTS
    from day0check.accelerated.records import Formats
    from day0check.accelerated.server.engine_thread import EngineOptions, EngineThread
    from day0check.accelerated.server.http import HttpOptions, Service
    from day0check.accelerated.server.images import ImageLimits
    from day0check.accelerated.server.live import Live
    from day0check.accelerated.server.metrics import Metrics
    from day0check.backends.accelerated import CACHES, CACHING, DTYPES, find_device
    from day0check.backends.loader import find_subclass, lay_over, read_operators
    from day0check.cli.resolve import find_model
    from day0check.probe.registry import Operators

    dtypes = DTYPES | CACHING
    if given["profile"] not in dtypes:
        raise UsageError(
            f"the server has no profile {given['profile']!r}", where="--profile", todo=f"use {', '.join(dtypes)}"
        )
    operators = Operators(TABLE, weights=WEIGHTS, pools=("kv", "index", "state"))
    if given["ops"] is not None:
        lay_over(operators, read_operators(given["ops"]), path=given["ops"], backend="accelerated")
    model = find_model(given["model"])
    name = given["served_model_name"] or model.name
    engine = EngineThread(
        EngineOptions(
            model_dir=Path(model.directory),
            dtype=dtypes[given["profile"]],
            device=find_device(given["device"]),
            page=given["page"],
            max_batch=given["max_batch"],
            chunk=given["chunk"],
            pages=given["pages"],
            max_model_len=given["max_model_len"],
            max_waiting=given["max_waiting"],
            mixed=given["mixed"],
            prefix_cache=given["prefix_cache"],
            snapshot_blocks=given["snapshot_blocks"],
            cache_bytes=given["cache_bytes"],
            host_bytes=given["host_bytes"] or 0,
            prefix_workspace=given["prefix_workspace"],
            formats=CACHES.get(given["profile"], Formats()),
        ),
        operators,
        Metrics(name),
        live=find_subclass(given["scheduler"], Live, where="--scheduler") if given["scheduler"] else Live,
    )
    images = ImageLimits(images=given["max_images"], image_bytes=given["max_image_mib"] * MIB)
    options = HttpOptions(name=name, api_key=given["api_key"], body_bytes=given["max_body_mib"] * MIB, images=images)
    return Service(engine, options)


def check_open(host: str, api_key: str | None) -> None:
    """Warns on stderr when anybody on the network may ask. Raises UsageError for an empty key."""
    if api_key == "":
        raise UsageError("the API key is empty", where="--api-key", todo="give one, or leave the option out")
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local and api_key is None:
        click.echo(f"serve: {host} is open to other machines and there is no --api-key", err=True)


class _Tell:
    """The address alone on stdout, for scripts; everything else is for people."""

    told = False

    def __call__(self, line: str) -> None:
        click.echo(line if not self.told else f"serve: {line}", err=self.told)
        self.told = True
