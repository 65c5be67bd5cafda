"""`python tests/reference/upstream`: the table of reference errors, measured now, as Markdown."""

import itertools
import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from crosscheck import clip_errors, draft_errors, expert_layer_errors, markdown, reference_errors

torch.set_num_threads(1)
print(markdown(itertools.chain(reference_errors(), clip_errors(), draft_errors(), expert_layer_errors())))
