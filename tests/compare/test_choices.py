"""Guards the judgement of choices on the candidate's own scores."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.compare.choices import judge_choice
from day0check.compare.judgement import Judgement
from day0check.compare.replay import Replay
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import Draw, generate


def judged(operator, arguments, *results, claims=True, keep=None) -> list[Judgement]:
    return judge_choice(Replay(CONTRACTS[operator], arguments), results, claims_tie_rule=claims, keep=keep)


def selection(name, seed=0):
    hard = generate(CONTRACTS["dsa.select"], name, seed, torch.bfloat16)
    arguments = {"scores": hard.args[0], **hard.kwargs}
    return arguments, CONTRACTS["dsa.select"].function()(hard.args[0], **hard.kwargs)


def pattern(judgements) -> str:
    return next((j.pattern for j in judgements if not j.passed), "")


# ---------------------------------------------------------------------------------------------------- key selection


def test_the_right_selection_passes_in_any_order_and_with_gaps_anywhere():
    """Catches a comparison of positions instead of sets."""
    for name in CONTRACTS["dsa.select"].hard_inputs:
        arguments, indices = selection(name)
        shuffled = indices[:, torch.randperm(indices.shape[1], generator=torch.Generator().manual_seed(1))]
        assert pattern(judged("dsa.select", arguments, shuffled)) == ""


def test_faults_of_a_selection_are_named():
    """Catches a future key, a skipped key, a repeated key, a missing key and an index out of range."""
    arguments, right = selection("plain")
    n = arguments["scores"].shape[1]
    row = 4

    def changed(place, value):
        indices = right.clone()
        indices[row, place] = value
        return indices

    visible = int(arguments["visible"][row])
    unseen = int(arguments["scores"][row, :visible].argmin())
    assert visible < n
    for indices, words in (
        (changed(2, visible), "selects the future"),
        (changed(2, unseen), "skips better keys"),
        (changed(2, int(right[row, 3])), "selects a key twice"),
        (changed(2, -1), "wrong count"),
        (changed(2, n), "out of range"),
        (changed(2, -2), "out of range"),
    ):
        found = judged("dsa.select", arguments, indices)
        assert pattern(found) == words
        assert found[0].row == row
        padding = torch.ones(len(right), dtype=torch.bool)
        padding[row] = False
        assert pattern(judged("dsa.select", arguments, indices, keep=padding)) == ""


def test_another_tie_rule_counts_only_where_one_is_claimed():
    """Catches an alarm on a free tie, and a claimed rule that is not held to the index."""
    for name in ("ties", "plateau_of_zeros"):
        arguments, right = selection(name)
        n = arguments["scores"].shape[1]
        last_wins = torch.full_like(right, -1)
        for row, (scores, visible) in enumerate(zip(arguments["scores"], arguments["visible"].tolist(), strict=True)):
            order = sorted(range(visible), key=lambda i: (-float(scores[i]), n - i))[: arguments["k"]]
            last_wins[row, : len(order)] = torch.tensor(order)
        assert pattern(judged("dsa.select", arguments, last_wins)) == "another tie rule"
        assert pattern(judged("dsa.select", arguments, last_wins, claims=False)) == ""


def test_a_threshold_bounds_the_count():
    """Catches a threshold that the judge forgets."""
    arguments, _ = selection("plain")
    arguments["threshold"] = 1.0
    right = CONTRACTS["dsa.select"].function()(
        arguments["scores"], **{k: v for k, v in arguments.items() if k != "scores"}
    )
    assert pattern(judged("dsa.select", arguments, right)) == ""
    _, unbounded = selection("plain")
    assert pattern(judged("dsa.select", arguments, unbounded)) == "wrong count"


@given(
    scores=st.lists(st.sampled_from([0.0, -0.0, 0.5, 1.0, -1.0, float("-inf"), float("nan")]), min_size=1, max_size=9),
    k=st.integers(1, 9),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_selection_is_judged_as_a_search_through_all_would(scores, k, data):
    """Catches a wrong verdict on ties, infinities and NaN by comparing with the definition on small rows."""
    visible = data.draw(st.integers(0, len(scores)))
    picked = data.draw(st.lists(st.integers(0, len(scores) - 1), max_size=k, unique=True))
    arguments = {
        "scores": torch.tensor([scores]),
        "k": k,
        "visible": torch.tensor([visible]),
        "threshold": None,
    }
    indices = torch.tensor([picked + [-1] * (k - len(picked))], dtype=torch.int32)

    def key(i):
        return (scores[i] != scores[i], -scores[i] if scores[i] == scores[i] else 0.0, i)

    right = set(sorted(range(visible), key=key)[:k]) == set(picked)
    if any(s != s for s in scores[:visible]):  # no order among NaN: only legality is judged
        right = len(picked) == min(k, visible) and all(i < visible for i in picked)
    assert (pattern(judged("dsa.select", arguments, indices)) == "") == right


# ----------------------------------------------------------------------------------------------------------- router


def routing(name="plain", seed=0):
    hard = generate(CONTRACTS["moe.route"], name, seed, torch.bfloat16)
    arguments = {"scores": hard.args[0], **hard.kwargs}
    return arguments, CONTRACTS["moe.route"].function()(hard.args[0], **hard.kwargs)


def weights_of(arguments, ids, *, scores=None, renormalise=True, scale=2.5):
    w = (arguments["scores"] if scores is None else scores).gather(1, ids)
    if arguments.get("weighting") == "softmax":
        return torch.softmax(w, -1)
    return scale * (w / w.sum(-1, keepdim=True) if renormalise else w)


def test_the_right_routing_passes_in_any_order_of_choices():
    """Catches a comparison of places, and a renormalisation without the 1e-20 called wrong."""
    for name in CONTRACTS["moe.route"].hard_inputs:
        for seed in range(5):
            arguments, (ids, weights) = routing(name, seed)
            assert pattern(judged("moe.route", arguments, ids.flip(1), weights.flip(1))) == ""
            assert pattern(judged("moe.route", arguments, ids, weights_of(arguments, ids))) == ""


def test_faults_of_the_weights_are_named():
    """Catches the bias in the weights, a lost renormalisation and a lost scale."""
    arguments, (ids, _) = routing()
    biased = arguments["scores"] + arguments["bias"]
    for weights, words in (
        (weights_of(arguments, ids, scores=biased), "bias in the weights"),
        (weights_of(arguments, ids, renormalise=False), "not renormalised"),
        (weights_of(arguments, ids, scale=1.0), "scale left out"),
        (weights_of(arguments, ids) * (1 + 2.0**-17), "wrong weights"),
        (weights_of(arguments, ids).bfloat16().float(), "wrong weights"),
    ):
        assert pattern(judged("moe.route", arguments, ids, weights)) == words


def test_faults_of_the_experts_are_named():
    """Catches a selection without bias, an expert outside the kept groups, a repeated expert and another tie rule."""
    arguments, (ids, _) = routing("large_bias")
    unbiased, _ = CONTRACTS["moe.route"].function()(
        arguments["scores"], **{**{k: v for k, v in arguments.items() if k != "scores"}, "bias": None}
    )
    assert "better experts" in pattern(
        judged("moe.route", arguments, unbiased, weights_of(arguments, unbiased))
    ) or "outside" in pattern(judged("moe.route", arguments, unbiased, weights_of(arguments, unbiased)))
    ungrouped = (arguments["scores"] + arguments["bias"]).topk(4).indices
    assert "outside" in pattern(judged("moe.route", arguments, ungrouped, weights_of(arguments, ungrouped)))
    twice = ids.clone()
    twice[3, 1] = twice[3, 0]
    assert pattern(judged("moe.route", arguments, twice, weights_of(arguments, twice))) == "chooses an expert twice"
    worse = ids.clone()
    group = ids[3, 0] // 4
    biased = arguments["scores"] + arguments["bias"]
    left = [e for e in range(int(group) * 4, int(group) * 4 + 4) if e not in ids[3].tolist()]
    if left:
        worse[3, 0] = left[0]
        assert biased[3, left[0]] < biased[3, ids[3, 0]]
        assert pattern(judged("moe.route", arguments, worse, weights_of(arguments, worse))) == "skips better experts"


def test_ties_between_experts_follow_the_rule_only_where_it_is_claimed():
    """Catches an alarm on free ties of experts or groups, and a rule that is not held to the expert."""
    arguments, _ = routing("ties")
    flipped = {**arguments, "scores": arguments["scores"].flip(1), "bias": arguments["bias"].flip(0)}
    ids, _ = CONTRACTS["moe.route"].function()(flipped["scores"], **{k: v for k, v in flipped.items() if k != "scores"})
    highest_wins = 15 - ids
    weights = weights_of(arguments, highest_wins)
    assert pattern(judged("moe.route", arguments, highest_wins, weights)) == "another tie rule"
    assert pattern(judged("moe.route", arguments, highest_wins, weights, claims=False)) == ""


# --------------------------------------------------------------------------------------------------------- sampling


def sampling(name):
    hard = generate(CONTRACTS["sample.token"], name, 0, torch.bfloat16)
    arguments = {"logits": hard.args[0], **hard.kwargs}
    return arguments, CONTRACTS["sample.token"].function()(hard.args[0], **hard.kwargs)


def test_greedy_tokens_are_held_to_the_largest_logit_and_the_lowest_id():
    """Catches a second-best token and another rule among equal logits."""
    arguments, ids = sampling("ties")
    assert pattern(judged("sample.token", arguments, ids)) == ""
    logits = arguments["logits"]
    last = logits.shape[1] - 1 - logits.flip(1).argmax(1)
    assert pattern(judged("sample.token", arguments, last)) == "another tie rule"
    assert pattern(judged("sample.token", arguments, last, claims=False)) == ""
    assert pattern(judged("sample.token", arguments, logits.argmin(1))) == "not the largest logit"
    assert pattern(judged("sample.token", arguments, ids + 400)) == "out of range"


def test_a_draw_is_that_of_its_seed_and_position():
    """Catches a draw whose seed or position is ignored, and allows the noise of a float32 running sum."""
    arguments, ids = sampling("sampled")
    assert pattern(judged("sample.token", arguments, ids)) == ""
    moved = {**arguments, "positions": arguments["positions"] + 1}
    other = CONTRACTS["sample.token"].function()(moved["logits"], **{k: v for k, v in moved.items() if k != "logits"})
    assert pattern(judged("sample.token", arguments, other)) == "not the draw of its seed and position"
    from reference.sampling import uniform

    d = Draw(0, torch.bfloat16)
    logits = d.float32(4000, 50)
    arguments = {
        "logits": logits,
        "temperature": torch.ones(4000),
        "seed": torch.arange(4000),
        "positions": torch.zeros(4000, dtype=torch.int64),
    }
    u = uniform(arguments["seed"], positions=arguments["positions"])
    in_float32 = torch.searchsorted(torch.softmax(logits, -1).cumsum(-1), u.float()[:, None], right=True)[:, 0].clamp(
        max=49
    )
    assert pattern(judged("sample.token", arguments, in_float32)) == ""
