"""Switches that no release has and known faults need: the part `day0check` of a preset's config.json.

They are laid over what the family's reader made of the rest. Standard library only.
"""

from __future__ import annotations

from dataclasses import replace

from reference.config import Gqa, ModelConfig
from reference.errors import CheckpointError
from reference.families.keys import Keys

PART = "day0check"


def with_switches(config: ModelConfig, keys: Keys) -> ModelConfig:
    """The configuration with the switches of config.json's own part; the same where there is none.

    `mrope_section`: [temporal, height, width] numbers of channel pairs. `image_break_token_id`: ends each row of an
    image. `index_kpool_overlap`: pools of index keys reach back over the pool before. `grouped_query`: the `layers`
    counted from 0, `heads`, `kv_heads`, `head_dim`. `linear_decay`: "low_rank" or "per_head". `calibrated_cache`:
    layers store the scale of their cache. Raises CheckpointError for a switch that does not fit the model.
    """
    own = keys.part(PART, optional=True)
    if own is None:
        return config
    sections = own.integers("mrope_section", None)
    if sections is not None:
        _must(len(sections) == 3 and all(count > 0 for count in sections), own, "mrope_section must be 3 numbers")
        _must(2 * sum(sections) == config.mla.rope, own, "mrope_section must add up to half of qk_rope_head_dim")
        rotated = config.index is None or config.index.rope in (0, config.mla.rope)
        _must(rotated, own, "mrope_section needs an indexer that is rotated like the attention")
        config = replace(config, rope=replace(config.rope, sections=tuple(sections)))
    row_break = own.integer("image_break_token_id", -1)
    _must(-1 <= row_break < config.vocab, own, f"image_break_token_id must be below {config.vocab}")
    config = replace(config, tokens=replace(config.tokens, row_break=row_break))
    if own.flag("index_kpool_overlap", False):
        pools = config.index is not None and config.index.pool > 1
        _must(pools, own, "index_kpool_overlap needs an index with pools")
        config = replace(config, index=replace(config.index, overlap=True))
    if own.flag("calibrated_cache", False):
        config = replace(config, mla=replace(config.mla, cache_scale=True))
    decay = own.text("linear_decay", "low_rank")
    _must(decay in ("low_rank", "per_head"), own, "linear_decay must be low_rank or per_head")
    if decay == "per_head":
        _must(config.kda is not None, own, "linear_decay needs linear attention")
        config = replace(config, kda=replace(config.kda, decay=decay))
    return _grouped_query(config, own)


def _grouped_query(config: ModelConfig, own: Keys) -> ModelConfig:
    part = own.part("grouped_query", optional=True)
    if part is None:
        return config
    gqa = Gqa(part.integer("heads"), part.integer("kv_heads"), part.integer("head_dim"))
    layers = part.integers("layers")
    _must(set(layers) <= set(range(len(config.layers))), part, f"layers must be below {len(config.layers)}")
    _must(min(gqa.kv_heads, gqa.dim) > 0 and gqa.heads % gqa.kv_heads == 0, part, "kv_heads must divide heads")
    _must(config.rope.layout == "none" or gqa.dim % 2 == 0, part, "head_dim must be even")
    kinds = tuple("gqa" if number in layers else kind for number, kind in enumerate(config.layers))
    return replace(config, layers=kinds, gqa=gqa)


def _must(holds: bool, own: Keys, what: str) -> None:
    if not holds:
        raise CheckpointError(what, where=f"config.json: {own.path}")
