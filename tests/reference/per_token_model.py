"""The text model once more, one token at a time in numpy float64, from the definitions of model.md 2.1 to 2.7.

Nothing of `reference/` but the configuration is used: no absorbed form, no chunks, no caches but plain lists, and
every matrix applied to one vector. Slow and for very small models.
"""

import math

import numpy as np

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, weight, eps):
    return weight * x / np.sqrt(np.mean(x**2) + eps)


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


def rotate(x, position, theta, layout):
    d, y = len(x), np.array(x)
    for pair in range(d // 2):
        a, b = (pair, pair + d // 2) if layout == "half" else (2 * pair, 2 * pair + 1)
        angle = float(np.float32(position) * np.float32(1 / np.float32(theta ** np.float32(2 * pair / d))))
        y[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        y[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return y


class PerToken:
    """`tensors`: canonical name -> float64 array (packed codes and scales as integers)."""

    def __init__(self, config, tensors):
        self.c, self.t = config, tensors

    def logits(self, tokens):
        self.memory, self.hidden = [{"conv": [], "keys": [], "index": []} for _ in self.c.layers], []
        return np.stack([self.token(token, position) for position, token in enumerate(tokens)])

    def token(self, token, position):
        c, self.choice = self.c, None
        spine = {"plain": Plain, "attention": AttentionResiduals, "mhc": Streams}[c.residual.kind](
            self, self.t["embed_tokens.weight"][token]
        )
        for layer, kind in enumerate(c.layers):
            self.prefix = f"layers.{layer}."
            h = rms(spine.attention_input(layer), self.w("input_layernorm.weight"), c.eps)
            attend = self.kda if kind == "kda" else self.latent_attention
            spine.attention_output(layer, attend(h, position, self.memory[layer], kind))
            h = rms(spine.mlp_input(layer), self.w("post_attention_layernorm.weight"), c.eps)
            spine.mlp_output(layer, self.moe(h) if c.is_moe(layer) else self.mlp(h, "mlp"))
        x = rms(spine.result(), self.t["norm.weight"], c.eps)
        self.hidden.append(x)
        return self.head() @ x

    def head(self):
        return self.t["embed_tokens.weight" if self.c.tied_head else "lm_head.weight"]

    def drafts(self, tokens):
        """What the draft layer says after each token but the last: it reads the model's own row and the next token."""
        self.logits(tokens)
        c, memory, said = self.c, {"keys": [], "index": []}, []
        layer = len(c.layers)
        self.prefix = f"layers.{layer}."
        for position, following in enumerate(tokens[1:]):
            embedded = rms(self.t["embed_tokens.weight"][following], self.w("enorm.weight"), c.eps)
            own = rms(self.hidden[position], self.w("hnorm.weight"), c.eps)
            x = self.w("eh_proj.weight") @ np.concatenate([embedded, own])
            h = rms(x, self.w("input_layernorm.weight"), c.eps)
            x = x + self.latent_attention(h, position, memory, c.draft.kind)
            h = rms(x, self.w("post_attention_layernorm.weight"), c.eps)
            x = x + (self.moe(h) if c.is_moe(layer) else self.mlp(h, "mlp"))
            said.append(self.head() @ rms(x, self.w("shared_head.norm.weight"), c.eps))
        return np.stack(said)

    def w(self, name):
        return self.t[self.prefix + name]

    # ------------------------------------------------------------------------------------------------------ attention

    def kda(self, x, position, memory, kind):
        k = self.c.kda
        convolved = []
        raw = {n: self.w(f"self_attn.{n}_proj.weight") @ x for n in "qkv"}
        memory["conv"].append(raw)
        for n in "qkv":
            kernel = self.w(f"self_attn.{n}_conv1d.weight")[:, 0]
            y = np.zeros(k.heads * k.dim)
            for back in range(k.conv):
                if position - back >= 0:
                    y += kernel[:, k.conv - 1 - back] * memory["conv"][position - back][n]
            convolved.append(silu(y).reshape(k.heads, k.dim))
        f = self.w("self_attn.f_b_proj.weight") @ (self.w("self_attn.f_a_proj.weight") @ x)
        f = (f + self.w("self_attn.dt_bias")).reshape(k.heads, k.dim)
        beta = sigmoid(self.w("self_attn.b_proj.weight") @ x)
        if k.full_rank_gate:
            z = self.w("self_attn.g_proj.weight") @ x
        else:
            z = self.w("self_attn.g_b_proj.weight") @ (self.w("self_attn.g_a_proj.weight") @ x)
        state = memory.setdefault("state", np.zeros((k.heads, k.dim, k.dim)))
        out = []
        for head in range(k.heads):
            q, key, v = (part[head] for part in convolved)
            q = q / np.sqrt(np.sum(q**2) + 1e-6) * k.dim**-0.5
            key = key / np.sqrt(np.sum(key**2) + 1e-6)
            speed = math.exp(self.w("self_attn.A_log")[head])
            if k.gate_lower_bound is None:
                g = -speed * np.log1p(np.exp(f[head]))
            else:
                g = k.gate_lower_bound * sigmoid(speed * f[head])
            s = np.exp(g)[:, None] * state[head]
            state[head] = s + beta[head] * np.outer(key, v - key @ s)
            o = rms(state[head].T @ q, self.w("self_attn.o_norm.weight"), self.c.eps)
            out.append(o * sigmoid(z.reshape(k.heads, k.dim)[head]))
        return self.w("self_attn.o_proj.weight") @ np.concatenate(out)

    def latent_attention(self, x, position, memory, kind):
        m, rope = self.c.mla, self.c.rope
        if m.q_lora is None:
            latent, q = None, self.w("self_attn.q_proj.weight") @ x
        else:
            latent = self.w("self_attn.q_a_proj.weight") @ x
            latent = rms(latent, self.w("self_attn.q_a_layernorm.weight"), m.latent_eps)
            q = self.w("self_attn.q_b_proj.weight") @ latent
        q = q.reshape(m.heads, m.nope + m.rope)
        joint = self.w("self_attn.kv_a_proj_with_mqa.weight") @ x
        c = rms(joint[: m.kv_lora], self.w("self_attn.kv_a_layernorm.weight"), m.latent_eps)
        key_rope = joint[m.kv_lora :]
        if rope.layout != "none":
            key_rope = rotate(key_rope, position, rope.theta, rope.layout)
        both = (self.w("self_attn.kv_b_proj.weight") @ c).reshape(m.heads, m.nope + m.v)
        memory["keys"].append((both, key_rope))
        if kind == "dsa":
            self.choice = self.choose(x, latent, position, memory)
        seen = range(position + 1) if kind == "mla" else self.choice
        out = []
        for head in range(m.heads):
            own = q[head].copy()
            if rope.layout != "none":
                own[m.nope :] = rotate(own[m.nope :], position, rope.theta, rope.layout)
            scores = [own @ np.concatenate([memory["keys"][s][0][head, : m.nope], memory["keys"][s][1]]) for s in seen]
            p = softmax(np.array(scores) * (m.nope + m.rope) ** -0.5)
            out.append(sum(w * memory["keys"][s][0][head, m.nope :] for w, s in zip(p, seen, strict=True)))
        o = np.concatenate(out)
        if m.gate:
            o = o * sigmoid(self.w("self_attn.g_proj.weight") @ x)
        return self.w("self_attn.o_proj.weight") @ o

    def choose(self, x, latent, position, memory):
        i = self.c.index
        q = (self.w("self_attn.indexer.wq_b.weight") @ latent).reshape(i.heads, i.dim)
        key = self.w("self_attn.indexer.wk.weight") @ x
        key = (key - key.mean()) / np.sqrt(key.var() + i.key_norm_eps)
        key = key * self.w("self_attn.indexer.k_norm.weight") + self.w("self_attn.indexer.k_norm.bias")
        if i.rope_layout != "none":
            turn = [rotate(v[: i.rope], position, self.c.rope.theta, i.rope_layout) for v in (*q, key)]
            q = np.stack([np.concatenate([turn[h], q[h, i.rope :]]) for h in range(i.heads)])
            key = np.concatenate([turn[-1], key[i.rope :]])
        memory["index"].append(key)
        weights = self.w("self_attn.indexer.weights_proj.weight") @ x * i.heads**-0.5
        scores = [
            sum(weights[h] * i.dim**-0.5 * max(0.0, q[h] @ memory["index"][s]) for h in range(i.heads))
            for s in range(position + 1)
        ]
        best = sorted(range(position + 1), key=lambda s: (-scores[s], s))
        return best[: i.topk]

    # --------------------------------------------------------------------------------------------------- feed forward

    def activate(self, g, u):
        a = self.c.activation
        if a.kind == "silu":
            return silu(g) * u
        return a.beta * np.tanh(g / a.beta) * sigmoid(g) * a.linear_beta * np.tanh(u / a.linear_beta)

    def mlp(self, x, prefix):
        gate, up, down = (self.w(f"{prefix}.{n}_proj.weight") for n in ("gate", "up", "down"))
        return down @ self.activate(gate @ x, up @ x)

    def expert(self, number, w):
        name = f"block_sparse_moe.experts.{number}.{w}.weight"
        if self.c.moe.packed == "none":
            return self.w(name)
        packed, scale = self.w(f"{name}_packed").astype(int), self.w(f"{name}_scale").astype(int)
        matrix = np.zeros((packed.shape[0], packed.shape[1] * 2))
        for row, column in np.ndindex(matrix.shape):
            byte = packed[row, column // 2]
            code = byte & 15 if column % 2 == 0 else byte >> 4
            sign = -1.0 if code & 8 else 1.0
            matrix[row, column] = sign * E2M1[code & 7] * 2.0 ** (scale[row, column // 32] - 127)
        return matrix

    def moe(self, x):
        m, at = self.c.moe, "block_sparse_moe"
        logits = self.w(f"{at}.gate.weight") @ x
        s = sigmoid(logits) if m.scoring == "sigmoid" else softmax(logits)
        biased = s + self.w(f"{at}.gate.e_score_correction_bias")
        size = m.experts // m.groups
        worth = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(m.groups)]
        kept = sorted(range(m.groups), key=lambda g: (-worth[g], g))[: m.kept_groups]
        able = [e for e in range(m.experts) if e // size in kept]
        chosen = sorted(able, key=lambda e: (-biased[e], e))[: m.topk]
        total = sum(s[e] for e in chosen) + 1e-20 if m.renormalise else 1.0
        inner = self.w(f"{at}.routed_expert_down_proj.weight") @ x if m.latent else x
        routed = np.zeros(len(inner))
        for e in chosen:
            h = self.activate(self.expert(e, "w1") @ inner, self.expert(e, "w3") @ inner)
            routed += s[e] / total * m.scale * (self.expert(e, "w2") @ h)
        if m.latent_norm:
            routed = rms(routed, self.w(f"{at}.routed_expert_norm.weight"), self.c.eps)
        if m.latent:
            routed = self.w(f"{at}.routed_expert_up_proj.weight") @ routed
        return routed + (self.mlp(x, f"{at}.shared_experts") if m.shared_width else 0)


class Plain:
    def __init__(self, model, embedding):
        self.x = embedding

    def attention_input(self, layer):
        return self.x

    def mlp_input(self, layer):
        return self.x

    def attention_output(self, layer, y):
        self.x = self.x + y

    def mlp_output(self, layer, y):
        self.x = self.x + y

    def result(self):
        return self.x


class AttentionResiduals:
    """Written from the other end than the model: it keeps every sublayer output and sums blocks anew for each mix."""

    def __init__(self, model, embedding):
        self.m, self.embedding, self.outputs = model, embedding, []  # (layer, attention or mlp output)

    def mix(self, sources, norm, proj):
        logits = [proj[0] @ rms(v, norm, self.m.c.eps) for v in sources]
        return sum(p * v for p, v in zip(softmax(np.array(logits)), sources, strict=True))

    def sources(self, layer, after_attention):
        """Block 0 is the embedding, block b the outputs of its layers; then the outputs since the last boundary, which
        at a boundary layer's attention are those of the whole block before it."""
        size = self.m.c.residual.block
        current = layer // size if after_attention or layer % size else layer // size - 1
        sources = [self.embedding]
        for block in range(current + 1):
            mine = [y for at, y in self.outputs if at // size == block]
            sources += [sum(mine)] if mine else []
        return sources

    def attention_input(self, layer):
        return self.mix(
            self.sources(layer, False),
            self.m.w("self_attention_res_norm.weight"),
            self.m.w("self_attention_res_proj.weight"),
        )

    def mlp_input(self, layer):
        return self.mix(self.sources(layer, True), self.m.w("mlp_res_norm.weight"), self.m.w("mlp_res_proj.weight"))

    def attention_output(self, layer, y):
        self.outputs.append((layer, y))

    mlp_output = attention_output

    def result(self):
        t = self.m.t
        layer = len(self.m.c.layers) - 1
        return self.mix(self.sources(layer, True), t["output_attn_res_norm.weight"], t["output_attn_res_proj.weight"])


class Streams:
    def __init__(self, model, embedding):
        self.m = model
        self.x = np.stack([embedding] * model.c.residual.streams)

    def coefficients(self, part):
        r, n = self.m.c.residual, self.m.c.residual.streams
        fn, base, scale = (self.m.w(f"hc_{part}_{name}") for name in ("fn", "base", "scale"))
        z = fn @ rms(self.x.reshape(-1), 1.0, self.m.c.eps)
        pre = sigmoid(z[:n] * scale[0] + base[:n]) + r.hc_eps
        self.post = 2 * sigmoid(z[n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = np.stack([softmax(row) for row in (z[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)]) + r.hc_eps
        for step in range(r.sinkhorn):
            if step:
                comb = comb / (comb.sum(1, keepdims=True) + r.hc_eps)
            comb = comb / (comb.sum(0, keepdims=True) + r.hc_eps)
        self.comb = comb
        return pre @ self.x

    def attention_input(self, layer):
        return self.coefficients("attn")

    def mlp_input(self, layer):
        return self.coefficients("ffn")

    def attention_output(self, layer, y):
        self.x = np.stack([self.post[j] * y + self.comb[:, j] @ self.x for j in range(len(self.x))])

    mlp_output = attention_output

    def result(self):
        return self.x.mean(0)
