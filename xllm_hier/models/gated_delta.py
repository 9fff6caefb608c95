"""The gated delta net of Qwen3-Next: the projections of a layer around its recurrence, and how they are loaded.

A projected row, all heads of this rank side by side::

    | queries | keys | values | shares b | fading, of which a is made | gates, after SiLU |
    |<------ channels ------->|                                      |
    |<---------------------- for the recurrence -------------------->|

A checkpoint has it key head by key head, which is how it is split over the ranks: each has some key heads, the value
heads that these serve, and the convolution of their channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .delta_rule import DeltaWeights
from .families import RecurrentSpec
from .linear import Fused, Linear
from .parallel import RowParallel
from .parts import Loader, rms_norm, tiles_of


@dataclass
class GatedDelta:
    """A gated delta net in the place of an attention part, with this rank's heads."""

    spec: RecurrentSpec
    eps: float
    inputs: Linear
    gate: Linear
    weights: DeltaWeights
    norm: torch.Tensor
    out: RowParallel

    @property
    def width(self) -> int:
        """Columns of a projected row."""
        return self.spec.inputs + self.spec.values

    def linears(self) -> list[Linear]:
        """The linears that run in the section's tiles."""
        return [self.inputs, self.gate, self.out.linear]

    def project(self, x: torch.Tensor, prefill: bool, target: torch.Tensor) -> None:
        """Project normed rows [rows, hidden], whole tiles of one section, into `target` [rows, width].

        The gates' activation runs inside their product, see Fused.
        """
        target[:, : self.spec.inputs] = self.inputs(x, tiles_of(self.inputs, prefill))
        target[:, self.spec.inputs :] = self.gate(x, tiles_of(self.gate, prefill))

    def for_recurrence(self, projected: torch.Tensor) -> torch.Tensor:
        """The columns of `projected` [rows, width] that the recurrence takes."""
        return projected[:, : self.spec.inputs]

    def gated(self, values: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """The recurrence's output [rows, value columns], each head normed and multiplied by its gate."""
        normed = rms_norm(values.view(len(values), -1, self.spec.value_dim), self.norm, self.eps).flatten(1)
        return normed.mul_(projected[:, self.spec.inputs :])

    def output(self, gated: torch.Tensor, prefill: bool, residual: torch.Tensor | None) -> torch.Tensor:
        """Rows [rows, hidden], complete on every rank, of gated rows."""
        return self.out(gated, tiles_of(self.out.linear, prefill), residual)


# ------------------------------------------------------------------------------------------------- loading


def load_gated_delta(loader: Loader, prefix: str, net: RecurrentSpec) -> GatedDelta:
    """The gated delta net of the layer whose tensors begin with `prefix`; `net` is that of the whole model.

    Raises:
        ConfigError: a tensor is missing or has another shape.
    """
    prefix, device = f"{prefix}linear_attn.", loader.device
    inputs, gates = _projections(loader, prefix, net)
    norm = loader.checkpoint.tensor(f"{prefix}norm.weight", (net.value_dim,), torch.float32)
    values = loader.parallel.part(net.values)
    return GatedDelta(
        spec=net.share(loader.parallel.size),
        eps=loader.spec.eps,
        inputs=loader.linear(inputs),
        gate=loader.linear(gates, None, Fused.SILU),
        weights=_weights(loader, prefix, net),
        norm=norm.to(device),  # its weights are not stored less 1, other than those of this family's other norms
        out=loader.row_parallel(f"{prefix}out_proj", loader.spec.hidden, net.values, values, bias=False),
    )


def _projections(loader: Loader, prefix: str, net: RecurrentSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of all that the recurrence takes, and of the gates, sorted from key heads to kinds."""
    served = net.value_heads // net.key_heads
    kinds = [net.key_dim, net.key_dim, served * net.value_dim, served * net.value_dim]
    queries, keys, values, gates = _by_kind(loader, f"{prefix}in_proj_qkvz", net.key_heads, kinds)
    shares, fadings = _by_kind(loader, f"{prefix}in_proj_ba", net.key_heads, [served, served])
    return torch.cat([queries, keys, values, shares, fadings]), gates


def _by_kind(loader: Loader, name: str, key_heads: int, rows: list[int]) -> list[torch.Tensor]:
    """A weight that has so many `rows` of each kind for a key head: those of this rank, one matrix a kind."""
    outputs, hidden = key_heads * sum(rows), loader.spec.hidden
    part = loader.parallel.part(outputs)
    weight = loader.checkpoint.tensor(f"{name}.weight", (outputs, hidden), loader.dtype, rows=part)
    return [kind.flatten(0, 1) for kind in torch.split(weight.view(-1, sum(rows), hidden), rows, dim=1)]


def _weights(loader: Loader, prefix: str, net: RecurrentSpec) -> DeltaWeights:
    parallel, keys = loader.parallel, net.key_heads * net.key_dim
    shape = (net.channels, 1, net.conv_size)
    conv = loader.checkpoint.tensor(f"{prefix}conv1d.weight", shape, torch.float32)[:, 0]
    kinds = zip(torch.split(conv, [keys, keys, net.values]), (keys, keys, net.values), strict=True)
    channels = torch.cat([kind[parallel.part(size)] for kind, size in kinds])
    heads = parallel.part(net.value_heads)
    logs, bias = (
        loader.checkpoint.tensor(f"{prefix}{name}", (net.value_heads,), torch.float32, rows=heads).to(loader.device)
        for name in ("A_log", "dt_bias")
    )
    return DeltaWeights(channels.t().contiguous().to(loader.device), logs.exp(), bias.clone())
