"""Guards what lies between a write into a cache and the reads of it: events of pages, states and the host tier."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.backends.accelerated import Accelerated
from day0check.compare import shadow as rules
from day0check.compare.shadow import Shadow
from day0check.probe.recorder import Observer, Recorder
from day0check.probe.rows import RowMap
from day0check.types import Request, Schedule, ScheduleEvent, Turn
from reference import cache
from reference.presets import preset_dir

PAGE, WIDTH, PAGES, SLOTS = 4, 6, 12, 4
LAYER = "layers.03"


class Memory:
    """A paged pool, a pool of states and a host tier whose calls a Shadow watches. Values are those of a request's
    tokens unless a test writes others."""

    def __init__(self, requests=(), *, observe=None) -> None:
        self.found = []
        self.shadow = Shadow(self.found.append, requests)
        self.recorder = Recorder([self.shadow])
        self.pool = torch.full((PAGES, PAGE, WIDTH), float("nan"), dtype=torch.bfloat16)
        self.states = torch.full((SLOTS, 5), float("nan"))
        self.host = torch.zeros(PAGES, PAGE, WIDTH, dtype=torch.bfloat16)
        self.counts = torch.ones(PAGES, dtype=torch.int64)
        self.hidden = observe or ()

    def call(self, operator, function, *args, rows, place=LAYER, site="", **kwargs):
        if operator in self.hidden:
            return function(*args, **kwargs)
        return self.recorder.call(place, operator, function, args, kwargs, site, rows)

    def step(self, request, tokens, start, pages, *, slot=None, load=None, write=True, gather=True, phase="prefill"):
        """Computes `tokens` at positions from `start` on, in memory on `pages`, with states in `slot`."""
        count = len(tokens)
        rows = rows_of(request, range(start, start + count))
        last = rows_of(request, [start + count - 1])
        table = torch.tensor([pages])
        with self.recorder.step(phase, rows, 0):
            self.call("embed.tokens", lambda ids: ids, torch.tensor(tokens), rows=rows, place="")
            if slot is not None:
                at = torch.tensor([(slot if start else -1) if load is None else load])
                self.call("state.load", cache.state_load, self.states, rows=last, site="kda", slots=at)
                value = torch.tensor([[float(sum(tokens)), start, count, 1.0, 2.0]])
                slots = torch.tensor([slot])
                self.call(
                    "state.store", cache.state_store, self.states, rows=last, site="kda", value=value, slots=slots
                )
            if write:
                slots = cache.slots(
                    table, owner=torch.zeros(count, dtype=torch.int64), positions=torch.tensor(rows.position), page=PAGE
                )
                self.call("kv.write", cache.write, self.pool, rows=rows, value=values(tokens, start), slots=slots)
            if gather:
                self.read(request, start + count, pages)

    def read(self, request, length, pages):
        keywords = {
            "table": torch.tensor([pages]),
            "owner": torch.tensor([0]),
            "indices": torch.arange(length, dtype=torch.int32)[None],
        }
        return self.call("kv.gather", cache.gather, self.pool, rows=rows_of(request, [length - 1]), **keywords)

    def between(self, request, positions):
        return self.recorder.between("prefill", rows_of(request, positions), 0)

    def match(self, request, tokens, pages):
        rows = rows_of(request, range(len(tokens)))
        with self.recorder.between("prefill", rows, 0):
            self.call("prefix.match", lambda t: torch.tensor(pages), torch.tensor(tokens), rows=rows, place="")

    def release(self, request, pages, *, others=0):
        self.counts[pages] = others
        rows = rows_of(request, [PAGE * n for n in range(len(pages))])
        keywords = {"pages": torch.tensor(pages), "held": torch.ones(len(pages), dtype=torch.int64)}
        self.call("pool.release", lambda counts, **_: None, self.counts, rows=rows, place="", **keywords)

    def move(self, operator, request, pages, places):
        rows = rows_of(request, [PAGE * n for n in range(len(pages))])
        function = cache.offload if operator == "kv.offload" else cache.reload
        keywords = {"host": self.host, "pages": torch.tensor(pages), "places": torch.tensor(places)}
        self.call(operator, function, self.pool, rows=rows, site="kv", **keywords)

    def end(self):
        """(operator, pattern) of every measure that fails, after the end of the case."""
        self.recorder.end_case()
        assert all(m.kind == "move" and m.tap.endswith(".content") for m in self.found)
        return [(m.operator, m.pattern) for m in self.found if not m.passed and not m.not_judged]


def rows_of(request, positions) -> RowMap:
    positions = tuple(positions)
    return RowMap((request,), (0,) * len(positions), positions)


def values(tokens, start) -> torch.Tensor:
    base = torch.tensor(tokens, dtype=torch.float32)[:, None] + torch.arange(start, start + len(tokens))[:, None] / 64
    return (base + torch.arange(WIDTH) / 8).bfloat16()


A = [5, 6, 7, 8, 9, 10, 11, 12, 13]  # two whole pages and a token
B = [5, 6, 7, 8, 9, 10, 11, 12, 44]


def test_a_legal_prefix_hit_passes():
    """Catches a false alarm about a page that another request wrote, which was given back and looked up again."""
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    m.release("a", [3, 7, 1])
    m.match("b", B[:8], [3, 7])
    m.step("b", B[8:], 8, [3, 7, 5])
    assert m.end() == []
    assert sum(found.rows for found in m.found) == 18


def test_share_with_a_request_of_other_tokens_is_named():
    """Catches pages that a table names and whose content is that of other tokens, though nobody has touched them."""
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    other = [*A[:4], 21, 22, 23, 24, 25]
    m.match("b", other[:8], [3, 7])
    m.step("b", other[8:], 8, [3, 7, 5])
    assert m.end() == [("kv.gather", rules.OTHER)]
    failing = next(f for f in m.found if not f.passed)
    assert (failing.request, failing.position, failing.layer, failing.phase) == ("b", 4, 3, "prefill")
    assert "holds what request a wrote for its position 4" in failing.message
    assert "(4 rows)" in failing.message


def test_copy_on_write_is_legal_and_a_write_without_the_copy_is_named():
    """Catches a request that writes into a page which another one still reads, and an alarm about a copied page whose
    copy no operator showed."""
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    m.pool[8, :2] = m.pool[7, :2]  # b goes its own way from position 6 on, on a copy of the second page
    m.match("b", A[:6], [3])
    m.step("b", [30, 31], 6, [3, 8])
    m.step("a", [14], 9, [3, 7, 1], phase="decode")
    assert m.end() == []
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    m.match("b", A[:6], [3, 7])
    m.step("b", [30, 31], 6, [3, 7])
    assert [f for f in m.found if not f.passed] == []
    m.step("a", [14], 9, [3, 7, 1], phase="decode")
    assert m.end() == [("kv.gather", rules.OTHER)]
    failing = next(f for f in m.found if not f.passed)
    assert (failing.request, failing.position, failing.phase) == ("a", 6, "decode")


def test_rescale_of_a_page_through_a_write_is_legal_and_one_in_place_is_named():
    """Catches a page whose codes are scaled anew behind everybody's back: named at its write, with the call at which
    it was right for the last time."""
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    rows, slots = rows_of("a", range(4)), torch.arange(12, 16)
    m.call("kv.write", cache.write, m.pool, rows=rows, value=values(A[:4], 0) * 2, slots=slots)
    m.read("a", 9, [3, 7, 1])
    assert m.end() == []
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    m.pool[7, 1] *= 2
    m.step("a", [14], 9, [3, 7, 1], phase="decode")
    assert m.end() == [("kv.write", rules.OVERWRITTEN)]
    failing = next(f for f in m.found if not f.passed)
    assert (failing.tap, failing.layer, failing.position) == ("layers.03.kv.write.content", 3, 5)
    assert "right at call 2 for the last time, and wrong at call 5" in failing.message


def shown(m, operator, function, **kwargs):
    return m.call(operator, function, m.pool, rows=rows_of("a", [0]), site="kv", **kwargs)


def test_a_copy_that_is_shown_carries_the_content():
    """Catches a copy of a page that is not followed: the copy would be nobody's, or be right whatever happens to it."""
    pages, into = torch.tensor([7]), torch.tensor([8])
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    shown(m, "kv.copy", cache.copy, pages=pages, into=into)
    m.read("a", 9, [3, 8, 1])
    assert m.end() == []
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    shown(m, "kv.copy", cache.copy, pages=pages, into=into)
    m.pool[8, 1] *= 2
    m.read("a", 9, [3, 8, 1])
    assert m.end() == [("kv.copy", rules.OVERWRITTEN)]
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    shown(m, "kv.copy", cache.copy, pages=torch.tensor([3]), into=into)
    m.read("a", 9, [3, 8, 1])
    assert m.end() == [("kv.gather", rules.OTHER)]


