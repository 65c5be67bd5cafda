"""Profiles: which dtype each rounding point of each operator rounds to under the precision that a candidate claims.

Torch-free. A point that a profile does not list is not rounded; a candidate that rounds at fewer points than its
profile lists is legal (it lies closer to the oracle).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from day0check.contracts import CONTRACTS
from day0check.contracts.contract import Contract, Result
from day0check.errors import UsageError


@dataclass(frozen=True)
class Profile:
    """A claimed precision.

    `act_dtype`: what "act" means in a contract, by torch's dtype name. `points[operator][point]`: dtype name of the
    rounding there; operators that round nowhere are absent. `forms[operator]`: the legal form that the points follow.
    `base`: the built-in profile that it is or comes from, by which a backend knows what to load.
    `inputs[operator]`: the block format (`compare/rounding.py:BLOCK_FORMATS`) to which its first argument may be
    quantised, inside the operator or before it by `quantise.rows`. `parts[operator]`: into how many pieces a linear
    splits its sums, each rounded at PARTIALS. `chunks[operator]`: the rows that it computes at once, whatever the
    call says. `resample[operator]`: the rule by which any implementation may resize an image, rounding levels at
    RESAMPLED.
    """

    name: str
    act_dtype: str
    points: Mapping[str, Mapping[str, str]]
    forms: Mapping[str, str]
    base: str = ""
    inputs: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    parts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    chunks: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    resample: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def points_of(self, operator: str) -> Mapping[str, str]:
        """Rounding points of an operator under this profile, empty when it rounds nowhere."""
        return self.points.get(operator, {})

    def inner_points(self, operator: str) -> tuple[str, ...]:
        """The points before the results: those whose noise needs replicates."""
        own = CONTRACTS[operator].result_points() if operator in CONTRACTS else ("out",)
        return tuple(p for p in self.points_of(operator) if p not in own)

    def rounding_of(self, operator: str, result: Result) -> str | None:
        """The dtype name to which a result is rounded, None where it keeps the precision of float32 sums."""
        if result.point != "out":
            return self.points_of(operator).get(result.point)
        dtype = self.dtype_of(result.dtype)
        return None if dtype == "float32" else dtype

    def dtype_of(self, contract_dtype: str) -> str:
        """The dtype name behind a contract's dtype."""
        return self.act_dtype if contract_dtype == "act" else contract_dtype


# The forms of the fast path: as few roundings as an operator can have. Operators without forms have all their points.
FUSED_FORMS: dict[str, str] = {
    "norm.rms": "fused",
    "residual.mix": "float32_p",
    "mlp.dense": "fused",
    "moe.experts": "fused",
    "moe.shared": "fused",
    "mla.attention": "flash",
    "mla.partial": "flash",
    "gqa.attention": "flash",
    "dsa.attention": "flash",
    "vision.attention": "flash",
    "vision.mlp": "fused",
    "vision.gated_mlp": "fused",
    "kda.conv": "fused",
    "rope.apply": "float32_table",
    "kda.attention": "chunked",
    "comm.all_reduce": "float32",
    "comm.reduce_scatter": "float32",
}

EAGER_FORMS: dict[str, str] = {
    "norm.rms": "cast_first",
    "residual.mix": "rounded_p",
    "mlp.dense": "eager",
    "moe.experts": "eager",
    "moe.shared": "eager",
    "mla.attention": "eager",
    "mla.partial": "eager",
    "gqa.attention": "eager",
    "dsa.attention": "eager",
    "vision.attention": "eager",
    "vision.mlp": "eager",
    "vision.gated_mlp": "eager",
    "kda.conv": "eager",
    "rope.apply": "rounded_table",
    "kda.attention": "chunked_bf16",
    "comm.all_reduce": "running",
    "comm.reduce_scatter": "running",
}


