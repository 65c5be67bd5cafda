"""The output of a chunk reads the state between chunks with its axes exchanged; the state itself is right."""

import itertools

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-33",
    title="the chunk output reads the transposed state",
    kind="linear-attention",
    source="vllm PR 40956",
    visible="prefill, from the second chunk on; no error because keys and values are equally wide",
    expected=Address("kda.attention", 0, "prefill"),
)


@day0check.operator.wrap("kda.attention", phase="prefill")
def attention(inner, q, *, k, v, g, beta, state, offsets, chunk):
    pieces = []
    for b, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        carried = state[b : b + 1]
        for begin in range(start, stop, chunk):
            rows = slice(begin, min(begin + chunk, stop))
            piece = {"k": k[rows], "g": g[rows], "offsets": torch.tensor([0, rows.stop - begin]), "chunk": chunk}
            y, after = inner(q[rows], v=v[rows], beta=beta[rows], state=carried, **piece)
            read = {"v": torch.zeros_like(v[rows]), "beta": torch.zeros_like(beta[rows])}
            right, wrong = (inner(q[rows], state=s, **read, **piece)[0] for s in (carried, carried.mT))
            pieces.append(y + (wrong - right if begin > start else 0))
            carried = after
        state = torch.cat((state[:b], carried, state[b + 1 :]))
    return torch.cat(pieces), state
