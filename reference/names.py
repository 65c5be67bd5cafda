"""Tensor names: canonical ones are those of the released Kimi K3 checkpoint without `language_model.model.` or
`language_model.`; every family's checkpoint names become canonical on reading. Standard library only.
"""

from __future__ import annotations

import re

_TOP_LEVEL = ("vision_tower.", "mm_projector.")
_TEXT_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")
_EXPERT_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

# Applied in order to what remains behind the prefix. transformers writes some names that no release has: it reverses
# its renaming of modules by pattern and so also reaches modules that were never renamed.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^blocks\.(\d+)\.", r"layers.\1."),
        (r"^(layers\.\d+)\.mlp\.(gate|experts|shared_experts)\.", r"\1.block_sparse_moe.\2."),
        (r"^(layers\.\d+)\.block_sparse_moe\.(gate|up|down)_proj\.", r"\1.mlp.\2_proj."),
        (r"^vision_tower\.encoder\.patch_embed\.", "vision_tower.patch_embed."),
    )
)
_EXPERT = re.compile(r"\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.")

# How a family's release spells names: prefix of the text model, prefix of the head, and whether experts are under
# `mlp` with gate_proj, up_proj and down_proj, or under `block_sparse_moe` with w1, w3 and w2.
_SPELLING: dict[str, tuple[str, str, bool]] = {
    "kimi_k3": ("language_model.model.", "language_model.", False),
    "kimi_linear": ("model.", "", False),
    "kimi_k25": ("language_model.model.", "language_model.", True),
    "deepseek_v3": ("model.", "", True),
    "deepseek_v32": ("model.", "", True),
    "glm_moe_dsa": ("model.", "", True),
    "glm5_next": ("model.language_model.", "", True),
}


def canonical_name(stored: str) -> str:
    """The canonical name behind a name in a checkpoint of any family; a name without a known form stays as it is."""
    name = stored
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    for pattern, replacement in _RULES:
        name = pattern.sub(replacement, name)
    return _EXPERT.sub(lambda found: f".experts.{found[1]}.{_EXPERT_PARTS[found[2]]}.", name)


def stored_name(name: str, *, family: str = "kimi_k3") -> str:
    """The name under which a released checkpoint of `family` (its model_type) stores canonical `name`.

    Raises KeyError for a family without a spelling.
    """
    text, head, under_mlp = _SPELLING[family]
    if name.startswith(_TOP_LEVEL):
        return name
    if name.startswith("visual."):
        return f"model.{name}"
    if name == "lm_head.weight":
        return head + name
    if under_mlp:
        name = re.sub(r"^(layers\.\d+)\.block_sparse_moe\.", r"\1.mlp.", name)
        parts = {w: part for part, w in _EXPERT_PARTS.items()}
        name = re.sub(r"\.experts\.(\d+)\.(w[123])\.", lambda found: f".experts.{found[1]}.{parts[found[2]]}.", name)
    return text + name


def stored_shape(name: str, shape: tuple[int, ...], *, family: str) -> tuple[int, ...]:
    """The shape under which a release of `family` stores a tensor of the canonical `shape`."""
    if family == "kimi_linear" and name.endswith(".A_log"):
        return (1, 1, *shape, 1)
    return shape
