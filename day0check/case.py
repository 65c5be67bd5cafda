"""Cases: selected by id, stage and model, their texts and images found, tokenised into `types.RunCase`.

The format of the files is in `case_format.py`. No torch here.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from day0check import types
from day0check.case_format import (
    DEFAULT_STAGE,
    STAGES,
    CaseEntry,
    Located,
    TurnEntry,
    catalogue,
    packaged_root,
    raise_all,
    read_case_file,
    refuse_twins,
)
from day0check.errors import InputError, NothingSelected, UsageError
from reference.config import ModelConfig

__all__ = ["STAGES", "CaseEntry", "Located", "catalogue", "find_image", "load_cases", "read_case_file", "read_text"]

_PACKAGE_FOLDERS = {"skimage": "data", "matplotlib": "mpl-data/sample_data"}


# ----------------------------------------------------------------------------------------------- texts, images


def read_text(source: str, *, folders: tuple[Path, ...]) -> str:
    """The text of one source: inline, or `file:NAME[#START:STOP]` with a half-open range of bytes.

    Raises InputError when the file is not in `folders`, the range is not inside it, or a range cuts a character.
    """
    if not source.startswith("file:"):
        return source
    match = re.fullmatch(r"file:([^#]+)(?:#(\d*):(\d*))?", source)
    if match is None:
        raise InputError("not a file source", where=source, todo="write file:NAME or file:NAME#START:STOP")
    data = _find(match[1], folders).read_bytes()
    start, stop = int(match[2] or 0), int(match[3]) if match[3] else len(data)
    if not start < stop <= len(data):
        raise InputError(f"the file has {len(data)} bytes", where=source, todo="give a range inside it, START < STOP")
    try:
        return data[start:stop].decode("utf-8")
    except UnicodeDecodeError as error:
        at = start + error.start
        todo = "save the text as UTF-8, or move START and STOP to the edge of a character"
        raise InputError(f"byte {at} is inside a character or not UTF-8", where=source, todo=todo) from None


def find_image(source: str, *, folders: tuple[Path, ...]) -> Path:
    """The file of one image source: `file:NAME`, or `package:NAME/FILE` for a sample image inside a Python package.

    Never loads the package and never uses the network. Raises InputError when there is no such file.
    """
    kind, _, name = source.partition(":")
    if kind == "file" and name:
        return _find(name, folders)
    package, _, name = name.partition("/")
    if kind != "package" or package not in _PACKAGE_FOLDERS or not name:
        known = ", ".join(f"package:{p}/FILE" for p in sorted(_PACKAGE_FOLDERS))
        raise InputError("not an image source", where=source, todo=f"write file:NAME or one of {known}")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise InputError(
            f"the package {package} is not installed", where=source, todo="install day0check's dependencies"
        )
    folder = Path(spec.origin).parent / _PACKAGE_FOLDERS[package]
    return _find(name, (folder,))


def _find(name: str, folders: tuple[Path, ...]) -> Path:
    """The first file `name` inside one of `folders`; a path that leads out of them is refused."""
    for folder in folders:
        home, path = folder.resolve(), (folder / name).resolve()
        if Path(name).is_absolute() or not path.is_relative_to(home):
            raise InputError("leads out of the folders of the cases", where=name, todo="give a path inside them")
        if path.is_file():
            return path
    present = sorted(p.name for folder in folders if folder.is_dir() for p in folder.iterdir() if p.is_file())
    near = difflib.get_close_matches(name, present, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "put the file there or correct the name"
    raise InputError(f"no such file in {' or '.join(map(str, folders))}", where=name, todo=hint)


def _image_size(path: Path) -> tuple[int, int]:
    """(width, height) in pixels of an image that decodes to its end: a broken one is no fault of a candidate."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            return image.size
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"not a whole image: {error}", where=str(path), todo="give a PNG or JPEG file") from None


# ------------------------------------------------------------------------------------------ expansion, selection


def to_run_case(located: Located, *, config: ModelConfig, root: Path | None = None) -> types.RunCase:
    """The case tokenised for a model. Raises InputError with every source that cannot be read, and when a request is
    longer than the model's positions."""
    entry, problems = located.entry, []
    folders = (located.file.parent, (root or packaged_root()) / "data")
    requests = []
    for i, request in enumerate(entry.request):
        turns = []
        for j, turn in enumerate(request.turns):
            try:
                turns.append(_to_turn(turn, folders, config, first=j == 0))
            except InputError as error:
                problems.append((f"request[{i}].turns[{j}]", str(error).replace("\n", ";")))
        positions = sum(len(turn.tokens) + request.max_new_tokens for turn in turns)
        if positions > config.max_positions:
            what = f"needs {positions} positions, model {config.name} has {config.max_positions}"
            problems.append((f"request[{i}]", what))
        plain = request.model_dump(exclude={"id", "turns"})
        requests.append(types.Request(id=request_id(entry.id, request.id), turns=tuple(turns), **plain))
    raise_all(located.file, problems)
    events = tuple(types.ScheduleEvent(e.at_step, e.do, request_id(entry.id, e.request)) for e in entry.schedule.events)
    schedule = types.Schedule(**{**entry.schedule.model_dump(), "events": events})
    return types.RunCase(entry.id, tuple(requests), schedule, entry.time_limit_s, entry.expect.checks, entry.stage)


