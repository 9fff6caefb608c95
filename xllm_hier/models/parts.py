"""The two parts of a decoder layer, attention and MLP, as most families have them, and how they are loaded.

A part works row by row; the paged attention between `project` and `output` is the only step that looks across rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from .families import DecoderSpec
from .linear import Fused, Linear, TileSizes
from .parallel import RowParallel, TensorParallel
from .rope import rotate
from .row_kernels import RowKernels
from .weights import Checkpoint


class AttentionPart(Protocol):
    """The projections around the paged attention of one layer; rows are [rows, hidden], whole tiles of one section."""

    def linears(self) -> list[Linear]:
        """The linears that run in the section's tiles."""

    def project(
        self, x: torch.Tensor, prefill: bool, cos: torch.Tensor, sin: torch.Tensor, target: torch.Tensor
    ) -> None:
        """Rotated queries and keys, values, and gates where there are, of normed rows, side by side into `target`.

        It is [rows, heads + 2 kv_heads (+ heads), head_dim].
        """

    def output(self, attended: torch.Tensor, prefill: bool, residual: torch.Tensor | None) -> torch.Tensor:
        """Rows [rows, hidden], complete on every rank, of attended rows [rows, heads * head_dim]."""


class Mlp(Protocol):
    """The part of a layer behind the attention; rows as in AttentionPart."""

    def linears(self) -> list[Linear]:
        """The linears that run in the section's tiles."""

    def grouped(self) -> list[Linear]:
        """The linears that pad their rows by themselves."""

    def __call__(self, x: torch.Tensor, prefill: bool, residual: torch.Tensor | None, count: int) -> torch.Tensor:
        """Rows [rows, hidden], complete on every rank; `residual`, when there is one, is added.

        The first `count` are needed, the others, padding, need only be finite.
        """


def tiles_of(linear: Linear, prefill: bool) -> TileSizes | None:
    """The tiles in which this linear computes prompt rows, or generated ones."""
    return linear.prefill if prefill else linear.decode


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kernels: RowKernels | None = None) -> torch.Tensor:
    """Root mean square norm over the last dimension, in fp32, rounded once; `weight` is fp32."""
    if kernels is not None:
        return kernels.norm(x, weight, eps)
    wide = x.float() if x.dtype is not torch.float32 else x.clone()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide.mul_(torch.rsqrt(length * length / x.shape[-1] + eps)).mul_(weight).to(x.dtype)


@dataclass
class SelfAttention:
    """Grouped query attention with this rank's heads; `qk_norm` [heads + kv_heads, head_dim] norms each head.

    `gate` makes what the attended heads are multiplied by.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    qkv: Linear
    out: RowParallel
    qk_norm: torch.Tensor | None = None
    gate: Linear | None = None
    kernels: RowKernels | None = None

    def linears(self) -> list[Linear]:
        return [self.qkv, *([self.gate] if self.gate else []), self.out.linear]

    def project(
        self, x: torch.Tensor, prefill: bool, cos: torch.Tensor, sin: torch.Tensor, target: torch.Tensor
    ) -> None:
        turning = self.heads + self.kv_heads
        qkv = self.qkv(x, tiles_of(self.qkv, prefill)).view(-1, turning + self.kv_heads, self.head_dim)
        queries_keys = qkv[:, :turning]
        if self.qk_norm is not None:
            queries_keys = rms_norm(queries_keys, self.qk_norm, self.eps, self.kernels)
        rotate(queries_keys, cos, sin, target[:, :turning], self.kernels)
        target[:, turning : turning + self.kv_heads] = qkv[:, turning:]
        if self.gate is not None:
            target[:, turning + self.kv_heads :].flatten(1).copy_(self.gate(x, tiles_of(self.gate, prefill)))

    def output(self, attended: torch.Tensor, prefill: bool, residual: torch.Tensor | None) -> torch.Tensor:
        return self.out(attended, tiles_of(self.out.linear, prefill), residual)


@dataclass
class DenseMlp:
    """down(activation(gate(x)) * up(x)), the inner dimension split over the ranks."""

    gate: Linear
    up: Linear
    down: RowParallel

    def linears(self) -> list[Linear]:
        return [self.gate, self.up, self.down.linear]

    def grouped(self) -> list[Linear]:
        return []

    def __call__(self, x: torch.Tensor, prefill: bool, residual: torch.Tensor | None, count: int) -> torch.Tensor:
        gate = self.gate(x, tiles_of(self.gate, prefill))
        product = self.up(x, tiles_of(self.up, prefill), gate)
        return self.down(product, tiles_of(self.down.linear, prefill), residual)


# ------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class Loader:
    """Reads this rank's part of a checkpoint; `spec` is that of the whole model, `kernels` None computes with torch.

    All methods raise ConfigError for a tensor that is missing or has another shape.
    """

    spec: DecoderSpec
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    parallel: TensorParallel
    kernels: RowKernels | None = None

    def norm(self, name: str, width: int = 0) -> torch.Tensor:
        """A norm's weight in fp32, of `width` columns (0: the hidden size)."""
        weight = self.checkpoint.tensor(name, (width or self.spec.hidden,), torch.float32)
        return (weight + self.spec.norm_offset).to(self.device)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, fused: Fused = Fused.NONE) -> Linear:
        """A linear of this weight, moved to the device."""
        bias = bias.to(self.device) if bias is not None else None
        return Linear(weight.to(self.device), bias, fused, kernels=self.kernels)

    def column_parallel(
        self, parts: Mapping[str, tuple[int, slice]], inputs: int, *, bias: bool, fused: Fused = Fused.NONE
    ) -> Linear:
        """One linear of the named tensors, one above the other; each is (all its rows, the rows of this rank)."""
        weights, biases = [], []
        for name, (outputs, rows) in parts.items():
            weights.append(self.checkpoint.tensor(f"{name}.weight", (outputs, inputs), self.dtype, rows=rows))
            if bias:
                biases.append(self.checkpoint.tensor(f"{name}.bias", (outputs,), self.dtype, rows=rows))
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return self.linear(weight, torch.cat(biases) if bias else None, fused)

    def row_parallel(self, name: str, outputs: int, inputs: int, columns: slice, *, bias: bool) -> RowParallel:
        """A linear whose inputs are split; the layer's residual is added unless a norm lies between."""
        weight = self.checkpoint.tensor(f"{name}.weight", (outputs, inputs), self.dtype, columns=columns)
        more = self.checkpoint.tensor(f"{name}.bias", (outputs,), self.dtype).to(self.device) if bias else None
        added = not self.spec.post_norms
        return RowParallel(self.parallel, weight.to(self.device), more, added=added, kernels=self.kernels)


