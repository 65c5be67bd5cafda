"""From a model directory's JSON files to a `ModelConfig`: one reader per `model_type`. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reference.config import ModelConfig
from reference.errors import CheckpointError
from reference.families.deepseek import deepseek_v3, deepseek_v32, glm_moe_dsa
from reference.families.glm5_next import glm5_next
from reference.families.keys import Keys
from reference.families.kimi_k3 import kimi_k3, kimi_linear
from reference.families.kimi_k25 import kimi_k25
from reference.families.parts import SPECIAL_TEXTS
from reference.families.switches import with_switches

__all__ = ["READERS", "SPECIAL_TEXTS", "read_config", "read_config_and_rest"]

Reader = Callable[[Keys, dict[str, Any], dict[str, Any]], ModelConfig]
READERS: dict[str, Reader] = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "glm5_next": glm5_next,
    "glm_moe_dsa": glm_moe_dsa,
    "kimi_k25": kimi_k25,
    "kimi_k3": kimi_k3,
    "kimi_linear": kimi_linear,
}


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
        config = with_switches(READERS[family](keys, preprocessor or {}, tokenizer or {}), keys)
    except (TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"the configuration makes no sense: {error}", where="config.json") from error
    _check(config)
    return config, tuple(sorted(keys.unknown()))


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
