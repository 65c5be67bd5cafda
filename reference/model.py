"""The whole model: weights, residual spine, vision tower, splice, head. Read beside model.md 2.7 and 2.9.

model = Model(Checkpoint(directory))
logits = model.forward(tokens, images=[path])         # one causal pass
state = model.start(); model.extend(state, tokens)    # the same with caches, in as many pieces as one likes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reference import draft as drafting
from reference import glm_vision, layers, residual, vision, vision_tower
from reference.formats import mxfp4_decode
from reference.layers import Call, Here, KdaCache, LatentCache, just_call
from reference.linear import embed, linear_float32
from reference.rope import rope_positions
from reference.vision_tower import Image
from reference.weights import Checkpoint

KEPT_BYTES = 2 << 30


class DecodedWeights:
    """A checkpoint's tensors in the computing dtype, read when asked for; up to `kept_bytes` of them stay in memory.

    Tensors stored in float32 stay so below float64: rounding them would be a model of its own.
    """

    def __init__(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: str, kept_bytes: int) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self._left, self._kept = kept_bytes, {}

    def __call__(self, name: str) -> Tensor:
        return self._keep(name, lambda: self._cast(self.checkpoint.tensor(name)))

    def expert(self, prefix: str, w: str, number: int) -> Tensor:
        """One expert's matrix [rows, columns]; packed codes are decoded exactly."""
        name = f"{prefix}.{number}.{w}.weight"
        if name in self.checkpoint:
            return self(name)
        return self._keep(
            name,
            lambda: mxfp4_decode(
                self.checkpoint.tensor(f"{name}_packed"), self.checkpoint.tensor(f"{name}_scale"), dtype=self.dtype
            ).to(self.device),
        )

    def experts(self, prefix: str, w: str, *, active: tuple[int, ...]) -> Any:
        several = OneByOne(self, prefix, w, active)
        size = math.prod(several.shape) * self.dtype.itemsize
        if size > KEPT_BYTES:
            return several
        matrices = [several[a] for a in range(len(active))]
        return torch.stack(matrices) if matrices else torch.zeros(several.shape, dtype=self.dtype, device=self.device)

    def _cast(self, tensor: Tensor) -> Tensor:
        keeps = tensor.dtype == torch.float32 and self.dtype != torch.float64
        return tensor.to(self.device, tensor.dtype if keeps else self.dtype)

    def _keep(self, name: str, read: Any) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        tensor = read()
        size = tensor.numel() * tensor.element_size()
        if size <= self._left:
            self._left -= size
            self._kept[name] = tensor
        return tensor


class OneByOne:
    """Stands for a tensor [A, rows, columns] of expert matrices that is too large to exist: an index decodes one."""

    def __init__(self, weights: DecodedWeights, prefix: str, w: str, active: tuple[int, ...]) -> None:
        self.weights, self.prefix, self.w, self.active = weights, prefix, w, active
        moe, hidden = weights.checkpoint.config.moe, weights.checkpoint.config.hidden
        inner = moe.latent or hidden
        self.shape = (len(active), inner, moe.width) if w == "w2" else (len(active), moe.width, inner)
        self.dtype = weights.dtype

    def __len__(self) -> int:
        return len(self.active)

    def __getitem__(self, index: int) -> Tensor:
        return self.weights.expert(self.prefix, self.w, self.active[index])


@dataclass
class State:
    """What a request remembers between calls of `extend`: one cache per layer, how many rows it has seen, and their
    tokens where positions of later ones follow from them. `waiting` [1, D]: the last row behind the final norm, where
    a draft layer waits for its next token; `drafted` [rows, V]: what the draft layer said in the latest call."""

    caches: list[KdaCache | LatentCache]
    length: int = 0
    tokens: Tensor | None = None
    waiting: Tensor | None = None
    drafted: Tensor | None = None


@dataclass
class Spine:
    """The residual stream of the rows in hand. Plain: `stream` [T, D]. Attention residuals: `bank` of frozen blocks
    [n, T, D], `frozen` of them filled, and `stream`, the running partial sum. mHC: `stream` [T, N, D]."""

    stream: Tensor
    bank: Tensor | None = None
    frozen: int = 0
    coefficients: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def sources(self) -> Tensor:
        """[T, n, D]: the frozen blocks in order, then the partial sum."""
        return torch.stack([*self.bank[: self.frozen], self.stream], dim=1)


