"""gpt-oss: its sizes and the names of its tensors (model.md 1.2, 3). Standard library only.

Of the model only the expert layer is here (`reference/gpt_oss.py`), so this is no reader that a checkpoint can be run
with: it is for counting, and for finding the expert layers of a released checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reference.families.keys import Keys
from reference.families.parts import must_be
from reference.tensors import Stored

MX_GROUP = 32


@dataclass(frozen=True)
class GptOssSizes:
    """`heads` query heads share `kv_heads` key heads of `head_dim`; every layer has `experts` of which `topk` work."""

    hidden: int
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    topk: int
    width: int
    limit: float
    alpha: float


def gpt_oss_sizes(config_json: dict[str, Any]) -> tuple[GptOssSizes, tuple[str, ...]]:
    """The sizes that config.json states, and the keys that nothing asked for. Raises CheckpointError by key."""
    keys = Keys(config_json)
    must_be(keys, "model_type", "gpt_oss")
    for key, allowed in (("hidden_act", "silu"), ("attention_bias", True), ("tie_word_embeddings", False)):
        must_be(keys, key, allowed)
    for key in (
        "layer_types",
        "sliding_window",
        "rope_theta",
        "rope_scaling",
        "max_position_embeddings",
        "rms_norm_eps",
    ):
        keys.used.add(key)  # of the attention, which is not here
    for key in ("initial_context_length", "experts_per_token", "eos_token_id", "pad_token_id"):
        keys.used.add(key)
    sizes = GptOssSizes(
        hidden=keys.integer("hidden_size"),
        layers=keys.integer("num_hidden_layers"),
        vocab=keys.integer("vocab_size"),
        heads=keys.integer("num_attention_heads"),
        kv_heads=keys.integer("num_key_value_heads"),
        head_dim=keys.integer("head_dim"),
        experts=keys.integer("num_local_experts"),
        topk=keys.integer("num_experts_per_tok"),
        width=keys.integer("intermediate_size"),
        limit=keys.number("swiglu_limit", 7.0),
        alpha=keys.number("swiglu_alpha", 1.702),
    )
    return sizes, tuple(sorted(keys.unknown()))


def gpt_oss_tensors(s: GptOssSizes) -> dict[str, Stored]:
    """Every tensor of a release, by its stored name: blocks hold two codes a byte, 16 bytes for a group of 32."""
    table = {"model.embed_tokens.weight": Stored((s.vocab, s.hidden))}
    for layer in range(s.layers):
        parts = {f"{norm}_layernorm.weight": Stored((s.hidden,)) for norm in ("input", "post_attention")}
        parts |= {f"self_attn.{k}": v for k, v in _attention(s).items()}
        parts |= {f"mlp.{k}": v for k, v in _experts(s).items()}
        table |= {f"model.layers.{layer}.{k}": v for k, v in parts.items()}
    return table | {"model.norm.weight": Stored((s.hidden,)), "lm_head.weight": Stored((s.vocab, s.hidden))}


def _attention(s: GptOssSizes) -> dict[str, Stored]:
    query, key = s.heads * s.head_dim, s.kv_heads * s.head_dim
    table = {"sinks": Stored((s.heads,))}
    for name, rows, columns in (
        ("q", query, s.hidden),
        ("k", key, s.hidden),
        ("v", key, s.hidden),
        ("o", s.hidden, query),
    ):
        table |= {f"{name}_proj.weight": Stored((rows, columns)), f"{name}_proj.bias": Stored((rows,))}
    return table


def _experts(s: GptOssSizes) -> dict[str, Stored]:
    table = {"router.weight": Stored((s.experts, s.hidden)), "router.bias": Stored((s.experts,))}
    for name, rows, columns in (("gate_up_proj", 2 * s.width, s.hidden), ("down_proj", s.hidden, s.width)):
        groups = columns // MX_GROUP
        table[f"experts.{name}_blocks"] = Stored((s.experts, rows, groups, MX_GROUP // 2), "uint8")
        table[f"experts.{name}_scales"] = Stored((s.experts, rows, groups), "uint8")
        table[f"experts.{name}_bias"] = Stored((s.experts, rows))
    return table
