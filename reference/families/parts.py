"""What several families spell alike: rotary embedding, special tokens, layer lists. Standard library only."""

from __future__ import annotations

from typing import Any

from reference.config import Draft, LayerKind, Rope, Tokens, Yarn
from reference.errors import CheckpointError
from reference.families.keys import Keys

SPECIAL_TEXTS = {
    "media_begin": "<|media_begin|>",
    "media_content": "<|media_content|>",
    "media_end": "<|media_end|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "end_of_turn": "<|end_of_turn|>",
}


def rope(text: Keys, *, layout: str | None = None) -> Rope:
    """Rotary embedding from `rope_theta` and `rope_scaling`, or from `rope_parameters` (transformers 5), which holds
    both. `layout` None reads `rope_interleave`. Raises CheckpointError for a kind of scaling that is not YaRN."""
    merged = text.part("rope_parameters", optional=True)
    scaling = text.part("rope_scaling", optional=True) or merged
    theta = (merged or text).number("rope_theta", text.number("rope_theta", 10000.0))
    if layout is None:
        layout = "interleaved" if text.flag("rope_interleave", True) else "half"
    if scaling is None:
        return Rope(layout, theta=theta)
    kind = scaling.text("rope_type", scaling.text("type", "yarn" if scaling is not merged else "default"))
    if kind == "default":
        return Rope(layout, theta=theta)
    if kind != "yarn":
        raise CheckpointError(
            f"rotary scaling {kind!r} has no reader", where=f"config.json: {scaling.path}", todo="known: yarn, default"
        )
    yarn = Yarn(
        factor=scaling.number("factor"),
        original_positions=scaling.integer("original_max_position_embeddings"),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        mscale=scaling.number("mscale", 1.0),
        mscale_all_dim=scaling.number("mscale_all_dim", 0.0),
    )
    return Rope(layout, theta=theta, yarn=yarn)


def token_id(keys: Keys, key: str, default: int = -1) -> int:
    """A special token's id; the first of a list, since a model may stop at several ids."""
    found = keys.data.get(key)
    return keys.integers(key)[0] if isinstance(found, list) and found else keys.integer(key, default)


def tokens(
    keys: Keys, text: Keys, *, tokenizer: dict[str, Any], media_pad: str = "media_placeholder_token_id"
) -> Tokens:
    """Special tokens: ids from the configuration (outer before inner), the others by their text in the tokenizer."""
    ids = {entry.get("content"): int(i) for i, entry in tokenizer.get("added_tokens_decoder", {}).items()}
    own = {
        name: token_id(keys, key, token_id(text, key))
        for name, key in (
            ("bos", "bos_token_id"),
            ("eos", "eos_token_id"),
            ("pad", "pad_token_id"),
            ("media_pad", media_pad),
        )
    }
    return Tokens(**own, **{name: ids.get(content, -1) for name, content in SPECIAL_TEXTS.items()})


def leading_dense(text: Keys, *, layers: int, default: int) -> int:
    """How many layers at the start have a dense MLP: from `mlp_layer_types` when it is there, else from
    `first_k_dense_replace`. Raises CheckpointError for a list that is not dense layers first, then sparse ones."""
    first = text.integer("first_k_dense_replace", default)
    types = text.value("mlp_layer_types", list, None)
    if types is None:
        return first
    first = types.count("dense")
    if types != ["dense"] * first + ["sparse"] * (layers - first):
        raise CheckpointError(
            f"mlp_layer_types must be dense layers, then sparse ones, {layers} in all",
            where=f"config.json: {text.path}",
        )
    return first


def indexer_types(text: Keys, *, layers: int) -> list[str]:
    """ "full" or "shared" for each layer: `indexer_types`, or the pattern `index_topk_pattern` ("FSSF..."), or every
    `index_topk_freq`-th layer from `index_skip_topk_offset` on; all "full" when none is given."""
    frequency = max(1, text.integer("index_topk_freq", 1))
    offset = text.integer("index_skip_topk_offset", 2)
    pattern = text.value("index_topk_pattern", str, None)
    if pattern is not None:
        letters = {"F": "full", "S": "shared"}
        default = [letters.get(letter, letter) for letter in pattern]
    else:
        default = ["shared" if max(n - offset + 1, 0) % frequency else "full" for n in range(layers)]
    types = text.value("indexer_types", list, default)
    if len(types) != layers or not set(types) <= {"full", "shared"}:
        raise CheckpointError(
            f"indexer_types must hold {layers} of full, shared", where=f"config.json: {text.path or 'indexer_types'}"
        )
    return types


def draft_layer(text: Keys, *, kind: str) -> Draft | None:
    """The draft layer that `num_nextn_predict_layers` declares, its attention of that kind. More than one layer is
    nowhere published: then the key stays among those without a reader."""
    count = text.integer("num_nextn_predict_layers", 0)
    if count not in (0, 1):
        text.used.discard("num_nextn_predict_layers")
    return Draft(kind) if count == 1 else None


SPARSE: dict[str, LayerKind] = {"full": "dsa", "shared": "dsa_shared"}


def must_be(text: Keys, key: str, *allowed: Any) -> None:
    """Raises CheckpointError when `key` is given with a value that the mathematics here does not cover."""
    text.used.add(key)
    found = text.data.get(key)
    if found is not None and found not in allowed:
        raise CheckpointError(
            f"key {key!r} is {found!r}",
            where=f"config.json: {text.path}" if text.path else "config.json",
            todo=f"covered: {', '.join(map(repr, allowed))}",
        )


def check_quantisation(*parts: Keys) -> None:
    """Raises CheckpointError when a part declares quantised weights that are neither DeepSeek's block FP8 nor INT4 in
    groups of 32: read as they are they would be other weights. Which linears are quantised the tensors say, not this
    declaration."""
    for part in parts:
        found = part.data.get("quantization_config")
        if found is not None and not is_block_fp8(found) and not is_int4(found):
            method = (
                found.get("fmt", found.get("format", found.get("quant_method"))) if isinstance(found, dict) else found
            )
            raise CheckpointError(
                f"quantisation {method!r} of this family has no reader",
                where=f"config.json: {part.path + '.' if part.path else ''}quantization_config",
                todo="give the checkpoint with BF16 weights, with fp8 in blocks of 128 x 128, or with int4 in groups "
                "of 32 (pack-quantized, symmetric)",
            )


def is_block_fp8(quantisation: Any) -> bool:
    """Whether a `quantization_config` declares E4M3 weights with a scale per 128 x 128 block."""
    return (
        isinstance(quantisation, dict)
        and quantisation.get("quant_method") == "fp8"
        and quantisation.get("fmt", "e4m3") == "e4m3"
        and quantisation.get("weight_block_size") == [128, 128]
    )


def is_int4(quantisation: Any) -> bool:
    """Whether a `quantization_config` of compressed-tensors declares symmetric INT4 weights with a scale per group of
    32 columns, and plain activations."""
    if not isinstance(quantisation, dict) or quantisation.get("format") != "pack-quantized":
        return False
    groups = quantisation.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        return False
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return all(
        isinstance(group, dict)
        and group.get("input_activations") is None
        and isinstance(group.get("weights"), dict)
        and wanted.items() <= group["weights"].items()
        and group["weights"].get("actorder") is None
        for group in groups.values()
    )
