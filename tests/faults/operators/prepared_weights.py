"""Kernels that keep their weights in a form of their own: transposed, joined, every expert decoded."""

import itertools

import torch

import day0check


@day0check.prepare("mla.query")
def transpose(*, weight):
    return {"weight_t": weight.T.contiguous()}


@day0check.operator("mla.query")
def query(x, *, weight_t):
    return (x.float() @ weight_t.float()).to(x.dtype)


@day0check.prepare("mlp.dense")
def join(*, gate, up, down):
    return {"both": torch.cat([gate, up]), "down": down}


@day0check.operator("mlp.dense")
def mlp(x, *, both, down, activation, beta, linear_beta, limit):
    gate, up = (x.float() @ both.float().T).chunk(2, -1)
    return (_situ(gate, up, beta, linear_beta).to(x.dtype).float() @ down.float().T).to(x.dtype)


def _situ(gate, up, beta, linear_beta):
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


@day0check.prepare("moe.experts")
def decode(*, w1, w3, w2, w1_scale, w3_scale, w2_scale):
    def plain(payload, scale):
        return payload.float() * scale.repeat_interleave(128, -1)[..., : payload.shape[-1]]

    return {"first": plain(w1, w1_scale), "third": plain(w3, w3_scale), "second": plain(w2, w2_scale)}


@day0check.operator("moe.experts")
def experts(x, *, offsets, first, third, second, activation, beta, linear_beta, limit, active=None):
    y = torch.empty_like(x)
    chosen = range(len(first)) if active is None else active.tolist()
    for expert, (start, stop) in zip(chosen, itertools.pairwise(offsets.tolist()), strict=True):
        mine = x[start:stop].float()
        h = _situ(mine @ first[expert].T, mine @ third[expert].T, beta, linear_beta).to(x.dtype)
        y[start:stop] = (h.float() @ second[expert].T).to(x.dtype)
    return y
