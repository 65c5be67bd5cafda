"""The switches that only the `fault-*` presets turn, added to the per-token derivation: one token, head and pair at a
time, from lists of what came before."""

import math

import numpy as np
import per_token_model
from per_token_model import PerToken, rms, softmax


def rotate_by(x, three, layout, config):
    """`rotate` with a position for each pair: the first pairs turn by time, the next by height, the last by width."""
    axes = [axis for axis, count in enumerate(config.rope.sections) for _ in range(count)]
    y = np.array(x)
    d = len(x)
    for pair, axis in enumerate(axes):
        a, b = (pair, pair + d // 2) if layout == "half" else (2 * pair, 2 * pair + 1)
        speed = np.float32(1 / np.float32(config.rope.theta ** np.float32(2 * pair / d)))
        angle = float(np.float32(three[axis]) * speed)
        y[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        y[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return y


class Switched(PerToken):
    """`three[position]`: the three positions of a token, written down by whoever made the sequence."""

    def __init__(self, config, tensors, three=None):
        super().__init__(config, tensors)
        self.three = three

    def logits(self, tokens):
        if self.three is None:
            return super().logits(tokens)
        plain = per_token_model.rotate
        per_token_model.rotate = lambda x, position, theta, layout: rotate_by(x, self.three[position], layout, self.c)
        try:
            return super().logits(tokens)
        finally:
            per_token_model.rotate = plain

    def w(self, name):
        """A decay for each head is the low-rank one whose second factor repeats a head's value over its channels."""
        k = self.c.kda
        if k is not None and k.decay == "per_head" and name == "self_attn.f_a_proj.weight":
            return super().w("self_attn.a_proj.weight")
        if k is not None and k.decay == "per_head" and name == "self_attn.f_b_proj.weight":
            return np.kron(np.eye(k.heads), np.ones((k.dim, 1)))
        return super().w(name)

    # ------------------------------------------------------------------------------------------------ grouped queries

    def latent_attention(self, x, position, memory, kind):
        if kind != "gqa":
            return super().latent_attention(x, position, memory, kind)
        g, out = self.c.gqa, []
        heads = {n: (self.w(f"self_attn.{n}_proj.weight") @ x).reshape(-1, g.dim) for n in "qkv"}
        for n in "qk":
            weights = self.w(f"self_attn.{n}_norm.weight").reshape(-1, g.dim)
            heads[n] = [rms(head, own, self.c.eps) for head, own in zip(heads[n], weights, strict=True)]
            if self.c.rope.layout != "none":
                heads[n] = [
                    per_token_model.rotate(h, position, self.c.rope.theta, self.c.rope.layout) for h in heads[n]
                ]
        memory["keys"].append((heads["k"], heads["v"]))
        for number, q in enumerate(heads["q"]):
            shared = number // (g.heads // g.kv_heads)
            p = softmax(np.array([q @ keys[shared] for keys, _ in memory["keys"]]) / math.sqrt(g.dim))
            out.append(sum(w * values[shared] for w, (_, values) in zip(p, memory["keys"], strict=True)))
        return self.w("self_attn.o_proj.weight") @ np.concatenate(out)

    # ----------------------------------------------------------------------------------------------------------- index

    def choose(self, x, latent, position, memory):
        """The pools of the best keys and the tokens behind the last whole pool; without pools as ever."""
        i = self.c.index
        if i.pool == 1:
            return super().choose(x, latent, position, memory)
        at = "self_attn.indexer"
        key = self.w(f"{at}.wk.weight") @ x
        key = (key - key.mean()) / np.sqrt(key.var() + i.key_norm_eps)
        key = key * self.w(f"{at}.k_norm.weight") + self.w(f"{at}.k_norm.bias")
        memory["index"].append((key, self.w(f"{at}.index_kpool_compress_gate") @ x))
        q = (self.w(f"{at}.wq_b.weight") @ latent).reshape(i.heads, i.dim)
        weights = self.w(f"{at}.weights_proj.weight") @ x * i.heads**-0.5
        whole = (position + 1) // i.pool
        scores = []
        for number in range(whole):
            pooled = self.pooled(memory["index"], number)
            scores.append(sum(weights[h] * i.dim**-0.5 * max(0.0, q[h] @ pooled) for h in range(i.heads)))
        best = sorted(range(whole), key=lambda s: (-scores[s], s))[: i.topk // i.pool]
        chosen = [pool * i.pool + j for pool in best for j in range(i.pool)]
        return chosen + list(range(whole * i.pool, position + 1))

    def pooled(self, rows, number):
        """Key of one pool, channel by channel: (place in the softmax, lane) of every token that is in it."""
        i = self.c.index
        ape = self.w("self_attn.indexer.index_kpool_compress_ape")
        tokens = [(number * i.pool + j, i.lanes - 1, (i.lanes - 1) * i.pool + j) for j in range(i.pool)]
        if i.overlap and number:
            tokens += [((number - 1) * i.pool + j, 0, j) for j in range(i.pool)]
        made = np.zeros(i.dim)
        for channel in range(i.dim):
            gates = [rows[t][1][lane * i.dim + channel] + ape[place, channel] for t, lane, place in tokens]
            keys = [rows[t][0][lane * i.dim + channel] for t, lane, _ in tokens]
            made[channel] = softmax(np.array(gates)) @ np.array(keys)
        return made
