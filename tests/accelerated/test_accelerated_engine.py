"""The engine on the whole `tiny` model: small equalities from which "the schedule does not matter" follows."""

import numpy as np
import pytest
import torch
from PIL import Image

from day0check.accelerated import cache as cache_module
from day0check.backends.accelerated import Accelerated
from day0check.errors import InputError, Unavailable
from day0check.probe.recorder import Observer, Recorder
from day0check.probe.registry import Registration
from day0check.types import Request, Schedule, ScheduleEvent, Turn
from reference.model import Model
from reference.presets import preset_dir
from reference.weights import Checkpoint

LAST = "layers.07.residual.add.mlp"
PAD = 259


class Rows(Observer):
    """Keeps each row of chosen taps by (request, position), and every call's tap with its phase and step."""

    def __init__(self, *taps: str) -> None:
        self.taps, self.rows, self.calls, self.kwargs, self.choices = taps, {}, [], [], {}

    def after(self, call, token, results):
        self.calls.append((call.phase, call.step, call.tap))
        self.kwargs.append((call.operator, set(call.kwargs)))
        if call.operator in ("moe.route", "dsa.select"):
            for i, row in enumerate(results[0].tolist()):
                self.choices.setdefault(call.rows.address(i), {})[call.tap] = sorted(row)
        if call.tap in self.taps:
            for i, row in enumerate(results[0].clone()):
                self.rows[call.rows.address(i)] = row

    def of(self, request: str) -> torch.Tensor:
        mine = sorted((position, row) for (name, position), row in self.rows.items() if name == request)
        assert [position for position, _ in mine] == list(range(len(mine)))
        return torch.stack([row for _, row in mine])


@pytest.fixture(scope="module")
def fp32():
    backend = Accelerated()
    backend.load(str(preset_dir("tiny")), "fp32", "cpu", {})
    return backend


@pytest.fixture(scope="module")
def bf16():
    backend = Accelerated()
    backend.load(str(preset_dir("tiny")), "bf16", "cpu", {})
    return backend


