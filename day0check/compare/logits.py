"""Logits and next tokens against the oracle under teacher forcing. n rows, V vocabulary, R replicates.

A token that differs from the oracle's is judged by the logit it gave up, in units of the logits' noise: a near-tie
may fall either way, a clear answer may not (method.md, 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from day0check.compare.net_noise import noise_map

MARGIN_LIMIT = 8.0


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
    given_up = given_up_noises(oracle, theirs, replicates)
    noise_kl = torch.stack([_divergence(oracle, r.double()) for r in replicates]).mean(0)
    return LogitRows(
        agrees=(best == theirs) & finite,
        margin=torch.where(finite, given_up, torch.inf),
        kl=torch.where(finite, _divergence(oracle, candidate), torch.inf),
        noise_kl=noise_kl,
    )


def given_up_noises(oracle: torch.Tensor, tokens: torch.Tensor, replicates: torch.Tensor) -> torch.Tensor:
    """[n]: the oracle's largest logit minus that of `tokens` [n], in noises of that difference; 0 where they are one.

    The noise is the larger of the noise map's at the two tokens and of what the replicates' own difference shows.
    Infinite for a token outside the vocabulary.
    """
    inside = (tokens >= 0) & (tokens < oracle.shape[-1])
    pair = torch.stack([oracle.argmax(-1), torch.where(inside, tokens, 0)], -1)
    given_up = oracle.amax(-1) - oracle.gather(1, pair[:, 1:]).squeeze(-1)
    errors = replicates.double() - oracle
    variance = noise_map(errors.square(), oracle).gather(1, pair).sum(-1)
    both = torch.stack([e.gather(1, pair) for e in errors])
    direct = (both[..., 0] - both[..., 1]).square().mean(0)
    noises = given_up / torch.maximum(variance, direct).clamp(min=torch.finfo(torch.float32).tiny).sqrt()
    return torch.where(inside, noises, torch.inf)


def _divergence(oracle: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    log_p, log_q = oracle.log_softmax(-1), other.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)