def test_a_page_that_is_shown_as_rescaled_is_legal_and_stays_what_it_was():
    """Catches a rescaled page that counts as overwritten, and one that counts as right for other tokens."""
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    shown(m, "kv.rewrite", cache.rewrite, value=m.pool[[7]] * 2, pages=torch.tensor([7]))
    m.read("a", 9, [3, 7, 1])
    assert m.end() == []
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    shown(m, "kv.rewrite", cache.rewrite, value=m.pool[[7]] * 2, pages=torch.tensor([7]))
    m.pool[7, 2] += 1
    m.read("a", 9, [3, 7, 1])
    assert m.end() == [("kv.rewrite", rules.OVERWRITTEN)]


@pytest.mark.parametrize(("place", "told"), [("", [("kv.gather", rules.OLDER)]), (LAYER, []), ("layers.07", [])])
def test_a_layer_whose_pages_have_numbers_of_their_own_says_when_they_are_given_back(place, told):
    """Catches a page of one layer that counts as given back because another layer gave back its page of that number."""
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    if place == LAYER:
        release_at(m, LAYER, [11])  # its own numbers count here, and page 3 is still held
        place = ""
    release_at(m, place, [3])
    m.read("a", 9, [3, 7, 1])
    assert m.end() == told
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    release_at(m, LAYER, [3])
    m.read("a", 9, [3, 7, 1])
    assert m.end() == [("kv.gather", rules.OLDER)]


