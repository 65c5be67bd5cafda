"""The operators of the fast path, by contract name, and the legal form each of them claims.

Written from the formulas, not from `reference/`: two derivations that agree are the point of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from day0check.accelerated.ops import attention, experts, index, kda, loading, paging, rope, sampling, spine, vision
from day0check.accelerated.ops.arithmetic import linear, per_head, strict_sums
from day0check.accelerated.server.operators import SERVING

TABLE: dict[str, Callable[..., Any]] = {
    "weights.read": loading.read,
    "weights.place": loading.place,
    "moe.convert": experts.convert,
    "image.preprocess": vision.preprocess,
    "vision.patch": vision.patch_embed,
    "vision.position": vision.position,
    "vision.qkv": linear,
    "vision.rope": vision.rope,
    "vision.attention": vision.attention,
    "vision.output": linear,
    "vision.mlp": vision.mlp,
    "vision.merge": vision.merge,
    "vision.project": vision.project,
    "embed.tokens": spine.embed_tokens,
    "splice.positions": spine.splice_positions,
    "splice.merge": spine.splice_merge,
    "norm.rms": spine.rms_norm,
    "residual.add": spine.residual_add,
    "residual.mix": spine.residual_mix,
    "residual.store": spine.residual_store,
    "residual.coefficients": spine.residual_coefficients,
    "residual.collapse": spine.residual_collapse,
    "residual.update": spine.residual_update,
    "mlp.dense": spine.mlp,
    "mla.query": linear,
    "mla.latent": linear,
    "rope.apply": rope.rope_apply,
    "mla.absorb": per_head,
    "mla.expand": linear,
    "mla.attention": attention.attention,
    "mla.merge": attention.merge,
    "mla.value": per_head,
    "mla.gate": linear,
    "mla.output": attention.gated_output,
    "dsa.index_query": linear,
    "dsa.index_weights": index.index_weights,
    "dsa.index_key": index.index_key,
    "dsa.pool_gate": linear,
    "dsa.pool_key": index.pool_key,
    "dsa.score": index.score,
    "dsa.select": index.select,
    "dsa.expand": index.expand,
    "dsa.attention": attention.sparse_attention,
    "kv.slots": paging.slots,
    "kv.write": paging.write,
    "kv.gather": paging.gather,
    "index.write": paging.write,
    "index.gather": paging.gather,
    "state.load": paging.state_load,
    "state.store": paging.state_store,
    "kda.project": linear,
    "kda.conv": kda.conv,
    "kda.gates": kda.gates,
    "kda.attention": kda.attention,
    "kda.output": kda.output,
    "moe.scores": experts.scores,
    "moe.route": experts.route,
    "moe.down": linear,
    "moe.dispatch": experts.dispatch,
    "moe.experts": experts.experts,
    "moe.combine": experts.combine,
    "moe.up": linear,
    "moe.shared": spine.mlp,
    "head.logits": sampling.logits,
    "sample.token": sampling.sample,
    **SERVING,
}

# Which legal form of a contract each operator is, where a contract has several.
FORMS: dict[str, str] = {
    "norm.rms": "fused",
    "residual.mix": "float32_p",
    "mlp.dense": "fused",
    "mla.attention": "flash",
    "dsa.attention": "flash",
    "vision.attention": "flash",
    "vision.mlp": "fused",
    "kda.conv": "fused",
    "kda.attention": "chunked",  # recurrent where `chunk` is None, as in decode
    "moe.experts": "fused",
    "moe.shared": "fused",
}

_LINEAR = ("weight", "bias")
_MLP = ("gate", "up", "down")

# The keywords of each operator that are weights: what `prepare` may repack.
WEIGHTS: dict[str, tuple[str, ...]] = {
    "vision.patch": _LINEAR,
    "vision.position": ("table",),
    "vision.qkv": _LINEAR,
    "vision.output": _LINEAR,
    "vision.mlp": ("fc0", "fc1", "bias0", "bias1"),
    "vision.project": ("w0", "w1", "norm_weight"),
    "embed.tokens": ("weight",),
    "norm.rms": ("weight",),
    "residual.mix": ("norm_weight", "proj"),
    "residual.coefficients": ("fn", "base", "scale"),
    "mlp.dense": _MLP,
    "mla.query": _LINEAR,
    "mla.latent": _LINEAR,
    "mla.absorb": ("weight",),
    "mla.expand": _LINEAR,
    "mla.value": ("weight",),
    "mla.gate": _LINEAR,
    "mla.output": ("weight",),
    "dsa.index_query": _LINEAR,
    "dsa.index_weights": ("weight",),
    "dsa.index_key": ("weight", "norm_weight", "norm_bias"),
    "dsa.pool_gate": _LINEAR,
    "dsa.pool_key": ("ape",),
    "kda.project": _LINEAR,
    "kda.conv": ("weight",),
    "kda.gates": ("a_log", "dt_bias"),
    "kda.output": ("norm_weight", "weight"),
    "moe.scores": ("weight",),
    "moe.route": ("bias",),
    "moe.down": _LINEAR,
    "moe.convert": ("packed", "scale"),
    "moe.experts": ("w1", "w3", "w2", "w1_scale", "w3_scale", "w2_scale"),
    "moe.up": _LINEAR,
    "moe.shared": _MLP,
    "head.logits": _LINEAR,
}

__all__ = ["FORMS", "TABLE", "WEIGHTS", "strict_sums"]