# A statistic of a measure, per tighter form that was tried on its results: 0 where they fit it, 1 where they do not.
MISFIT = "misfit_"
NARROWED = "narrowed"  # one of a write into memory of states that is narrower than they are
LOOSER = "looser_"  # one of a measure that fails and fits this looser form
RESAMPLED = {
    "pass": "uint8",
    "level": "uint8",
}  # points of a resampler, between the axes and at the end; a file claims it
RESAMPLERS = ("bicubic-antialias",)  # rules that have more than one implementation
PARTIALS = "partials"  # the point of a split sum, which only a file claims
QUANTISED = "fp8-activations"
# what quantised rows, quantised rows between two matrices (a file claims them), and others are called where forms are
FP8_FORM, FP8_INNER, PLAIN_ROWS = "fp8_rows", "fp8_h", "plain_rows"
FP8_BLOCKS = "float8_e4m3fn/128"  # E4M3 with a scale per row and 128 columns
ROW_FORMATS = (FP8_BLOCKS, f"{FP8_BLOCKS}/powers_of_two")
# What runs in FP8 there, as in DeepSeek-V3: the linears of decoder layers and the first matrices of their MLPs and
# experts. Router, index head weights and index keys, attention, what lies inside fused operators and the head stay.
FP8_INPUTS = (
    "mla.query",
    "mla.latent",
    "mla.expand",
    "mla.gate",
    "dsa.index_query",
    "kda.project",
    "mlp.dense",
    "moe.down",
    "moe.up",
    "moe.shared",
    "moe.experts",
)


CACHED = "fp8-cache"
# What an FP8 cache keeps as codes: latents (not their rope part) and index keys with scales per 128 of them, and latent
# rows with one calibrated scale, whose codes are at least as coarse.
FP8_CACHES = ("kv.record", "index.record", "kv.quantise")


STATES = "bf16-states"  # KDA states kept in bfloat16 between calls, float32 inside them


def quantiser_profile(site: str) -> tuple[str, str]:
    """(the operator whose input a quantiser at this site makes, the built-in profile that claims it)."""
    operator = ".".join(site.split(".")[:2])
    return operator, CACHED if operator in FP8_CACHES else QUANTISED


def _form_points(contract: Contract, form: str | None) -> tuple[str, ...]:
    if form is None:
        return contract.points
    for candidate in contract.forms:
        if candidate.name == form:
            return candidate.points
    raise ValueError(f"{contract.name} has no form {form!r}")


def make_profile(name: str, act_dtype: str, forms: Mapping[str, str]) -> Profile:
    """A profile that rounds the points of the given forms to `act_dtype`.

    Float32 results are sums only: "out" is not a rounding point of an operator all of whose results are float32. In a
    float32 profile nothing is rounded on purpose, so an operator is judged by the noise of float32 sums alone, unless
    its contract fixes a narrower result: the values of an FP8 cache's records are bfloat16 whatever is claimed.
    """
    points: dict[str, Mapping[str, str]] = {}
    for contract in CONTRACTS.values():
        if own := _rounded(contract, forms.get(contract.name), act_dtype):
            points[contract.name] = MappingProxyType(own)
    return Profile(name, act_dtype, MappingProxyType(points), MappingProxyType(dict(forms)), base=name)


def _rounded(contract: Contract, form: str | None, act_dtype: str) -> dict[str, str]:
    """The dtype of each rounding point of a form: that of the activations, for a result of a fixed type its own."""
    listed = _form_points(contract, form)
    own = {} if act_dtype == "float32" else {point: act_dtype for point in listed if point != "out"}
    results = {result.dtype for result in contract.results if result.point == "out"}
    if "bfloat16" in results:
        own["out"] = "bfloat16"
    elif "act" in results and "out" in listed and act_dtype != "float32":
        own["out"] = act_dtype
    return own


def with_form(profile: Profile, contract: Contract, form: str) -> Profile:
    """The profile with another legal form of one operator. Raises ValueError for a form that the contract has not."""
    own = _rounded(contract, form, profile.act_dtype)
    points = dict(profile.points)
    points.pop(contract.name, None)
    if own:
        points[contract.name] = MappingProxyType(own)
    forms = MappingProxyType({**profile.forms, contract.name: form})
    return replace(profile, points=MappingProxyType(points), forms=forms)


def other_forms(profile: Profile, contract: Contract, *, looser: bool) -> tuple[tuple[str, Profile], ...]:
    """(what to call it, profile) for each form of the contract that rounds at more points than the profile, or at
    fewer; the tightest first. "kda.attention" of another chunk size is no form of its own. Quantised rows are one."""
    now = set(profile.points_of(contract.name))
    found = []
    for form in contract.forms:
        other = with_form(profile, contract, form.name)
        points = set(other.points_of(contract.name))
        if (points > now) if looser else (points < now):
            found.append((len(points), form.name, other))
    found.sort(key=lambda f: f[0])
    rows = _other_rows(profile, contract.name, looser=looser)
    return (*((name, other) for _, name, other in found), *rows)


