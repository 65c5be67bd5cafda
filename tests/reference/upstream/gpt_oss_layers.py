"""The expert layer of gpt-oss on both sides: a directory that transformers saved, its experts packed as released."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from crosscheck import precision, randomise, relative_error
from safetensors.torch import load_file, save_file

from reference.formats import MX_GROUP, mxfp4_encode
from reference.gpt_oss import ExpertLayer, expert_layer, read_expert_layer
from reference.weights import SINGLE, read_tensor

EXPERTS, TOPK, LAYER = 8, 2, 1


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of [E, in, out], which upstream keeps transposed; the groups lie along the input."""
    codes, scales = mxfp4_encode(weight.transpose(1, 2).contiguous())
    return codes.unflatten(-1, (-1, MX_GROUP // 2)), scales


def write_packed_model(folder: Path, *, seed: int = 0) -> Path:
    """A tiny random GptOssForCausalLM as transformers saves it, its experts then packed as the release packs them."""
    import transformers as upstream

    config = upstream.GptOssConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        sliding_window=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = upstream.GptOssForCausalLM(config)
    randomise(model, seed)
    model.save_pretrained(folder)
    tensors = load_file(folder / SINGLE)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        # values well beyond the clamps of the activation
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed(6 * tensors.pop(name))
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    file.write_text(json.dumps(settings))
    return folder


def both_layers(directory: Path, dtype: torch.dtype) -> tuple[Any, ExpertLayer]:
    """Upstream's module and ours, read from the same packed file."""
    import transformers as upstream

    model = upstream.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, quantization_config=upstream.Mxfp4Config(dequantize=True)
    )
    model.set_experts_implementation("eager")
    ours = read_expert_layer(partial(read_tensor, file=directory / SINGLE), prefix=f"model.layers.{LAYER}.mlp")
    return model.to(dtype).model.layers[LAYER].mlp, ours


def expected_rows(theirs: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), precision(x.dtype):
        return theirs(x[None])[0][0]


def input_rows(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(40, 64, generator=torch.Generator().manual_seed(5)).to(dtype)


def layer_error(directory: Path, dtype: torch.dtype) -> float:
    """Relative error of our layer beside upstream's in `dtype`."""
    theirs, ours = both_layers(directory, dtype)
    x = input_rows(dtype)
    return relative_error(expert_layer(x.double(), ours, k=TOPK), expected_rows(theirs, x))
