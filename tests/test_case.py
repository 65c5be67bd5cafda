"""Case files: what is accepted, what is refused and in which words, and which cases a selection yields."""

from __future__ import annotations

import dataclasses
import sys
import types as python_types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.case import find_image, load_cases, read_case_file, read_text
from day0check.case_format import catalogue
from day0check.errors import InputError, NothingSelected, UsageError
from reference.config import ModelConfig, Vision

CONFIG = ModelConfig(name="tiny", hidden=8, layers=("kda",), vocab=320, max_positions=4096, mlp_width=8)
SEEING = dataclasses.replace(CONFIG, vision=Vision(8, 1, 1, 8, 8))

MINIMAL = 'id = "text/a"\n[[request]]\nid = "a"\nturns = [{ user = "Hello" }]\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of cases with data: text/a of stage t0, text/b of t1, image/c with a photograph."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sea.txt").write_text("Ebbe und Flut, maré, 潮", encoding="utf-8")
    write(tmp_path, "text/a", MINIMAL)
    write(tmp_path, "text/b", MINIMAL.replace("text/a", "text/b").replace("\n", '\nstage = "t1"\n', 1))
    photo = MINIMAL.replace("text/a", "image/c").replace('user = "Hello"', 'image = "package:skimage/chelsea.png"')
    write(tmp_path, "image/c", photo)
    return tmp_path


def write(root: Path, case_id: str, text: str) -> Path:
    path = root / f"{case_id}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(InputError) as caught:
        read_case_file(write(tmp_path, "bad", text))
    message = str(caught.value)
    assert str(tmp_path / "bad.toml") in message
    assert caught.value.todo
    return message


