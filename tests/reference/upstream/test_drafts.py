"""The draft layer beside transformers' own modules (`drafting.py`)."""

import pytest
import torch
from crosscheck import BOUNDS, precision, relative_error, token_ids
from drafting import CONFIGS, Drafting, drafted, outcome


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_drafts_are_upstreams(tmp_path, family, dtype):
    """Catches the hidden half in front of the embedding half, a hidden row before the final norm, an embedding of the
    row's own token, a norm left out, and a tensor name of the layer that no release has. Nothing is left over."""
    drafting = Drafting(family, tmp_path, dtype)
    assert drafting.checkpoint.unexpected == ()
    kept = [found for found in (outcome(drafting, seed) for seed in range(3)) if found.counts(dtype)]
    assert kept, "no sequence was decided by a clear margin: choose others"
    assert max(found.error for found in kept) <= BOUNDS[dtype]


def test_upstreams_own_pass_gives_the_same(tmp_path):
    """Catches a position, a mask or an order of calls that this file and the reference read alike and upstream does
    not: for DeepSeek-V3 transformers runs the layer itself, with a cache and positions from 1 on."""
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    drafting = Drafting("deepseek-v3", tmp_path, torch.float64)
    ids = token_ids(0)
    whole = MtpModel(drafting.model, 1)
    whole.layers[0] = drafting.layer
    with torch.no_grad(), precision(torch.float64):
        hidden = drafting.model.model(ids[None]).last_hidden_state
        cache = MtpCache(config=drafting.model.config.get_mtp_config())
        rows = whole.forward_layer(0, hidden[:, :-1], torch.arange(1, len(ids))[None], cache, input_ids=ids[None, 1:])
        expected = drafting.model.lm_head(rows)[0]
    assert relative_error(drafted(drafting.checkpoint, ids), expected) <= 1e-10
