"""Mixture of experts, the work: rows are sorted to their experts, computed in fixed-row tiles, and added up again.

    rows        | a | b | c |                      a goes to experts 0 and 2, b to 2 and 0, c to 2 and 1
    sorted      | a  b  .  . | c  .  .  . | a  b  c  . |      each expert's rows, padded to its tiles' unit
    results     | 0a 0b .  . | 1c .  .  . | 2a 2b 2c . | shared a b c | residual a b c |
    a's row     = weight x 0a + weight x 2a + 1 x shared a + 1 x residual a

A row's summands are taken best expert first, in fp32, and rounded once. So neither the other rows nor the places of
its own change its bits. Experts are split over the ranks along their inner dimension; the router is on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .expert_routing import MoeSpec, choose_experts, sigmoid
from .linear import Fused, Linear
from .parallel import TensorParallel
from .parts import Loader, tiles_of
from .row_kernels import RowKernels


@dataclass
class Expert:
    """down(activation(gate(x)) * up(x)) with this rank's part of the inner dimension: a summand of the whole."""

    gate: Linear
    up: Linear
    down: Linear

    def linears(self) -> list[Linear]:
        return [self.gate, self.up, self.down]

    def __call__(self, x: torch.Tensor, prefill: bool) -> torch.Tensor:
        gate = self.gate(x, tiles_of(self.gate, prefill))
        product = self.up(x, tiles_of(self.up, prefill), gate)
        return self.down(product, tiles_of(self.down, prefill))