@pytest.fixture(autouse=True)
def plain_tokeniser(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token a byte and 300 for an image, so that these tests hang on the case room alone."""

    def chat_turn(config: ModelConfig, text: str, image_sizes: tuple, first: bool) -> list[int]:
        return [300] * first + [300 + w for w, _ in image_sizes] + list(text.encode())

    fake = python_types.ModuleType("reference.tokenizer")
    fake.chat_turn = chat_turn
    monkeypatch.setitem(sys.modules, "reference.tokenizer", fake)


def ids(cases: tuple) -> list[str]:
    return [case.id for case in cases]


# ------------------------------------------------------------------------------------------------- the format


def test_every_problem_of_a_file_is_named_with_its_key(tmp_path: Path) -> None:
    """Would catch a reader that stops at the first problem, loses the key path or lets an unknown key pass."""
    message = refusal(
        tmp_path,
        'id = "text/a"\nstag = "t0"\n[[request]]\nid = "a"\nturns = [{ usr = "x" }]\nmax_new_tokens = true\n'
        '[schedule]\nchunk = 0\nevents = [{ at_step = 1, do = "stop", request = "a" }]\n',
    )
    assert "5 keys" in message
    for key in ("stag:", "request[0].turns[0].usr:", "request[0].max_new_tokens:", "schedule.chunk:", "events[0].do:"):
        assert key in message
    assert "did you mean 'stage'" in message


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('id = "text/a"', "", "id: is missing"),
        ('id = "text/a"', 'id = "Text a"', "id: 'Text a'"),
        ('user = "Hello"', "", "request[0].turns[0]: neither text nor image"),
        ('user = "Hello"', "user = 7", "request[0].turns[0].user"),
        ('id = "a"', 'id = "a/b"', "request[0].id"),
        ('id = "text/a"', 'id = "operators/a"', "runs no model"),
        ('id = "text/a"', 'id = "text/a"\ntime_limit_s = 0', "time_limit_s"),
        ('id = "text/a"', 'id = "text/a"\ntime_limit_s = inf', "time_limit_s"),
        ('id = "text/a"', 'id = "text/a"\nstage = []', "stage"),
        ('id = "text/a"', 'id = "text/a"\nstage = "t9"', "stage[0]"),
    ],
)
def test_refused_values_name_their_key(tmp_path: Path, old: str, new: str, words: str) -> None:
    """Would catch a rule of the format that went missing."""
    assert words in refusal(tmp_path, MINIMAL.replace(old, new))


def test_contradictions_between_keys_are_refused(tmp_path: Path) -> None:
    """Would catch two requests of one name, and an event for a request that does not exist."""
    event = '[schedule]\nevents = [{ at_step = 1, do = "abort", request = "b" }]\n'
    assert "'b' in this case" in refusal(tmp_path, MINIMAL + event)
    twice = MINIMAL + '[[request]]\nid = "a"\nturns = [{ user = "x" }]\n'
    assert "request[1].id: 'a' stands twice" in refusal(tmp_path, twice)
    assert "at least one request" in refusal(tmp_path, 'id = "text/a"\n')


def test_files_that_are_not_toml_or_not_there(tmp_path: Path) -> None:
    """Would catch a traceback of the TOML reader, of the UTF-8 decoder or of a directory in the place of a file."""
    assert "line 2" in refusal(tmp_path, 'id = "text/a"\n= 3\n')
    (tmp_path / "latin.toml").write_bytes(b'id = "\xe9"\n')
    for path in (tmp_path / "latin.toml", tmp_path / "absent.toml", tmp_path):
        with pytest.raises(InputError) as caught:
            read_case_file(path)
        assert str(path) in str(caught.value)


# ------------------------------------------------------------------------------------------------- the matrix


def test_the_matrix_makes_stable_ids_and_values_of_the_right_place(tmp_path: Path) -> None:
    """Would catch ids that depend on the order of the file and values written into the wrong request."""
    tail = '[matrix]\n"schedule.chunk" = [63, 64]\n"request.a.max_new_tokens" = [1]\n'
    other = '[[request]]\nid = "b"\nturns = [{ user = "x" }]\n'
    found = read_case_file(write(tmp_path, "m", MINIMAL + other + tail))
    assert [f.entry.id for f in found] == [
        "text/a[request.a.max_new_tokens=1,schedule.chunk=63]",
        "text/a[request.a.max_new_tokens=1,schedule.chunk=64]",
    ]
    assert [f.entry.schedule.chunk for f in found] == [63, 64]
    assert [r.max_new_tokens for r in found[0].entry.request] == [1, 0]


def test_exclude_drops_combinations_and_must_match(tmp_path: Path) -> None:
    """Would catch an exclusion that is ignored, one that drops too much, and a misspelt one that drops nothing."""
    tail = '[matrix]\n"schedule.chunk" = [1, 2]\n"schedule.page" = [16, 64]\n[[exclude]]\n"schedule.chunk" = 1\n'
    more = '"schedule.page" = 16\n'
    found = read_case_file(write(tmp_path, "m", MINIMAL + tail + more))
    assert [(f.entry.schedule.chunk, f.entry.schedule.page) for f in found] == [(1, 64), (2, 16), (2, 64)]
    assert "exclude[0]: matches no" in refusal(tmp_path, MINIMAL + tail.replace('chunk" = 1\n', 'chunk" = 3\n'))
    everything = tail + '[[exclude]]\n"schedule.chunk" = 2\n'
    assert "leaves no combination" in refusal(tmp_path, MINIMAL + everything)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        ('"schedule.chnk" = [1]', "schedule.chnk: unknown key; did you mean 'chunk'"),
        ('"request.z.seed" = [1]', "matrix.request.z.seed: no such key"),
        ('"schedule.chunk" = []', "matrix.schedule.chunk: a list"),
        ('"schedule.chunk" = [1, 1]', "stands twice"),
        ('"schedule.chunk" = [{ a = 1 }]', "matrix.schedule.chunk: a list"),
    ],
)
def test_refused_matrices(tmp_path: Path, matrix: str, words: str) -> None:
    """Would catch a matrix that silently varies nothing."""
    assert words in refusal(tmp_path, f"{MINIMAL}[matrix]\n{matrix}\n")


@settings(max_examples=25, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 500), min_size=1, max_size=4, unique=True),
    pages=st.lists(st.integers(1, 500), min_size=1, max_size=4, unique=True),
)
def test_matrix_is_the_whole_product(tmp_path_factory: pytest.TempPathFactory, chunks: list, pages: list) -> None:
    """Would catch combinations lost, repeated, or given an id that does not say what was varied."""
    root = tmp_path_factory.mktemp("matrix")
    text = f'{MINIMAL}[matrix]\n"schedule.page" = {pages}\n"schedule.chunk" = {chunks}\n'
    found = [f.entry for f in read_case_file(write(root, "m", text))]
    assert {(e.schedule.chunk, e.schedule.page) for e in found} == {(c, p) for c in chunks for p in pages}
    assert len(found) == len(chunks) * len(pages)
    for e in found:
        assert e.id == f"text/a[schedule.chunk={e.schedule.chunk},schedule.page={e.schedule.page}]"


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text('ab/#:[]="\n', max_size=6),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(["id", "request", "turns", "schedule", "matrix", "exclude", "chunk", "user", "stage"]),
                inner,
                max_size=3,
            )
        ),
        max_leaves=8,
    )
)
def test_no_content_makes_a_traceback(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    """Would catch any shape of file that ends in another exception than ours."""
    path = write(tmp_path_factory.mktemp("odd"), "odd", f'id = "text/a"\n{to_toml(value)}')
    try:
        read_case_file(path)
    except InputError as error:
        message = str(error)
    else:
        message = str(path)
    assert str(path) in message


def to_toml(value: object) -> str:
    """`value` as the right side of several keys; what TOML has no spelling for stays as it is written."""
    spelled = toml_value(value)
    return "\n".join(f"{key} = {spelled}" for key in ("request", "schedule", "matrix", "exclude", "stage"))


def toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{k}" = {toml_value(v)}' for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, str):
        return '"' + value.replace('"', '\\"').replace("\n", "\\n") + '"'
    return str(value)


# --------------------------------------------------------------------------------------------- texts and images


def test_a_text_is_inline_or_a_range_of_bytes(folder: Path) -> None:
    """Would catch ranges in characters instead of bytes, and open ends that lose a byte."""
    data = (folder / "data",)
    assert read_text("Hello", folders=data) == "Hello"
    assert read_text("file:sea.txt#0:4", folders=data) == "Ebbe"
    assert read_text("file:sea.txt#15:20", folders=data) == "maré"
    assert read_text("file:sea.txt#15:", folders=data) == "maré, 潮"
    assert read_text("file:sea.txt", folders=data) == "Ebbe und Flut, maré, 潮"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("file:sea.txt#0:19", "byte 18"),
        ("file:sea.txt#0:999", "25 bytes"),
        ("file:sea.txt#4:4", "25 bytes"),
        ("file:sea.txt#x:4", "file:NAME"),
        ("file:see.txt", "did you mean 'sea.txt'"),
        ("file:../text/a.toml", "leads out"),
        ("file:/etc/hostname", "leads out"),
        ("file:link.txt", "leads out"),
    ],
)
def test_refused_texts(folder: Path, source: str, words: str) -> None:
    """Would catch a cut character passed on, an empty text, and a file read from outside the cases."""
    (folder / "outside.txt").write_text("secret")
    (folder / "data" / "link.txt").symlink_to(folder / "outside.txt")
    with pytest.raises(InputError) as caught:
        read_text(source, folders=(folder / "data",))
    assert words in str(caught.value)


@given(st.text(min_size=1, max_size=20), st.data())
@settings(max_examples=40, deadline=None)
def test_a_byte_range_is_that_slice_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str, data: st.DataObject
) -> None:
    """Would catch a range that is off by one, or one through a character that is repaired instead of refused."""
    path = tmp_path_factory.mktemp("text") / "t.txt"
    raw = text.encode("utf-8")
    path.write_bytes(raw)
    start = data.draw(st.integers(0, len(raw) - 1))
    stop = data.draw(st.integers(start + 1, len(raw)))
    try:
        expected = raw[start:stop].decode("utf-8")
    except UnicodeDecodeError:
        with pytest.raises(InputError):
            read_text(f"file:t.txt#{start}:{stop}", folders=(path.parent,))
    else:
        assert read_text(f"file:t.txt#{start}:{stop}", folders=(path.parent,)) == expected


def test_images_are_found_inside_packages_without_importing_them(folder: Path) -> None:
    """Would catch a download, and a package name taken as any path."""
    loaded = set(sys.modules)
    assert find_image("package:skimage/chelsea.png", folders=()).name == "chelsea.png"
    assert find_image("package:matplotlib/grace_hopper.jpg", folders=()).is_file()
    assert not {"skimage.data", "matplotlib.image"} & (set(sys.modules) - loaded)
    for source, words in {
        "package:skimage/chelse.png": "did you mean 'chelsea.png'",
        "package:skimage/../__init__.py": "leads out",
        "package:os/path.py": "package:skimage/FILE",
        "chelsea.png": "file:NAME",
    }.items():
        with pytest.raises(InputError) as caught:
            find_image(source, folders=())
        assert words in str(caught.value)


@pytest.mark.parametrize("content", ["text", "half"])
def test_an_image_that_is_none_is_named_with_its_key(folder: Path, content: str) -> None:
    """Would catch a traceback of the image library, a message that does not say which turn, and a photograph cut in
    the middle that reaches the candidate and becomes its fault."""
    photo = find_image("package:skimage/chelsea.png", folders=()).read_bytes()
    (folder / "data" / "fake.png").write_bytes(b"not an image" if content == "text" else photo[: len(photo) // 2])
    bad = MINIMAL.replace('user = "Hello"', 'image = "file:fake.png"').replace("text/a", "image/d")
    write(folder, "image/d", bad)
    with pytest.raises(InputError) as caught:
        load_cases(("image/d",), config=SEEING, model="tiny", root=folder)
    assert "request[0].turns[0]" in str(caught.value)
    assert "not a whole image" in str(caught.value)


# ------------------------------------------------------------------------------------------------- selection


def test_selection_by_prefix_stage_and_path(folder: Path) -> None:
    """Would catch a stage that is ignored, one that hides what was asked for by name, and prefixes by letters."""
    load = lambda *s, **k: ids(load_cases(s, **{"config": SEEING, "model": "tiny", "root": folder} | k))  # noqa: E731
    assert load() == ["image/c", "text/a"]
    assert load(stage="t1") == ["text/b"]
    assert load("text") == ["text/a", "text/b"]
    assert load("text/b") == ["text/b"]
    assert load("text", "image/c", stage="t0") == ["image/c", "text/a"]
    assert load(str(folder / "text/b.toml")) == ["text/b"]
    assert load("text/a", "text") == ["text/a", "text/b"]


def test_selections_of_nothing_are_refused(folder: Path) -> None:
    """Would catch a run that silently does less than was asked: a selector left with no case must not pass."""
    keys = {"config": CONFIG, "model": "tiny", "root": folder}
    with pytest.raises(NothingSelected) as caught:
        load_cases(("text/a", "text/b"), stage="t0", **keys)
    assert "text/b is for stage t1" in str(caught.value)
    with pytest.raises(NothingSelected) as caught:
        load_cases(("image",), **keys)
    assert "no vision" in str(caught.value)
    with pytest.raises(UsageError) as caught:
        load_cases(("texd",), **keys)
    assert "did you mean 'text'" in str(caught.value)
    with pytest.raises(UsageError):
        load_cases(("te",), **keys)
    with pytest.raises(UsageError) as caught:
        load_cases((), stage="t2", **keys)
    assert "t-minus" in str(caught.value)


def test_a_case_for_one_model_or_profile_runs_only_there(folder: Path) -> None:
    """Would catch a case run on a model it was not written for, which could pass without testing anything."""
    own = MINIMAL.replace("\n", '\nmodel = "tiny"\nprofile = "fp32"\n', 1)
    write(folder, "text/a", own)
    keys = {"config": dataclasses.replace(CONFIG, name="big"), "root": folder}
    with pytest.raises(NothingSelected):
        load_cases(("text/a",), model="big", **keys)
    with pytest.raises(NothingSelected):
        load_cases(("text/a",), model="tiny", profile="bf16", **keys)
    assert ids(load_cases(("text/a",), model="tiny", profile="fp32", **keys)) == ["text/a"]


def test_two_files_with_one_id_are_refused(folder: Path) -> None:
    """Would catch a case that hides another one."""
    path = write(folder, "text/again", MINIMAL)
    with pytest.raises(InputError) as caught:
        catalogue(folder)
    assert "text/again.toml" in str(caught.value)
    assert "text/a.toml" in str(caught.value)
    path.rename(folder.parent / "elsewhere.toml")
    with pytest.raises(InputError):
        load_cases(("text/a", str(folder.parent / "elsewhere.toml")), config=CONFIG, model="tiny", root=folder)


def test_the_run_case_holds_what_the_file_says(folder: Path) -> None:
    """Would catch a key that is read and then forgotten."""
    text = (
        'id = "text/full"\nstage = "t1"\ntime_limit_s = 7\n[[request]]\nid = "x"\nmax_new_tokens = 3\narrive_step = 2\n'
        'temperature = 0.5\nseed = 9\nstop_tokens = [4]\nturns = [{ user = ["a", "file:sea.txt#0:4"] }, '
        '{ user = "b" }]\n'
        '[schedule]\nchunk = 5\npage = 16\nmax_batch = 2\nevents = [{ at_step = 1, do = "preempt", request = "x" }]\n'
        '[expect]\nchecks = ["logits"]\n'
    )
    write(folder, "text/full", text)
    (case,) = load_cases(("text/full",), config=CONFIG, model="tiny", root=folder)
    (request,) = case.requests
    assert (case.id, case.stages, case.time_limit_s, case.checks) == ("text/full", ("t1",), 7.0, ("logits",))
    assert request.id == "text/full/x#1"
    assert request.turns[0].tokens == (300, *b"aEbbe")
    assert request.turns[1].tokens == tuple(b"b")
    assert (request.max_new_tokens, request.arrive_step, request.seed, request.stop_tokens) == (3, 2, 9, (4,))
    assert request.temperature == 0.5
    schedule = case.schedule
    assert (schedule.chunk, schedule.page, schedule.max_batch) == (5, 16, 2)
    event = schedule.events[0]
    assert (event.at_step, event.do, event.request) == (1, "preempt", "text/full/x#1")


def test_a_request_longer_than_the_model_is_refused(folder: Path) -> None:
    """Would catch a case that runs past the last position."""
    short = dataclasses.replace(CONFIG, max_positions=5)
    with pytest.raises(InputError) as caught:
        load_cases(("text/a",), config=short, model="tiny", root=folder)
    assert "needs 6 positions" in str(caught.value)


def test_a_model_without_the_chat_tokens_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a traceback of the tokeniser when a model's chat format is another one."""
    monkeypatch.delitem(sys.modules, "reference.tokenizer")
    with pytest.raises(InputError) as caught:
        load_cases(("text/a",), config=CONFIG, model="tiny", root=folder)
    assert "request[0].turns[0]" in str(caught.value)
    assert "token" in str(caught.value)