def release_at(m, place, pages):
    """Gives pages back at a place, while the request lives on."""
    pages = torch.tensor(pages)
    m.counts[pages] = 0
    m.call("pool.release", lambda counts, **_: None, m.counts, rows=rows_of("nobody", [0]), place=place, pages=pages)
    m.counts[pages] = 1


def test_offload_keeps_the_content_and_a_host_page_that_changes_is_named():
    """Catches host memory that is written while a request is away: it comes back right, but as something else."""
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    m.move("kv.offload", "a", [3, 7, 1], [2, 0, 4])
    m.host[0, 2, 1] += 1
    m.release("a", [3, 7, 1])
    m.move("kv.reload", "a", [9, 8, 2], [2, 0, 4])
    m.step("a", [14], 9, [9, 8, 2], phase="decode")
    assert m.end() == [("kv.offload", rules.OVERWRITTEN)]
    assert next(f for f in m.found if not f.passed).position == 6


def test_reload_is_legal_and_pages_in_another_order_are_named():
    """Catches a reload into pages of the request that are not those of its positions, and a false alarm about the
    right one, though other requests wrote in its old pages meanwhile."""
    for places, told in (([2, 0, 4], []), ([0, 2, 4], [("kv.gather", rules.OTHER)])):
        m = Memory()
        m.step("a", A, 0, [3, 7, 1])
        m.move("kv.offload", "a", [3, 7, 1], [2, 0, 4])
        m.release("a", [3, 7, 1])
        m.step("c", [50, 51, 52, 53, 54], 0, [7, 3])
        m.move("kv.reload", "a", [9, 8, 2], places)
        m.step("a", [14], 9, [9, 8, 2], phase="decode")
        assert m.end() == told


def test_rollback_of_a_draft_is_named_when_its_row_is_read():
    """Catches a rejected draft whose row stays in the cache for the token that took its place."""
    for again, told in ((True, []), (False, [("kv.gather", rules.OTHER)])):
        m = Memory()
        m.step("a", A[:5], 0, [3, 7])
        m.step("a", [80, 81], 5, [3, 7], phase="decode")
        m.step("a", [10], 5, [3, 7], phase="decode", write=again)
        assert m.end() == told


def test_an_older_generation_of_a_page_is_named():
    """Catches a page that was given back, taken again and read before it was written: the old bytes are the right ones
    only by chance."""
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    m.release("a", [3, 7, 1])
    m.step("a", A[:4], 0, [3, 7, 1])
    m.step("a", A[4:8], 4, [3, 7, 1], write=False)
    assert m.end() == [("kv.gather", rules.OLDER)]
    assert next(f for f in m.found if not f.passed).position == 4


def test_a_rewrite_after_a_preemption_is_legal():
    """Catches a false alarm about rows that are computed again, with other bytes and on the same pages."""
    m = Memory()
    m.step("a", A, 0, [3, 7, 1], slot=2)
    m.release("a", [3, 7, 1])
    m.step("a", [*A, 14], 0, [7, 3, 1], slot=0)
    m.step("a", [15], 10, [7, 3, 1], slot=0, phase="decode")
    assert m.end() == []


