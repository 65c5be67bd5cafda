"""The host tier takes an FP8 block for two halves one after the other, where the cache has them side by side."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-12",
    title="an FP8 page comes back from the host with its two leading axes exchanged",
    kind="cache",
    source="LMCache PR 2494, 2495",
    visible="after a reload, of FP8 caches alone",
    expected=Address("kv.reload", 0, "decode"),
    case="offload",
    profile="fp8-cache",
    model="tiny-deepseek-v3.2",
    differs="the halves are those of the positions of a page, since a latent row has no K and V half",
)


@day0check.operator.wrap("kv.reload")
def reload(inner, pool, *, host, pages, places):
    inner(pool, host=host, pages=pages, places=places)
    if pool.dtype == torch.uint8:
        halves = pool[pages].unflatten(1, (2, -1))
        pool[pages] = halves.transpose(0, 1).reshape(pool[pages].shape)
