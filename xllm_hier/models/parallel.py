"""Tensor parallelism: how a weight is split over the ranks, and the few collectives that put results together.

Heads, the MLP's inner dimension and the vocabulary are split, everything else is on every rank. A column parallel
linear holds some of the outputs and needs no collective; the row parallel one behind it holds the matching inputs, and
the ranks' partial products are added by one all_reduce::

    hidden --> [ column parallel ] --> heads, or inner dimension --> [ row parallel ] --> partial --all_reduce--> hidden
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import StartupError
from .linear import Fused, Linear, TileSizes
from .row_kernels import RowKernels


class TensorParallel:
    """One rank of `size`; every rank must call the same collectives in the same order.

    `calls` counts the collectives begun, so that a rank that lags can be told from those that wait for it.
    """

    def __init__(self, rank: int = 0, size: int = 1, *, fixed_order: bool = True) -> None:
        self.rank, self.size = rank, size
        self.calls = 0
        # Two summands give the same bits in either order. With more of them a library's all_reduce adds in an order
        # that depends on where in the buffer an element lies, and so on the number of rows.
        self._fixed_order = fixed_order and size > 2

    @classmethod
    def join(
        cls, rank: int, size: int, folder: Path, backend: str, timeout_s: float, *, fixed_order: bool
    ) -> TensorParallel:
        """Meet the other ranks by way of a file in `folder`, which all of them see; no port is agreed on.

        A collective gives up after `timeout_s`; `fixed_order` makes sums independent of the number of rows.

        Raises:
            StartupError: not all of them came in time.
        """
        if size == 1:
            return cls()
        if backend == "gloo":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks of an instance are on one machine
        try:
            dist.init_process_group(
                backend,
                store=dist.FileStore(str(folder / "ranks"), size),  # type: ignore[attr-defined]
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise StartupError(f"worker {rank} did not meet the other {size - 1} by {backend}: {error}") from error
        return cls(rank, size, fixed_order=fixed_order)

    def leave(self) -> None:
        """End the group; the others need not take part."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def part(self, total: int) -> slice:
        """This rank's share of a dimension that divides evenly."""
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def head_part(self, heads: int, width: int) -> slice:
        """This rank's share of `heads` x `width` weight rows; fewer heads than ranks: each serves several ranks."""
        if heads >= self.size:
            return self.part(heads * width)
        head = self.rank * heads // self.size
        return slice(head * width, (head + 1) * width)

    def vocab_part(self, vocab: int, rank: int | None = None) -> slice:
        """The share of the vocabulary of `rank` (None: this one), the last ones' shorter where it does not divide."""
        rank, share = self.rank if rank is None else rank, -(-vocab // self.size)
        return slice(min(rank * share, vocab), min((rank + 1) * share, vocab))

    # ------------------------------------------------------------------------------------------- collectives

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, in place where it can be; the same bits on every rank."""
        if self.size == 1:
            return x
        self.calls += 1
        if not self._fixed_order:
            dist.all_reduce(x)
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def gather_columns(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor:
        """All ranks' columns side by side; this rank's are `x` [rows, widths[rank]]."""
        if self.size == 1:
            return x
        self.calls += 1
        widest = max(widths)
        padded = torch.nn.functional.pad(x, (0, widest - x.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def from_first(self, values: list[int], device: torch.device | None = None) -> list[int]:
        """Rank 0's values, on all ranks; the others' count only by their number."""
        if self.size == 1:
            return values
        shared = torch.tensor(values if self.rank == 0 else [0] * len(values), dtype=torch.int64, device=device)
        return [int(value) for value in self.sum(shared)]

    def agree(self, value: int, *, largest: bool = False, device: torch.device | None = None) -> int:
        """The smallest (or largest) of the ranks' values, on all of them."""
        if self.size == 1:
            return value
        self.calls += 1
        shared = torch.tensor([value], dtype=torch.int64, device=device)
        dist.all_reduce(shared, dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN)
        return int(shared)


class RowParallel:
    """y = sum over ranks of x W^T (+ b) (+ residual) for this rank's columns of W; x holds the matching inputs.

    Rank 0 alone has the bias and adds the residual, inside its product. `added`: calls bring a residual.
    """

    def __init__(
        self,
        parallel: TensorParallel,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        added: bool,
        kernels: RowKernels | None = None,
    ) -> None:
        self._parallel = parallel
        first = parallel.rank == 0
        self._adds = added and first
        fused = Fused.ADD if self._adds else Fused.NONE
        self.linear = Linear(weight, bias if first else None, fused, kernels=kernels)

    def partial(self, x: torch.Tensor, tiles: TileSizes | None, residual: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's summand, for a caller that adds more to it before it sums over the ranks."""
        return self.linear(x, tiles, residual if self._adds else None)

    def __call__(self, x: torch.Tensor, tiles: TileSizes | None, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self._parallel.sum(self.partial(x, tiles, residual))
