"""The draft layer of multi-token prediction (model.md 2.8): one decoder layer more that guesses the token after next.

Row i takes the model's own final hidden row i and the embedding of token i+1, and its logits are for token i+2. So the
layer runs one row behind the model: a row waits until its next token is known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference import layers
from reference.layers import Here, LatentCache
from reference.linear import linear
from reference.residual import add


def draft_rows(
    here: Here, embedded: Tensor, *, hidden: Tensor, cache: LatentCache, form: str, rotary: Tensor | None = None
) -> Tensor:
    """What the head reads [T, D] of T more rows; the cache grows by them.

    `embedded` [T, D] of each row's next token, `hidden` [T, D] behind the model's final norm; the embedding is the
    first half of what `eh_proj` takes. `here`: the place of the draft layer. The residual is plain whatever the
    model's is. Every row has its embedding, the first too: DeepSeek-V3's report (2.2) and transformers leave none out,
    vLLM puts zeros beside position 0.
    """
    config, number = here.config, len(here.config.layers)
    pair = torch.cat(
        [here.norm(embedded, "enorm", site="draft_embedding"), here.norm(hidden, "hnorm", site="draft_hidden")], dim=-1
    )
    x = here("draft.project", linear, pair, weight=here.weight("eh_proj"))
    h = here.norm(x, "input_layernorm", site="input")
    h = layers.full_attention(here, h, cache, kind=config.draft.kind, form=form, shared_selection=None, rotary=rotary)
    x = here("residual.add", add, x, y=h, site="attention")
    h = here.norm(x, "post_attention_layernorm", site="post_attention")
    h = layers.moe(here, h) if config.is_moe(number) else layers.dense_mlp(here, h)
    x = here("residual.add", add, x, y=h, site="mlp")
    return here.norm(x, "shared_head.norm", site="draft_head")
