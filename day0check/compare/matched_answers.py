"""The matched filter where only answers are seen: logits, or log-probabilities of a few tokens of each.

Nothing inside is known, so nothing is replayed: every replicate makes its own choices, and what a choice that falls
otherwise does to an answer is part of the noise. Such noise is heavy-tailed; an element counts as at most CLIP noises.
A hypothesis changes a parameter wherever the model has it, or in one layer; the oracle's own choices are kept in it.
Legend: N values of all prompts, P prompts, H hypotheses, K replicates. Source: method notes, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from day0check.compare import kept_states
from day0check.compare.matched_guesses import Guess, parameters_of
from day0check.compare.matched_statistics import Projections
from day0check.compare.matched_verdict import measure
from day0check.compare.net_noise import noise_map
from day0check.compare.propagated import REPLAYED, Forward, forwards, rounded, routed, seeded
from day0check.compare.rounding import Rounder, round_blocks
from day0check.contracts.profiles import Profile
from day0check.types import Measure

REPLICATES = 8
CLIP = 4.0  # noises that one value counts at most
BEST = 128  # tokens of a row of logits that are compared: those that the candidate holds most likely
WORTH = 2.0  # spreads of a parameter changed everywhere from which on its layers are asked one by one
MOST_ROWS = 256  # of one prompt


@dataclass(frozen=True)
class Heard:
    """What a black box said to one prompt: after `tokens` were fed, `values` float64 [n, d] are the log-probabilities
    of tokens `ids` int64 [n, d] in `rows` int64 [n] of the logits."""

    tokens: tuple[int, ...]
    rows: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor
    images: tuple[str, ...] = ()

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """The same values of the logits [tokens, vocab] of a pass."""
        here = logits[self.rows.to(logits.device)].double().log_softmax(-1)
        return here.gather(1, self.ids.to(logits.device)).cpu()


def heard_logits(tokens: Sequence[int], rows: Sequence[int], logits: torch.Tensor, images: Sequence[str] = ()) -> Heard:
    """From whole rows of logits [n, vocab] at positions `rows`; rows that are not finite are left out."""
    finite = torch.isfinite(logits).all(-1).nonzero().flatten()[:MOST_ROWS].cpu()
    logprobs = logits.cpu()[finite].double().log_softmax(-1)
    best = logprobs.topk(min(BEST, logprobs.shape[-1]), dim=-1)
    at = torch.tensor(list(rows), dtype=torch.int64)[finite]
    return Heard(tuple(tokens), at, best.indices, best.values, tuple(images))


def heard_logprobs(prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]) -> Heard:
    """From the log-probabilities [n] of the n tokens that were answered to a prompt; those not finite are left out."""
    values = torch.tensor(list(logprobs), dtype=torch.float64)
    finite = torch.isfinite(values).nonzero().flatten()
    rows = torch.arange(len(prompt) - 1, len(prompt) - 1 + len(tokens))
    ids = torch.tensor(list(tokens), dtype=torch.int64)
    return Heard((*prompt, *tokens[:-1]), rows[finite], ids[finite, None], values[finite, None])


def project(
    models: tuple[Forward, Forward],
    profile: Profile,
    heard: Sequence[Heard],
    *,
    device: str = "cpu",
    replicates: int = REPLICATES,
    seed: int = 0,
) -> tuple[Projections, tuple[Guess, ...]]:
    """The candidate's errors beside the change that each hypothesis makes, all parameters everywhere first, then layer
    by layer those that may be in it. `models`: (oracle in float64, expected), as in `compare_case`."""
    prompts = [_Prompt.asked(models, profile, h, (seed, i), device, replicates) for i, h in enumerate(heard)]
    variance = [p.variance for p in prompts]
    found = Projections.of([p.errors for p in prompts], variance, clip=CLIP)
    parameters = parameters_of(models[0], heard[0].tokens, heard[0].images)
    first = tuple(Guess(p, None) for p in parameters)
    found = found.with_changes([p.changes(first) for p in prompts], variance)
    worth = [i for i in range(len(first)) if (t := found.told(found.direction(i))) and t.significance >= WORTH]
    alone = tuple(
        Guess(parameters[i], n) for i in worth for n in parameters[i].layers() if len(parameters[i].layers()) > 1
    )
    if alone:
        found = found.with_changes([p.changes(alone) for p in prompts], variance)
    return found, (*first, *alone)


@dataclass
class _Prompt:
    """The passes of one prompt. `errors` [2 + K, n, d]: candidate, nearest, replicates, all beside the oracle."""

    heard: Heard
    expected: Forward
    choices: dict[str, Any]
    errors: torch.Tensor
    variance: torch.Tensor
    base: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def asked(
        cls,
        models: tuple[Forward, Forward],
        profile: Profile,
        heard: Heard,
        key: tuple[int, int],
        device: str,
        count: int,
    ) -> _Prompt:
        oracle, expected = models
        choices: dict[str, Any] = {}
        exact = heard.of(_pass(oracle, heard, _noting(choices)))
        nearest = heard.of(_pass(expected, heard, _rounding(profile, None)))
        replicates = [
            heard.of(_pass(expected, heard, _rounding(profile, seeded((*key, r), device)))) - exact
            for r in range(count)
        ]
        errors = torch.stack([heard.values.double() - exact, nearest - exact, *replicates])
        prompt = cls(heard, expected, choices, errors, noise_map(errors[2:].square(), exact))
        prompt.base = heard.of(_pass(expected, heard, _keeping(choices, None)))
        return prompt

    def changes(self, asked: Sequence[Guess]) -> torch.Tensor:
        """[H, n, d]: what each guess changes, at the oracle's choices."""
        passes = [_pass(self.expected, self.heard, _keeping(self.choices, h)) for h in asked]
        return torch.stack([self.heard.of(p) - self.base for p in passes])


