"""Writes a tiny checkpoint with random weights and a byte-level BPE tokenizer made from Python's own library.

    python tiny_models.py qwen3 FOLDER

Run by an environment that has transformers (for `llama_gguf`: gguf). The same name gives the same weights.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

VOCAB = 1024
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
END, PAD = 2, 0  # ids of <|im_end|> and <|endoftext|>
CHAT = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
TOKENS = {"bos_token_id": PAD, "eos_token_id": END, "pad_token_id": PAD, "tie_word_embeddings": False}
PLAIN = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    **TOKENS,
}
LATENT = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    **TOKENS,
}
SPARSE = {"index_head_dim": 128, "index_topk": 64}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3": PLAIN,
    "qwen3_moe": {**PLAIN, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {**PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128},
    "deepseek_v3": LATENT,
    "deepseek_v32": {**LATENT, **SPARSE, "index_n_heads": 4},
    "glm_moe_dsa": {**LATENT, **SPARSE, "index_n_heads": 32},
    "kimi_linear": {
        **LATENT,
        "q_lora_rank": None,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "n_group": 1,
        "topk_group": 1,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "linear_attn_config": {
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "head_dim": 128,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "qwen2_5_vl": {
        "text_config": {
            **PLAIN,
            "hidden_size": 128,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": SPECIAL.index("<|image_pad|>"),
        "video_token_id": SPECIAL.index("<|video_pad|>"),
        "vision_start_token_id": SPECIAL.index("<|vision_start|>"),
        "vision_end_token_id": SPECIAL.index("<|vision_end|>"),
        "bos_token_id": PAD,
        "eos_token_id": END,
    },
}


def tokenizer() -> Any:
    """A byte-level BPE of 1,024 tokens, trained on the first files of the standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    made.train([str(file) for file in files], trainer)
    return made


def write(name: str, home: Path) -> None:
    """A checkpoint folder in float32. Raises KeyError for an unknown name."""
    import torch
    import transformers

    settings = SETTINGS[name]
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(),
        eos_token=SPECIAL[END],
        pad_token=SPECIAL[PAD],
        additional_special_tokens=list(SPECIAL[1:]),
        model_max_length=8192,
    )
    words.chat_template = CHAT
    words.save_pretrained(home)
    config = transformers.AutoConfig.for_model(name, **settings)
    sees = "vision_config" in settings
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for place, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.5 if "embed" in place else 0.08)
    model.generation_config.do_sample = False
    model.save_pretrained(home)
    if sees:
        images = transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=224 * 224)
        videos = transformers.Qwen2VLVideoProcessor()
        parts = {"image_processor": images, "tokenizer": words, "video_processor": videos, "chat_template": CHAT}
        transformers.Qwen2_5_VLProcessor(**parts).save_pretrained(home)


def write_gguf(home: Path) -> None:
    """A two-layer llama in GGUF with a vocabulary of bytes and special tokens."""
    import gguf
    import numpy

    file = home / "model.gguf"
    words, merges = _byte_words()
    heads, kv_heads, width, inner, layers = 4, 2, 64, 128, 2
    size = width // heads
    out = gguf.GGUFWriter(str(file), "llama")
    _describe(out, words, merges, heads, kv_heads, width, inner, layers)
    draw = numpy.random.default_rng(0)

    def weights(*shape: int, scale: float = 0.08) -> Any:
        return (draw.standard_normal(shape) * scale).astype(numpy.float32)

    ones = numpy.ones(width, numpy.float32)
    out.add_tensor("token_embd.weight", weights(len(words), width, scale=0.5))
    out.add_tensor("output.weight", weights(len(words), width))
    out.add_tensor("output_norm.weight", ones)
    shapes = {
        "attn_q": (width, width),
        "attn_k": (kv_heads * size, width),
        "attn_v": (kv_heads * size, width),
        "attn_output": (width, width),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    for layer in range(layers):
        for name, shape in shapes.items():
            out.add_tensor(f"blk.{layer}.{name}.weight", weights(*shape))
        out.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        out.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _describe(out: Any, words: list[str], merges: list[str], *sizes: int) -> None:
    """What a reader of the file must know of the model and its tokens."""
    heads, kv_heads, width, inner, layers = sizes
    size = width // heads
    out.add_context_length(2048)
    out.add_embedding_length(width)
    out.add_block_count(layers)
    out.add_feed_forward_length(inner)
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(1e-6)
    out.add_rope_dimension_count(size)
    out.add_rope_freq_base(10000.0)
    out.add_vocab_size(len(words))
    out.add_file_type(0)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(words)
    out.add_token_types([3 if word in SPECIAL else 1 for word in words])
    out.add_token_merges(merges)
    out.add_eos_token_id(words.index(SPECIAL[END]))
    out.add_bos_token_id(words.index(SPECIAL[PAD]))
    out.add_pad_token_id(words.index(SPECIAL[PAD]))
    out.add_add_bos_token(False)
    out.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _byte_words() -> tuple[list[str], list[str]]:
    """The 256 bytes as GPT-2 writes them, some pairs of letters with their merges, and the special tokens."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    pairs = [(one, two) for one in letters for two in letters][:400]
    words = [*SPECIAL, *(table[byte] for byte in range(256)), *(one + two for one, two in pairs)]
    return words, [f"{one} {two}" for one, two in pairs]


def main(name: str, folder: str) -> None:
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    if name == "llama_gguf":
        write_gguf(home)
    else:
        write(name, home)
    sizes = {file.name: file.stat().st_size for file in sorted(home.iterdir()) if file.is_file()}
    print(json.dumps({"model": name, "files": sizes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
