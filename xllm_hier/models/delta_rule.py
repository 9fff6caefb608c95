"""The gated delta rule over a run of tokens of one sequence, in fp32 (https://arxiv.org/abs/2412.06464).

A head's state S [key_dim, value_dim] answers a key with a value. A token lets it fade by a and then puts right, by a
share b, what it answers to the token's key::

    u(t) = b(t) (v(t) - a(t) k(t) S(t-1))      S(t) = a(t) S(t-1) + k(t) u(t)      o(t) = q(t) S(t)

For n tokens at once, with c(t) = a(1) ... a(t), the corrections u are the solution of a triangular system, and the rest
is matrix products (sections 3.2 and 3.3 of the paper)::

    u(i) + b(i) sum over j < i  of c(i)/c(j) (k(i).k(j)) u(j)  =  b(i) (v(i) - c(i) k(i) S)
    o(i) = c(i) q(i) S + sum over j <= i  of c(i)/c(j) (q(i).k(j)) u(j)
    S   <- c(n) S      + sum over j       of c(n)/c(j) k(j) u(j)

Nothing here looks at the number of rows of a step: who wants equal bits runs tokens in runs of one length, filled up
with tokens whose b is 0 and whose a is 1. They leave the state as it is, and no token sees those behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .families import RecurrentSpec

# What keeps the length of a key of zeros from 0; read in transformers' model and in its authors' kernels.
_EPS = 1e-6


@dataclass(frozen=True)
class DeltaWeights:
    """The weights of a layer's rule, in fp32: `conv` [conv_size, channels], `fading` and `bias` [value_heads].

    A token's log a is -`fading` softplus(what the layer projects for it + `bias`).
    """

    conv: torch.Tensor
    fading: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class Mixed:
    """The inputs of tokens to the states: the convolution's `channels` [tokens, channels] in their order, and numbers.

    `shares` b and `logs` of a are [value_heads, tokens].
    """

    channels: torch.Tensor
    shares: torch.Tensor
    logs: torch.Tensor


def convolve(inputs: torch.Tensor, conv: torch.Tensor) -> torch.Tensor:
    """SiLU of the causal convolution of each channel by itself, [tokens, channels].

    `inputs` [conv_size - 1 + tokens, channels] begin with those of the tokens before.
    """
    tokens = len(inputs) - len(conv) + 1
    mixed = inputs[:tokens] * conv[0]
    for place in range(1, len(conv)):
        mixed.addcmul_(inputs[place : place + tokens], conv[place])
    return F.silu(mixed, inplace=True)


def shares_and_logs(projected: torch.Tensor, weights: DeltaWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Shares b and logs of a, each [value_heads, tokens], of what the layer projects for them [tokens, 2 heads]."""
    shares, fading = projected.t().chunk(2)
    logs = F.softplus(fading + weights.bias[:, None]).mul_(-weights.fading[:, None])
    return shares.sigmoid(), logs


def advance_token(spec: RecurrentSpec, state: torch.Tensor, target: torch.Tensor, mixed: Mixed) -> torch.Tensor:
    """`state` [value_heads, key_dim, value_dim] after one token more goes to `target`; returns [1, heads, value_dim].

    Of `state` only products are taken, one by one: where it lies in memory does not matter.
    """
    queries_keys = _for_value_heads(spec, _unit_length(spec, _queries_keys(spec, mixed)))
    torch.mul(state, mixed.logs.exp()[..., None], out=target)
    query, key = queries_keys[:, :1], queries_keys[:, 1:]
    corrections = (_values(spec, mixed) - torch.bmm(key, target)).mul_(mixed.shares[..., None])
    target.addcmul_(key.transpose(1, 2), corrections)
    return torch.bmm(query, target).transpose(0, 1)


def advance_cell(spec: RecurrentSpec, state: torch.Tensor, mixed: Mixed) -> torch.Tensor:
    """Take `state` over all tokens at once, in place; returns [tokens, value_heads, value_dim]. See `advance_token`."""
    tokens, shares, sums = len(mixed.channels), mixed.shares[..., None], mixed.logs.cumsum(1)
    faded, between = sums.exp()[..., None], _between(sums)
    queries_keys = _unit_length(spec, _queries_keys(spec, mixed))
    products = torch.bmm(queries_keys, queries_keys[:, tokens:].transpose(1, 2))
    queries_keys = _for_value_heads(spec, queries_keys)
    answers = torch.bmm(queries_keys, state)
    scores = _for_value_heads(spec, products).view(spec.value_heads, 2, tokens, tokens) * between[:, None]
    wanted = (_values(spec, mixed) - answers[:, tokens:] * faded).mul_(shares)
    system = scores[:, 1].mul_(shares)
    corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    state.mul_(faded[:, -1:]).baddbmm_(
        (queries_keys[:, tokens:] * between[:, -1, :, None]).transpose(1, 2), corrections
    )
    return torch.bmm(scores[:, 0], corrections).addcmul_(answers[:, :tokens], faded).transpose(0, 1)


def _queries_keys(spec: RecurrentSpec, mixed: Mixed) -> torch.Tensor:
    """[tokens, queries and keys, key_heads, key_dim]"""
    return mixed.channels[:, : -spec.values].view(-1, 2, spec.key_heads, spec.key_dim)


def _values(spec: RecurrentSpec, mixed: Mixed) -> torch.Tensor:
    """[value_heads, tokens, value_dim]"""
    return mixed.channels[:, -spec.values :].view(-1, spec.value_heads, spec.value_dim).transpose(0, 1)


def _unit_length(spec: RecurrentSpec, x: torch.Tensor) -> torch.Tensor:
    """Queries, then keys, of length 1 (queries: key_dim ** -0.5), [key_heads, 2 tokens, key_dim]."""
    lengths = (x * x).sum(-1, keepdim=True)
    scaled = x * torch.rsqrt(lengths + _EPS)
    scaled[:, 0] *= spec.key_dim**-0.5
    return scaled.permute(2, 1, 0, 3).reshape(spec.key_heads, 2 * len(x), spec.key_dim)


def _for_value_heads(spec: RecurrentSpec, x: torch.Tensor) -> torch.Tensor:
    """The values of each key head, [key_heads, ...], once for each value head that it serves."""
    return x[:, None].expand(-1, spec.value_heads // spec.key_heads, -1, -1).reshape(-1, *x.shape[1:])


def _between(sums: torch.Tensor) -> torch.Tensor:
    """c(i)/c(j) for j <= i, else 0, [heads, tokens, tokens].

    Of differences of logs: a quotient of two powers that are all but 0 is no number.
    """
    ahead = torch.ones(sums.shape[1], sums.shape[1], dtype=torch.bool, device=sums.device).triu(1)
    return (sums[:, :, None] - sums[:, None, :]).masked_fill_(ahead, float("-inf")).exp_()