def _other_rows(profile: Profile, operator: str, *, looser: bool) -> tuple[tuple[str, Profile], ...]:
    """The same with the rows that go into an operator quantised, or those between its two matrices, or not."""
    inputs = dict(profile.inputs)
    if looser and operator in FP8_INPUTS and operator not in inputs and profile.act_dtype == "bfloat16":
        return ((FP8_FORM, replace(profile, inputs=MappingProxyType(inputs | {operator: FP8_BLOCKS}))),)
    if looser and operator in inputs and profile.points_of(operator).get("h") == profile.act_dtype:
        own = MappingProxyType({**profile.points_of(operator), "h": FP8_BLOCKS})
        return ((FP8_INNER, replace(profile, points=MappingProxyType({**profile.points, operator: own}))),)
    if not looser and inputs.pop(operator, None) is not None:
        return ((PLAIN_ROWS, replace(profile, inputs=MappingProxyType(inputs))),)
    return ()


def profile_with_form(profile: Profile, operator: str, form: str) -> str:
    """The name of the built-in profile of the same activation type in which an operator has that form, "" for none."""
    if form == FP8_FORM:
        return QUANTISED
    for other in PROFILES.values():
        if other.act_dtype == profile.act_dtype and other.forms.get(operator) == form and not other.inputs:
            return other.name
    return ""


def fitting_profile(claimed: Profile, fits: Mapping[str, str]) -> Profile | None:
    """The built-in profile (or the claimed one) of the claimed activation type with the fewest roundings that holds the
    forms found; None where none holds them.

    `fits[operator]`: the form that its results fit, "" for the claimed one.
    """
    own = claimed
    if FP8_INNER in fits.values():
        return None
    for operator, form in fits.items():
        if form in (PLAIN_ROWS, FP8_FORM):
            inputs = {k: v for k, v in own.inputs.items() if k != operator}
            inputs |= {operator: FP8_BLOCKS} if form == FP8_FORM else {}
            own = replace(own, inputs=MappingProxyType(inputs))
        elif form:
            own = with_form(own, CONTRACTS[operator], form)
    known = {p.name: p for p in (claimed, *PROFILES.values()) if p.act_dtype == claimed.act_dtype}
    return min((p for p in known.values() if _holds(p, own, fits)), key=_roundings, default=None)


def _holds(wide: Profile, narrow: Profile, operators: Mapping[str, str]) -> bool:
    """Whether `wide` allows what `narrow` rounds in these operators; caches, which no operator's form tells, always."""
    needed = [name for name in narrow.inputs if name in operators or name not in FP8_INPUTS]
    return all(name in wide.inputs for name in needed) and all(
        set(narrow.points_of(name)) <= set(wide.points_of(name)) for name in operators
    )


def _roundings(profile: Profile) -> int:
    return sum(len(points) for points in profile.points.values()) + len(profile.inputs)


PROFILES: dict[str, Profile] = {
    "bf16": make_profile("bf16", "bfloat16", FUSED_FORMS),
    "eager-bf16": make_profile("eager-bf16", "bfloat16", EAGER_FORMS),
    QUANTISED: replace(
        make_profile(QUANTISED, "bfloat16", FUSED_FORMS),
        inputs=MappingProxyType(dict.fromkeys(FP8_INPUTS, FP8_BLOCKS)),
    ),
    CACHED: replace(
        make_profile(CACHED, "bfloat16", FUSED_FORMS), inputs=MappingProxyType(dict.fromkeys(FP8_CACHES, FP8_BLOCKS))
    ),
    STATES: make_profile(STATES, "bfloat16", {**FUSED_FORMS, "kda.attention": "kept_bf16"}),
    "fp32": make_profile("fp32", "float32", FUSED_FORMS),
}


def profile_named(name: str) -> Profile:
    """The built-in profile of that name, or the one in a file `*.toml`. Raises UsageError that lists what there is, and
    InputError for a file that is no profile."""
    if name.endswith(".toml"):
        from day0check.contracts.profile_files import read_profile

        return read_profile(Path(name))
    if name not in PROFILES:
        todo = f"known: {', '.join(PROFILES)}, or a file *.toml"
        raise UsageError(f"there is no profile {name!r}", where="--profile", todo=todo)
    return PROFILES[name]


def fitting_form(claimed: str, statistics: Mapping[str, float]) -> str:
    """The tightest form that an operator's results fit; the claimed one where no tighter fits.

    `statistics`: the worst of all its judgements, in the order in which forms were tried, the tightest first.
    """
    tried = (key.removeprefix(MISFIT) for key, value in statistics.items() if key.startswith(MISFIT) and value == 0)
    return next(tried, claimed)