def request_id(case: str, request: str, attempt: int = 1) -> str:
    return f"{case}/{request}#{attempt}"


def _to_turn(turn: TurnEntry, folders: tuple[Path, ...], config: ModelConfig, *, first: bool) -> types.Turn:
    from reference.tokenizer import chat_turn

    images = tuple(find_image(source, folders=folders) for source in turn.image)
    text = "".join(read_text(source, folders=folders) for source in turn.user)
    sizes = tuple(_image_size(path) for path in images)
    try:
        tokens = chat_turn(config, text, sizes, first)
    except ValueError as error:  # the model's chat format or vision does not allow this turn
        raise InputError(str(error), todo="choose another case or model") from None
    return types.Turn(tuple(tokens), tuple(map(str, images)))


def load_cases(
    selectors: tuple[str, ...] = (),
    *,
    config: ModelConfig,
    model: str,
    stage: str | None = None,
    profile: str | None = None,
    root: Path | None = None,
) -> tuple[types.RunCase, ...]:
    """The selected cases, expanded and tokenised: those without a model first, then the shortest first.

    `selectors`: case ids, their leading parts ("text", "text/one_turn") or paths of .toml files; none selects all of
    the stage. `stage`: none means t0 without selectors, any with them. Left out are cases for another stage, model or
    profile, and cases with images when the model has no vision. Raises InputError for a file that does not fit,
    UsageError for a selector or stage that means nothing, NothingSelected when a selector is left with no case.
    """
    if stage is not None and stage not in STAGES:
        raise UsageError(f"no stage {stage!r}", where="--stage", todo=f"choose one of {', '.join(STAGES)}")
    if stage is None and not selectors:
        stage = DEFAULT_STAGE
    library = catalogue(root)
    chosen: dict[str, Located] = {}
    for selector in selectors or ("",):
        matching = _matching(selector, library)
        reasons = {located.entry.id: _left_out(located.entry, config, model, stage, profile) for located in matching}
        kept = [located for located in matching if not reasons[located.entry.id]]
        if not kept:
            raise _nothing(selector, reasons)
        refuse_twins((*chosen.values(), *kept))
        chosen |= {located.entry.id: located for located in kept}
    cases = [to_run_case(located, config=config, root=root) for located in chosen.values()]
    return tuple(sorted(cases, key=_order))


def _order(case: types.RunCase) -> tuple[int, str]:
    turns = [(turn, request) for request in case.requests for turn in request.turns]
    return sum(len(turn.tokens) + request.max_new_tokens for turn, request in turns), case.id


def _matching(selector: str, library: tuple[Located, ...]) -> tuple[Located, ...]:
    if selector.endswith(".toml"):
        return read_case_file(Path(selector))
    wanted = selector.rstrip("/")
    found = tuple(located for located in library if not wanted or _leads_to(wanted, located.entry.id))
    if found:
        return found
    names = {located.entry.id for located in library}
    names |= {name.split("[")[0] for name in names} | {name.split("/")[0] for name in names}
    near = difflib.get_close_matches(wanted, sorted(names), n=1)
    todo = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"no case {selector!r}", where="CASE", todo=f"{todo}`day0check list cases` shows all")


def _leads_to(wanted: str, case_id: str) -> bool:
    return case_id == wanted or case_id.startswith((f"{wanted}/", f"{wanted}["))


def _left_out(entry: CaseEntry, config: ModelConfig, model: str, stage: str | None, profile: str | None) -> str:
    """Why a case is not for this run; empty when it is."""
    if stage is not None and stage not in entry.stage:
        return f"is for stage {', '.join(entry.stage)}"
    if entry.model is not None and entry.model not in (model, config.name):
        return f"is for model {entry.model}"
    if entry.profile is not None and profile is not None and entry.profile != profile:
        return f"is for profile {entry.profile}"
    if entry.needs_vision and config.vision is None:
        return f"has images, and model {config.name} has no vision"
    return ""


def _nothing(selector: str, reasons: Mapping[str, str]) -> NothingSelected:
    shown = "".join(f"\n    {name} {reason}" for name, reason in sorted(reasons.items())[:8])
    what = f"{selector!r} selects no case of this run" if selector else "no case is for this run"
    return NothingSelected(what + shown, where="CASE", todo="choose another case, stage, model or profile")