class ExpertLinear(Linear):
    """The matrices of one kind of all experts, whose rows are one call of the native kernels.

    `read(e)` gives those of expert e; each is packed and dropped before the next is read.
    """

    def __init__(
        self, kernels: RowKernels, experts: int, read: Callable[[int], torch.Tensor], fused: Fused = Fused.NONE
    ) -> None:
        weight = read(0)
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device, self.nbytes = weight.dtype, weight.device, weight.nbytes * experts
        self.bias, self.fused, self.prefill, self.decode, self.rows_invariant = None, fused, None, None, True
        self.experts = experts
        self.rows_of = kernels.grouped_product(experts, self.out_features, self.in_features, weight.dtype, fused.value)
        for number in range(experts):
            self.rows_of.fill(number, read(number))
        self._product = self._of_the_first

    @property
    def shape_key(self) -> tuple[int, int, str, torch.dtype]:
        return self.in_features, self.out_features, f"{self.fused.value} of {self.experts} experts", self.dtype

    def _of_the_first(self, x: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        return self.rows_of(x, [len(x), *[0] * (self.experts - 1)], other)


@dataclass
class ExpertGroup:
    """All experts of a layer on native kernels: three calls for the rows of all of them."""

    gate: ExpertLinear
    up: ExpertLinear
    down: ExpertLinear

    def linears(self) -> list[Linear]:
        return [self.gate, self.up, self.down]

    def __call__(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Results of rows sorted to their experts."""
        return self.down.rows_of(self.up.rows_of(x, sizes, self.gate.rows_of(x, sizes)), sizes)


@dataclass
class MoeMlp:
    """The MLP of a layer with experts; `correction` is the router's bias for the choice, fp32 [experts].

    With a gate for the shared experts the router's last output is its logit.
    """

    spec: MoeSpec
    parallel: TensorParallel
    router: Linear
    correction: torch.Tensor | None
    experts: Sequence[Expert] | ExpertGroup
    shared: Expert | None

    def linears(self) -> list[Linear]:
        return [self.router, *(self.shared.linears() if self.shared else [])]

    def grouped(self) -> list[Linear]:
        if isinstance(self.experts, ExpertGroup):
            return self.experts.linears()
        return [linear for expert in self.experts for linear in expert.linears()]

    def __call__(
        self, x: torch.Tensor, prefill: bool, residual: torch.Tensor | None, count: int | None = None
    ) -> torch.Tensor:
        """As Mlp says. Rows from `count` on are padding (None: there is none): they go to no expert and come back as 0.

        At decode that matters: one row and seven of padding would touch the experts of eight rows.
        """
        count = len(x) if count is None else count
        logits = self.router(x.to(self.router.dtype), tiles_of(self.router, prefill))[:count].float()
        chosen, weights = choose_experts(logits[:, : self.spec.num_experts], self.spec, self.correction)
        if self.spec.shared_gate:
            weights = torch.cat([weights, sigmoid(logits[:, self.spec.num_experts :])], dim=1)
        results, places = self._routed(x, chosen, prefill)
        for rows in self._plain(x, prefill, residual):
            start = sum(map(len, results))
            places.append(torch.arange(start, start + count, device=x.device)[:, None])
            results.append(rows[:count])
        summands = torch.cat(places, dim=1)
        weights = F.pad(weights, (0, summands.shape[1] - weights.shape[1]), value=1.0).to(x.dtype)
        # This kernel walks a row's summands in order, whatever the number of rows, and keeps their sum in fp32.
        added = F.embedding_bag(summands, torch.cat(results), mode="sum", per_sample_weights=weights)
        return F.pad(self.parallel.sum(added), (0, 0, 0, len(x) - count))

    def _routed(
        self, x: torch.Tensor, chosen: torch.Tensor, prefill: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Results of all experts that have rows, ascending, and the place of each choice in them [rows, top_k]."""
        rows, place, sizes = sort_to_experts(chosen, self.spec.num_experts, self._unit(prefill))
        x = x[rows]
        if isinstance(self.experts, ExpertGroup):
            return [self.experts(x, sizes)], [place]
        results, start = [], 0
        for expert, size in zip(self.experts, sizes, strict=True):
            if size:
                results.append(expert(x[start : start + size], prefill))
                start += size
        return results, [place]

    def _plain(self, x: torch.Tensor, prefill: bool, residual: torch.Tensor | None) -> list[torch.Tensor]:
        """Summands of weight 1; one rank brings the residual."""
        shared = [self.shared(x, prefill)] if self.shared else []
        return [*shared, residual] if residual is not None and self.parallel.rank == 0 else shared

    def _unit(self, prefill: bool) -> int:
        if isinstance(self.experts, ExpertGroup):
            return 1
        tiles = [tiles_of(linear, prefill) for linear in self.experts[0].linears()]
        return max(sizes.unit if sizes else 1 for sizes in tiles)


def sort_to_experts(chosen: torch.Tensor, num_experts: int, unit: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Lay rows out by expert, each expert's padded to a multiple of `unit`, for the experts chosen [rows, top_k].

    Returns the row to take for each place (padding takes the first), the place of each choice [rows, top_k], and how
    many places each expert has.
    """
    flat = chosen.flatten()
    counts = torch.bincount(flat, minlength=num_experts)
    sizes = (counts + unit - 1).div(unit, rounding_mode="floor") * unit
    order = flat.argsort(stable=True)
    moved = (sizes - counts).cumsum(0) - (sizes - counts)  # by the padding of the experts before
    number = torch.arange(len(flat), device=chosen.device)
    place = torch.empty_like(flat)
    place[order] = number + moved[flat[order]]
    places = sizes.tolist()
    rows = flat.new_zeros(sum(places))
    rows[place] = number.div(chosen.shape[1], rounding_mode="floor")
    return rows, place.view_as(chosen), places


# ------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class _Names:
    """Where published checkpoints have the tensors of a layer's experts."""

    block: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"


_NAMES = {
    "mixtral": _Names("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_next": _Names("mlp", shared="shared_expert"),
}


def load_experts(loader: Loader, prefix: str, spec: MoeSpec) -> MoeMlp:
    """The MLP with experts of the layer whose tensors begin with `prefix`.

    Raises:
        ConfigError: a tensor is missing or has another shape.
    """
    names = _NAMES.get(loader.spec.family, _Names("mlp"))
    block, hidden, read = f"{prefix}{names.block}", loader.spec.hidden, loader.checkpoint.tensor

    def expert(name: str, ffn: int) -> Expert:
        part = loader.parallel.part(ffn)

        def inner(kind: str, fused: Fused) -> Linear:
            return loader.column_parallel({f"{block}.{name}.{kind}": (ffn, part)}, hidden, bias=False, fused=fused)

        down = read(f"{block}.{name}.{names.down}.weight", (hidden, ffn), loader.dtype, columns=part)
        return Expert(inner(names.gate, loader.spec.activation), inner(names.up, Fused.MUL), loader.linear(down))

    count, dtype = spec.num_experts, torch.float32 if spec.fp32_router else loader.dtype
    router = read(f"{block}.gate.weight", (count, hidden), dtype)
    if spec.shared_gate:
        router = torch.cat([router, read(f"{block}.{names.shared}_gate.weight", (1, hidden), dtype)])
    bias = read(f"{block}.gate.e_score_correction_bias", (count,), torch.float32) if spec.correction else None
    return MoeMlp(
        spec=spec,
        parallel=loader.parallel,
        router=loader.linear(router),
        correction=bias.to(loader.device) if bias is not None else None,
        experts=_group(loader, f"{block}.experts", names, spec)
        if loader.kernels is not None
        else [expert(f"experts.{number}", spec.ffn) for number in range(count)],
        shared=expert(names.shared, spec.shared_ffn) if spec.shared_ffn else None,
    )


def _group(loader: Loader, block: str, names: _Names, spec: MoeSpec) -> ExpertGroup:
    hidden, ffn, part = loader.spec.hidden, spec.ffn, loader.parallel.part(spec.ffn)
    assert loader.kernels is not None
    kernels, count = loader.kernels, spec.num_experts

    def inner(number: int, kind: str) -> torch.Tensor:
        return loader.checkpoint.tensor(f"{block}.{number}.{kind}.weight", (ffn, hidden), loader.dtype, rows=part)

    def down(number: int) -> torch.Tensor:
        name = f"{block}.{number}.{names.down}.weight"
        return loader.checkpoint.tensor(name, (hidden, ffn), loader.dtype, columns=part)

    return ExpertGroup(
        ExpertLinear(kernels, count, lambda number: inner(number, names.gate), loader.spec.activation),
        ExpertLinear(kernels, count, lambda number: inner(number, names.up), Fused.MUL),
        ExpertLinear(kernels, count, down),
    )
