"""What each operator costs at least: operations, and bytes that must be read and written once.

A model is a function of the call itself, `model(first, **keywords)`, and needs nothing of a tensor but its shape and
element size. Where an operator has no model of its own, only bytes count: what it is given and what has its shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from day0check.contracts.contract import Cost, linear_cost


def size(*tensors: Any) -> float:
    """Bytes of the tensors among them; what is none (None, numbers, pools of others) counts nothing."""
    return float(sum(t.numel() * t.element_size() for t in tensors if hasattr(t, "element_size")))


def _product(x: Any, weight: Any) -> float:
    """Operations of x [..., in] times a matrix [..., out, in] that all of x meets."""
    return 2.0 * x.numel() / x.shape[-1] * weight.shape[-1] * weight.shape[-2]


def _per_head(x: Any, *, weight: Any, **_: Any) -> Cost:
    rows = x.shape[0]
    return Cost(
        2.0 * rows * weight.numel(), size(x, weight) + rows * weight.shape[0] * weight.shape[2] * x.element_size()
    )


def _mlp(x: Any, *, gate: Any, up: Any, down: Any, **_: Any) -> Cost:
    return Cost(_product(x, gate) * 3, 2 * size(x) + size(gate, up, down))


def _score(q: Any, *, weights: Any, keys: Any, owner: Any, **_: Any) -> Cost:
    rows, heads, dim = q.shape
    n = keys.shape[1]
    return Cost(2.0 * rows * n * heads * (dim + 1), size(q, weights, keys) + rows * n * 4.0)


def _select(scores: Any, *, k: int, **_: Any) -> Cost:
    """Up to k keys all are taken and nothing is compared; beyond, a bitonic network keeps the k best of n with about
    n log2(k) (log2(k) + 1) / 2 pairs of minimum and maximum (Batcher 1968)."""
    n, steps = scores.shape[-1], math.log2(k) if k > 1 else 1.0
    compared = scores.numel() * steps * (steps + 1) if n > k else 0.0
    return Cost(compared, size(scores) + scores.shape[0] * k * 4.0)


def _attention(q: Any, *, keys: Any, values: Any, visible: Any, **_: Any) -> Cost:
    rows, heads, d = q.shape
    # a row sees at most `n` keys; over a prompt the mean is what its causal triangle holds
    seen = float(visible.sum()) if hasattr(visible, "sum") else float(rows * keys.shape[1])
    dv = values.shape[-1]
    return Cost(2.0 * seen * heads * (d + dv), size(q, keys) + rows * heads * dv * q.element_size())


def _sparse(q: Any, *, keys: Any, value_width: int, **_: Any) -> Cost:
    rows, heads, d = q.shape
    return Cost(
        2.0 * rows * keys.shape[1] * heads * (d + value_width),
        size(q, keys) + rows * heads * value_width * q.element_size(),
    )


def _kda(q: Any, *, v: Any, state: Any, chunk: int | None = None, **given: Any) -> Cost:
    """The recurrence: a read, an update and a read of the state for each row; a chunked form adds its triangles."""
    rows, heads, dk = q.shape
    dv, c = v.shape[-1], chunk or 0
    per_row = 6.0 * dk * dv + 2.0 * c * (dk + dv)
    return Cost(rows * heads * per_row, size(q, given.get("k"), v, given.get("g"), v) + 2 * size(state))


def _conv(x: Any, *, weight: Any, state: Any, **_: Any) -> Cost:
    return Cost(2.0 * x.numel() * weight.shape[1], 2 * size(x) + size(weight) + 2 * size(state))


def _output(x: Any, *, weight: Any, **given: Any) -> Cost:
    written = x.shape[0] * weight.shape[0] * x.element_size()
    return Cost(2.0 * x.shape[0] * weight.numel(), size(x, given.get("gate"), weight) + written)


def _experts(x: Any, *, w1: Any = None, w3: Any = None, w2: Any = None, **_: Any) -> Cost | None:
    if w1 is None:
        return None
    return Cost(6.0 * x.shape[0] * w1.shape[1] * w1.shape[2], 2 * size(x) + size(w1, w3, w2))


def _convert(packed: Any, *, scale: Any, experts: Any, **_: Any) -> Cost:
    share = len(experts) / packed.shape[0]
    return Cost(0.0, share * (3 * size(packed) + size(scale)))


def _gather(pool: Any, *, indices: Any, **_: Any) -> Cost:
    shape = pool.shape if hasattr(pool, "shape") else (1, *pool.row)
    width = math.prod(shape[2:]) * (pool.element_size() if hasattr(pool, "element_size") else pool.dtype.itemsize)
    return Cost(0.0, size(indices) + 2.0 * indices.numel() * width)


def _write(pool: Any, *, value: Any, **_: Any) -> Cost:
    return Cost(0.0, 2 * size(value))


def _embed(ids: Any, *, weight: Any, **_: Any) -> Cost:
    return Cost(0.0, 2.0 * ids.numel() * weight.shape[1] * weight.element_size())


def _logits(x: Any, *, weight: Any, **_: Any) -> Cost:
    rows = x.shape[0]
    return Cost(2.0 * rows * weight.numel(), size(x, weight) + 4.0 * rows * weight.shape[0])


def _streamed(x: Any, **given: Any) -> Cost:
    """Read everything once, write something of the shape of the first argument."""
    return Cost(0.0, 2 * size(x) + size(*given.values()))


MODELS: dict[str, Callable[..., Cost | None]] = {
    "mla.absorb": _per_head,
    "mla.value": _per_head,
    "mla.attention": _attention,
    "mla.partial": _attention,
    "gqa.attention": _attention,
    "mla.output": _output,
    "dsa.index_weights": linear_cost,
    "dsa.index_key": linear_cost,
    "dsa.score": _score,
    "dsa.select": _select,
    "dsa.attention": _sparse,
    "kda.attention": _kda,
    "kda.conv": _conv,
    "kda.output": _output,
    "mlp.dense": _mlp,
    "moe.shared": _mlp,
    "moe.scores": linear_cost,
    "moe.experts": _experts,
    "moe.convert": _convert,
    "kv.gather": _gather,
    "prefix.gather": _gather,
    "index.gather": _gather,
    "kv.write": _write,
    "index.write": _write,
    "state.store": _write,
    "residual.store": _write,
    "embed.tokens": _embed,
    "head.logits": _logits,
}


def cost_of(operator: str, *args: Any, **kwargs: Any) -> Cost | None:
    """The least that this call of `operator` costs; None where its arguments do not say (fused or prepared kernels)."""
    from day0check.contracts import CONTRACTS

    contract = CONTRACTS.get(operator)
    model = MODELS.get(operator) or (contract.cost if contract is not None else None) or _streamed
    try:
        return model(*args, **kwargs)
    except (TypeError, AttributeError, IndexError):
        return None  # a kernel of another signature: covered arguments, prepared weights
