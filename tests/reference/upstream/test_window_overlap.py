"""Keys of pools that overlap, beside the compressor of DeepSeek-V4's indexer in transformers."""

import pytest
import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as upstream
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from reference.attention import pool_key
from reference.pooling import pool_members

DIM, HIDDEN, ROWS = 8, 24, 23


@pytest.fixture
def indexer(monkeypatch):
    """Upstream's indexer in float64 without what comes behind the pooling (norm, rotation), which shows its pools."""
    torch.manual_seed(0)
    made = upstream.DeepseekV4Indexer(DeepseekV4Config(hidden_size=HIDDEN, index_head_dim=DIM, q_lora_rank=16))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    monkeypatch.setattr(upstream, "apply_rotary_pos_emb", lambda x, cos, sin: x)
    made = made.double()
    made.kv_norm, made.rotary_emb = torch.nn.Identity(), torch.nn.Module()
    monkeypatch.setattr(made.rotary_emb, "forward", lambda *args, **kwargs: (None, None), raising=False)
    made.seen = []

    class Scorer(torch.nn.Module):
        def forward(self, q, keys, hidden):
            made.seen.append(keys[0])
            return torch.zeros(1, q.shape[1], keys.shape[1], dtype=q.dtype)

    made.scorer = Scorer()
    return made


def test_pools_that_overlap_are_those_of_deepseek_v4(indexer):
    """Catches lanes exchanged, a place of a token counted from the wrong pool, and a first pool that is padded with
    zeros instead of nothing."""
    x = torch.randn(ROWS, HIDDEN, dtype=torch.float64)
    latent = torch.randn(1, ROWS, 16, dtype=torch.float64)
    with torch.no_grad():
        indexer(x[None], latent, torch.arange(ROWS)[None], None, 0)
        keys, gates = ((x @ w.T).unflatten(-1, (2, DIM)) for w in (indexer.kv_proj.weight, indexer.gate_proj.weight))
        place, pool = torch.cat(indexer.position_bias.split(DIM, dim=-1)).double(), indexer.compress_rate
    members = {"pool": pool, "previous": 0}
    mine = pool_key(
        pool_members(keys, absent=0.0, **members), gates=pool_members(gates, absent=-torch.inf, **members), ape=place
    )
    (theirs,) = indexer.seen
    assert len(mine) == ROWS // pool
    assert float((mine - theirs).abs().max()) < 1e-6 * float(theirs.abs().max())  # their softmax is float32
