"""Linear layers whose rows do not depend on how many rows there are.

A matrix product rounds differently when the number of rows changes, because the kernel splits its sums differently;
at one and the same number of rows neither the place of a row nor its neighbours matter. So rows run in tiles of fixed
sizes. Sizes that give the same bits for a given weight matrix form a class; a check at load time finds the classes and
each linear keeps one, for prompt rows and for generated rows apart:

    rows of a step, padded to the model's unit |<-- 256 -->|<-- 256 -->|<- 64 ->|

All this is for torch's kernels. With `row_kernels` a row's bits are the same in any number of rows: nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F

from .row_kernels import RowKernels

# Relative cost of a row in a tile of so many rows, measured with bf16 on AMX: small tiles cannot fill the unit.
PREFILL_TILE_COST = {32: 3.0, 64: 1.8, 128: 1.3, 256: 1.0}
DECODE_TILE_COST = {8: 3.0, 16: 1.8, 32: 1.0}


class Fused(Enum):
    """The step of a linear between its product and the rounding, which saves an elementwise pass behind it.

    The activations run inside the matrix kernel for bits too: elsewhere an exponential differs between vector body and
    tail, and where the tail lies depends on the number of rows and threads.
    """

    NONE = "none"
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SIGMOID = "sigmoid"
    ADD = "add"
    MUL = "mul"


@dataclass(frozen=True)
class TileSizes:
    """Row counts that give equal bits, ascending; the smallest is what a number of rows is padded to."""

    sizes: tuple[int, ...]

    @property
    def unit(self) -> int:
        return self.sizes[0]

    def pieces(self, rows: int) -> list[tuple[int, int]]:
        """Cut `rows` into (start, stop), largest tiles first.

        Raises:
            ValueError: it is no multiple of `unit`.
        """
        pieces, start = [], 0
        for size in reversed(self.sizes):
            while rows - start >= size:
                pieces.append((start, start + size))
                start += size
        if start != rows:
            raise ValueError(f"{rows} rows do not divide into tiles of {self.sizes}")
        return pieces


class Linear:
    """y = fused(x W^T + b [, other]) for weight W [out, in]; packed for the CPU where its kernels can.

    `prefill` and `decode` are set by the load-time check; None means that rows run as they come. `out_dtype`, only with
    `kernels`: of y, where it is not the weight's.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        fused: Fused = Fused.NONE,
        *,
        kernels: RowKernels | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self.bias, self.fused = bias, fused
        self.prefill: TileSizes | None = None
        self.decode: TileSizes | None = None
        self.rows_invariant = kernels is not None
        if kernels is not None:
            self._product = kernels.product(weight, bias, fused.value, out_dtype)
        elif can_pack(weight.dtype, weight.device):
            self._product = _packed_product(weight, bias, fused)
        else:
            self._product = _plain_product(weight, bias, fused)

    @property
    def shape_key(self) -> tuple[int, int, str, torch.dtype]:
        """Linears with equal keys run the same kernel."""
        what = f"{self.fused.value} and bias" if self.bias is not None else self.fused.value
        return self.in_features, self.out_features, what, self.dtype

    def one_tile(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        """All rows of `x` in one product, whatever their number."""
        return self._product(x, other)

    def __call__(self, x: torch.Tensor, tiles: TileSizes | None, other: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of `x` in tiles; their number must be a multiple of the tiles' unit."""
        if tiles is None or x.shape[0] in tiles.sizes:
            return self._product(x, other)
        return torch.cat(
            [
                self._product(x[start:stop], other if other is None else other[start:stop])
                for start, stop in tiles.pieces(x.shape[0])
            ]
        )


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the CPU library holds weights of this dtype in its own layout: 1.2 to 1.7 times faster at few rows."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    mkldnn = torch.ops.mkldnn
    if dtype is torch.bfloat16:
        return bool(mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


_Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
_PACKED_ACTIVATION = {
    Fused.NONE: ("none", ""),
    Fused.SILU: ("swish", ""),
    Fused.GELU: ("gelu", "none"),
    Fused.GELU_TANH: ("gelu", "tanh"),
    Fused.SIGMOID: ("sigmoid", ""),
}


def _packed_product(weight: torch.Tensor, bias: torch.Tensor | None, fused: Fused) -> _Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    pointwise = torch.ops.mkldnn._linear_pointwise
    if fused in _PACKED_ACTIVATION:
        name, algorithm = _PACKED_ACTIVATION[fused]
        return lambda x, other: pointwise(x, packed, bias, name, [], algorithm)
    binary = pointwise.binary
    return lambda x, other: binary(x, other, packed, bias, fused.value)


def _plain_product(weight: torch.Tensor, bias: torch.Tensor | None, fused: Fused) -> _Product:
    def product(x: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        y = F.linear(x, weight, bias)
        match fused:
            case Fused.SILU:
                return F.silu(y)
            case Fused.GELU | Fused.GELU_TANH:
                return F.gelu(y, approximate="tanh" if fused is Fused.GELU_TANH else "none")
            case Fused.SIGMOID:
                return y.sigmoid_()
            case Fused.ADD | Fused.MUL:
                assert other is not None
                return y.add_(other) if fused is Fused.ADD else y.mul_(other)
        return y

    return product


# ------------------------------------------------------------------------------------------- load-time check


def equal_bit_classes(linear: Linear, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Partition tile `sizes` by the bits that this linear's own weights give for the same random rows."""
    rows = max(sizes)
    generator = torch.Generator().manual_seed(rows)

    def random(width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator).to(linear.device, linear.dtype)

    x = random(linear.in_features)
    other = random(linear.out_features) if linear.fused in (Fused.ADD, Fused.MUL) else None
    classes: list[tuple[torch.Tensor, list[int]]] = []
    for size in sizes:
        y = linear(x, TileSizes((size,)), other)
        for first, members in classes:
            if torch.equal(first, y):
                members.append(size)
                break
        else:
            classes.append((y, [size]))
    return [tuple(sorted(members)) for _, members in classes]


def cheapest_class(classes: Sequence[tuple[int, ...]], cost: dict[int, float]) -> TileSizes:
    """The class to run with: a long prompt pays its largest tile's cost per row, a short suffix one smallest tile."""
    bulk = max(cost)
    best = min(classes, key=lambda sizes: cost[sizes[-1]] + cost[sizes[0]] * sizes[0] / bulk)
    return TileSizes(best)


def choose_tiles(linears: Sequence[Linear], prefill: dict[int, float], decode: dict[int, float]) -> None:
    """Set each linear's tile sizes; one check per distinct shape. A single allowed size needs no check.

    Linears whose rows are invariant need none.
    """
    found: dict[tuple[int, int, str, torch.dtype], tuple[TileSizes, TileSizes]] = {}
    for linear in linears:
        if linear.rows_invariant:
            continue
        if linear.shape_key not in found:
            found[linear.shape_key] = (_choose(linear, prefill), _choose(linear, decode))
        linear.prefill, linear.decode = found[linear.shape_key]


def _choose(linear: Linear, cost: dict[int, float]) -> TileSizes:
    return cheapest_class(equal_bit_classes(linear, sorted(cost)) if len(cost) > 1 else [tuple(cost)], cost)
