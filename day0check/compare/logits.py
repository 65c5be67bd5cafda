"""Logits and next tokens against the oracle under teacher forcing. n rows, V vocabulary, R replicates.

A token that differs from the oracle's is judged by the logit it gave up, in units of the logits' noise: a near-tie
may fall either way, a clear answer may not (method.md, 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MARGIN_LIMIT = 8.0
FLOOR = 4 * 2.0**-24


@dataclass(frozen=True)
class LogitRows:
    """One row a line, [n].

    `margin`: what the candidate's best token gives up in the oracle, in logit noises, 0 where they agree. `kl`:
    divergence of the candidate's distribution from the oracle's in nats; `noise_kl`: that of a replicate.
    """

    agrees: torch.Tensor
    margin: torch.Tensor
    kl: torch.Tensor
    noise_kl: torch.Tensor


def compare_logits(oracle: torch.Tensor, candidate: torch.Tensor, replicates: torch.Tensor) -> LogitRows:
    """`oracle`, `candidate` [n, V], `replicates` [R, n, V]. Non-finite candidate rows agree nowhere."""
    oracle, candidate = oracle.double(), candidate.double()
    finite = torch.isfinite(candidate).all(-1)
    best = oracle.argmax(-1)
    theirs = candidate.nan_to_num(nan=-torch.inf).argmax(-1)
    given_up = given_up_logits(oracle, theirs) / logit_noise(oracle, replicates)
    noise_kl = torch.stack([_divergence(oracle, r.double()) for r in replicates]).mean(0)
    return LogitRows(
        agrees=(best == theirs) & finite,
        margin=torch.where(finite, given_up, torch.inf),
        kl=torch.where(finite, _divergence(oracle, candidate), torch.inf),
        noise_kl=noise_kl,
    )


def given_up_logits(oracle: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[n]: the oracle's largest logit minus that of `tokens` [n]; infinite for a token outside the vocabulary."""
    inside = (tokens >= 0) & (tokens < oracle.shape[-1])
    value = oracle.gather(1, torch.where(inside, tokens, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(inside, oracle.amax(-1) - value, torch.inf)


def logit_noise(oracle: torch.Tensor, replicates: torch.Tensor) -> torch.Tensor:
    """[n]: root mean square error of the replicates' logits, half the row's and half that of all, at least float32's."""
    rows = (replicates.double() - oracle).square().mean((0, 2))
    floor = (FLOOR * oracle.abs().amax(-1)).square().clamp(min=torch.finfo(torch.float32).tiny)
    return ((rows + rows.mean()) / 2 + floor).sqrt()


def _divergence(oracle: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    log_p, log_q = oracle.log_softmax(-1), other.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)
