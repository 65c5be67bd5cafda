"""How the result of each operator is cut over ranks, in dims strings (`probe/flow.py` says what they mean)."""

from __future__ import annotations

from day0check.accelerated.parallel.layout import Layout

HEADS, COLUMNS, PART = "rows, heads@tp, dim", "rows, heads*dim@tp", "rows, hidden, partial@tp"
# Tensor parallel: operator, and site where it matters -> the dims of its results.
_TENSOR = {
    "mla.query.up": COLUMNS,
    "rope.apply.query": HEADS,
    "mla.absorb": HEADS,
    "mla.attention": HEADS,
    "mla.partial": f"{HEADS}; rows, heads@tp",
    "mla.merge": HEADS,
    "dsa.attention": HEADS,
    "mla.value": HEADS,
    "mla.gate": COLUMNS,
    "mla.output": PART,
    **{f"kda.project.{site}": COLUMNS for site in ("q", "k", "v", "f_b", "gate", "gate_b")},
    **{f"gqa.project.{site}": COLUMNS for site in "qkv"},
    "norm.rms.query": HEADS,
    "norm.rms.key": HEADS,
    "gqa.attention": HEADS,
    "gqa.output": PART,
    "kda.project.alpha": "rows, heads@tp",
    "kda.project.beta": "rows, heads@tp",
    "kda.conv": "rows, channels@tp/3; batch, width, channels@tp/3",  # inside each of q, k and v
    "state.load.conv": "batch, width, channels@tp/3",
    "state.load.kda": "batch, heads@tp, dim, dim",
    "kda.gates": f"{HEADS}; rows, heads@tp",
    "kda.attention": f"{HEADS}; batch, heads@tp, dim, dim",
    "kda.output": PART,
    "mlp.dense": PART,
    "moe.shared": PART,
    "head.logits": "rows, vocabulary@tp",
}
_CUT_EXPERTS = {"moe.experts": "pairs, latent, partial@tp", "moe.combine": "rows, latent, partial@tp"}
_ROWS = ("moe.scores", "moe.route", "moe.down", "moe.combine", "norm.rms.routed_expert", "moe.up")
_EXCHANGED = {operator: "rows@ep, ...; rows@ep, ..." for operator in _ROWS}
_OWN_PAIRS = {"moe.dispatch": "pairs@ep, ...", "moe.experts": "pairs@ep, ..."}
_OWN_SUMS = {**_OWN_PAIRS, "moe.combine": "rows, latent, partial@ep"}


# Where the rows of a step are laid over ranks: what runs on a rank's own rows, and how many results it has.
_ON_OWN_ROWS = {
    "norm.rms.input": 1,
    "norm.rms.post_attention": 1,
    "norm.rms.routed_expert": 1,
    "moe.up": 1,
    "residual.add": 1,
    "residual.mix": 1,
    "residual.coefficients": 3,
    "residual.collapse": 1,
    "residual.update": 1,
    "comm.reduce_scatter": 1,
}


def dims_of(layout: Layout, place: str, operator: str, site: str, *, spread: bool = False) -> str:
    """The dims strings of the results of an operator under `layout`, joined by ";"; "" where they are whole.

    `spread`: the rows of the step are laid over the tensor parallel ranks.
    """
    if place.startswith("vision"):
        return ""
    if spread:
        own = _ON_OWN_ROWS.get(f"{operator}.{site}", _ON_OWN_ROWS.get(operator))
        if own is not None:
            return "; ".join(["rows@tp, ..."] * own)
    for name in (f"{operator}.{site}", operator):
        if layout.expert > 1:
            found = (_OWN_SUMS if layout.dispatch == "reduce" else {**_EXCHANGED, **_OWN_PAIRS}).get(name)
        else:
            found = _CUT_EXPERTS.get(name)
        if found is None and layout.tensor > 1:
            found = _TENSOR.get(name)
        if found is not None:
            return found
    return ""
