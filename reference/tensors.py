"""Which tensors a model has: canonical name -> shape and stored dtype, from its ModelConfig. Standard library only.

Canonical names are those of the released Kimi K3 checkpoint without `language_model.model.` or `language_model.`.
Shapes: model.md 4. Every linear weight is [out, in].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from reference.config import ModelConfig
from reference.names import canonical_name, stored_name

__all__ = ["DRAFT_COPIES", "Stored", "canonical_name", "expected_tensors", "stored_name", "with_stored_draft"]

# What a draft layer may store again, by the name behind `layers.N.` -> the tensor of the model that it repeats.
DRAFT_COPIES = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


@dataclass(frozen=True)
class Stored:
    """What a checkpoint holds under one name. `dtype` as torch spells it, without "torch."."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"


def expected_tensors(config: ModelConfig) -> dict[str, Stored]:
    """Every tensor of the model, in the order of the forward pass; those of the draft layer follow its layers."""
    c = config
    table = {"embed_tokens.weight": Stored((c.vocab, c.hidden))}
    for layer in range(len(c.every_layer)):
        parts = {"input_layernorm.weight": Stored((c.hidden,)), "post_attention_layernorm.weight": Stored((c.hidden,))}
        parts |= _residual(c) if layer < len(c.layers) else _draft(c)
        parts |= {f"self_attn.{k}": v for k, v in _attention(c, layer).items()}
        parts |= _moe(c) if c.is_moe(layer) else _mlp(c.hidden, c.mlp_width, "mlp")
        table |= {f"layers.{layer}.{k}": v for k, v in parts.items()}
    if c.residual.kind == "attention":
        table |= {
            "output_attn_res_norm.weight": Stored((c.hidden,)),
            "output_attn_res_proj.weight": Stored((1, c.hidden)),
        }
    table["norm.weight"] = Stored((c.hidden,))
    if not c.tied_head:
        table["lm_head.weight"] = Stored((c.vocab, c.hidden))
    return table | _vision(c)


def with_stored_draft(config: ModelConfig, names: Iterable[str]) -> ModelConfig:
    """`config` without its draft layer when none of the canonical `names` belongs to it: many checkpoints leave the
    layer out and keep the key that declares it."""
    own = f"layers.{len(config.layers)}."
    if config.draft is None or any(name.startswith(own) for name in names):
        return config
    return replace(config, draft=None)


def _draft(c: ModelConfig) -> dict[str, Stored]:
    """What a draft layer has beyond a decoder layer (model.md 2.8). Embedding and head are those of the model; a
    release may store copies of them (`DRAFT_COPIES`)."""
    norms = ("enorm", "hnorm", "shared_head.norm")
    return {f"{name}.weight": Stored((c.hidden,)) for name in norms} | {
        "eh_proj.weight": Stored((c.hidden, 2 * c.hidden))
    }


def _residual(c: ModelConfig) -> dict[str, Stored]:
    if c.residual.kind == "attention":
        return {
            f"{part}_res_{what}.weight": Stored(shape)
            for part in ("self_attention", "mlp")
            for what, shape in (("norm", (c.hidden,)), ("proj", (1, c.hidden)))
        }
    if c.residual.kind == "mhc":
        n = c.residual.streams
        return {
            f"hc_{part}_{what}": stored
            for part in ("attn", "ffn")
            for what, stored in (
                ("fn", Stored((n * (2 + n), n * c.hidden))),
                ("base", Stored((n * (2 + n),), "float32")),
                ("scale", Stored((3,), "float32")),
            )
        }
    return {}


def _attention(c: ModelConfig, layer: int) -> dict[str, Stored]:
    kind = c.every_layer[layer]
    return _kda(c) if kind == "kda" else _gqa(c) if kind == "gqa" else _mla(c, layer)


def _gqa(c: ModelConfig) -> dict[str, Stored]:
    g, d = c.gqa, c.hidden
    table = {
        f"{x}_proj.weight": Stored((n * g.dim, d)) for x, n in (("q", g.heads), ("k", g.kv_heads), ("v", g.kv_heads))
    }
    table |= {f"{x}_norm.weight": Stored((n * g.dim,)) for x, n in (("q", g.heads), ("k", g.kv_heads))}
    return table | {"o_proj.weight": Stored((d, g.heads * g.dim))}


