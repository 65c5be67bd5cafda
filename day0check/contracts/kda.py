"""Kimi delta attention: H heads, dk key and dv value dims, C = H (2 dk + dv) conv channels, W conv width."""

from day0check.contracts.contract import OFFSETS, Contract, Direction, Form, Result, batch, linear, rows, shared, static

CONTRACTS = (
    linear(
        "kda.project",
        "projections of the hidden state",
        sites=("q", "k", "v", "f_a", "f_b", "alpha", "beta", "gate", "gate_a", "gate_b"),
    ),
    Contract(
        "kda.conv",
        "compute",
        "causal depthwise convolution over [state | rows] of each request, then SiLU; new state: the last W-1 raw rows",
        (rows("x", "rows C"), shared("weight", "C W", "float32"), batch("state", "batch W-1 C"), OFFSETS),
        (Result("y", "rows C"), Result("new_state", "batch W-1 C", rows="batch")),
        "reference.kda:conv",
        points=("conv", "out"),
        forms=(Form("fused", ("out",)), Form("eager", ("conv", "out"))),
        hard_inputs=("plain", "shorter_than_state", "ragged", "fresh_state"),
    ),
    Contract(
        "kda.gates",
        "compute",
        "log decay g (lb sigmoid(A f) or -A softplus(f), f with dt_bias added) and beta = sigmoid(b), float32",
        (
            rows("f", "rows H dk"),
            rows("b", "rows H"),
            shared("a_log", "H", "float32"),
            shared("dt_bias", "H dk", "float32"),
            static("lower_bound"),
        ),
        (Result("g", "rows H dk", "float32"), Result("beta", "rows H", "float32")),
        "reference.kda:gates",
        points=("out",),
        hard_inputs=("plain", "saturated", "strong_decay"),
        directions=(Direction("dt_bias", "dt_bias"),),
    ),
    Contract(
        "kda.attention",
        "compute",
        "gated delta rule with L2-normalised q, k and q scaled by dk^-1/2; o is read after the update; state float32, "
        "or kept in the activation type between calls where a form says so",
        (
            rows("q", "rows H dk"),
            rows("k", "rows H dk"),
            rows("v", "rows H dv"),
            rows("g", "rows H dk", "float32"),
            rows("beta", "rows H", "float32"),
            batch("state", "batch H dk dv", "float32"),
            OFFSETS,
            static("chunk", optional=True),
        ),
        (Result("y", "rows H dv"), Result("new_state", "batch H dk dv", "float32", rows="batch", point="kept")),
        "reference.kda:attention",
        points=("operands", "state", "kept", "out"),
        forms=(
            Form("recurrent", ("out",), "chunk is None"),
            Form("chunked", ("out",), "chunk size is part of the profile"),
            Form("kept_bf16", ("kept", "out"), "float32 inside a call, the state in bf16 between calls"),
            Form("chunked_bf16", ("operands", "out"), "decayed q k, inverse, w u and V~ in bf16"),
            Form("chunked_bf16_state", ("operands", "state", "kept", "out"), "and the state in bf16 after every chunk"),
        ),
        hard_inputs=("plain", "chunk_edge", "strong_decay", "beta_extremes", "long_state", "ragged"),
        directions=(Direction("beta", "beta"), Direction("g", "log decay g")),
    ),
    Contract(
        "kda.output",
        "compute",
        "(RMSNorm_dv(o) * sigmoid(gate)) Wo^T, norm and gate in float32",
        (
            rows("x", "rows H dv"),
            rows("gate", "rows H*dv"),
            shared("norm_weight", "dv", "float32"),
            shared("weight", "D H*dv"),
            static("eps"),
        ),
        (Result("y", "rows D"),),
        "reference.kda:output",
        points=("gated", "out"),
        hard_inputs=("plain", "small_norm_row", "closed_gate"),
        directions=(Direction("eps", "eps"), Direction("gate", "gate")),
    ),
)
