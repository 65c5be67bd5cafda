"""The draft layer of multi-token prediction on the fast path: run once over what each request became.

Row i of the layer needs the model's own final row i and token i + 1 (model.md 2.8), so that it trails the model by a
token in every step. Here it runs after the requests, in one piece over each whole sequence and in memory of its own:
its operators are called and judged as any others, and no schedule, page or state of the model depends on it. Nothing
is proposed and nothing accepted; the model's own tokens are the same with it and without.

The final rows are those of the model's own steps: a second pass would choose other experts and keys where two are
close, and its drafts would follow from choices that nobody recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from day0check.accelerated import layers
from day0check.accelerated.batch import Batch, Part, make_batch
from day0check.accelerated.cache import Caches
from day0check.accelerated.engine import Engine
from day0check.accelerated.residual import PlainSpine, Spine
from day0check.accelerated.weights import Draft
from day0check.probe.recorder import Caller, Recorder
from day0check.types import Outputs, Request

PAGE = 64


class FinalRows:
    """What the layers of the model make of each row of each request inside `with`, before the final norm; of two rows
    of one position the later. Nothing where the model has no draft layer."""

    def __init__(self, engine: Engine, caller: Caller) -> None:
        self.engine, self.caller = engine, quiet(caller)
        self._rows: dict[str, dict[int, tuple[Tensor, int]]] = {}

    def __enter__(self) -> FinalRows:
        self.engine.after_layers = None if self.engine.model.draft is None else self.keep
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.after_layers = None

    def keep(self, batch: Batch, spine: Spine) -> None:
        every = torch.arange(len(batch.ids), device=batch.ids.device)
        with self.caller.recorder.step(batch.phase, batch.rows, 0):
            rows = spine.output(self.caller.at(""), every, batch.rows)
        first = 0
        for part in batch.parts:
            own = self._rows.setdefault(part.request, {})
            own.update((part.start + i, (rows, first + i)) for i in range(len(part.tokens)))
            first += len(part.tokens)

    def of(self, request: str) -> Tensor | None:
        """The rows [n, D] of the n positions that were computed; None when there are none, or some between them are
        missing because their pages were those of another request."""
        own = self._rows.get(request, {})
        if not own or max(own) >= len(own):
            return None
        return torch.stack([rows[row] for rows, row in (own[position] for position in range(len(own)))])


def quiet(caller: Caller) -> Caller:
    """The same operators with nobody looking on: for rows that were all seen before."""
    return type(caller)(caller.operators, Recorder())


@torch.no_grad()
def run_drafts(
    engine: Engine, requests: tuple[Request, ...], outputs: Outputs, caller: Caller, finals: FinalRows, *, step: int
) -> None:
    """Runs the draft layer, if the model has one, over what each finished request without images fed to the model and
    computed itself; the steps are numbered from `step` on. A token chosen last has no row, and none before it."""
    if engine.model.draft is None:
        return
    for request in requests:
        if any(turn.images for turn in request.turns) or outputs.finish.get(request.id) == "aborted":
            continue
        rows = finals.of(request.id)
        if rows is not None and len(rows) > 1:
            _one(engine, request.id, outputs.sequences[request.id][: len(rows)], caller, rows[:-1], step)
            step += 1


def _one(engine: Engine, request: str, sequence: tuple[int, ...], caller: Caller, rows: Tensor, step: int) -> None:
    pages = -(-len(sequence) // PAGE)
    caches = engine.caches(pages=pages, page=PAGE, slots=1, drafts=True)
    table, slot = tuple(caches.pages.take() for _ in range(pages)), caches.slots.take()
    part = Part(request, sequence[:-1], start=0, table=table, slot=slot, wants_logits=False)
    batch = make_batch("prefill", [part], page=PAGE, device=engine.device)
    alone = quiet(caller)
    with alone.recorder.step("prefill", batch.rows, step):
        hidden = alone.at("")("norm.rms", rows, site="final", weight=engine.model.final_norm, eps=engine.config.eps)
    with caller.recorder.step("prefill", batch.rows, step):
        following = torch.tensor(sequence[1:], device=engine.device)
        _layer(engine, engine.model.draft, batch, caches, caller, hidden=hidden, following=following)


def _layer(
    engine: Engine, p: Draft, batch: Batch, caches: Caches, caller: Caller, *, hidden: Tensor, following: Tensor
) -> Tensor:
    """Logits [rows, V] of the draft layer for the token behind each of `following`."""
    config, number = engine.config, len(engine.config.layers)
    at = caller.at(f"layers.{number:02d}")
    step = layers.Step(config, caches, engine.workspace, caller, batch, ranks=engine.ranks)
    embedded = at("embed.tokens", following, weight=engine.model.embed)
    embedded = at("norm.rms", embedded, site="draft_embedding", weight=p.embedding_norm, eps=config.eps)
    hidden = at("norm.rms", hidden, site="draft_hidden", weight=p.hidden_norm, eps=config.eps)
    spine = PlainSpine(at("draft.project", torch.cat((embedded, hidden), -1), weight=p.project))
    h = at("norm.rms", spine.attention_input(at, number), site="input", weight=p.layer.input_norm, eps=config.eps)
    spine.add_attention(at, number, layers.mla(step, at, number, h, p.layer.attention))
    h = at("norm.rms", spine.mlp_input(at, number), site="post_attention", weight=p.layer.post_norm, eps=config.eps)
    spine.add_mlp(at, number, layers.feed_forward(step, at, h, p.layer.mlp))
    h = at("norm.rms", spine.x, site="draft_head", weight=p.head_norm, eps=config.eps)
    logits = at("head.logits", h, weight=engine.model.head)
    return logits if engine.ranks is None else engine.ranks.whole_logits(at, logits, batch.rows)
