"""The reference beside transformers' own classes: tiny random models that upstream saves and we read, and the reverse.

`reference_errors()` measures every family in every mode and gives the rows of the table in the README.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from upstream_configs import FAMILIES, upstream_model

from reference.generate import generate
from reference.image_grid import image_grid
from reference.layers import just_call
from reference.model import Model
from reference.vision import preprocess, preprocess_in_budget
from reference.vision_tower import of_patches
from reference.weights import Checkpoint

UPSTREAM_VERSION = "5.24.0"
ROWS, PREFILL, NEW = 40, 24, 6
SMALLEST_MARGIN = 1e-4  # a closer selection may fall either way in float32
BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}


class Widened(TorchFunctionMode):
    """Turns every float32 that upstream's code asks for into float64: its fixed float32 norms, softmaxes, routers and
    states then show their formula and not their precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return func(*(_widened(value) for value in args), **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def precision(dtype: torch.dtype) -> contextlib.AbstractContextManager:
    return Widened() if dtype == torch.float64 else contextlib.nullcontext()


# --------------------------------------------------------------------------------------------------- random weights


def randomise(model: Any, seed: int) -> None:
    """Seeded weights with every part awake: norms around one, biases, decays from weak to strong, spread scores."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: torch.Size, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):  # what is computed, as frequencies, is not in it
            tensor.copy_(_values(name, tensor.shape, normal))
        pad = getattr(model.config, "image_token_id", None)
        if pad is not None:
            # Never answered: upstream's Kimi K2.5 embeds a media pad that the model itself writes as token 0, we as
            # the pad, and no release says which.
            model.get_output_embeddings().weight[pad] = 0


def _values(name: str, shape: torch.Size, normal: Callable[[torch.Size, float], torch.Tensor]) -> torch.Tensor:
    if name.endswith("A_log"):
        return normal(shape, 0.4)
    if name.endswith("dt_bias"):
        return normal(shape, 1.0) - 2
    if name.endswith("correction_bias"):
        return normal(shape, 0.1)
    if name.endswith("compress_ape"):
        return normal(shape, 0.7)
    if "conv1d" in name:
        return normal(shape, 0.6)
    if name.endswith((".scale", "hc_scale")) or ("norm" in name and name.endswith("weight")):
        return 1 + normal(shape, 0.2)
    if len(shape) == 1:
        return normal(shape, 0.3)
    if name.endswith(".fn"):  # milder mixing of streams: it multiplies upstream's own float32 noise from layer to layer
        return normal(shape, 0.3 / math.sqrt(shape[-1]))
    if "embed_tokens" in name or "pos_emb" in name:
        return normal(shape, 1.0)
    # Image features larger than embeddings: small ones magnify the float32 noise of what is added to them.
    gain = 20.0 if name.endswith(("merger.down_proj.weight", "mm_projector.out_proj.weight")) else 1.0
    fan_in = math.prod(shape[1:]) if len(shape) > 3 else shape[-1]
    return normal(shape, gain / math.sqrt(fan_in))


# ------------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Pair:
    """The same weights on both sides."""

    upstream: Any
    ours: Model
    checkpoint: Checkpoint
    dtype: torch.dtype


@dataclass(frozen=True)
class Outcome:
    """Relative error of all logits; `margin` of the closest selection; `same_tokens` None where none are made."""

    error: float
    margin: float
    same_tokens: bool | None = None

    def counts(self, dtype: torch.dtype) -> bool:
        """Whether precision cannot have decided a selection; in float64 it never does."""
        return dtype == torch.float64 or self.margin >= SMALLEST_MARGIN


def saved_by_upstream(family: str, directory: Path, *, seed: int, dtype: torch.dtype) -> Pair:
    """A random upstream model, saved by transformers and read here."""
    model = upstream_model(family)
    randomise(model, seed)
    model.save_pretrained(directory)
    if hasattr(model.model, "visual"):
        glm_processor(min_tokens=2, max_tokens=8).save_pretrained(directory)
    return _pair(model, directory, dtype)


def written_here(family: str, directory: Path, *, dtype: torch.dtype) -> Pair:
    """A directory of ours, loaded by transformers. Raises AssertionError when names are left over on either side, but
    for those of a draft layer, which upstream leaves out by the number that its release has (`test_drafts`)."""
    _, model_class = FAMILIES[family]
    model, info = model_class().from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    draft = f"model.layers.{len(Checkpoint(directory).config.layers)}."
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        left = {name for name in info[what] if not str(name).startswith(draft)}
        assert not left, (what, left)
    return _pair(model, directory, dtype)


def _pair(model: Any, directory: Path, dtype: torch.dtype) -> Pair:
    model.set_experts_implementation("eager")
    model = model.to(dtype).eval()
    checkpoint = Checkpoint(directory)
    return Pair(model, Model(checkpoint, dtype=torch.float64), checkpoint, dtype)


def token_ids(seed: int, *, high: int = 120, rows: int = ROWS) -> torch.Tensor:
    return torch.randint(3, high, (rows,), generator=torch.Generator().manual_seed(1000 + seed))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected|| over all rows together."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@dataclass(frozen=True)
class Prompt:
    """Token ids with every media pad in place; images for us, and what upstream takes for them."""

    ids: torch.Tensor
    images: tuple[torch.Tensor, ...] = ()
    upstream: dict[str, Any] = field(default_factory=dict)


def text_prompt(pair: Pair, seed: int) -> Prompt:
    return Prompt(token_ids(seed))


class Margins:
    """A `call` of the reference that remembers how closely any selection was decided."""

    def __init__(self) -> None:
        self.smallest = math.inf

    def __call__(self, place: str, operator: str, function: Any, *args: Any, site: str = "", **kwargs: Any) -> Any:
        if operator == "dsa.select":
            column = torch.arange(args[0].shape[1])
            self._gap(args[0].masked_fill(column >= kwargs["visible"][:, None], -math.inf), kwargs["k"])
        if operator == "moe.route":
            self._route(args[0] if kwargs["bias"] is None else args[0] + kwargs["bias"], **kwargs)
        return just_call(place, operator, function, *args, site=site, **kwargs)

    def _route(self, biased: torch.Tensor, *, k: int, groups: int, kept_groups: int, **_: Any) -> None:
        if groups > 1:
            members = biased.unflatten(1, (groups, -1))
            worth = members.topk(2, dim=-1).values.sum(-1)
            self._gap(worth, kept_groups)
            cut = worth.topk(kept_groups, dim=-1).values[:, -1:]
            biased = members.masked_fill((worth < cut)[..., None], -math.inf).flatten(1)
        self._gap(biased, k)

    def _gap(self, scores: torch.Tensor, k: int) -> None:
        if scores.shape[1] <= k:
            return
        best = scores.topk(k + 1, dim=-1).values
        gap = (best[:, k - 1] - best[:, k])[torch.isfinite(best[:, k])]
        self.smallest = min([self.smallest, *gap.tolist()])


@torch.no_grad()
def prefill(pair: Pair, prompt: Prompt) -> Outcome:
    """All logits of one causal pass."""
    margins = Margins()
    with precision(pair.dtype):
        expected = pair.upstream(prompt.ids[None], **prompt.upstream).logits[0]
    found = pair.ours.forward(prompt.ids, images=prompt.images, call=margins)
    return Outcome(relative_error(found, expected), margins.smallest)


@torch.no_grad()
def decode(pair: Pair, prompt: Prompt) -> Outcome:
    """Cached logits: a prefill, then every further token by itself, on both sides."""
    margins, state, ids = Margins(), pair.ours.start(), prompt.ids
    found = [pair.ours.extend(state, ids[:PREFILL], images=prompt.images, call=margins)]
    found += [pair.ours.extend(state, ids[n : n + 1], call=margins) for n in range(PREFILL, len(ids))]
    with precision(pair.dtype):
        out = pair.upstream(ids[None, :PREFILL], use_cache=True, **prompt.upstream)
        expected = [out.logits[0]]
        for n in range(PREFILL, len(ids)):
            out = pair.upstream(ids[None, n : n + 1], use_cache=True, cache=out.cache)
            expected.append(out.logits[0])
    return Outcome(relative_error(torch.cat(found), torch.cat(expected)), margins.smallest)


@torch.no_grad()
def generation(pair: Pair, prompt: Prompt) -> Outcome:
    """Greedy answers of both sides, and the error of our logits beside upstream's scores."""
    margins = Margins()
    with precision(pair.dtype):
        answer = pair.upstream.generate(
            prompt.ids[None],
            attention_mask=torch.ones_like(prompt.ids)[None],
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            **prompt.upstream,
        )
    turn = SimpleNamespace(tokens=prompt.ids.tolist(), images=prompt.images)
    request = SimpleNamespace(turns=[turn], max_new_tokens=NEW, stop_tokens=(), temperature=0.0, seed=0, forced=())
    own = generate(pair.ours, request, call=margins)
    best = own.logits.topk(2, dim=-1).values
    margin = min(margins.smallest, float((best[:, 0] - best[:, 1]).min()))
    error = relative_error(own.logits, torch.cat(list(answer.logits)))
    return Outcome(error, margin, list(own.tokens) == answer.sequences[0].tolist())


# ----------------------------------------------------------------------------------------------------------- images


def image_prompt(pair: Pair, seed: int) -> Prompt:
    """Two drawn images of different shapes between drawn tokens, 40 in all."""
    generator = torch.Generator().manual_seed(2000 + seed)
    images = tuple(torch.randint(0, 256, (h, w, 3), generator=generator).byte() for h, w in ((50, 80), (120, 40)))
    vision = pair.checkpoint.config.vision
    tokens = [image_grid(image.shape[1], image.shape[0], vision).tokens for image in images]
    text, pad = token_ids(seed).tolist(), pair.checkpoint.config.tokens.media_pad
    ids = [*text[:3], *[pad] * tokens[0], *text[3:6], *[pad] * tokens[1], *text[6:8]]
    ids += text[8 : 8 + ROWS - len(ids)]
    assert sum(tokens) < PREFILL - 6, "the images must lie in the prefill"
    pixels, grids = (glm_pixels if vision.kind == "glm" else moonvit_pixels)(images, vision)
    return Prompt(torch.tensor(ids), images, {"pixel_values": pixels.to(pair.dtype), "image_grid_thw": grids})


def glm_processor(*, min_tokens: int, max_tokens: int) -> Any:
    from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil

    return Glm5NextImageProcessorPil(min_image_tokens=min_tokens, max_image_tokens=max_tokens)


def glm_pixels(images: tuple[torch.Tensor, ...], vision: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Our float64 pixels as upstream lays them out, by merge group and with every frame: its own are float32."""
    budget = {"min_tokens": vision.min_tokens, "max_tokens": vision.max_tokens}
    shape = {"patch": vision.patch, "merge": vision.merge, "mean": vision.image_mean, "std": vision.image_std}
    parts, grids = zip(*(preprocess_in_budget(i, **shape, **budget) for i in images), strict=True)
    m, laid = vision.merge, []
    for part, (_, h, w) in zip(parts, (grid.tolist() for grid in grids), strict=True):
        by_group = part.reshape(h // m, m, w // m, m, 3, -1).transpose(1, 2).flatten(0, 3)
        laid.append(by_group[:, :, None].expand(-1, -1, vision.frames, -1).flatten(1))
    return torch.cat(laid), torch.stack(grids)


def moonvit_pixels(images: tuple[torch.Tensor, ...], vision: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Our pixels: upstream's processor needs torchvision."""
    limits = {"patch_limit": vision.patch_limit, "side_limit": vision.side_limit}
    shape = {"patch": vision.patch, "merge": vision.merge, "mean": vision.image_mean, "std": vision.image_std}
    parts, grids = zip(*(preprocess(i, **shape, **limits) for i in images), strict=True)
    return torch.cat(parts).unflatten(-1, (3, vision.patch, vision.patch)), torch.stack(grids)


RUNS: dict[str, Callable[[Pair, Prompt], Outcome]] = {"prefill": prefill, "decode": decode, "generate": generation}


def prompts(pair: Pair, seed: int) -> dict[str, Prompt]:
    """What a pair is asked: text, and text with images when it has a tower."""
    own = {"text": text_prompt(pair, seed)}
    return own if pair.checkpoint.config.vision is None else own | {"image": image_prompt(pair, seed)}


def outcomes(pair: Pair, seed: int) -> Iterator[tuple[str, Outcome]]:
    """(mode, Outcome) of every kind of prompt x run, e.g. "image decode"."""
    for kind, prompt in prompts(pair, seed).items():
        for name, run in RUNS.items():
            yield f"{kind} {name}", run(pair, prompt)


# ------------------------------------------------------------------------------------------------------------ table


@dataclass(frozen=True)
class Row:
    """One line of the table: the largest error over the seeds that were decided, and how many were not."""

    family: str
    mode: str
    dtype: str
    error: float
    bound: float
    seeds: int
    skipped: int


def reference_errors(families: tuple[str, ...] = (), seeds: Iterable[int] = range(6)) -> Iterator[Row]:
    """Every family (or those named) x mode x precision, measured now."""
    for family in families or tuple(FAMILIES):
        for dtype, bound in BOUNDS.items():
            found: dict[str, list[Outcome]] = {}
            for seed in seeds:
                with tempfile.TemporaryDirectory() as directory:
                    pair = saved_by_upstream(family, Path(directory), seed=seed, dtype=dtype)
                    for mode, outcome in outcomes(pair, seed):
                        found.setdefault(mode, []).append(outcome)
            for mode, own in found.items():
                kept = [o for o in own if o.counts(dtype)]
                worst = max((o.error for o in kept), default=math.nan)
                name = str(dtype).removeprefix("torch.")
                yield Row(family, mode, name, worst, bound, len(kept), len(own) - len(kept))


CLIPS = ((2, 4, 6), (1, 4, 4), (3, 2, 8), (4, 8, 8), (1, 8, 8))  # the table has 8 x 8 places and 4 frames


def clip_features(pair: Pair, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of drawn patches on both sides: upstream takes patches [P, 3, 14, 14] and a grid for each clip. Its
    temporal table was made before anything was widened, so it is made anew."""
    for module in (m for m in pair.upstream.modules() if hasattr(m, "compute_pos_embed")):
        with precision(pair.dtype):
            module.time_position_embeddings = module.compute_pos_embed()
    count = sum(t * h * w for t, h, w in CLIPS)
    patches = torch.randn(count, 3, 14, 14, generator=torch.Generator().manual_seed(seed)).to(pair.dtype)
    with torch.no_grad(), precision(pair.dtype):
        found = pair.upstream.get_image_features(patches, torch.tensor(CLIPS)).pooler_output
    expected = torch.cat(list(found)) if isinstance(found, (list, tuple)) else found
    top = pair.ours._here("vision", "", just_call)
    return of_patches(top, patches.double().flatten(1), grids=CLIPS), expected


def clip_errors() -> Iterator[Row]:
    """The rows of clips: the tower of Kimi K2.5 on patches of several frames."""
    for dtype, bound in BOUNDS.items():
        with tempfile.TemporaryDirectory() as directory:
            pair = saved_by_upstream("kimi-k2.5", Path(directory), seed=0, dtype=dtype)
            errors = [relative_error(*clip_features(pair, seed=seed)) for seed in range(3)]
        yield Row("kimi-k2.5", "tower, clips", str(dtype).removeprefix("torch."), max(errors), bound, len(errors), 0)


def draft_errors() -> Iterator[Row]:
    """The rows of draft layers."""
    from drafting import CONFIGS, Drafting, outcome

    for family in CONFIGS:
        for dtype, bound in BOUNDS.items():
            with tempfile.TemporaryDirectory() as directory:
                drafting = Drafting(family, Path(directory), dtype)
                found = [outcome(drafting, seed) for seed in range(3)]
            kept = [o for o in found if o.counts(dtype)]
            worst = max((o.error for o in kept), default=math.nan)
            name = str(dtype).removeprefix("torch.")
            yield Row(family, "draft layer", name, worst, bound, len(kept), len(found) - len(kept))


def expert_layer_errors() -> Iterator[Row]:
    """The rows of gpt-oss, of which the expert layer alone is here."""
    from gpt_oss_layers import layer_error, write_packed_model

    with tempfile.TemporaryDirectory() as directory:
        folder = write_packed_model(Path(directory))
        for dtype, bound in BOUNDS.items():
            error = layer_error(folder, dtype)
            yield Row("gpt-oss", "expert layer", str(dtype).removeprefix("torch."), error, bound, 1, 0)


def markdown(rows: Iterable[Row]) -> str:
    """The table of the README. Errors are the largest over the seeds; the skipped seeds were decided too closely."""
    lines = [
        "| family | mode | upstream in | relative error | bound | seeds | skipped |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.family} | {r.mode} | {r.dtype} | {r.error:.1e} | {r.bound:.0e} | {r.seeds} | {r.skipped} |" for r in rows
    ]
    return "\n".join(lines)


# -------------------------------------------------------------------------------------- what the tests of a family ask


def assert_reads_what_upstream_saved(family: str, directory: Path, *, dtype: torch.dtype) -> None:
    """Every mode on directories that transformers saved, two seeds; no key and no tensor is left over."""
    decided = 0
    for seed in (0, 1):
        pair = saved_by_upstream(family, directory / str(seed), seed=seed, dtype=dtype)
        assert (pair.checkpoint.unknown_keys, pair.checkpoint.unexpected) == ((), ())
        for mode, outcome in outcomes(pair, seed):
            if not outcome.counts(dtype):
                continue
            decided += 1
            assert outcome.error <= BOUNDS[dtype], (mode, seed, outcome)
            assert outcome.same_tokens in (None, True), (mode, seed)
    assert decided >= 3, "too few seeds were decided by a clear margin: choose others"


def assert_upstream_reads_what_we_write(family: str, directory: Path) -> None:
    """Every mode on a directory of ours that transformers loads, in float64. What is rotated meets the float32 bound:
    upstream raises theta to its powers in float32, and its frequencies need not be the nearest ones."""
    pair = written_here(family, directory, dtype=torch.float64)
    rotated = {"text": pair.checkpoint.config.rope.layout != "none"}
    rotated["image"] = True
    decided = 0
    for seed in (0, 1, 2):
        for mode, outcome in outcomes(pair, seed):
            dtype = torch.float32 if rotated[mode.split()[0]] else torch.float64
            if not outcome.counts(dtype):
                continue
            decided += 1
            assert outcome.error <= BOUNDS[dtype], (mode, seed, outcome)
            assert outcome.same_tokens in (None, True), (mode, seed)
    assert decided >= 3, "too few sequences were decided by a clear margin: choose others"


def error_of_other_reading(pair: Pair, change: Callable[[Any], Any], *, kind: str = "text", seed: int = 0) -> float:
    """The error of a prefill when our configuration is read differently: `change` takes and gives a ModelConfig."""
    prompt = prompts(pair, seed)[kind]
    other = Model(pair.checkpoint, dtype=torch.float64)
    other.config = change(other.config)
    return prefill(replace(pair, ours=other), prompt).error