def load_self_attention(loader: Loader, prefix: str) -> SelfAttention:
    """The attention part of the layer whose tensors begin with `prefix`."""
    spec, parallel = loader.spec, loader.parallel
    local, q, kv = spec.share(parallel.size), spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    q_rows, kv_rows = (parallel.head_part(heads, spec.head_dim) for heads in (spec.heads, spec.kv_heads))
    parts = {"q_proj": (q, q_rows), "k_proj": (kv, kv_rows), "v_proj": (kv, kv_rows)}
    named = {f"{prefix}self_attn.{name}": part for name, part in parts.items()}
    if spec.attention_gate:
        qkv, gate = _gated_projections(loader, named)
    else:
        qkv, gate = loader.column_parallel(named, spec.hidden, bias=spec.qkv_bias), None
    return SelfAttention(
        heads=local.heads,
        kv_heads=local.kv_heads,
        head_dim=spec.head_dim,
        eps=spec.eps,
        qkv=qkv,
        out=loader.row_parallel(f"{prefix}self_attn.o_proj", spec.hidden, q, q_rows, bias=spec.output_bias),
        qk_norm=_query_key_norm(loader, prefix, local) if spec.qk_norm else None,
        gate=gate,
        kernels=loader.kernels,
    )


def _gated_projections(loader: Loader, parts: Mapping[str, tuple[int, slice]]) -> tuple[Linear, Linear]:
    """Queries, keys and values, and the gates: the first of `parts` has a head's query and gate one above the other."""
    hidden, width = loader.spec.hidden, loader.spec.head_dim
    (name, (outputs, rows)), *others = parts.items()
    both = slice(2 * rows.start, 2 * rows.stop)
    weight = loader.checkpoint.tensor(f"{name}.weight", (2 * outputs, hidden), loader.dtype, rows=both)
    queries, gates = (part.flatten(0, 1) for part in weight.view(-1, 2, width, hidden).unbind(1))
    weights = [queries]
    for name, (outputs, rows) in others:
        weights.append(loader.checkpoint.tensor(f"{name}.weight", (outputs, hidden), loader.dtype, rows=rows))
    return loader.linear(torch.cat(weights)), loader.linear(gates, None, Fused.SIGMOID)


def _query_key_norm(loader: Loader, prefix: str, local: DecoderSpec) -> torch.Tensor:
    """The two head norms as one weight [heads + kv_heads, head_dim], so that queries and keys are normed in one go."""
    q, k = (loader.norm(f"{prefix}self_attn.{name}_norm.weight", local.head_dim) for name in ("q", "k"))
    return torch.cat([q.expand(local.heads, -1), k.expand(local.kv_heads, -1)])


def load_mlp(loader: Loader, prefix: str) -> DenseMlp:
    """The dense MLP of the layer whose tensors begin with `prefix`."""
    spec, part = loader.spec, loader.parallel.part(loader.spec.ffn)

    def inner(name: str, fused: Fused) -> Linear:
        parts = {f"{prefix}mlp.{name}": (spec.ffn, part)}
        return loader.column_parallel(parts, spec.hidden, bias=spec.mlp_bias, fused=fused)

    return DenseMlp(
        gate=inner("gate_proj", spec.activation),
        up=inner("up_proj", Fused.MUL),
        down=loader.row_parallel(f"{prefix}mlp.down_proj", spec.hidden, spec.ffn, part, bias=spec.mlp_bias),
    )
