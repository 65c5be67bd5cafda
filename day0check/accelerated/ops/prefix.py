"""The prefix cache of the fast path: blocks are looked up by a hash chain and accepted only when their content agrees.

The key of a block is the first 63 bits of SHA-256 over the key before it, its tokens and its salts: equal keys after
different beginnings do not occur by themselves, and a collision is no hit, since tokens, salts and parent are compared.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

ENTRY, PARENT, BOUNDARY, SNAPSHOT, KEY, HEAD = range(6)
NO_PARENT = 0


def chain(tokens: Tensor, salts: Tensor, *, page: int, key: int = 0) -> list[int]:
    """Keys of the whole blocks of `tokens` int64 [n] with `salts` [n, 2], after a block with `key` (0: none)."""
    keys = []
    rows = torch.cat((tokens.unsqueeze(1), salts), 1).cpu().contiguous()
    for first in range(0, len(rows) - page + 1, page):
        digest = hashlib.sha256(key.to_bytes(8, "little"))
        digest.update(rows[first : first + page].numpy().astype("<i8", copy=False).tobytes())
        key = int.from_bytes(digest.digest()[:8], "big") >> 1
        keys.append(key)
    return keys


def match(tokens: Tensor, *, salts: Tensor, held: Tensor) -> Tensor:
    """Pages int64 [blocks] of the longest known prefix that ends in a block with a snapshot."""
    page = (held.shape[1] - HEAD) // 3
    wanted = torch.tensor(chain(tokens, salts, page=page), dtype=torch.int64, device=held.device)
    count = wanted.numel()
    if count == 0 or held.shape[0] == 0:
        return wanted[:0]
    keys, order = torch.where(held[:, ENTRY] > 0, held[:, KEY], -1).sort()
    place = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    pages = order[place]
    rows = held[pages]
    content = torch.cat((tokens[: count * page].view(count, page), salts[: count * page].reshape(count, -1)), 1)
    parents = torch.cat((rows.new_tensor([NO_PARENT]), rows[:-1, ENTRY]))
    good = (keys[place] == wanted) & (rows[:, HEAD:] == content).all(1) & (rows[:, PARENT] == parents)
    good = good.to(torch.int64).cumprod(0).bool()
    ends = torch.nonzero(good & (rows[:, SNAPSHOT] >= 0)).flatten()
    return pages[: int(ends[-1]) + 1] if ends.numel() else pages[:0]


def register(
    held: Tensor,
    *,
    tokens: Tensor,
    salts: Tensor,
    at: Tensor,
    table: Tensor,
    entries: Tensor,
    parent: Tensor,
    snapshots: Tensor,
) -> None:
    """Enters the blocks of `tokens` that are absorbed to their end, and no other."""
    page = (held.shape[1] - HEAD) // 3
    first, absorbed = at.tolist()
    count = max(0, (absorbed - first) // page)
    if count == 0:
        return
    before = held[held[:, ENTRY] == parent[0], KEY] if int(parent[0]) else held.new_zeros(1)
    keys = chain(tokens[: count * page], salts[: count * page], page=page, key=int(before[0]) if len(before) else 0)
    numbers = torch.arange(1, count + 1, device=held.device)
    rows = held.new_full((count, held.shape[1]), -1)
    rows[:, ENTRY] = entries[:count]
    rows[:, PARENT] = torch.cat((parent, entries[: count - 1]))
    rows[:, BOUNDARY] = first + numbers * page
    rows[:, SNAPSHOT] = snapshots[:count]
    rows[:, KEY] = held.new_tensor(keys)
    rows[:, HEAD : HEAD + page] = tokens[: count * page].view(count, page)
    rows[:, HEAD + page :] = salts[: count * page].reshape(count, -1)
    held[table[:count]] = rows


def release(counts: Tensor, *, pages: Tensor, held: Tensor) -> None:
    """Takes one holder from each of `pages`."""
    counts[pages] = held - 1
