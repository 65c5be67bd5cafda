"""Sequences longer than a chunk of KDA, than YaRN's original context and than many selections, beside transformers."""

import pytest
import torch
from crosscheck import BOUNDS, Prompt, prefill, saved_by_upstream, token_ids
from upstream_configs import FAMILIES

ROWS = 150  # two whole chunks of 64 and a part; the configurations' original context is 64


@pytest.mark.parametrize("family", FAMILIES)
def test_long_prefill_is_upstreams(family, tmp_path):
    """Catches a state lost between chunks, a ramp of YaRN that only shows behind the original context, and a selection
    that is right only while nearly every key is selected."""
    pair = saved_by_upstream(family, tmp_path / "model", seed=3, dtype=torch.float64)
    outcome = prefill(pair, Prompt(token_ids(3, rows=ROWS)))
    assert outcome.error <= BOUNDS[torch.float64]
