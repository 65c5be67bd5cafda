"""From a model directory's JSON files to a `ModelConfig`: one reader per `model_type`. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from reference.config import (
    Activation,
    Index,
    Kda,
    LayerKind,
    Mla,
    ModelConfig,
    Moe,
    Residual,
    Rope,
    Tokens,
    Vision,
    Yarn,
)
from reference.errors import CheckpointError

# Written by every exporter and without any meaning for the mathematics.
IGNORED_KEYS = frozenset(
    """architectures auto_map dtype torch_dtype model_type transformers_version use_cache initializer_range
    attention_dropout _name_or_path _attn_implementation output_attentions output_hidden_states return_dict
    chunk_size_feed_forward is_encoder_decoder problem_type id2label label2id ignore_index quantization_config
    num_key_value_heads head_dim image_placeholder""".split()
)
SPECIAL_TEXTS = {
    "media_begin": "<|media_begin|>",
    "media_content": "<|media_content|>",
    "media_end": "<|media_end|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "end_of_turn": "<|end_of_turn|>",
}
_MISSING = object()


class Keys:
    """One JSON object, read key by key; remembers what was asked for, so that the rest can be reported."""

    def __init__(self, data: Any, path: str = "") -> None:
        if not isinstance(data, dict):
            raise CheckpointError(f"{path or 'the file'} is not a JSON object", where="config.json")
        self.data, self.path, self.used, self.parts = data, path, set(), []

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def value(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        """The value of `key`, checked to be of `kind`; null counts as absent. Raises CheckpointError naming the key."""
        self.used.add(key)
        found = self.data.get(key)
        if found is None:
            if default is _MISSING:
                raise CheckpointError(
                    f"key {self._name(key)!r} is missing",
                    where="config.json",
                    todo="the model cannot be built without it",
                )
            return default
        fits = isinstance(found, kind) and not (kind is not bool and isinstance(found, bool))
        if kind is float and isinstance(found, int) and not isinstance(found, bool):
            return float(found)
        if not fits:
            raise CheckpointError(
                f"key {self._name(key)!r} must be {kind.__name__}, got {found!r}", where="config.json"
            )
        return found

    def integer(self, key: str, default: Any = _MISSING) -> Any:
        return self.value(key, int, default)

    def number(self, key: str, default: Any = _MISSING) -> Any:
        return self.value(key, float, default)

    def flag(self, key: str, default: Any = _MISSING) -> Any:
        return self.value(key, bool, default)

    def text(self, key: str, default: Any = _MISSING) -> Any:
        return self.value(key, str, default)

    def integers(self, key: str, default: Any = _MISSING) -> Any:
        found = self.value(key, list, default)
        if found is not default and not all(isinstance(i, int) and not isinstance(i, bool) for i in found):
            raise CheckpointError(f"key {self._name(key)!r} must be a list of integers", where="config.json")
        return found

    def part(self, key: str, *, optional: bool = False) -> Keys | None:
        self.used.add(key)
        if optional and self.data.get(key) is None:
            return None
        if key not in self.data:
            raise CheckpointError(f"key {self._name(key)!r} is missing", where="config.json")
        part = Keys(self.data[key], self._name(key))
        self.parts.append(part)
        return part

    def unknown(self) -> Iterable[str]:
        yield from (self._name(key) for key in self.data if key not in self.used and key not in IGNORED_KEYS)
        for part in self.parts:
            yield from part.unknown()


def read_config(
    config_json: dict[str, Any],
    *,
    preprocessor: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> ModelConfig:
    """The ModelConfig that config.json, preprocessor_config.json and tokenizer_config.json describe.

    Raises CheckpointError naming the key that is missing or does not fit, or the model_type that has no reader.
    """
    return read_config_and_rest(config_json, preprocessor=preprocessor, tokenizer=tokenizer)[0]


def read_config_and_rest(
    config_json: dict[str, Any],
    *,
    preprocessor: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> tuple[ModelConfig, tuple[str, ...]]:
    """As `read_config`, with the keys of config.json that no reader asked for."""
    keys = Keys(config_json)
    family = keys.text("model_type")
    if family not in READERS:
        raise CheckpointError(
            f"model_type {family!r} has no reader",
            where="config.json",
            todo=f"known model types: {', '.join(sorted(READERS))}",
        )
    try:
        config = READERS[family](keys, preprocessor or {}, tokenizer or {})
    except (TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"the configuration makes no sense: {error}", where="config.json") from error
    _check(config)
    return config, tuple(sorted(keys.unknown()))


def _kimi_k3(keys: Keys, preprocessor: dict[str, Any], tokenizer: dict[str, Any]) -> ModelConfig:
    """Kimi K3 (model.md 1.1 and 4), and compositions of it with an indexer and rotary embedding."""
    text = keys.part("text_config")
    linear = text.part("linear_attn_config")
    layers = _layer_kinds(text, linear)
    nope = text.flag("mla_use_nope", True)
    rope_dims = text.integer("qk_rope_head_dim")
    attention = _full_attention(text, rope_dims)
    block = text.integer("attn_res_block_size", None)
    linear_beta = text.number("activation_situ_linear_beta", None)
    situ = text.text("hidden_act", "silu") == "situ"
    if text.data.get("num_nextn_predict_layers") == 0:  # any other number stays among the unknown keys
        text.used.add("num_nextn_predict_layers")
    return ModelConfig(
        name=keys.text("name", "kimi_k3"),
        hidden=text.integer("hidden_size"),
        layers=layers,
        vocab=text.integer("vocab_size"),
        max_positions=text.integer("max_position_embeddings", text.integer("model_max_length", 0)),
        mlp_width=text.integer("intermediate_size"),
        mla=attention,
        index=_index(text, 0 if nope else rope_dims),
        kda=_kda(linear),
        moe=_kimi_moe(text),
        vision=_moonvit(keys.part("vision_config", optional=True), preprocessor),
        residual=Residual() if block is None else Residual("attention", block=block),
        activation=Activation("situ", text.number("activation_situ_beta", 1.0), linear_beta) if situ else Activation(),
        rope=Rope() if nope else _rope(text),
        eps=text.number("rms_norm_eps"),
        tied_head=keys.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False)),
        tokens=_tokens(keys, text, tokenizer),
    )


def _layer_kinds(text: Keys, linear: Keys) -> tuple[LayerKind, ...]:
    """Attention kind of each layer: the two lists are 1-based; `indexer_types` (0-based, one per layer) says which
    full-attention layers select keys. A period would be wrong: the last layer of K3 breaks it (model.md 6.8)."""
    count = text.integer("num_hidden_layers")
    kda, full = linear.integers("kda_layers"), linear.integers("full_attn_layers")
    if sorted(kda + full) != list(range(1, count + 1)):
        raise CheckpointError(
            f"kda_layers and full_attn_layers together must name each of the layers 1 to {count} once",
            where="config.json: text_config.linear_attn_config",
        )
    has_index = text.integer("index_topk", None) is not None
    types = text.value("indexer_types", list, ["full" if has_index else "none"] * count)
    kinds: dict[str, LayerKind] = {"full": "dsa", "shared": "dsa_shared", "none": "mla"}
    if len(types) != count or not set(types) <= set(kinds):
        raise CheckpointError(
            f"indexer_types must hold {count} of {', '.join(kinds)}", where="config.json: text_config.indexer_types"
        )
    return tuple("kda" if i + 1 in set(kda) else kinds[types[i]] for i in range(count))


def _full_attention(text: Keys, rope_dims: int) -> Mla:
    return Mla(
        heads=text.integer("num_attention_heads"),
        q_lora=text.integer("q_lora_rank", None),
        kv_lora=text.integer("kv_lora_rank"),
        nope=text.integer("qk_nope_head_dim"),
        rope=rope_dims,
        v=text.integer("v_head_dim"),
        gate=text.flag("mla_use_output_gate", False),
    )


def _index(text: Keys, rope_dims: int) -> Index | None:
    topk = text.integer("index_topk", None)
    if topk is None:
        return None
    return Index(
        heads=text.integer("index_n_heads"),
        dim=text.integer("index_head_dim"),
        topk=topk,
        rope=rope_dims,
        rope_layout=(
            "none" if not rope_dims else "interleaved" if text.flag("indexer_rope_interleave", False) else "half"
        ),
    )


def _kda(linear: Keys) -> Kda:
    dim = linear.integer("head_dim")
    return Kda(
        heads=linear.integer("num_heads"),
        dim=dim,
        conv=linear.integer("short_conv_kernel_size", 4),
        gate_lower_bound=linear.number("gate_lower_bound", None),
        full_rank_gate=linear.flag("use_full_rank_gate", False),
        rank=dim,  # no key of its own: f_a_proj has head_dim rows in every released checkpoint
    )


def _kimi_moe(text: Keys) -> Moe | None:
    experts = text.integer("num_experts", None)
    if experts is None:
        return None
    quantization = text.part("quantization_config", optional=True)
    packed = "none"
    if quantization is not None:
        stated = quantization.data.get("format")
        if stated != "mxfp4-pack-quantized":
            raise CheckpointError(
                f"quantisation format {stated!r} has no reader",
                where="config.json: text_config.quantization_config.format",
                todo="known: mxfp4-pack-quantized",
            )
        packed = "mxfp4"
        quantization.used.update(quantization.data)
    width = text.integer("moe_intermediate_size")
    text.text("topk_method", "noaux_tc"), text.flag("use_grouped_topk", True)
    return Moe(
        experts=experts,
        topk=text.integer("num_experts_per_token"),
        width=width,
        shared_width=width * text.integer("num_shared_experts", 0),
        groups=text.integer("num_expert_group", 1),
        kept_groups=text.integer("topk_group", 1),
        renormalise=text.flag("moe_renormalize", True),
        scale=text.number("routed_scaling_factor", 1.0),
        scoring=text.text("moe_router_activation_func", "sigmoid"),
        latent=text.integer("routed_expert_hidden_size", None),
        latent_norm=text.flag("latent_moe_use_norm", False),
        first_dense=text.integer("first_k_dense_replace", 0),
        frequency=text.integer("moe_layer_freq", 1),
        packed=packed,
    )


def _rope(text: Keys) -> Rope:
    scaling = text.part("rope_scaling", optional=True)
    yarn = None
    if scaling is not None:
        scaling.text("type", ""), scaling.text("rope_type", "")
        yarn = Yarn(
            factor=scaling.number("factor"),
            original_positions=scaling.integer("original_max_position_embeddings"),
            beta_fast=scaling.number("beta_fast", 32.0),
            beta_slow=scaling.number("beta_slow", 1.0),
            mscale=scaling.number("mscale", 1.0),
            mscale_all_dim=scaling.number("mscale_all_dim", 0.0),
        )
    layout = "interleaved" if text.flag("rope_interleave", True) else "half"
    return Rope(layout, theta=text.number("rope_theta", 10000.0), yarn=yarn)


def _moonvit(vision: Keys | None, preprocessor: dict[str, Any]) -> Vision | None:
    if vision is None:
        return None
    media = preprocessor.get("media_proc_cfg", preprocessor)
    heads = vision.integer("vt_num_attention_heads")
    merge = vision.integers("merge_kernel_size", [2, 2])
    for key in ("mm_hidden_size", "text_hidden_size", "init_pos_emb_time"):
        vision.integer(key, None)
    for key in (
        "merge_type",
        "mlp_type",
        "mm_projector_type",
        "pos_emb_type",
        "projector_hidden_act",
        "activation_func",
    ):
        vision.text(key, None)
    vision.flag("attn_bias", False), vision.flag("patch_embed_proj_bias", False)
    return Vision(
        hidden=vision.integer("vt_hidden_size"),
        layers=vision.integer("vt_num_hidden_layers"),
        heads=heads,
        head_dim=vision.integer("qkv_hidden_size") // heads,
        mlp=vision.integer("vt_intermediate_size"),
        patch=vision.integer("patch_size", 14),
        merge=merge[0],
        table=(vision.integer("init_pos_emb_height", 64), vision.integer("init_pos_emb_width", 64)),
        interpolation=vision.text("pos_emb_interpolation_mode", "bilinear"),
        norm="rms" if vision.text("norm_type", "rmsnorm") == "rmsnorm" else "layer",
        bias=vision.flag("linear_bias", False),
        projector_eps=vision.number("projector_ln_eps", 1e-5),
        patch_limit=int(media.get("in_patch_limit", 65536)),
        side_limit=int(media.get("patch_limit_on_one_side", 512)),
        image_mean=tuple(float(m) for m in media.get("image_mean", (0.5, 0.5, 0.5))),
        image_std=tuple(float(s) for s in media.get("image_std", (0.5, 0.5, 0.5))),
    )


def _tokens(keys: Keys, text: Keys, tokenizer: dict[str, Any]) -> Tokens:
    ids = {entry.get("content"): int(i) for i, entry in tokenizer.get("added_tokens_decoder", {}).items()}
    own = {
        name: keys.integer(key, text.integer(key, -1))
        for name, key in (
            ("bos", "bos_token_id"),
            ("eos", "eos_token_id"),
            ("pad", "pad_token_id"),
            ("media_pad", "media_placeholder_token_id"),
        )
    }
    return Tokens(**own, **{name: ids.get(content, -1) for name, content in SPECIAL_TEXTS.items()})


def _check(config: ModelConfig) -> None:
    """Raises CheckpointError for values that no model can have."""
    moe, index, vision = config.moe, config.index, config.vision
    wrong = [
        (config.hidden < 1 or config.vocab < 1, "hidden_size and vocab_size must be positive"),
        (config.residual.block < 1, "attn_res_block_size must be positive"),
        (moe is not None and not 1 <= moe.topk <= moe.experts, "num_experts_per_token must be 1 to num_experts"),
        (moe is not None and moe.experts % max(1, moe.groups) != 0, "num_expert_group must divide num_experts"),
        (moe is not None and moe.packed == "mxfp4" and moe.width % 32 != 0, "packed experts need a width of whole 32s"),
        (index is None and "dsa" in config.layers, "a layer selects keys, but index_topk is missing"),
        (index is not None and not config.mla.q_lora, "an indexer needs q_lora_rank: it reads the query latent"),
        (vision is not None and vision.head_dim % 4 != 0, "2-D rotary embedding needs a vision head of whole 4s"),
    ]
    for is_wrong, what in wrong:
        if is_wrong:
            raise CheckpointError(what, where="config.json")


READERS: dict[str, Callable[[Keys, dict[str, Any], dict[str, Any]], ModelConfig]] = {"kimi_k3": _kimi_k3}
