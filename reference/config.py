"""ModelConfig: every part of the composition is an independent switch. Readers turn an HF config.json into one.

Standard library only, so that the command line can plan without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LayerKind = Literal["kda", "mla", "dsa", "dsa_shared", "gqa"]


@dataclass(frozen=True)
class Yarn:
    """Long-context scaling of RoPE (Peng et al. 2023; DeepSeek-V3.2 config `rope_scaling`)."""

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0


@dataclass(frozen=True)
class Rope:
    """`layout`: "half" rotates pairs (i, i+d/2), "interleaved" pairs (2i, 2i+1), "none" leaves the dims as they are.
    `sections`: how many pairs turn by the temporal, the height and the width position, in this order (M-RoPE)."""

    layout: Literal["none", "half", "interleaved"] = "none"
    theta: float = 10000.0
    yarn: Yarn | None = None
    sections: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention. The `rope` dims count in the softmax scale even when nothing is rotated."""

    heads: int
    kv_lora: int
    nope: int
    rope: int
    v: int
    q_lora: int | None = None  # None: queries are projected from the hidden state directly
    gate: bool = False  # sigmoid output gate
    latent_eps: float = 1e-6  # of q_a_layernorm and kv_a_layernorm, not rms_norm_eps: see model.md 2.1
    cache_scale: bool = False  # every layer stores `k_scale`, calibrated for plain FP8 codes of its cached rows


@dataclass(frozen=True)
class Index:
    """Lightning indexer. `select` "topk" keeps the k best, "threshold" every visible key that scores at least
    `threshold` up to the k best. `pool` > 1 scores pools of that many tokens (GLM-5.3). With `overlap` a pool's key is
    made of 2 * pool tokens, those of the pool before it in a lane of their own (DeepSeek-V4)."""

    heads: int
    dim: int
    topk: int
    rope: int = 0  # the first `rope` dims are rotated
    rope_layout: Literal["none", "half", "interleaved"] = "half"
    key_norm_eps: float = 1e-6
    select: Literal["topk", "threshold"] = "topk"
    threshold: float = 0.0
    pool: int = 1
    pool_tail: bool = True
    overlap: bool = False

    @property
    def lanes(self) -> int:
        """Keys (and gates) that a token has: one for its own pool, and with `overlap` one before it for the next."""
        return 2 if self.overlap else 1

    @property
    def waiting(self) -> int:
        """Tokens whose keys and gates a request keeps at most while a pool is not whole."""
        return self.lanes * self.pool - 1


@dataclass(frozen=True)
class Kda:
    """Kimi delta attention. `gate_lower_bound` set: g = bound * sigmoid(A f); None: g = -A softplus(f).
    `decay` "low_rank": f = (x Wfa) Wfb, a value per channel; "per_head": f = x Wa, one per head (gated DeltaNet)."""

    heads: int
    dim: int
    conv: int = 4
    gate_lower_bound: float | None = None
    full_rank_gate: bool = True  # output gate x Wg; else (x Wga) Wgb of rank `rank`
    rank: int = 16  # of the decay projection f = (x Wfa) Wfb and of a low-rank output gate
    chunk: int = 64
    l2_eps: float = 1e-6
    decay: Literal["low_rank", "per_head"] = "low_rank"


@dataclass(frozen=True)
class Gqa:
    """Grouped-query attention: `heads / kv_heads` query heads share a key and a value head. RMSNorm over each head of
    the queries and of the keys, with weights of its own for each head, before the rotation of all `dim` channels."""

    heads: int
    kv_heads: int
    dim: int

    @property
    def scale(self) -> float:
        """Scale of attention scores."""
        return self.dim**-0.5


@dataclass(frozen=True)
class Activation:
    """Kind "silu": silu(g) u. "situ": beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta).
    "clamped": silu(min(g, limit)) * clamp(u, -limit, limit)."""

    kind: Literal["silu", "situ", "clamped"] = "silu"
    beta: float = 1.0
    linear_beta: float | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Moe:
    experts: int
    topk: int
    width: int
    shared_width: int
    groups: int = 1
    kept_groups: int = 1
    renormalise: bool = True
    scale: float = 1.0
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    latent: int | None = None  # routed experts work in a latent of this width (K3)
    latent_norm: bool = False  # RMSNorm after the weighted sum
    first_dense: int = 0
    frequency: int = 1
    packed: Literal["none", "mxfp4"] = "none"


