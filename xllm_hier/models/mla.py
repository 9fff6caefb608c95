"""Multi-head Latent Attention: the projections of a layer of DeepSeek V2 and V3 around the attention over latents.

A head's key is W_UK c and a rotated part that all heads share, its value W_UV c, for one latent c per token. Both
matrices move to the other side of their product, so that only latents are cached and neither keys nor values are ever
made (https://arxiv.org/abs/2405.04434, section 2.1.2)::

    q . (W_UK c) = (q W_UK) . c                sum of p (W_UV c) = W_UV (sum of p c)

    target, one row   | head 0: q W_UK, rotated q | head 1 | ... | latent, rotated key |
    attended, one row | head 0: latent, no use    | head 1 | ... |

Heads are split over the ranks. Latents are computed by every rank, from the same rows with the same weights in linears
of their own: their bits are the same on all of them, as the cache that is stored once for all ranks asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .families import LatentSpec
from .linear import Fused, Linear
from .parallel import RowParallel
from .parts import Loader, rms_norm, tiles_of
from .rope import rotate
from .row_kernels import Product, RowKernels

# The two inner norms take this one whatever `rms_norm_eps` says: read in transformers' models and in DeepSeek's own.
_EPS = 1e-6


class HeadLinear(Linear):
    """A matrix of its own for each head: rows [rows, heads, in] to [rows, heads, out], for weight [heads, out, in].

    One batched product: five times faster than a packed linear per head at 16 heads, and all heads share its tiles.
    """

    def __init__(self, weight: torch.Tensor, kernels: RowKernels | None = None) -> None:
        self.heads, outputs, inputs = weight.shape
        self.in_features, self.out_features = self.heads * inputs, self.heads * outputs
        self.dtype, self.device, self.nbytes = weight.dtype, weight.device, weight.nbytes
        self.bias, self.fused = None, Fused.NONE
        self.prefill = self.decode = None
        self.rows_invariant = kernels is not None
        self._product = self._per_head if kernels is None else self._native(kernels, weight)
        if kernels is None:
            self._weight = weight.transpose(1, 2).clone(memory_format=torch.contiguous_format)

    @property
    def shape_key(self) -> tuple[int, int, str, torch.dtype]:
        return self.in_features, self.out_features, f"{self.heads} heads", self.dtype

    def _native(self, kernels: RowKernels, weight: torch.Tensor) -> Product:
        product = kernels.product_per_head(weight)
        return lambda x, _: product(x.view(len(x), self.heads, -1))

    def _per_head(self, x: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        # The copy lies at the start of a buffer: a row's place in the step must not become its alignment in memory.
        by_head = x.view(len(x), self.heads, -1).transpose(0, 1).clone(memory_format=torch.contiguous_format)
        return torch.bmm(by_head, self._weight).transpose(0, 1)


@dataclass
class LatentSelfAttention:
    """The attention part with this rank's heads; `down` is whole on every rank.

    `down` makes the queries' latent, where there is one (`query_norm` is not None), and the row for the cache;
    `queries` makes the heads' queries of that latent, else of the hidden rows.
    """

    latent: LatentSpec
    heads: int
    down: Linear
    latent_norm: torch.Tensor
    query_norm: torch.Tensor | None
    queries: Linear
    absorb_key: HeadLinear
    expand_value: HeadLinear
    out: RowParallel
    kernels: RowKernels | None = None

    def linears(self) -> list[Linear]:
        return [self.down, self.queries, self.absorb_key, self.expand_value, self.out.linear]

    def project(
        self, x: torch.Tensor, prefill: bool, cos: torch.Tensor, sin: torch.Tensor, target: torch.Tensor
    ) -> None:
        rank, nope = self.latent.kv_lora_rank, self.latent.nope_dim
        down = self.down(x, tiles_of(self.down, prefill))
        cached = down[:, None, -self.latent.width :]
        target[:, self.heads :, :rank] = rms_norm(cached[..., :rank], self.latent_norm, _EPS, self.kernels)
        rotate(cached[..., rank:], cos, sin, target[:, self.heads :, rank:], self.kernels)
        if self.query_norm is not None:
            x = rms_norm(down[:, : -self.latent.width], self.query_norm, _EPS, self.kernels)
        queries = self.queries(x, tiles_of(self.queries, prefill)).view(len(x), self.heads, -1)
        target[:, : self.heads, :rank] = self.absorb_key(queries[..., :nope], tiles_of(self.absorb_key, prefill))
        rotate(queries[..., nope:], cos, sin, target[:, : self.heads, rank:], self.kernels)

    def output(self, attended: torch.Tensor, prefill: bool, residual: torch.Tensor | None) -> torch.Tensor:
        latents = attended.view(len(attended), self.heads, -1)[..., : self.latent.kv_lora_rank]
        values = self.expand_value(latents, tiles_of(self.expand_value, prefill))
        return self.out(values.flatten(1), tiles_of(self.out.linear, prefill), residual)


# ------------------------------------------------------------------------------------------------- loading


def load_latent_attention(loader: Loader, prefix: str, latent: LatentSpec) -> LatentSelfAttention:
    """The attention part of the layer whose tensors begin with `prefix`."""
    prefix = f"{prefix}self_attn."
    values = loader.spec.heads * latent.value_dim
    absorb_key, expand_value = _split_expansion(loader, f"{prefix}kv_b_proj", latent)
    return LatentSelfAttention(
        latent=latent,
        heads=loader.spec.heads // loader.parallel.size,
        down=_down(loader, prefix, latent),
        latent_norm=loader.norm(f"{prefix}kv_a_layernorm.weight", latent.kv_lora_rank),
        query_norm=loader.norm(f"{prefix}q_a_layernorm.weight", latent.q_lora_rank) if latent.q_lora_rank else None,
        queries=_queries(loader, prefix, latent),
        absorb_key=absorb_key,
        expand_value=expand_value,
        out=loader.row_parallel(
            f"{prefix}o_proj", loader.spec.hidden, values, loader.parallel.part(values), bias=False
        ),
        kernels=loader.kernels,
    )


def _down(loader: Loader, prefix: str, latent: LatentSpec) -> Linear:
    rows = {"kv_a_proj_with_mqa": latent.width}
    if latent.q_lora_rank:
        rows = {"q_a_proj": latent.q_lora_rank, **rows}
    weights = [_read(loader, f"{prefix}{name}", count, loader.spec.hidden) for name, count in rows.items()]
    return loader.linear(_halved(torch.cat(weights), latent))


def _queries(loader: Loader, prefix: str, latent: LatentSpec) -> Linear:
    name, inputs = ("q_b_proj", latent.q_lora_rank) if latent.q_lora_rank else ("q_proj", loader.spec.hidden)
    weight = _head_rows(loader, f"{prefix}{name}", latent.nope_dim + latent.rope_dim, inputs)
    return loader.linear(_halved(weight, latent).flatten(0, 1))


def _split_expansion(loader: Loader, name: str, latent: LatentSpec) -> tuple[HeadLinear, HeadLinear]:
    """W_UK, turned round, and W_UV of this rank's heads."""
    weight = _head_rows(loader, name, latent.nope_dim + latent.value_dim, latent.kv_lora_rank).to(loader.device)
    keys, values = weight[:, : latent.nope_dim].transpose(1, 2), weight[:, latent.nope_dim :]
    return HeadLinear(keys, loader.kernels), HeadLinear(values, loader.kernels)


def _head_rows(loader: Loader, name: str, width: int, inputs: int) -> torch.Tensor:
    """The weight of this rank's heads, [heads, width, inputs]."""
    outputs = loader.spec.heads * width
    return _read(loader, name, outputs, inputs, loader.parallel.part(outputs)).view(-1, width, inputs)


def _read(loader: Loader, name: str, outputs: int, inputs: int, rows: slice | None = None) -> torch.Tensor:
    return loader.checkpoint.tensor(f"{name}.weight", (outputs, inputs), loader.dtype, rows=rows)


def _halved(weight: torch.Tensor, latent: LatentSpec) -> torch.Tensor:
    """Sort the rotated rows, the last `rope_dim` of dimension -2, from pairs to halves, which is how `rotate` turns.

    Query and key are sorted alike, so that their product stays what it was.
    """
    if not latent.rope_pairs:
        return weight
    plain, turned = weight[..., : -latent.rope_dim, :], weight[..., -latent.rope_dim :, :]
    return torch.cat([plain, turned[..., 0::2, :], turned[..., 1::2, :]], dim=-2)
