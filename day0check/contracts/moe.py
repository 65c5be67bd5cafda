"""Mixture of experts: E experts, A active ones, k per token, L width of the routed input (latent or D), I expert width.

A pair is one (row, choice); pair number = row * k + choice. `order` lists pair numbers sorted by expert (stable).
"""

from day0check.contracts.contract import OFFSETS, Contract, Direction, Form, Result, linear, rows, shared, static
from day0check.contracts.spine import ACTIVATION_ARGS

CONTRACTS = (
    Contract(
        "moe.scores",
        "compute",
        "router scores sigmoid(x W^T) or softmax, float32",
        (rows("x", "rows D"), shared("weight", "E D"), static("scoring")),
        (Result("scores", "rows E", "float32"),),
        "reference.moe:router_scores",
        points=("out",),
        hard_inputs=("plain", "outlier_channel", "saturated"),
    ),
    Contract(
        "moe.route",
        "choose",
        "experts by biased score (with groups: sum of the two best of each group, kept_groups stay), weights from the "
        "unbiased scores of the chosen, renormalised with + 1e-20, times scale",
        (
            rows("scores", "rows E", "float32"),
            shared("bias", "E", "float32", optional=True),
            static("k"),
            static("groups"),
            static("kept_groups"),
            static("renormalise"),
            static("scale"),
        ),
        (Result("ids", "rows k", "int64"), Result("weights", "rows k", "float32")),
        "reference.moe:route",
        ties="among equal biased scores the lower expert id wins; the order of the result is free",
        hard_inputs=("plain", "ties", "negative_biased", "large_bias", "saturated"),
        net=True,
    ),
    linear("moe.down", "routed input: x to the expert latent"),
    Contract(
        "moe.dispatch",
        "move",
        "rows repeated per choice and sorted by expert; id -1 is dispatched nowhere",
        (rows("x", "rows L"), rows("ids", "rows k", "int64"), static("experts")),
        (
            Result("y", "pairs L", rows="pairs"),
            Result("order", "pairs", "int64", rows=""),
            Result("active", "A", "int64", rows=""),
            Result("offsets", "A+1", "int64", rows=""),
        ),
        "reference.moe:dispatch",
        hard_inputs=("plain", "one_expert", "empty_experts", "padding"),
    ),
    Contract(
        "moe.experts",
        "compute",
        "act(x w1^T, x w3^T) w2^T of each expert on its own pairs; an FP8 weight is payload x scale per 128 columns",
        (
            rows("x", "pairs L"),
            OFFSETS,
            shared("w1", "A I L", "any"),
            shared("w3", "A I L", "any"),
            shared("w2", "A L I", "any"),
            shared("w1_scale", "A I L/128", "float32", optional=True),
            shared("w3_scale", "A I L/128", "float32", optional=True),
            shared("w2_scale", "A L I/128", "float32", optional=True),
            *ACTIVATION_ARGS,
        ),
        (Result("y", "pairs L", rows="pairs"),),
        "reference.moe:experts",
        points=("gate", "up", "h", "out"),
        forms=(Form("fused", ("h", "out")), Form("eager", ("gate", "up", "h", "out"))),
        hard_inputs=("plain", "one_pair", "extreme_codes", "large_gate"),
        directions=(Direction("w1", "gate projection"), Direction("w3", "up projection")),
    ),
    Contract(
        "moe.combine",
        "compute",
        "sum of each row's expert outputs times their weights, float32 sums",
        (rows("y", "pairs L"), shared("order", "pairs", "int64"), rows("weights", "rows k", "float32")),
        (Result("out", "rows L"),),
        "reference.moe:combine",
        points=("out",),
        hard_inputs=("plain", "cancellation", "padding"),
        directions=(Direction("weights", "router weights"),),
    ),
    linear("moe.up", "expert latent to the hidden size"),
    Contract(
        "moe.shared",
        "compute",
        "the shared expert, an MLP on every row",
        (
            rows("x", "rows D"),
            shared("gate", "I D"),
            shared("up", "I D"),
            shared("down", "D I"),
            *ACTIVATION_ARGS,
        ),
        (Result("y", "rows D"),),
        "reference.moe:mlp",
        points=("gate", "up", "h", "out"),
        forms=(Form("fused", ("h", "out")), Form("eager", ("gate", "up", "h", "out"))),
        hard_inputs=("plain", "outlier_channel", "large_gate"),
        directions=(Direction("gate", "gate projection"), Direction("up", "up projection")),
    ),
)
