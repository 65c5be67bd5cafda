"""Seeded small models: a preset is a configuration and a recipe per tensor, written once as an HF directory.

A value depends on (tensor name, flat index) alone, through 64-bit integer arithmetic and single float32 products, so
that any slice can be made by itself and every torch build makes the same bytes.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from reference.config import ModelConfig
from reference.families import SPECIAL_TEXTS, read_config
from reference.fault_presets import FAULT_FORMS, FAULT_PRESETS
from reference.packing import packed
from reference.preset_families import FAMILY_PRESETS, FORMS, IDS, KIMI_K3_VISION, KIMI_MEDIA, MXFP4
from reference.storage import Form, stored_as
from reference.tensors import Stored, expected_tensors
from reference.weights import write_checkpoint

BYTES = 256  # vocabulary entries that are bytes; the rest are special tokens or unused
GENERATOR_VERSION = 1  # part of the digest: raise it when the arithmetic or a recipe changes

# ------------------------------------------------------------------------------------------------------- recipes


@dataclass(frozen=True)
class Recipe:
    """How the values of a tensor are drawn.

    "normal": mean + scale * n, n nearly standard normal. "uniform": low to high in 2^24 steps. "codes": every byte.
    "exponents": E8M0 bytes around `mean`, within 6 of each other but for one in 64, which is 4 lower.
    With `outlier`, one index in 41 of the last axis is multiplied by it. Rows from `quiet_from` on are divided by 64.
    `common` of every 256 codes are the same in all experts: trained experts are alike too, and a legal routing flip
    then moves a row a little instead of turning it around.
    """

    kind: Literal["normal", "uniform", "codes", "exponents"] = "normal"
    scale: float = 1.0
    mean: float = 0.0
    low: float = 0.0
    high: float = 1.0
    outlier: float = 1.0
    quiet_from: int | None = None
    common: int = 0


def _wrap(number: int) -> int:
    """A 64-bit pattern as the signed integer that torch holds."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def counter_bits(name: str, start: int, stop: int) -> torch.Tensor:
    """64 random-looking bits (as int64) for each flat index of start:stop of tensor `name`.

    SplitMix64 (Steele, Lea, Flood 2014) of index times its golden-ratio increment plus the first 8 bytes of
    sha256(name); int64 products wrap.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    x = torch.arange(start, stop, dtype=torch.int64) * _wrap(0x9E3779B97F4A7C15) + _wrap(seed)
    x = (x ^ _logical_shift(x, 30)) * _wrap(0xBF58476D1CE4E5B9)
    x = (x ^ _logical_shift(x, 27)) * _wrap(0x94D049BB133111EB)
    return x ^ _logical_shift(x, 31)


def values(
    name: str, stored: Stored, recipe: Recipe, *, start: int = 0, stop: int | None = None, seed: int = 0
) -> torch.Tensor:
    """Values start:stop (flat) of tensor `name`, in its stored dtype; other ones for each `seed`."""
    stop = math.prod(stored.shape) if stop is None else stop
    name = f"{seed}/{name}" if seed else name
    bits = counter_bits(name, start, stop)
    if recipe.kind == "codes":
        alike = counter_bits(re.sub(r"experts\.\d+\.", "experts.", name), start, stop)
        return torch.where(_logical_shift(bits, 56) < recipe.common, alike & 0xFF, bits & 0xFF).to(torch.uint8)
    if recipe.kind == "exponents":
        rare = (_logical_shift(bits, 58) == 0).long() * 4
        return (int(recipe.mean) + (bits & 0x3) - rare).to(torch.uint8)
    dtype = getattr(torch, stored.dtype)
    if recipe.kind == "uniform":
        unit = _logical_shift(bits, 40).double() * 2.0**-24
        return (unit * (recipe.high - recipe.low) + recipe.low).float().to(dtype)
    lanes = sum(((bits >> shift) & 0xFFFF) for shift in (0, 16, 32, 48)) - 131070
    index = torch.arange(start, stop, dtype=torch.int64)
    scale = torch.full((stop - start,), recipe.scale * math.sqrt(3) * 2.0**-16, dtype=torch.float32)
    if recipe.outlier != 1.0:
        scale = torch.where(_outlier(index % stored.shape[-1]), scale * recipe.outlier, scale)
    if recipe.quiet_from is not None:
        row = index // math.prod(stored.shape[1:])
        scale = torch.where(row >= recipe.quiet_from, scale / 64, scale)
    drawn = lanes.float() * scale
    if recipe.mean:  # norm weights: the mean is an outlier with its channel
        mean = torch.full_like(drawn, recipe.mean)
        drawn = drawn + torch.where(_outlier(index % stored.shape[-1]), mean * recipe.outlier, mean)
    return drawn.to(dtype)


def _outlier(channel: torch.Tensor) -> torch.Tensor:
    return channel % 41 == 7


def recipe_for(name: str, stored: Stored) -> Recipe:
    """The recipe of a tensor by its canonical name: linears keep the size of their input, decays run from weak to
    strong, the head hardly ever picks a special token.

    Sublayers write a fifth of what they read and attention is not sharp: with full-sized writes, bfloat16 noise alone
    grows from layer to layer until a quarter of the logits is noise, which no trained model does.
    """
    fan_in = math.prod(stored.shape[1:])
    keep = 1 / math.sqrt(fan_in) if fan_in else 1.0
    write = Recipe(scale=0.2 * keep)
    rules: tuple[tuple[str, Recipe], ...] = (
        (".weight_packed", Recipe("codes", common=208)),
        (".weight_scale", Recipe("exponents", mean=120)),
        ("embed_tokens.weight", Recipe(outlier=3.0)),
        ("lm_head.weight", Recipe(scale=3 * keep, quiet_from=BYTES)),
        (".k_scale", Recipe("uniform", low=0.03, high=0.05)),
        ("A_log", Recipe("uniform", low=-0.7, high=0.7)),
        ("dt_bias", Recipe("uniform", low=-8.0, high=1.0)),
        ("_conv1d.weight", Recipe(scale=0.6)),
        ("e_score_correction_bias", Recipe(scale=0.04)),
        ("_res_proj.weight", Recipe(scale=0.6 * keep)),
        ("q_b_proj.weight", Recipe(scale=0.8 * keep)),
        ("indexer.wq_b.weight", Recipe(scale=keep, outlier=2.0)),
        ("k_norm.bias", Recipe(scale=0.2)),
        ("pos_emb.weight", Recipe(scale=0.3)),
        ("block_sparse_moe.gate.weight", Recipe(scale=1.5 * keep)),
        ("routed_expert_down_proj.weight", Recipe(scale=keep)),
        ("routed_expert_up_proj.weight", write),
        ("o_proj.weight", write),
        ("down_proj.weight", write),
    )
    for ending, recipe in rules:
        if name.endswith(ending):
            return recipe
    if len(stored.shape) == 1:
        return Recipe(scale=0.1, mean=1.0, outlier=2.5)  # a norm
    return Recipe(scale=keep)


# ------------------------------------------------------------------------------------------------------- presets

SPECIALS = {
    256: "[BOS]",
    257: "[EOS]",
    258: "[PAD]",
    259: "<|media_pad|>",
    **{260 + i: text for i, text in enumerate(SPECIAL_TEXTS.values())},
}


@dataclass(frozen=True)
class Preset:
    """A model as data: the JSON files of its directory; configuration and tensors follow from them."""

    name: str
    json_files: dict[str, dict[str, Any]]
    forms: tuple[Form, ...] = ()  # in which its files store what `table` lists plainly
    seed: int = 0  # other values of every tensor

    def config(self) -> ModelConfig:
        return read_config(
            self.json_files["config.json"],
            preprocessor=self.json_files.get("preprocessor_config.json"),
            tokenizer=self.json_files.get("tokenizer_config.json"),
        )

    def table(self) -> dict[str, tuple[Stored, Recipe]]:
        """Canonical name -> what is stored and how it is drawn."""
        return {name: (stored, recipe_for(name, stored)) for name, stored in expected_tensors(self.config()).items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        config = self.config()
        table = self.table().items()
        drawn = ((n, values(n, stored, r, seed=self.seed).reshape(stored.shape)) for n, (stored, r) in table)
        for name, tensor in packed(drawn, forms=self.forms, config=config):
            yield from stored_as(name, tensor, forms=self.forms, head_width=config.kda and config.kda.dim)

    def digest(self) -> str:
        """Twelve hex digits of everything that decides the bytes."""
        decisive = [GENERATOR_VERSION, self.json_files, repr(list(self.table().items())), *self.forms]
        text = json.dumps([*decisive, self.seed] if self.seed else decisive, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _tiny() -> Preset:
    """Everything in one: KDA, dense MLA, DSA, block attention residuals, latent MXFP4 experts, vision."""
    text = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": 128,
        "num_hidden_layers": 8,
        "vocab_size": 320,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 3,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "mla_use_nope": False,
        "mla_use_output_gate": True,
        "rope_theta": 10000.0,
        "rope_interleave": True,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 64,
        "indexer_rope_interleave": False,
        "indexer_types": ["none", "none", "none", "full", "none", "none", "none", "full"],
        "linear_attn_config": {
            "kda_layers": [1, 2, 3, 5, 7],
            "full_attn_layers": [4, 6, 8],
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_shared_experts": 1,
        "num_expert_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 64,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "quantization_config": MXFP4,
    }
    vision = {**KIMI_K3_VISION, "vt_num_attention_heads": 4, "qkv_hidden_size": 64}
    media = {**KIMI_MEDIA, "transparent_bg_fill_stage": "after_resize"}
    return kimi_k3_preset("tiny", text, vision=vision, media=media)


def kimi_k3_preset(
    name: str, text: dict[str, Any], *, vision: dict[str, Any] | None, media: dict[str, Any] | None
) -> Preset:
    """A preset of the Kimi K3 family from its text_config, vision_config and media_proc_cfg."""
    config = {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "name": name,
        "dtype": "bfloat16",
        **IDS,
        "media_placeholder_token_id": 259,
        "tie_word_embeddings": False,
        "text_config": text,
    }
    files = {
        "config.json": config | ({} if vision is None else {"vision_config": vision}),
        "generation_config.json": {**IDS, "do_sample": False},
        "tokenizer_config.json": _tokenizer(),
    }
    if media is not None:
        files["preprocessor_config.json"] = {"media_proc_cfg": media}
    return Preset(name, files)


def _tokenizer() -> dict[str, Any]:
    tokens = {str(i): {"content": content, "special": True} for i, content in SPECIALS.items()}
    return {"tokenizer_class": "ByteLevel", "added_tokens_decoder": tokens}


def _family(name: str) -> Preset:
    files = {**FAMILY_PRESETS[name](name), "tokenizer_config.json": _tokenizer()}
    return Preset(name, files, FORMS.get(name, ()))


def _variant(name: str) -> Preset:
    base, change = FAULT_PRESETS[name]
    chosen = preset(base)
    files = copy.deepcopy(chosen.json_files)
    change(files)
    files["config.json"]["name"] = name
    return Preset(name, files, FAULT_FORMS.get(name, chosen.forms))


_PRESETS: dict[str, Callable[[], Preset]] = {
    "tiny": _tiny,
    **{name: functools.partial(_family, name) for name in FAMILY_PRESETS},
    **{name: functools.partial(_variant, name) for name in FAULT_PRESETS},
}


def preset_names() -> tuple[str, ...]:
    return tuple(_PRESETS)


def preset(name: str) -> Preset:
    """The preset of that name; "tiny@3" is "tiny" with the values of seed 3. Raises KeyError(name)."""
    base, at, seed = name.partition("@")
    if base not in _PRESETS or (at and not seed.isdecimal()):
        raise KeyError(name)
    return replace(_PRESETS[base](), seed=int(seed or 0))


def write_preset(name: str, directory: str | os.PathLike[str]) -> Path:
    """Writes the preset as an HF model directory, all or nothing; one that is already there is left as it is."""
    chosen = preset(name)
    return write_checkpoint(Path(directory), chosen.tensors(), json_files=chosen.json_files)


def preset_dir(name: str) -> Path:
    """The directory of the preset, written on first use under $DAY0CHECK_CACHE/models (or ~/.cache/day0check/models).

    The directory name carries the digest, so a changed preset never meets old files. Raises KeyError(name).
    """
    cache = os.environ.get("DAY0CHECK_CACHE")
    root = Path(cache) if cache else Path.home() / ".cache" / "day0check"
    directory = root / "models" / f"{name}-{preset(name).digest()}"
    return directory if directory.is_dir() else write_preset(name, directory)
