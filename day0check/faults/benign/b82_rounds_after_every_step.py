"""Norms and MLPs of chains of operations that each round to bfloat16, under the profile that claims it."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-82",
    title="norm cast before its weight, MLP with rounded gate and up, under eager-bf16",
    kind="residual",
    visible="last bits of every norm and MLP",
    expected=None,
    profile="eager-bf16",
)


@day0check.operator("norm.rms")
def rms_norm(x, *, weight=None, eps):
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if weight is None else normed * weight.to(x.dtype)


def product(x, weight):
    return (x.float() @ weight.float().T).to(x.dtype)


def activated(gate, up, activation, beta, linear_beta, limit):
    g, u = gate.float(), up.float()
    if activation == "situ":
        b = 1.0 if beta is None else beta
        bounded = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
        return (b * torch.tanh(g / b) * torch.sigmoid(g) * bounded).to(gate.dtype)
    if activation == "clamped":
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (torch.nn.functional.silu(g) * u).to(gate.dtype)


def mlp(x, *, gate, up, down, activation, beta=None, linear_beta=None, limit=None):
    h = activated(product(x, gate), product(x, up), activation, beta, linear_beta, limit)
    return product(h, down)


@day0check.operator("mlp.dense")
def dense(x, **kwargs):
    return mlp(x, **kwargs)


@day0check.operator("moe.shared")
def shared(x, **kwargs):
    return mlp(x, **kwargs)