class Model:
    """The reference of a checkpoint in any float dtype. One request at a time; float64 is the oracle."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self.config, self.dtype, self.device = checkpoint.config, dtype, device
        self.weights = DecodedWeights(checkpoint, dtype=dtype, device=device, kept_bytes=kept_bytes)

    def start(self) -> State:
        """An empty state."""
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        return State([layers.fresh_cache(self.config, n, like=like) for n in range(len(self.config.every_layer))])

    def forward(
        self,
        tokens: Sequence[int] | Tensor,
        *,
        images: Sequence[Image] = (),
        call: Call = just_call,
        form: str = "absorbed",
        chunk_kda: int | None = None,
        drafts: bool = False,
    ) -> Tensor:
        """Logits [T, vocab] (at least float32) of one causal pass; arguments as in `extend`."""
        return self.extend(
            self.start(), tokens, images=images, call=call, form=form, chunk_kda=chunk_kda, drafts=drafts
        )

    @torch.no_grad()
    def extend(
        self,
        state: State,
        tokens: Sequence[int] | Tensor,
        *,
        images: Sequence[Image] = (),
        call: Call = just_call,
        form: str = "absorbed",
        chunk_kda: int | None = None,
        drafts: bool = False,
    ) -> Tensor:
        """Logits [T, vocab] of T more tokens; `state` moves on.

        `images`: file paths or uint8 arrays [height, width, channels] whose features take the media pads of these
        tokens in order (pads beyond them keep their embedding: a model may write one). `form`: "absorbed" or "plain".
        `chunk_kda`: rows per chunk, 0 for the recurrence; None is the configuration's chunk, and the recurrence for a
        single row. `drafts`: the draft layer runs too, on every row whose next token is known, in all calls of a state
        or in none; its logits are `state.drafted`. Raises ValueError for an empty or too long sequence, for fewer pads
        than image features, and for drafts of a model that has no draft layer.
        """
        ids = torch.as_tensor(tokens, dtype=torch.int64, device=self.device)
        if ids.numel() == 0 or state.length + ids.numel() > self.config.max_positions:
            raise ValueError(
                f"{ids.numel()} tokens after {state.length}: 1 to {self.config.max_positions} positions exist"
            )
        top = self._here("", "", call)
        x = top("embed.tokens", embed, ids, weight=top.weight("embed_tokens"))
        if images:
            x = self._splice(ids, x, images, call)
        chunk = (
            (self.config.kda.chunk if ids.numel() > 1 else 0) if chunk_kda is None and self.config.kda else chunk_kda
        )
        spine, selected, rotary = self._open(x), None, self._rotary(top, state, ids)
        for number, kind in enumerate(self.config.layers):
            here = self._here(f"layers.{number:02d}", f"layers.{number}.", call)
            h = here.norm(self._before_attention(here, spine, number), "input_layernorm", site="input")
            cache = state.caches[number]
            if kind == "kda":
                h = layers.kda(here, h, cache, chunk=chunk or None)
            elif kind == "gqa":
                h = layers.grouped_attention(here, h, cache, rotary=rotary)
            else:
                h = layers.full_attention(
                    here, h, cache, kind=kind, form=form, shared_selection=selected, rotary=rotary
                )
                selected = selected if cache.selected is None else cache.selected
            self._after_attention(here, spine, h, number)
            h = here.norm(self._before_mlp(here, spine), "post_attention_layernorm", site="post_attention")
            h = layers.moe(here, h) if self.config.is_moe(number) else layers.dense_mlp(here, h)
            self._after_mlp(here, spine, h)
        state.length += ids.numel()
        x = top.norm(self._close(top, spine), "norm", site="final")
        if drafts:
            self._draft(state, ids, x, call, form)
        return top("head.logits", linear_float32, x, weight=self._head(top))

    def _head(self, top: Here) -> Tensor:
        return top.weight("embed_tokens" if self.config.tied_head else "lm_head")

    def _draft(self, state: State, ids: Tensor, hidden: Tensor, call: Call, form: str) -> None:
        """Runs the draft layer on the rows whose next token is among `ids` [T], `hidden` [T, D] being theirs."""
        if self.config.draft is None:
            raise ValueError(f"model {self.config.name} has no draft layer")
        rows = hidden[:-1] if state.waiting is None else torch.cat([state.waiting, hidden[:-1]])
        following = ids[len(ids) - len(rows) :]
        state.waiting, state.drafted = hidden[-1:], hidden.new_zeros(0, self.config.vocab)
        if not len(rows):
            return
        number, top = len(self.config.layers), self._here("", "", call)
        here = self._here(f"layers.{number:02d}", f"layers.{number}.", call)
        embedded = here("embed.tokens", embed, following, weight=top.weight("embed_tokens"))
        h = drafting.draft_rows(here, embedded, hidden=rows, cache=state.caches[number], form=form)
        state.drafted = here("head.logits", linear_float32, h, weight=self._head(top))

    def _rotary(self, top: Here, state: State, ids: Tensor) -> Tensor | None:
        """Positions [T, 3] that the rows of `ids` are turned by; None where it is their place in the sequence."""
        if self.config.rope.sections is None:
            return None
        state.tokens = ids if state.tokens is None else torch.cat([state.tokens, ids])
        t = self.config.tokens
        every = top("rope.positions", rope_positions, state.tokens, media_pad=t.media_pad, row_break=t.row_break)
        return every[state.length :]

    def _here(self, place: str, prefix: str, call: Call) -> Here:
        return Here(place, prefix, self.config, self.weights, call)

    # ------------------------------------------------------------------------------------------------ residual spine

    def _open(self, x: Tensor) -> Spine:
        kind, r = self.config.residual.kind, self.config.residual
        if kind == "mhc":
            return Spine(x[:, None].repeat(1, r.streams, 1))
        if kind == "attention":
            return Spine(x, x.new_zeros(math.ceil(len(self.config.layers) / r.block), *x.shape))
        return Spine(x)

    def _mix(self, here: Here, spine: Spine, name: str, site: str) -> Tensor:
        return here(
            "residual.mix",
            residual.attention_mix,
            spine.sources(),
            norm_weight=here.weight(f"{name}_norm"),
            proj=here.weight(f"{name}_proj")[0],
            eps=self.config.eps,
            site=site,
        )

    def _before_attention(self, here: Here, spine: Spine, layer: int) -> Tensor:
        """The input of the attention sublayer. At a boundary the mix still sees the complete partial sum as its last
        source; then it is frozen."""
        kind = self.config.residual.kind
        if kind == "mhc":
            return self._collapse(here, spine, "attn", "attention")
        if kind == "plain":
            return spine.stream
        mixed = self._mix(here, spine, "self_attention_res", "attention")
        if layer % self.config.residual.block == 0:
            here("residual.store", residual.store, spine.bank, value=spine.stream, slot=spine.frozen)
            spine.frozen += 1
        return mixed

    def _after_attention(self, here: Here, spine: Spine, h: Tensor, layer: int) -> None:
        kind, block = self.config.residual.kind, self.config.residual.block
        if kind == "mhc":
            self._update(here, spine, h, "attention")
        elif kind == "attention" and layer % block == 0:
            spine.stream = h  # the partial sum restarts from the output of a boundary layer's attention
        else:
            spine.stream = here("residual.add", residual.add, spine.stream, y=h, site="attention")

    def _before_mlp(self, here: Here, spine: Spine) -> Tensor:
        kind = self.config.residual.kind
        if kind == "mhc":
            return self._collapse(here, spine, "ffn", "mlp")
        return spine.stream if kind == "plain" else self._mix(here, spine, "mlp_res", "mlp")

    def _after_mlp(self, here: Here, spine: Spine, h: Tensor) -> None:
        if self.config.residual.kind == "mhc":
            self._update(here, spine, h, "mlp")
        else:
            spine.stream = here("residual.add", residual.add, spine.stream, y=h, site="mlp")

    def _close(self, top: Here, spine: Spine) -> Tensor:
        kind = self.config.residual.kind
        if kind == "mhc":
            equal = torch.full_like(spine.stream[..., 0], 1 / spine.stream.shape[1])
            return top("residual.collapse", residual.collapse_streams, spine.stream, pre=equal, site="output")
        return spine.stream if kind == "plain" else self._mix(top, spine, "output_attn_res", "output")

    def _collapse(self, here: Here, spine: Spine, part: str, site: str) -> Tensor:
        r = self.config.residual
        pre, *spine.coefficients = here(
            "residual.coefficients",
            residual.stream_coefficients,
            spine.stream,
            **{name: here.tensor(f"hc_{part}_{name}") for name in ("fn", "base", "scale")},
            eps=self.config.eps,
            hc_eps=r.hc_eps,
            iterations=r.sinkhorn,
            site=site,
        )
        return here("residual.collapse", residual.collapse_streams, spine.stream, pre=pre, site=site)

    def _update(self, here: Here, spine: Spine, h: Tensor, site: str) -> None:
        post, comb = spine.coefficients
        spine.stream = here(
            "residual.update", residual.update_streams, spine.stream, output=h, post=post, comb=comb, site=site
        )

    # -------------------------------------------------------------------------------------------------------- vision

    def _splice(self, ids: Tensor, x: Tensor, images: Sequence[Image], call: Call) -> Tensor:
        top = self._here("", "", call)
        at, feature = top(
            "splice.positions", vision.splice_positions, ids, media_pad=self.config.tokens.media_pad, first=0
        )
        features = self.image_features(images, call=call)
        if at.numel() < features.shape[0]:
            raise ValueError(f"{at.numel()} media pads for {features.shape[0]} image features")
        at, feature = at[: features.shape[0]], feature[: features.shape[0]]
        return top("splice.merge", vision.splice_merge, x, features=features[feature], at=at)

    @torch.no_grad()
    def image_features(self, images: Sequence[Image], *, call: Call = just_call) -> Tensor:
        """Features [tokens, D] of the images in order: tower and projector. Raises ValueError without a tower."""
        v = self.config.vision
        if v is None:
            raise ValueError(f"model {self.config.name} has no vision; {len(images)} images were given")
        tower = {"moonvit": vision_tower.features, "glm": glm_vision.features}[v.kind]
        return tower(self._here("vision", "", call), images, device=self.device, dtype=self.dtype)