@dataclass(frozen=True)
class Residual:
    """Kind "plain": x + f(norm x). "attention": Block Attention Residuals, blocks of `block` decoder layers.
    "mhc": `streams` residual streams with Sinkhorn mixing."""

    kind: Literal["plain", "attention", "mhc"] = "plain"
    block: int = 12
    streams: int = 4
    sinkhorn: int = 20
    hc_eps: float = 1e-6


@dataclass(frozen=True)
class Draft:
    """Multi-token prediction: one decoder layer behind the others, with a plain residual, that guesses the token after
    next. The model's own tokens do not depend on it. `kind`: of its attention."""

    kind: Literal["mla", "dsa"]


@dataclass(frozen=True)
class Vision:
    hidden: int
    layers: int
    heads: int
    head_dim: int
    mlp: int
    patch: int = 14
    merge: int = 2
    table: tuple[int, int] = (64, 64)  # learned position table, height x width
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    norm: Literal["rms", "layer"] = "rms"
    eps: float = 2.0**-23  # upstream leaves it to torch; see model.md 2.9
    bias: bool = False
    projector_pre_norm: bool = False
    projector_eps: float = 1e-5
    patch_limit: int = 65536
    side_limit: int = 512  # patches per side
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    rope_theta: float = 10000.0
    kind: Literal["moonvit", "glm"] = "moonvit"
    # Only for "glm" (GLM-5.3), whose images are fitted into a budget of tokens instead of patches:
    frames: int = 1  # of the patch kernel; a still image is all of them
    out_hidden: int = 0  # width after merging
    projector_width: int = 0
    limit: float = 0.0  # of the clamped activations
    min_tokens: int = 0
    max_tokens: int = 0


@dataclass(frozen=True)
class Tokens:
    """Special token ids; -1 where the model has none."""

    bos: int = -1
    eos: int = -1
    pad: int = -1
    media_pad: int = -1
    media_begin: int = -1
    media_content: int = -1
    media_end: int = -1
    user: int = -1
    assistant: int = -1
    end_of_turn: int = -1
    row_break: int = -1  # ends each row of an image's pads and has no feature; -1: rows follow each other directly


@dataclass(frozen=True)
class ModelConfig:
    name: str
    hidden: int
    layers: tuple[LayerKind, ...]
    vocab: int
    max_positions: int
    mlp_width: int  # of the dense layers
    mla: Mla | None = None
    index: Index | None = None
    kda: Kda | None = None
    gqa: Gqa | None = None
    moe: Moe | None = None
    vision: Vision | None = None
    draft: Draft | None = None
    residual: Residual = Residual()
    activation: Activation = Activation()
    rope: Rope = Rope()
    eps: float = 1e-5
    tied_head: bool = False
    tokens: Tokens = field(default_factory=Tokens)

    @property
    def every_layer(self) -> tuple[LayerKind, ...]:
        """Attention kinds of the decoder layers and, behind them, of the draft layer where there is one."""
        return self.layers if self.draft is None else (*self.layers, self.draft.kind)

    def cache_width(self, layer: int) -> int:
        """Values that a token adds to the cache of an attention layer: latent and rope key, or keys and values."""
        if self.every_layer[layer] == "gqa":
            return 2 * self.gqa.kv_heads * self.gqa.dim
        return self.mla.kv_lora + self.mla.rope

    def is_moe(self, layer: int) -> bool:
        m = self.moe
        return m is not None and layer >= m.first_dense and layer % m.frequency == 0

    def layer_class(self, layer: int) -> str:
        """Attention kind and feed-forward kind of a decoder layer, e.g. "dsa+moe": the class that findings share."""
        return f"{self.every_layer[layer]}+{'moe' if self.is_moe(layer) else 'dense'}"

    def softmax_scale(self) -> float:
        """Scale of attention scores: (nope + rope)^-1/2, times mscale^2 under YaRN beyond the original context."""
        import math

        scale = (self.mla.nope + self.mla.rope) ** -0.5
        yarn = self.rope.yarn
        if yarn is not None and yarn.factor > 1 and yarn.mscale_all_dim:
            scale *= (0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1.0) ** 2
        return scale