def _kda(c: ModelConfig) -> dict[str, Stored]:
    k, d = c.kda, c.hidden
    width = k.heads * k.dim
    table = {f"{x}_proj.weight": Stored((width, d)) for x in "qkv"}
    table |= {f"{x}_conv1d.weight": Stored((width, 1, k.conv), "float32") for x in "qkv"}
    if k.decay == "per_head":
        table["a_proj.weight"] = Stored((k.heads, d))
    else:
        table |= {"f_a_proj.weight": Stored((k.rank, d)), "f_b_proj.weight": Stored((width, k.rank))}
    table |= {
        "A_log": Stored((k.heads,), "float32"),
        "dt_bias": Stored((width,), "float32"),
        "b_proj.weight": Stored((k.heads, d)),
    }
    if k.full_rank_gate:
        table["g_proj.weight"] = Stored((width, d))
    else:
        table |= {"g_a_proj.weight": Stored((k.rank, d)), "g_b_proj.weight": Stored((width, k.rank))}
    return table | {"o_norm.weight": Stored((k.dim,), "float32"), "o_proj.weight": Stored((d, width))}


def _mla(c: ModelConfig, layer: int) -> dict[str, Stored]:
    m, d = c.mla, c.hidden
    query = m.heads * (m.nope + m.rope)
    table = {}
    if m.q_lora is None:
        table["q_proj.weight"] = Stored((query, d))
    else:
        table["q_a_proj.weight"] = Stored((m.q_lora, d))
        table["q_a_layernorm.weight"] = Stored((m.q_lora,))
        table["q_b_proj.weight"] = Stored((query, m.q_lora))
    table |= {
        "kv_a_proj_with_mqa.weight": Stored((m.kv_lora + m.rope, d)),
        "kv_a_layernorm.weight": Stored((m.kv_lora,)),
        "kv_b_proj.weight": Stored((m.heads * (m.nope + m.v), m.kv_lora)),
    }
    if m.cache_scale:
        table["k_scale"] = Stored((1,), "float32")
    if c.every_layer[layer] == "dsa":
        i = c.index
        table |= {
            "indexer.wq_b.weight": Stored((i.heads * i.dim, m.q_lora)),
            "indexer.wk.weight": Stored((i.lanes * i.dim, d)),
            "indexer.k_norm.weight": Stored((i.lanes * i.dim,)),
            "indexer.k_norm.bias": Stored((i.lanes * i.dim,)),
            "indexer.weights_proj.weight": Stored((i.heads, d)),
        }
        if i.pool > 1:
            table |= {
                "indexer.index_kpool_compress_ape": Stored((i.lanes * i.pool, i.dim)),
                "indexer.index_kpool_compress_gate": Stored((i.lanes * i.dim, d)),
            }
    if m.gate:
        table["g_proj.weight"] = Stored((m.heads * m.v, d))
    return table | {"o_proj.weight": Stored((d, m.heads * m.v))}


def _mlp(hidden: int, width: int, prefix: str) -> dict[str, Stored]:
    return {
        f"{prefix}.gate_proj.weight": Stored((width, hidden)),
        f"{prefix}.up_proj.weight": Stored((width, hidden)),
        f"{prefix}.down_proj.weight": Stored((hidden, width)),
    }