@pytest.mark.parametrize("load", [2, 3])
def test_a_state_from_before_a_preemption_is_named(load):
    """Catches a request that begins again behind the state at which it was interrupted, and one that begins from the
    state of another."""
    m = Memory()
    m.step("b", [50, 51], 0, [9], slot=3)
    m.step("a", A, 0, [3, 7, 1], slot=2)
    m.release("a", [3, 7, 1])
    m.step("a", A, 0, [7, 3, 1], slot=2, load=load)
    assert m.end() == [("state.load", rules.OLDER if load == 2 else rules.OTHER)]
    failing = next(f for f in m.found if not f.passed)
    assert (failing.request, failing.position) == ("a", 0)
    assert f"which is of what request {'a' if load == 2 else 'b'} wrote" in failing.message


def test_a_state_of_an_earlier_life_is_named_where_its_position_fits():
    """Catches a state that a prefix hit should have brought: the old one has seen the same tokens, by chance."""
    m = Memory()
    m.step("a", A[:8], 0, [3, 7], slot=2)
    m.release("a", [3, 7])
    m.match("a", A[:8], [3, 7])
    m.step("a", A[8:], 8, [3, 7, 1], slot=2)
    assert m.end() == [("state.load", rules.OLDER)]


def test_a_fresh_state_in_the_middle_is_named():
    """Catches a step that loses the state of a request and goes on from zeros."""
    m = Memory()
    m.step("a", A[:4], 0, [3, 7], slot=2)
    m.step("a", A[4:8], 4, [3, 7], slot=2, load=-1)
    assert m.end() == [("state.load", rules.LOST)]


def test_a_snapshot_is_restored_for_the_prefix_that_it_was_stored_of():
    """Catches the snapshot of another block at a hit, and a false alarm about the right one."""
    for slot, told in ((1, []), (3, [("prefix.restore", rules.OTHER)])):
        m = Memory()
        m.step("a", A[:4], 0, [3, 7], slot=2)
        for begin, snapshot in ((4, 1), (8, 3)):
            with m.between("a", [begin - 1]):
                last = rows_of("a", [begin - 1])
                taken = m.call("state.load", cache.state_load, m.states, rows=last, site="kda", slots=torch.tensor([2]))
                m.call(
                    "prefix.store",
                    cache.state_store,
                    m.states,
                    rows=last,
                    site="kda",
                    value=taken,
                    slots=torch.tensor([snapshot]),
                )
            if begin == 4:
                m.step("a", A[4:8], 4, [3, 7], slot=2)
        m.match("b", A[:4], [3])
        with m.between("b", [3]):
            m.call(
                "prefix.restore",
                cache.state_load,
                m.states,
                rows=rows_of("b", [3]),
                site="kda",
                slots=torch.tensor([slot]),
            )
        assert m.end() == told


def test_a_slot_that_nobody_wrote_is_named():
    """Catches a table that leads to an empty page."""
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    m.read("a", 9, [3, 5, 1])
    assert m.end() == [("kv.gather", rules.EMPTY)]


def test_media_pads_of_another_image_are_another_content(tmp_path):
    """Catches pages shared by two prompts with equal tokens and different pictures, and refuses none of the same."""
    for name in ("x", "y", "z"):
        (tmp_path / name).write_bytes(b"other" if name == "y" else b"same")
    tokens = (5, 99, 99, 99, 6)
    requests = [Request(n, (Turn(tokens, (str(tmp_path / f),)),)) for n, f in (("a", "x"), ("b", "y"), ("c", "z"))]
    for reader, told in (("b", [("kv.gather", rules.OTHER)]), ("c", [])):
        m = Memory(requests)
        rows = rows_of("a", range(5))
        m.call("splice.positions", lambda ids, **_: ids, torch.tensor(tokens), rows=rows, place="", media_pad=99)
        m.step("a", list(tokens), 0, [3, 7])
        m.match(reader, list(tokens[:4]), [3])
        m.step(reader, [6], 4, [3, 8])
        assert m.end() == told


def test_what_is_not_shown_is_not_judged():
    """Catches a pass where the reads, the writes or the tokens of a backend are hidden."""
    for hidden, reason in (
        ("kv.gather", "was never seen read"),
        ("kv.write", "nobody showed the writes"),
        ("embed.tokens", "nobody showed embed.tokens"),
    ):
        m = Memory(observe=(hidden,))
        m.step("a", A, 0, [3, 7, 1])
        assert m.end() == []
        assert any(reason in f.not_judged and not f.passed for f in m.found), hidden


