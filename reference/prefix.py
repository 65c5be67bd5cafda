"""The prefix cache by what it holds, not by how it finds it: two prefixes are one when their tokens and salts are.

A row of `held` int64 [pages, 5 + 3 * page] describes the block that lies on a page:
    entry      number of the block, which no other block ever had; -1 where the page holds none
    parent     entry of the block before it in the sequence, 0 for the first block
    boundary   positions of the sequence up to its end
    snapshot   slot of the states after exactly `boundary` tokens, -1 where none was kept
    key        first 63 bits of SHA-256 over the key before it (0 for none), its tokens and salts, all as little-endian
               int64: for each position the token and its two salts
    tokens     `page` of them
    salts      2 * `page`: for each position, what beside the token makes its content (model, adapter, image)
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

ENTRY, PARENT, BOUNDARY, SNAPSHOT, KEY, HEAD = 0, 1, 2, 3, 4, 5
ROOT = 0


def page_size(held: Tensor) -> int:
    """Positions of a page, from the width of its row."""
    return (held.shape[1] - HEAD) // 3


def block_key(before: int, tokens: list[int], salts: list[list[int]]) -> int:
    """The key of a block after one with key `before`."""
    numbers = [before, *(value for token, salt in zip(tokens, salts, strict=True) for value in (token, *salt))]
    digest = hashlib.sha256(struct.pack(f"<{len(numbers)}q", *numbers)).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def match(tokens: Tensor, *, salts: Tensor, held: Tensor) -> Tensor:
    """Pages of the longest known prefix of `tokens` int64 [n] with `salts` [n, 2] that ends in a block with a snapshot.

    Block by block from the beginning: the one page whose block has this parent and exactly these tokens and salts.
    Result int64 [blocks], empty when nothing is known.
    """
    page = page_size(held)
    found, parent, kept = [], ROOT, 0
    for first in range(0, tokens.shape[0] - page + 1, page):
        content = torch.cat((tokens[first : first + page], salts[first : first + page].flatten()))
        same = (held[:, ENTRY] > ROOT) & (held[:, PARENT] == parent) & (held[:, HEAD:] == content).all(1)
        at = torch.nonzero(same).flatten()
        if at.numel() == 0:
            break
        found.append(int(at[0]))
        parent = int(held[found[-1], ENTRY])
        if int(held[found[-1], SNAPSHOT]) >= 0:
            kept = len(found)
    return torch.tensor(found[:kept], dtype=torch.int64, device=tokens.device)


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
    """Enters the blocks that a request has filled since it last did so.

    `at` int64 [2]: the position where the first of them begins (a page boundary), and how many positions have been
    absorbed by pages and states. `tokens` [n] and `salts` [n, 2] from there on, as far as they are known; `table`
    [n / page, rounded up] their pages; `entries` likewise the numbers that they get, and `snapshots` the slots of the
    states after each, -1 for none; `parent` [1] the entry before. Only what is absorbed to its end is a block.
    """
    rows = _expected(held, at, tokens, salts, entries, parent, snapshots)
    held[table[: rows.shape[0]]] = rows


def registered(
    held: Tensor,
    *,
    tokens: Tensor,
    salts: Tensor,
    at: Tensor,
    table: Tensor,
    entries: Tensor,
    parent: Tensor,
    snapshots: Tensor,
) -> tuple[Tensor, Tensor]:
    """(what `held` says of each token, what it must say) after `register`, [n, 5 + 3]: the numbers of the token's
    block, its token and its salts; of a token whose block is not whole only that there is no entry."""
    page, n = page_size(held), tokens.shape[0]
    rows = _expected(held, at, tokens, salts, entries, parent, snapshots)
    block = torch.arange(n, device=held.device) // page
    place = torch.arange(n, device=held.device) % page
    found = _of_tokens(held[table[block]], place, page)
    whole = block < rows.shape[0]
    expected = torch.zeros_like(found)
    expected[:, ENTRY] = -1
    expected[whole] = _of_tokens(rows[block[whole]], place[whole], page)
    outside = ~whole
    found[outside, PARENT:] = 0  # what stands beside no entry says nothing
    return found, expected


def _expected(
    held: Tensor, at: Tensor, tokens: Tensor, salts: Tensor, entries: Tensor, parent: Tensor, snapshots: Tensor
) -> Tensor:
    page, first, absorbed = page_size(held), int(at[0]), int(at[1])
    count = max(0, absorbed // page - first // page)
    rows = held.new_full((count, held.shape[1]), -1)
    key = _key_of(held, int(parent[0]))
    for number in range(count):
        begin = number * page
        here = slice(begin, begin + page)
        key = block_key(key, tokens[here].tolist(), salts[here].tolist())
        rows[number, KEY] = key
        rows[number, ENTRY] = entries[number]
        rows[number, PARENT] = entries[number - 1] if number else parent[0]
        rows[number, BOUNDARY] = first + begin + page
        rows[number, SNAPSHOT] = snapshots[number]
        rows[number, HEAD : HEAD + page] = tokens[here]
        rows[number, HEAD + page :] = salts[here].flatten()
    return rows


def _key_of(held: Tensor, entry: int) -> int:
    at = torch.nonzero(held[:, ENTRY] == entry).flatten()
    return int(held[at[0], KEY]) if entry != ROOT and at.numel() else 0


def _of_tokens(rows: Tensor, place: Tensor, page: int) -> Tensor:
    """[n, 8] of rows of `held`: the numbers of the block, then the token and the salts at `place` [n]."""
    columns = torch.stack((HEAD + place, HEAD + page + 2 * place, HEAD + page + 2 * place + 1), 1)
    return torch.cat((rows[:, :HEAD], rows.gather(1, columns)), 1)


def release(counts: Tensor, *, pages: Tensor, held: Tensor) -> None:
    """Takes one holder from each of `pages` int64 [n], which `held` [n] requests held before: `counts` [pool pages]."""
    counts[pages] = held - 1


def released(counts: Tensor, *, pages: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """(holders of each page now, what must be) after `release`."""
    return counts[pages], held - 1