def _moe(c: ModelConfig) -> dict[str, Stored]:
    m, d = c.moe, c.hidden
    inner = m.latent or d
    table = {
        "gate.weight": Stored((m.experts, d)),
        "gate.e_score_correction_bias": Stored((m.experts,), "float32"),
    }
    if m.latent:
        table |= {
            "routed_expert_down_proj.weight": Stored((inner, d)),
            "routed_expert_up_proj.weight": Stored((d, inner)),
        }
        if m.latent_norm:
            table["routed_expert_norm.weight"] = Stored((inner,))
    if m.shared_width:
        table |= _mlp(d, m.shared_width, "shared_experts")
    for expert in range(m.experts):
        for w, rows, columns in (("w1", m.width, inner), ("w3", m.width, inner), ("w2", inner, m.width)):
            name = f"experts.{expert}.{w}.weight"
            if m.packed == "mxfp4":
                table[f"{name}_packed"] = Stored((rows, columns // 2), "uint8")
                table[f"{name}_scale"] = Stored((rows, columns // 32), "uint8")
            else:
                table[name] = Stored((rows, columns))
    return {f"block_sparse_moe.{k}": v for k, v in table.items()}


def _vision(c: ModelConfig) -> dict[str, Stored]:
    v = c.vision
    if v is None:
        return {}
    if v.kind == "glm":
        return _glm_vision(c)
    inner, merged = v.heads * v.head_dim, v.hidden * v.merge * v.merge
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj": (v.hidden, 3, v.patch, v.patch),
        "vision_tower.patch_embed.pos_emb": (*v.table, v.hidden),
    }
    norms = ["vision_tower.encoder.final_layernorm"]
    for block in range(v.layers):
        at = f"vision_tower.encoder.blocks.{block}"
        norms += [f"{at}.norm0", f"{at}.norm1"]
        shapes |= {
            f"{at}.norm0": (v.hidden,),
            f"{at}.norm1": (v.hidden,),
            f"{at}.wqkv": (3 * inner, v.hidden),
            f"{at}.wo": (v.hidden, inner),
            f"{at}.mlp.fc0": (v.mlp, v.hidden),
            f"{at}.mlp.fc1": (v.hidden, v.mlp),
        }
    shapes |= {
        "vision_tower.encoder.final_layernorm": (v.hidden,),
        "mm_projector.proj.0": (merged, merged),
        "mm_projector.proj.2": (c.hidden, merged),
    }
    if v.projector_pre_norm:
        shapes["mm_projector.pre_norm"] = (v.hidden,)
    else:
        shapes["mm_projector.post_norm"] = (c.hidden,)
    table = {f"{name}.weight": Stored(shape) for name, shape in shapes.items()}
    if v.norm == "layer":
        table |= {f"{name}.bias": Stored(shapes[name]) for name in norms}
    if v.projector_pre_norm:
        table["mm_projector.pre_norm.bias"] = Stored((v.hidden,))
    if v.bias:
        without = {*norms, "vision_tower.patch_embed.pos_emb", "mm_projector.post_norm", "mm_projector.pre_norm"}
        table |= {f"{name}.bias": Stored(shape[:1]) for name, shape in shapes.items() if name not in without}
    return table


def _glm_vision(c: ModelConfig) -> dict[str, Stored]:
    v = c.vision
    table = {
        "patch_embed.proj.weight": Stored((v.hidden, 3, v.frames, v.patch, v.patch)),
        "patch_embed.proj.bias": Stored((v.hidden,)),
    }
    for block in range(v.layers):
        linears = {
            "attn.qkv": (3 * v.hidden, v.hidden),
            "attn.proj": (v.hidden, v.hidden),
            "mlp.gate_proj": (v.mlp, v.hidden),
            "mlp.up_proj": (v.mlp, v.hidden),
            "mlp.down_proj": (v.hidden, v.mlp),
        }
        widths = {"norm1": v.hidden, "norm2": v.hidden, "attn.q_norm": v.head_dim, "attn.k_norm": v.head_dim}
        own = {f"{name}.weight": Stored((width,)) for name, width in widths.items()}
        own |= {f"{name}.weight": Stored(shape) for name, shape in linears.items()}
        if v.bias:
            own |= {f"{name}.bias": Stored(shape[:1]) for name, shape in linears.items()}
        table |= {f"blocks.{block}.{name}": stored for name, stored in own.items()}
    table |= {
        "post_layernorm.weight": Stored((v.hidden,)),
        "downsample.weight": Stored((v.out_hidden, v.hidden, v.merge, v.merge)),
        "downsample.bias": Stored((v.out_hidden,)),
        "merger.proj.weight": Stored((v.out_hidden, v.out_hidden)),
        "merger.post_projection_norm.weight": Stored((v.out_hidden,)),
        "merger.post_projection_norm.bias": Stored((v.out_hidden,)),
        "merger.gate_proj.weight": Stored((v.projector_width, v.out_hidden)),
        "merger.up_proj.weight": Stored((v.projector_width, v.out_hidden)),
        "merger.down_proj.weight": Stored((v.out_hidden, v.projector_width)),
    }
    return {f"visual.{name}": stored for name, stored in table.items()}
