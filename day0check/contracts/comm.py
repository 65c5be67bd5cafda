"""Between ranks: N ranks of a group ("tp", "ep"). What a gather or an exchange must give lies on other ranks: their
records are joined before they are judged (`joined`)."""

from day0check.contracts.contract import Contract, Direction, Form, Result, rows, static

_SUBLAYERS = ("attention", "mlp", "routed", "shared")
_SUMS = (
    Form("float32", ("out",), "one rounding, in any order of ranks"),
    Form("running", ("partial", "out"), "the running sum is kept in the activation type"),
)

CONTRACTS = (
    Contract(
        "comm.all_reduce",
        "compute",
        "sum of the parts of all ranks, float32 sums; on each rank the same to the bit",
        (rows("parts", "rows N D"),),
        (Result("y", "rows D"),),
        "reference.comm:all_reduce",
        points=("partial", "out"),
        forms=_SUMS,
        hard_inputs=("plain", "cancellation", "uneven_rows", "one_rank"),
        sites=_SUBLAYERS,
        directions=(Direction("parts", "parts"),),
    ),
    Contract(
        "comm.reduce_scatter",
        "compute",
        "sum over ranks for the rows of this rank alone: their parts of all ranks, which came by comm.all_to_all",
        (rows("parts", "rows N D"),),
        (Result("y", "rows D"),),
        "reference.comm:reduce_scatter",
        points=("partial", "out"),
        forms=_SUMS,
        hard_inputs=("plain", "cancellation", "uneven_rows", "one_rank"),
        sites=_SUBLAYERS,
        directions=(Direction("parts", "parts"),),
    ),
    Contract(
        "comm.all_gather",
        "move",
        "the tensor of every rank in order of rank, joined along one axis",
        (rows("x", "rows ...", "any"), static("group"), static("axis"), static("sizes")),
        (Result("y", "rows ...", "any"),),
        "reference.comm:all_gather",
        sites=(*_SUBLAYERS, "rows", "attention_rows", "mlp_rows", "shared_rows", "output_rows", "logits"),
        joined=True,
    ),
    Contract(
        "comm.all_to_all",
        "move",
        "rows in runs for each rank; the rows that each rank sent here, in order of rank",
        (rows("x", "rows ...", "any"), static("group"), static("send"), static("receive")),
        (Result("y", "pairs ...", "any", rows=""),),
        "reference.comm:all_to_all",
        sites=("ids", "dispatch", "combine", *_SUBLAYERS),
        joined=True,
    ),
)
