"""The draft layer on both sides: transformers' own modules with random weights, saved under released names.

Upstream drafts with DeepSeek-V3 as a whole. For V3.2 and GLM-5 it has the decoder layer and not the way through it, so
here its modules are called one after another as its `MtpLayer` calls them.
"""

from __future__ import annotations

import json

import torch
from crosscheck import Margins, Outcome, precision, randomise, relative_error, token_ids
from safetensors.torch import load_file, save_file
from upstream_configs import COMMON, DEEPSEEK, YARN, deepseek_v32, glm_5

from reference.model import Model
from reference.weights import SINGLE, Checkpoint

LAYERS = DEEPSEEK["num_hidden_layers"]


def deepseek_v3():
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **COMMON, **DEEPSEEK, n_group=2, topk_group=1, first_k_dense_replace=1, rope_parameters=YARN
    )


CONFIGS = {"deepseek-v3": deepseek_v3, "deepseek-v3.2": deepseek_v32, "glm-5": glm_5}


class Drafting:
    """An upstream model and its draft layer, and the checkpoint of both."""

    def __init__(self, family, folder, dtype):
        import transformers as upstream
        from transformers.modeling_layers import MtpLayer

        config = CONFIGS[family]()
        self.model = upstream.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        randomise(self.model, 3)
        self.model.save_pretrained(folder)
        config.num_mtp_layers, config.mtp_layer_types, config.mtp_mlp_layer_types = 1, ["indexed_attention"], ["sparse"]
        decoder = self.model.model.layers[-1]
        norm = type(decoder.input_layernorm)
        self.layer = MtpLayer(config.get_mtp_config(), type(decoder), norm, 0)
        randomise(self.layer, 4)
        self.add_to(folder)
        self.model.set_experts_implementation("eager")
        self.layer.config._experts_implementation = "eager"
        self.model, self.layer = self.model.to(dtype).eval(), self.layer.to(dtype).eval()
        self.dtype, self.checkpoint = dtype, Checkpoint(folder)

    def add_to(self, folder):
        """Writes the draft layer behind the others, as releases name it, with copies of embedding and head."""
        tensors = load_file(folder / SINGLE)
        for name, tensor in self.layer.state_dict().items():
            name = name.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
            for stored, part in released(name, tensor):
                tensors[f"model.layers.{LAYERS}.{stored}"] = part.contiguous()
        tensors[f"model.layers.{LAYERS}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{LAYERS}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        settings = json.loads((folder / "config.json").read_text())
        settings["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(settings))

    @torch.no_grad()
    def expected(self, ids):
        """Upstream's draft logits [T-1, V] of one causal pass."""
        m = self.model.model
        with precision(self.dtype):
            hidden = m(ids[None]).last_hidden_state[:, :-1]
            embedded, rows = m.embed_tokens(ids[None, 1:]), len(ids) - 1
            positions = torch.arange(rows)[None]
            mask = torch.full((rows, rows), -torch.inf, dtype=self.dtype).triu(1)[None, None]
            rotary = m.rotary_emb(embedded, position_ids=positions)
            x = self.layer.eh_proj(torch.cat([self.layer.enorm(embedded), self.layer.hnorm(hidden)], dim=-1))
            x = self.layer.mtp_block(x, attention_mask=mask, position_embeddings=rotary, position_ids=positions)
            x = self.layer.post_norm(x[0] if isinstance(x, tuple) else x)
            return self.model.lm_head(x)[0]


def released(name, tensor):
    """(stored name, tensor) pairs: upstream keeps experts in one tensor, gate before up."""
    if name.endswith("experts.gate_up_proj"):
        for e, pair in enumerate(tensor):
            for part, half in zip(("gate_proj", "up_proj"), pair.chunk(2), strict=True):
                yield f"mlp.experts.{e}.{part}.weight", half
    elif name.endswith("experts.down_proj"):
        yield from ((f"mlp.experts.{e}.down_proj.weight", part) for e, part in enumerate(tensor))
    else:
        yield name, tensor


def drafted(checkpoint, ids, call=None):
    model = Model(checkpoint, dtype=torch.float64)
    state = model.start()
    model.extend(state, ids, drafts=True, **({} if call is None else {"call": call}))
    return state.drafted


def outcome(drafting, seed):
    """Error and closest selection of the drafts of one drawn sequence."""
    margins, ids = Margins(), token_ids(seed)
    found = drafted(drafting.checkpoint, ids, margins)
    return Outcome(relative_error(found, drafting.expected(ids)), margins.smallest)
