"""The engine: weights on a device, and one step of a ragged batch from token ids to the next tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from day0check.accelerated import layers, towers, vision
from day0check.accelerated.batch import Batch
from day0check.accelerated.cache import Caches
from day0check.accelerated.grouped import gqa
from day0check.accelerated.ops import strict_sums
from day0check.accelerated.records import Formats
from day0check.accelerated.residual import Spine, make_spine
from day0check.accelerated.weights import Gqa, Kda, Mla, read_model
from day0check.accelerated.workspace import Workspace
from day0check.errors import InputError
from day0check.probe.recorder import Caller
from day0check.probe.rows import RowMap
from reference.weights import Checkpoint

if TYPE_CHECKING:
    from day0check.accelerated.parallel.ranks import Ranks


class Engine:
    """Runs steps of one model. `dtype` is the activation type; caches belong to the caller, weights to the engine.

    `layouts`: who owns the memory of the pools "kv", "index" and "state", where it is not the engine. `ranks`: where
    the model is cut over several; every rank runs the same steps. `formats`: how caches keep what is written.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        layouts: Mapping[str, Any] | None = None,
        ranks: Ranks | None = None,
        formats: Formats | None = None,
    ) -> None:
        strict_sums()
        self.formats = formats or Formats()
        self.formats.check(checkpoint.config, dtype)
        self.config, self.dtype, self.device, self.ranks = checkpoint.config, dtype, device, ranks
        if ranks is None:
            self.model = read_model(checkpoint, dtype=dtype, device=device)
        else:
            self.model, self.config = ranks.read(checkpoint, dtype=dtype, device=device)
        self.workspace = Workspace(self.model, device)
        self.layouts = dict(layouts or {})
        self.after_layers: Callable[[Batch, Spine], None] | None = None  # sees each step between its layers and logits
        self.one_row: Callable[[Caller, Caches, Batch], Spine | None] | None = (
            None  # decode steps of one row, if it can
        )
        self.wanted_logits: Tensor | None = None  # [wanted rows, V] of the latest step, None when it wanted none

    def caches(
        self,
        *,
        pages: int,
        page: int,
        slots: int,
        seed: int = 0,
        snapshots: int = 0,
        memory: str = "",
        drafts: bool = False,
        prefix_tokens: int = 0,
    ) -> Caches:
        return Caches(
            self.config,
            pages=pages,
            page=page,
            slots=slots,
            dtype=self.dtype,
            device=self.device,
            seed=seed,
            snapshots=snapshots,
            memory=memory,
            layouts=self.layouts,
            drafts=drafts,
            formats=self.formats,
            prefix_tokens=prefix_tokens,
        )

    @torch.no_grad()
    def features(self, caller: Caller, images: list[str], request: str, pads: list[int]) -> Tensor:
        """Features [pads, D] of the images of one turn, whose media pads stand at positions `pads`."""
        if self.model.vision is None:
            raise InputError("the model has no vision tower", where=request, todo="leave the images out")
        pixels = [vision.read_image(path).to(self.device) for path in images]
        pictures = vision.place(pixels, self.config.vision, request, pads)
        return towers.features(caller, pictures, self.model.vision, self.config.vision, self.dtype)

    @torch.no_grad()
    def prefill(
        self, caller: Caller, caches: Caches, batch: Batch, features: Sequence[Tensor | None] | None = None
    ) -> list[int]:
        """Rows of prompts; returns the token chosen at each wanted row. `features` [pads so far, D] of each request of
        the batch, None for one without images."""
        x = caller.at("")("embed.tokens", batch.ids, weight=self.model.embed)
        return self._decoder(
            caller, caches, batch, self._spliced(caller, batch, x, features or [None] * len(batch.parts))
        )

    @torch.no_grad()
    def decode(self, caller: Caller, caches: Caches, batch: Batch) -> list[int]:
        """One row a request: one new latent and one new index key a layer, states advanced by one token."""
        if self.one_row is not None:
            spine = self.one_row(caller, caches, batch)
            if spine is not None:
                return self._behind_layers(caller, batch, spine)
        x = caller.at("")("embed.tokens", batch.ids, weight=self.model.embed)
        return self._decoder(caller, caches, batch, x)

    def _spliced(self, caller: Caller, batch: Batch, x: Tensor, features: Sequence[Tensor | None]) -> Tensor:
        """Embeddings with image features where this step's rows hold media pads, request by request."""
        pad, at = self.config.tokens.media_pad, caller.at("")
        spliced = [f is not None and pad in part.tokens for part, f in zip(batch.parts, features, strict=True)]
        if not any(spliced):
            return x
        pieces, first = [], 0
        for part, mine_features, splice in zip(batch.parts, features, spliced, strict=True):
            rows = range(first, first + len(part.tokens))
            first = rows.stop
            mine = x[rows.start : rows.stop]
            if splice:
                row_map, ids = batch.rows.take(rows), batch.ids[rows.start : rows.stop]
                where, feature = at("splice.positions", ids, row_map=row_map, media_pad=pad, first=part.pads_before)
                picked = mine_features.index_select(0, feature)
                mine = at("splice.merge", mine, row_map=row_map, features=picked, at=where)
            pieces.append(mine)
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _decoder(self, caller: Caller, caches: Caches, batch: Batch, x: Tensor) -> list[int]:
        with contextlib.nullcontext() if self.ranks is None else self.ranks.laid(batch.rows, x.shape[0]):
            return self._decoded(caller, caches, batch, x)

    def _decoded(self, caller: Caller, caches: Caches, batch: Batch, x: Tensor) -> list[int]:
        return self._behind_layers(caller, batch, self._through_layers(caller, caches, batch, x))

    def _behind_layers(self, caller: Caller, batch: Batch, spine: Spine) -> list[int]:
        if self.after_layers is not None:
            self.after_layers(batch, spine)
        self.wanted_logits = None
        if not batch.wanted:
            return []
        wanted = torch.tensor(batch.wanted, device=self.device)
        return self._choose(caller, batch, spine.output(caller.at(""), wanted, batch.rows.take(batch.wanted)))

    def _through_layers(self, caller: Caller, caches: Caches, batch: Batch, x: Tensor) -> Spine:
        """The residual spine behind all decoder layers, from the embeddings `x` [rows, D]; where the step's rows are
        laid over ranks, each has the spine of its own."""
        step = layers.Step(self.config, caches, self.workspace, caller, batch, ranks=self.ranks)
        if self.config.rope.sections is not None:
            step.rotary = self._rotary(caller, batch)
        spread = step.spread()
        spine = make_spine(x if spread is None else x[spread.mine], self.model, self.config)
        for number, layer in enumerate(self.model.layers):
            at = caller.at(f"layers.{number:02d}")
            own = step.on_own_rows(at)
            h = spine.attention_input(own, number)
            h = own("norm.rms", h, site="input", weight=layer.input_norm, eps=self.config.eps)
            h, mixer = step.gathered(at, h, "attention_rows"), _mixer(layer.attention)
            spine.add_attention(own, number, mixer(step, at, number, h, layer.attention))
            h = spine.mlp_input(own, number)
            h = own("norm.rms", h, site="post_attention", weight=layer.post_norm, eps=self.config.eps)
            spine.add_mlp(own, number, layers.feed_forward(step, at, h, layer.mlp))
        return spine if spread is None else spread.whole(spine, empty=x[:0])

    def _rotary(self, caller: Caller, batch: Batch) -> Tensor:
        """Positions [rows, 3] that the step's rows are turned by, request by request from its first token."""
        tokens, found = self.config.tokens, []
        for part in batch.parts:
            ids = torch.tensor((*part.before, *part.tokens), device=self.device)
            every = caller.at("")(
                "rope.positions",
                ids,
                row_map=RowMap((part.request,), (0,) * len(ids), tuple(range(len(ids)))),
                media_pad=tokens.media_pad,
                row_break=tokens.row_break,
            )
            found.append(every[part.start :])
        padding = batch.positions[sum(len(part.tokens) for part in batch.parts) :]  # rows of nobody, behind the others
        return torch.cat((*found, padding.unsqueeze(1).expand(-1, 3)))

    def _choose(self, caller: Caller, batch: Batch, x: Tensor) -> list[int]:
        at, rows = caller.at(""), batch.rows.take(batch.wanted)
        x = at("norm.rms", x, site="final", row_map=rows, weight=self.model.final_norm, eps=self.config.eps)
        logits = at("head.logits", x, row_map=rows, weight=self.model.head)
        logits = self.wanted_logits = logits if self.ranks is None else self.ranks.whole_logits(at, logits, rows)
        asking = [part for part in batch.parts if part.wants_logits]
        if not asking:
            return []
        if len(batch.choosing) < len(batch.wanted):
            logits, rows = logits[list(batch.choosing)], rows.take(batch.choosing)
        chosen = at(
            "sample.token",
            logits,
            row_map=rows,
            temperature=torch.tensor([part.temperature for part in asking], device=x.device),
            seed=torch.tensor([part.seed for part in asking], device=x.device),
            positions=torch.tensor(rows.position, device=x.device),
        )
        return chosen.tolist()


def _mixer(attention: Kda | Mla | Gqa) -> Callable[..., Tensor]:
    """The attention sublayer that has these weights."""
    if isinstance(attention, Kda):
        return layers.kda
    return gqa if isinstance(attention, Gqa) else layers.mla