def text(seed: int, count: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def run(backend, *requests, taps=(LAST,), **schedule):
    rows = Rows(*taps)
    outputs = backend.run(tuple(requests), Schedule(**schedule), Recorder([rows]))
    return outputs, rows


def close(a, b, limit=1e-4):
    assert a.shape == b.shape
    assert bool(a.isfinite().all())
    assert float((a - b).norm(dim=-1).max() / b.norm(dim=-1).mean()) < limit


def alike(mine, other, request, limit=1e-4):
    """The rows of a request in two runs, but for those in which a choice fell otherwise: near ties, which are few and
    exchange one of the chosen where they begin. What follows from that exchange may differ in more."""
    a, b = mine.of(request), other.of(request)
    choices = [(mine.choices[request, i], other.choices[request, i]) for i in range(len(a))]
    same = torch.tensor([own == its for own, its in choices])
    assert a.shape == b.shape
    assert int((~same).sum()) <= max(1, len(a) // 100)
    for own, its in choices:
        assert list(own) == list(its)
        first = next((tap for tap in own if own[tap] != its[tap]), None)
        assert first is None or len(set(own[first]) - set(its[first])) == 1
    close(a[same], b[same], limit)


def as_turns(request: Request, sequence: tuple[int, ...]) -> Request:
    """The whole sequence as one prompt of the same name."""
    return Request(request.id, (Turn(sequence, tuple(i for t in request.turns for i in t.images)),))


@pytest.mark.parametrize("chunk", [1, 63, 64, 65, 100])
def test_chunked_prefill_is_one_shot(fp32, chunk):
    """Catches a state, page or index key lost or doubled at a chunk's edge."""
    request = Request("a", (Turn(text(1, 30 if chunk == 1 else 200)),))
    _, once = run(fp32, request)
    _, pieces = run(fp32, request, chunk=chunk, page=16)
    alike(pieces, once, "a")


def test_decode_is_prefill_at_every_position(fp32):
    """Catches a decode path that differs from the prompt path at any position, over two turns and the top-k edge."""
    request = Request("a", (Turn(text(2, 50)), Turn(text(3, 20))), max_new_tokens=30)
    outputs, decoded = run(fp32, request)
    begin, end = outputs.generated["a"][0]
    assert (begin, end) == (50, 80)
    assert outputs.generated["a"][1] == (100, 130)
    sequence = outputs.sequences["a"]
    assert sequence[80:100] == text(3, 20)
    _, once = run(fp32, as_turns(request, sequence[:-1]))
    alike(decoded, once, "a")
    phases = {phase for phase, _, tap in decoded.calls if tap == LAST}
    assert phases == {"prefill", "decode"}


def test_decode_is_prefill_within_bf16(bf16):
    """Catches a decode-only rounding or state fault in the first layers, before choices can differ."""
    first = "layers.00.residual.add.mlp"
    request = Request("a", (Turn(text(2, 40)),), max_new_tokens=25)
    outputs, decoded = run(bf16, request, taps=(first,))
    _, once = run(bf16, as_turns(request, outputs.sequences["a"][:-1]), taps=(first,))
    close(decoded.of("a").float(), once.of("a").float(), limit=0.02)


def test_alone_is_batched(fp32):
    """Catches rows, pages, states or experts of one request that reach another."""
    requests = [Request(name, (Turn(text(n, 30 + 37 * n)),), max_new_tokens=6) for n, name in enumerate("abc", 1)]
    together, mixed = run(fp32, *requests, page=16, chunk=90)
    for request in requests:
        alone, rows = run(fp32, request)
        assert together.sequences[request.id] == alone.sequences[request.id]
        alike(mixed, rows, request.id)


def test_late_and_queued_requests_are_the_same_requests(fp32):
    """Catches memory of a finished request that a later one inherits, and admission beyond max_batch."""
    requests = [
        Request(name, (Turn(text(n, 40)),), max_new_tokens=4, arrive_step=3 * n) for n, name in enumerate("abcd")
    ]
    outputs, rows = run(fp32, *requests, max_batch=2, page=16)
    for request in requests:
        alone, own = run(fp32, request)
        assert outputs.sequences[request.id] == alone.sequences[request.id]
        alike(rows, own, request.id)


def test_which_pages_are_given_out_changes_nothing(fp32, monkeypatch):
    """Catches code that takes pages for neighbours: shuffled and reversed pages must agree bit for bit."""
    request = Request("a", (Turn(text(5, 150)),), max_new_tokens=5)
    one, shuffled = run(fp32, request, page=16)
    tables = [t.table for t in fp32.pools()._tenancies.values()]
    assert tables[0] != list(range(len(tables[0])))
    monkeypatch.setattr(cache_module.random.Random, "shuffle", lambda self, numbers: numbers.reverse())
    other, reversed_ = run(fp32, request, page=16)
    assert one == other
    assert torch.equal(shuffled.of("a"), reversed_.of("a"))


def test_preempted_is_undisturbed(fp32):
    """Catches a preempted request that keeps memory which another one has been given, or that loses its place."""
    requests = [
        Request("a", (Turn(text(1, 45)),), max_new_tokens=12),
        Request("c", (Turn(text(2, 45)),), max_new_tokens=8),
        Request("d", (Turn(text(3, 45)),), max_new_tokens=20, arrive_step=2),
    ]
    outputs, rows = run(fp32, *requests, page=16, max_batch=2, events=(ScheduleEvent(4, "preempt", "a"),))
    for request in requests:
        alone, own = run(fp32, request)
        assert outputs.sequences[request.id] == alone.sequences[request.id]
        alike(rows, own, request.id)
    prefills = [step for phase, step, tap in rows.calls if phase == "prefill" and tap == LAST]
    assert len(prefills) == 3
    assert prefills[:2] == [0, 4]


def test_aborted_leaves_the_others_alone(fp32):
    """Catches an aborted request that runs on, never ends, or disturbs its neighbour; also one not begun yet."""
    requests = [
        Request("a", (Turn(text(1, 20)),), max_new_tokens=6),
        Request("b", (Turn(text(2, 20)),), max_new_tokens=6),
        Request("c", (Turn(text(3, 20)),), max_new_tokens=6, arrive_step=5),
    ]
    events = (ScheduleEvent(3, "abort", "b"), ScheduleEvent(4, "abort", "c"))
    outputs, rows = run(fp32, *requests, page=16, events=events)
    assert outputs.finish == {"a": "length", "b": "aborted", "c": "aborted"}
    assert len(outputs.sequences["b"]) == 23
    assert outputs.sequences["c"] == ()
    alone, own = run(fp32, requests[0])
    assert outputs.sequences["a"] == alone.sequences["a"]
    alike(rows, own, "a")


def test_forced_stop_and_no_new_tokens(fp32):
    """Catches a forced token that is ignored, a stop that is not one, and an answer that was not asked for."""
    prompt = (Turn(text(6, 20)), Turn(text(7, 5)))
    outputs, _ = run(fp32, Request("a", prompt, max_new_tokens=4, forced=((9, 8, 7, 6), (5, 4, 3, 2))))
    assert outputs.sequences["a"] == (*text(6, 20), 9, 8, 7, 6, *text(7, 5), 5, 4, 3, 2)
    outputs, _ = run(fp32, Request("a", prompt, max_new_tokens=4, forced=((9, 8),), stop_tokens=(8,)))
    assert outputs.generated["a"][0] == (20, 22)
    outputs, rows = run(fp32, Request("a", prompt))
    assert outputs.sequences["a"] == (*text(6, 20), *text(7, 5))
    assert outputs.generated["a"] == ((20, 20), (25, 25))
    assert not any(tap == "head.logits" for _, _, tap in rows.calls)


def test_seeded_draws_do_not_depend_on_the_batch(fp32):
    """Catches a draw taken from a stream that other requests share."""
    requests = [Request(n, (Turn(text(8, 20)),), max_new_tokens=8, temperature=1.0, seed=3) for n in "ab"]
    outputs, _ = run(fp32, *requests)
    alone, _ = run(fp32, requests[0], chunk=7)
    greedy, _ = run(fp32, Request("a", requests[0].turns, max_new_tokens=8))
    assert outputs.sequences["a"] == outputs.sequences["b"] == alone.sequences["a"]
    assert greedy.sequences["a"] != alone.sequences["a"]


# ----------------------------------------------------------------------------------------------------- the decode path


def test_a_decode_step_writes_one_key_and_runs_recurrently(fp32):
    """Catches an index that is computed anew in decode, and a decode that falls back to chunks."""
    request = Request("a", (Turn(text(9, 30)),), max_new_tokens=5)
    seen = []

    class Shapes(Observer):
        def after(self, call, token, results):
            if call.phase == "decode" and call.operator in ("index.write", "dsa.index_key", "kda.attention"):
                value = call.kwargs.get("value", call.args[0])
                seen.append((call.operator, call.step, len(value), call.kwargs.get("chunk")))

    fp32.run((request,), Schedule(), Recorder([Shapes()]))
    assert {rows for _, _, rows, _ in seen} == {1}
    assert {chunk for operator, _, _, chunk in seen if operator == "kda.attention"} == {None}
    for operator, layers in (("index.write", 2), ("dsa.index_key", 2), ("kda.attention", 5)):
        assert sum(name == operator for name, *_ in seen) == 4 * layers


def test_all_layers_decode_their_experts_into_one_workspace(fp32):
    """Catches an engine that keeps FP8 experts of every layer, or converts experts that are not active."""
    places, counts = set(), []

    class Payloads(Observer):
        def after(self, call, token, results):
            if call.operator == "moe.convert":
                counts.append((call.kwargs["experts"].numel(), results[0].shape[0], call.phase))
                places.add(results[0].untyped_storage().data_ptr())

    fp32.run((Request("a", (Turn(text(9, 3)),), max_new_tokens=2),), Schedule(), Recorder([Payloads()]))
    assert len(places) == 1
    assert all(asked == given for asked, given, _ in counts)
    assert {asked for asked, _, phase in counts if phase == "decode"} == {4}


def test_a_fused_kernel_gets_the_pool_in_place_of_the_keys():
    """Catches a kv.gather that still runs beside the kernel that covers it."""
    backend = Accelerated()

    def fused(q, *, pool, table, owner, indices, value_width, scale):
        table_of = backend.operators()
        keys = table_of.get("kv.gather")(pool, table=table, owner=owner, indices=indices)
        plain = Accelerated().operators().get("dsa.attention")
        return plain(q, keys=keys, valid=indices >= 0, value_width=value_width, scale=scale)

    covers = ("kv.gather", "dsa.attention")
    backend.operators().apply((Registration("replace", "dsa.attention", fused, covers=covers),))
    backend.load(str(preset_dir("tiny")), "fp32", "cpu", {})
    request = Request("a", (Turn(text(10, 90)),), max_new_tokens=3)
    outputs, rows = run(backend, request)
    gathers = {tap for _, _, tap in rows.calls if "kv.gather" in tap}
    assert gathers == {"layers.05.kv.gather"}
    asked = [names for operator, names in rows.kwargs if operator == "dsa.attention"]
    assert all({"pool", "table", "owner", "indices"} <= names and "keys" not in names for names in asked)
    assert backend.operators().fused == {"kv.gather + dsa.attention": len(asked)}
    plain = Accelerated()
    plain.load(str(preset_dir("tiny")), "fp32", "cpu", {})
    assert run(plain, request)[0] == outputs


# ------------------------------------------------------------------------------------------------------------- images


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    down, across = np.indices((70, 100))
    pixels = np.stack((down * 3 % 256, across * 2 % 256, (down * across) % 256), -1).astype(np.uint8)
    path = tmp_path_factory.mktemp("pictures") / "waves.png"
    Image.fromarray(pixels).save(path)
    return str(path)


PADS = (PAD,) * 12  # 70 x 100 pixels: padded to 84 x 112, 6 x 8 patches, 12 groups


def test_images_are_spliced_once_and_over_chunks(fp32, picture):
    """Catches features shifted at a chunk's edge, a second image that takes the first one's, a tower run twice."""
    tokens = (*text(11, 5), *PADS, *text(12, 4), *PADS, *text(13, 6))
    request = Request("a", (Turn(tokens, (picture, picture)), Turn((*text(14, 3), *PADS, 7), (picture,))), 2)
    outputs, once = run(fp32, request)
    for schedule in ({"chunk": 9, "page": 16}, {"chunk": 1}):
        again, pieces = run(fp32, request, **schedule)
        assert again.sequences == outputs.sequences
        alike(pieces, once, "a")
        assert sum(tap == "vision.vision.project" for _, _, tap in pieces.calls) == 2
    blank = Request("a", (Turn(tokens), Turn(request.turns[1].tokens)), 2)
    _, other = run(fp32, blank)
    assert float((other.of("a")[5] - once.of("a")[5]).norm()) > 0.1


def test_image_requests_that_make_no_sense(fp32, picture, tmp_path):
    """Catches pads and images that do not fit, and a file that is no picture, before they become wrong rows."""
    with pytest.raises(InputError, match="fill 12 media pads, the turn has 11"):
        run(fp32, Request("a", (Turn((1, *PADS[:-1]), (picture,)),)))
    with pytest.raises(InputError, match="media pads without an image"):
        run(fp32, Request("a", (Turn((1, *PADS), (picture,)), Turn((1, PAD)))))
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not a picture")
    with pytest.raises(InputError, match="cannot be read as an image"):
        run(fp32, Request("a", (Turn((1, *PADS), (str(broken),)),)))


# ------------------------------------------------------------------------------------------------ against the oracle


def test_fp32_logits_are_those_of_the_reference(fp32, picture):
    """Catches any difference of formula, assembly, weights or position between the two derivations."""
    first = (*text(15, 60), *PADS, *text(16, 60))
    request = Request("a", (Turn(first, (picture,)), Turn(text(17, 30))), max_new_tokens=12)
    outputs, rows = run(fp32, request, taps=("head.logits",), chunk=50, page=16)
    oracle = Model(Checkpoint(preset_dir("tiny"))).forward(list(outputs.sequences["a"]), images=[picture])
    wanted = sorted(position for _, position in rows.rows)
    got = torch.stack([rows.rows["a", position] for position in wanted]).double()
    assert len(wanted) == 24
    close(got, oracle[wanted], limit=1e-4)
    assert torch.equal(got.argmax(-1), oracle[wanted].argmax(-1))


# --------------------------------------------------------------------------------------------------------------- pools


def test_pools_show_what_was_written_until_it_is_reused(fp32):
    """Catches a reader that ignores the page table, and one that shows another request's memory."""
    written = {}

    class Writes(Observer):
        def after(self, call, token, results):
            if call.tap == "layers.03.index.write":
                for i, row in enumerate(call.kwargs["value"].clone()):
                    written[call.rows.address(i)] = row

    requests = tuple(Request(n, (Turn(text(18, 40)),), max_new_tokens=3) for n in "ab")
    fp32.run(requests, Schedule(page=16, max_batch=1), Recorder([Writes()]))
    pools = fp32.pools()
    got = pools.read(3, "index", "b", [0, 39, 41])
    assert torch.equal(got, torch.stack([written["b", p] for p in (0, 39, 41)]))
    assert pools.read(3, "kv", "b", [5]).shape == (1, 48)
    assert pools.read(0, "kda", "b", []).shape == (1, 4 * 16 * 16)
    with pytest.raises(Unavailable, match="given to another request"):
        pools.read(3, "index", "a", [0])
    with pytest.raises(Unavailable, match="no such pool"):
        pools.read(0, "kv", "b", [0])
    with pytest.raises(Unavailable, match="did not run"):
        pools.read(3, "kv", "z", [0])
