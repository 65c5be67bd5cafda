"""What must hold before a server calls itself ready: weights that are numbers, and every operator run once."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from day0check.accelerated.engine import Engine
from day0check.accelerated.server.images import image_tokens
from day0check.accelerated.server.live import Live
from day0check.accelerated.server.orders import Order, Times, TokenLogprob
from day0check.errors import Day0Error, InputError
from day0check.probe.recorder import Call, Observer
from reference.config import ModelConfig
from reference.weights import Checkpoint

WARM_UP = "warm-up"
PICTURE_PIXELS = (45, 31)  # neither side a multiple of anything
BLOCK_ELEMENTS = 1 << 24  # of one tensor looked at at once: as float32 64 MiB


def verify_weights(checkpoint: Checkpoint, engine: Engine) -> str:
    """Reads every stored tensor once more and looks at every loaded one; a sentence on what was seen.

    Raises InputError for values that are no finite numbers, in the files or on the device. Opening the checkpoint has
    already checked names, shapes, types and file sizes.
    """
    for name in checkpoint.names():
        if not _finite(checkpoint.tensor(name)):
            raise InputError(
                f"tensor {name!r} holds NaN or infinity", where=str(checkpoint.directory), todo="fetch the file again"
            )
    loaded = dict(_tensors(engine.model, "model"))
    for place, tensor in loaded.items():
        if not _finite(tensor):
            raise InputError(f"{place} is not finite on the device", where=str(engine.device), todo="load it again")
    stray = f", {len(checkpoint.unexpected)} that the model has no use for" if checkpoint.unexpected else ""
    size = sum(t.numel() * t.element_size() for t in loaded.values())
    return f"{len(checkpoint.names())} stored tensors{stray}, {len(loaded)} loaded, {size} bytes, all finite"


def _finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    flat = tensor.reshape(-1)
    blocks = (flat[i : i + BLOCK_ELEMENTS] for i in range(0, flat.numel(), BLOCK_ELEMENTS))
    return all(bool(torch.isfinite(block.float()).all()) for block in blocks)


def _tensors(value: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name), f"{place}.{field.name}")
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{place}[{number}]")


class _Seen(Observer):
    """`inside`: the call that has not come back."""

    def __init__(self) -> None:
        self.operators: set[str] = set()
        self.inside: Call | None = None

    def before(self, call: Call) -> None:
        self.inside = call

    def after(self, call: Call, token: Any, results: tuple[Any, ...]) -> None:
        self.operators.add(call.operator)
        self.inside = None


class _Discard:
    """A sink that wants nothing but to know of a failure."""

    failed = ""

    def take(self, token: int, logprob: TokenLogprob | None) -> bool:
        return False

    def prompt(self, logprobs: list[TokenLogprob]) -> None:
        pass

    def finish(self, reason: str) -> None:
        pass

    def fail(self, message: str, *, shutting_down: bool = False) -> None:
        self.failed = message


def warm_up(live: Live, config: ModelConfig, *, images: bool) -> str:
    """Answers a few requests twice, watched and unwatched: long and short prompts together, single tokens, greedy and
    drawn, with log-probabilities, and an image where the model has a tower. A sentence on what ran.

    Raises Day0Error, with what an operator raised as its cause, or when logits are no numbers. Nothing may be running.
    """
    seen, recorder = _Seen(), live.caller.recorder
    with tempfile.TemporaryDirectory(prefix="day0check-warm-up-") as folder:
        picture = _picture(Path(folder), config) if images and config.vision is not None else ()
        recorder.observers.append(seen)
        try:
            steps = _answer(live, _orders(live, config, picture), seen)
        finally:
            recorder.observers.remove(seen)
        steps += _answer(live, _orders(live, config, picture))
    return f"{len(seen.operators)} operators in {steps} steps" + (", with an image" if picture else "")


def _failed(call: Call, error: Exception, replaced: tuple[str, ...]) -> Day0Error:
    """Whose fault it is, an operators file's or ours, tells the class and with it the exit code."""
    yours = call.operator in replaced
    where = f"operator {call.operator} at {call.tap}, in the warm-up"
    todo = "`day0check run operators` gives it its hard inputs" + ("" if yours else "; no file of yours replaced it")
    kind, what = InputError if yours else Day0Error, f"{type(error).__name__}: {error}"
    return kind(what, where=where, todo=todo, operator=call.operator)


def _answer(live: Live, orders: list[Order], seen: _Seen | None = None) -> int:
    begin, sinks = live.step, [_Discard() for _ in orders]
    for order, sink in zip(orders, sinks, strict=True):
        live.submit(order, sink, Times(0.0))
    try:
        while live.busy:
            live.advance()
    except Exception as error:
        if seen is None or seen.inside is None:
            raise
        raise _failed(seen.inside, error, live.caller.operators.replaced) from error
    finally:
        for order in orders:
            live.abort(order.id)
        live.finished.clear()
    for sink in sinks:
        if sink.failed:
            raise Day0Error(sink.failed, where="warm-up", todo="an operator of the serve family fails")
    return live.step - begin


def _orders(live: Live, config: ModelConfig, picture: tuple[str, int] | tuple[()]) -> list[Order]:
    most = max(1, min(config.max_positions, live.pages * live.caches.page) - 3)
    long = tuple(i % min(config.vocab, 256) for i in range(min(live.caches.page + 1, most)))
    orders = [
        Order(f"{WARM_UP}/long", long, max_new_tokens=3, top=2, prompt_top=1),
        Order(f"{WARM_UP}/short", long[:2], max_new_tokens=2, temperature=1.0, seed=1),
    ]
    if picture:
        path, count = picture
        prompt = (*long[:1], *[config.tokens.media_pad] * count, *long[:1])
        if len(prompt) < most:
            orders.append(Order(f"{WARM_UP}/image", prompt, max_new_tokens=2, images=(path,), top=0))
    return orders


def _picture(folder: Path, config: ModelConfig) -> tuple[str, int]:
    path = folder / "picture.png"
    Image.linear_gradient("L").resize(PICTURE_PIXELS).convert("RGB").save(path)
    return str(path), image_tokens(PICTURE_PIXELS, config.vision)