def _pass(forward: Forward, heard: Heard, call: Callable[..., Any]) -> torch.Tensor:
    with torch.inference_mode():
        return forward(heard.tokens, heard.images, call)


def _tap(place: str, operator: str, site: str) -> str:
    return ".".join(part for part in (place, operator, site) if part)


def _noting(choices: dict[str, Any]) -> Callable[..., Any]:
    def call(place: str, operator: str, function: Callable, *args: Any, site: str = "", **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if operator in REPLAYED:
            choices[_tap(place, operator, site)] = result if operator == "dsa.select" else result[0]
        return result

    return call


def _keeping(choices: dict[str, Any], guess: Guess | None) -> Callable[..., Any]:
    def call(place: str, operator: str, function: Callable, *args: Any, site: str = "", **kwargs: Any) -> Any:
        tap = _tap(place, operator, site)
        if guess is not None and guess.touches(tap):
            kwargs = guess.applied(kwargs)
        if operator in REPLAYED:
            chosen = choices[tap]
            return chosen if operator == "dsa.select" else routed(chosen, *args, **kwargs)
        return function(*args, **kwargs)

    return call


def _rounding(profile: Profile, generator: torch.Generator | None) -> Callable[..., Any]:
    """Rounds at random where the profile rounds, or to nearest without a generator."""

    def call(place: str, operator: str, function: Callable, *args: Any, site: str = "", **kwargs: Any) -> Any:
        if operator == kept_states.OPERATOR and kept_states.claimed(profile):
            function = kept_states.in_calls(function, ())
        if generator is not None:
            return rounded(profile, operator, function, args, kwargs, generator)
        points, block = profile.points_of(operator), profile.inputs.get(operator)
        args = args if block is None else (round_blocks(args[0], block), *args[1:])
        return function(*args, **kwargs, **({"round": Rounder(points)} if points else {}))

    return call


def compare_answers(
    model: Any, profile: Profile, heard: Sequence[Heard], *, device: str = "cpu", order: int = 0, seed: int = 0
) -> list[Measure]:
    """The measure of the parameter that explains most of the error of answers; none where nothing was heard. `model` as
    in `compare_case`."""
    heard = [h for h in heard if len(h.rows)]
    if not heard:
        return []
    models = model if isinstance(model, tuple) else forwards(model, profile, device)
    found, guesses = project(models, profile, heard, device=device, seed=seed)
    told = measure(found, guesses, order=order)
    return [] if told is None else [told]
