"""The draft layer of multi-token prediction on the fast path: run once over what each request became.

Row i of the layer needs the model's own final row i and token i + 1 (model.md 2.8), so that it trails the model by a
token in every step. Here it runs after the requests, in one piece over each whole sequence and in memory of its own:
its operators are called and judged as any others, and no schedule, page or state of the model depends on it. Nothing
is proposed and nothing accepted; the model's own tokens are the same with it and without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from day0check.accelerated import layers
from day0check.accelerated.batch import Batch, Part, make_batch
from day0check.accelerated.cache import Caches
from day0check.accelerated.engine import Engine
from day0check.accelerated.residual import PlainSpine
from day0check.accelerated.weights import Draft
from day0check.probe.recorder import Caller, Recorder
from day0check.types import Outputs, Request

PAGE = 64


def run_drafts(engine: Engine, requests: tuple[Request, ...], outputs: Outputs, caller: Caller, *, step: int) -> None:
    """Runs the draft layer, if the model has one, over the sequence of each finished request without images; the steps
    are numbered from `step` on."""
    if engine.model.draft is None:
        return
    for request in requests:
        sequence = outputs.sequences.get(request.id, ())
        images = any(turn.images for turn in request.turns)
        if len(sequence) < 2 or images or outputs.finish.get(request.id) == "aborted":
            continue
        _one(engine, request.id, sequence, caller, step)
        step += 1


@torch.no_grad()
def _one(engine: Engine, request: str, sequence: tuple[int, ...], caller: Caller, step: int) -> None:
    pages = -(-len(sequence) // PAGE)
    caches = engine.caches(pages=pages, page=PAGE, slots=1, drafts=True)
    table, slot = tuple(caches.pages.take() for _ in range(pages)), caches.slots.take()
    part = Part(request, sequence[:-1], start=0, table=table, slot=slot, wants_logits=False)
    batch = make_batch("prefill", [part], page=PAGE, device=engine.device)
    hidden = _hidden(engine, batch, caches, caller)
    with caller.recorder.step("prefill", batch.rows, step):
        following = torch.tensor(sequence[1:], device=engine.device)
        _layer(engine, engine.model.draft, batch, caches, caller, hidden=hidden, following=following)


def _hidden(engine: Engine, batch: Batch, caches: Caches, caller: Caller) -> Tensor:
    """The model's rows [rows, D] behind its final norm; nobody looks on, these calls were all seen before."""
    quiet = Recorder()
    with quiet.step("prefill", batch.rows, 0):
        alone = type(caller)(caller.operators, quiet)
        x = alone.at("")("embed.tokens", batch.ids, weight=engine.model.embed)
        spine = engine.through_layers(alone, caches, batch, x)
        every = torch.arange(len(batch.ids), device=engine.device)
        x = spine.output(alone.at(""), every, batch.rows)
        return alone.at("")("norm.rms", x, site="final", weight=engine.model.final_norm, eps=engine.config.eps)


def _layer(
    engine: Engine, p: Draft, batch: Batch, caches: Caches, caller: Caller, *, hidden: Tensor, following: Tensor
) -> Tensor:
    """Logits [rows, V] of the draft layer for the token behind each of `following`."""
    config, number = engine.config, len(engine.config.layers)
    at = caller.at(f"layers.{number:02d}")
    step = layers.Step(config, caches, engine.workspace, caller, batch)
    embedded = at("embed.tokens", following, weight=engine.model.embed)
    embedded = at("norm.rms", embedded, site="draft_embedding", weight=p.embedding_norm, eps=config.eps)
    hidden = at("norm.rms", hidden, site="draft_hidden", weight=p.hidden_norm, eps=config.eps)
    spine = PlainSpine(at("draft.project", torch.cat((embedded, hidden), -1), weight=p.project))
    h = at("norm.rms", spine.attention_input(at, number), site="input", weight=p.layer.input_norm, eps=config.eps)
    spine.add_attention(at, number, layers.mla(step, at, number, h, p.layer.attention))
    h = at("norm.rms", spine.mlp_input(at, number), site="post_attention", weight=p.layer.post_norm, eps=config.eps)
    spine.add_mlp(at, number, layers.feed_forward(step, at, h, p.layer.mlp))
    h = at("norm.rms", spine.x, site="draft_head", weight=p.head_norm, eps=config.eps)
    return at("head.logits", h, weight=engine.model.head)