def test_a_call_that_cannot_be_followed_is_not_judged():
    """Catches a malformed call that ends the run as our own fault, or one that is left out in silence."""
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    m.call("kv.gather", lambda pool, **_: pool, m.pool, rows=rows_of("a", [8]), table=None)
    assert m.end() == []
    assert [f.not_judged.split(":")[0] for f in m.found if not f.passed] == ["the call could not be followed"]


def test_a_fused_kernel_that_shows_its_pool_is_judged():
    """Catches a kernel that gathers by itself and is therefore believed."""
    m = Memory(observe=("kv.gather",))
    m.step("a", A, 0, [3, 7, 1])
    m.pool[3, 0] += 1
    rows = rows_of("a", [8])
    keywords = {"table": torch.tensor([[3, 7, 1]]), "owner": torch.tensor([0]), "visible": torch.tensor([9])}
    m.call("mla.attention", lambda q, **_: q, torch.zeros(1, 2), rows=rows, pool=m.pool, **keywords)
    assert m.end() == [("kv.write", rules.OVERWRITTEN)]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.permutations(range(PAGES)), st.data())
def test_chunks_of_any_size_on_any_pages_pass_and_one_changed_row_is_found(chunks, pages, data):
    """Catches limits of a page or of a chunk: no alarm on healthy memory, and the very position that was changed."""
    total = min(sum(chunks), 20)
    tokens, done, m = [100 + p for p in range(total)], 0, Memory()
    for count in chunks:
        m.step("a", tokens[done : done + count], done, pages[:5]) if tokens[done:] else None
        done += count
    at = data.draw(st.integers(0, total - 1))
    assert [f for f in m.found if not f.passed] == []
    m.pool[pages[at // PAGE], at % PAGE, 3] += 1
    m.read("a", total, pages[:5])
    assert m.end() == [("kv.write", rules.OVERWRITTEN)]
    assert next(f for f in m.found if not f.passed).position == at


def test_long_reads_are_digested_in_turns(monkeypatch):
    """Catches a part of a long cache whose bytes no read ever looks at."""
    monkeypatch.setattr(rules, "ROWS_A_READ", 3)
    m = Memory()
    m.step("a", A, 0, [3, 7, 1])
    m.pool[7, 2] += 1
    for _ in range(3):
        m.read("a", 9, [3, 7, 1])
    assert m.end() == [("kv.write", rules.OVERWRITTEN)]


@pytest.mark.parametrize("model", ["tiny", "tiny-glm-5.3"])
def test_the_engine_raises_no_alarm_and_a_page_written_over_does(model):
    """Catches a false alarm about pooled index keys, hits, preemptions and the host tier as the engine does them, and
    an engine whose memory is not followed at all."""
    backend = Accelerated()
    backend.load(str(preset_dir(model)), "bf16", "cpu", {})
    prompts = {"a": range(60, 96), "b": (*range(60, 92), 7, 8, 9)}
    requests = tuple(
        Request(name, (Turn(tuple(tokens)),), max_new_tokens=3, arrive_step=12 * at)
        for at, (name, tokens) in enumerate(prompts.items())
    )
    away = (ScheduleEvent(4, "offload", "a"), ScheduleEvent(16, "preempt", "b"))
    schedule = Schedule(chunk=11, page=16, prefix_cache=True, host_pages=8, events=away)

    def run(*breaks):
        found = []
        shadow = Shadow(found.append, requests)
        with torch.no_grad():
            backend.run(requests, schedule, Recorder([*breaks, shadow]))
        shadow.end_case()
        return found

    class Scribble(Observer):
        """Writes over the row of position 3 of the last written pool of index keys before request "b" reads it."""

        pool = slot = None

        def before(self, call):
            if call.operator == "index.write" and self.slot is None:
                self.pool, self.slot = call.args[0], int(call.kwargs["slots"][0])
            if call.operator == "index.gather" and call.args[0] is self.pool and "b" in call.rows.requests:
                self.pool.view(-1, self.pool.shape[2])[self.slot] += 1

    healthy = run()
    assert [(m.tap, m.message, m.not_judged) for m in healthy if not m.passed] == []
    operators = {"index.gather", "kv.gather", "kv.offload", "kv.reload"}
    assert operators <= {m.operator for m in healthy if m.rows}
    assert {m.operator for m in run(Scribble()) if not m.passed} == {"index.write"}
