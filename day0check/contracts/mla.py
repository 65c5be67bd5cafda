"""Multi-head latent attention: H heads, c latent width, dn/dr/dv nope, rope and value dims, n keys, Hk = H or 1.

Both forms are cut where they round: plain = expand, then attention on k and v; absorbed = absorb, then attention on
the latent rows themselves (Hk = 1), then value.

Benign column of the merge by log-sum-exp: 0 alarms in 1,000 healthy runs, at most 0.06 of a limit used.
"""

from day0check.contracts.contract import (
    OWNER,
    X_SCALE,
    Arg,
    Contract,
    Direction,
    Form,
    Result,
    batch,
    linear,
    rows,
    shared,
    static,
)

PARTS = ("prefix", "own")  # of the keys: a chunk of those behind which a prompt goes on, and those of the step itself

CONTRACTS = (
    linear("mla.query", "query projection: to the latent (`down`), from it (`up`), or direct", sites=("down", "up")),
    linear("mla.latent", "kv_a_proj_with_mqa: x -> [latent | rope key]"),
    Contract(
        "rope.apply",
        "compute",
        "rotary embedding of every head; the angle is float32 position times float32 frequency; with sections, "
        "positions have a temporal, a height and a width column",
        (
            rows("x", "rows heads d"),
            rows("positions", "rows", "int64"),
            static("theta"),
            static("layout"),
            static("yarn", optional=True),
            static("sections", optional=True),
        ),
        (Result("y", "rows heads d"),),
        "reference.rope:apply_rope",
        points=("table", "out"),
        forms=(Form("float32_table", ("out",)), Form("rounded_table", ("table", "out"), "cos and sin kept rounded")),
        hard_inputs=("position_zero", "long_position", "million_positions", "three_axes", "plain"),
        sites=("query", "key", "index_query", "index_key"),
    ),
    Contract(
        "mla.absorb",
        "compute",
        "absorbed query: q_nope,h Wuk_h",
        (rows("x", "rows H dn"), shared("weight", "H dn c")),
        (Result("y", "rows H c"),),
        "reference.linear:per_head",
        points=("out",),
        hard_inputs=("plain", "outlier_channel"),
    ),
    Contract(
        "mla.expand",
        "compute",
        "plain form: latent rows to [k_nope | v] per head",
        (rows("x", "keys c"), shared("weight", "H*(dn+dv) c"), shared("bias", "H*(dn+dv)", optional=True), X_SCALE),
        (Result("y", "keys H*(dn+dv)", rows="keys"),),
        "reference.linear:linear",
        points=("out",),
        hard_inputs=("plain", "outlier_channel"),
    ),
    Contract(
        "mla.attention",
        "compute",
        "causal attention of each row on the first `visible` keys of its own request; zero for a row that sees none",
        (
            rows("q", "rows H d"),
            batch("keys", "batch n Hk d"),
            batch("values", "batch n Hk dv"),
            OWNER,
            Arg("visible", "rows", "rows", "int64"),
            static("scale"),
        ),
        (Result("y", "rows H dv"),),
        "reference.attention:attention",
        points=("s", "p", "out"),
        forms=(Form("flash", ("p", "out")), Form("eager", ("s", "p", "out")), Form("float32_p", ("out",))),
        hard_inputs=("plain", "sharp", "one_key", "no_key", "page_edge", "ragged"),
        directions=(Direction("scale", "softmax scale", per_head=True),),
    ),
    Contract(
        "mla.partial",
        "compute",
        "attention of each row on the first `visible` keys of a part of its request's, H / Hk query heads to a key, "
        "and the natural logarithm of the sum that it was divided by; zeros and -inf for a row that sees none",
        (
            rows("q", "rows H d"),
            batch("keys", "batch n Hk d"),
            batch("values", "batch n Hk dv"),
            OWNER,
            Arg("visible", "rows", "rows", "int64"),
            static("scale"),
        ),
        (Result("y", "rows H dv"), Result("lse", "rows H", "float32")),
        "reference.attention:partial_attention",
        points=("s", "p", "out"),
        forms=(Form("flash", ("p", "out")), Form("eager", ("s", "p", "out")), Form("float32_p", ("out",))),
        hard_inputs=("plain", "sharp", "one_key", "no_key", "page_edge", "ragged", "grouped"),
        sites=PARTS,
        directions=(Direction("scale", "softmax scale", per_head=True),),
    ),
    Contract(
        "mla.merge",
        "compute",
        "partial attention results joined by their log-sum-exp; an empty part has weight zero",
        (rows("parts", "rows P H dv"), rows("lse", "rows P H", "float32")),
        (Result("y", "rows H dv"),),
        "reference.attention:merge_partial",
        points=("out",),
        hard_inputs=("plain", "empty_part", "all_empty"),
    ),
    Contract(
        "mla.value",
        "compute",
        "absorbed value: z_h Wuv_h^T",
        (rows("x", "rows H c"), shared("weight", "H c dv")),
        (Result("y", "rows H dv"),),
        "reference.linear:per_head",
        points=("out",),
        hard_inputs=("plain", "outlier_channel"),
    ),
    linear("mla.gate", "output gate before its sigmoid"),
    Contract(
        "mla.output",
        "compute",
        "(o * sigmoid(gate)) Wo^T, or o Wo^T without a gate",
        (rows("x", "rows H*dv"), rows("gate", "rows H*dv", optional=True), shared("weight", "D H*dv")),
        (Result("y", "rows D"),),
        "reference.attention:gated_output",
        points=("gated", "out"),
        hard_inputs=("plain", "outlier_channel", "closed_gate"),
        directions=(Direction("gate", "gate"),),
    ),
)
