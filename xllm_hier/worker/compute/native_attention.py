"""Attention by the CPU's native kernel: blocks are read in place, all rows of a step in one call a layer.

Prompt rows, generated rows and drafts are the same to it; a row's bits depend on the keys that it sees alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...models.row_kernels import RowKernels
from .attention import PagedAttention, Span
from .latent_attention import LatentAttention


class NativeAttention(PagedAttention):
    """`PagedAttention` by `RowKernels.attention`; it has no query tiles."""

    kernel = "native"

    def __init__(self, *, kernels: RowKernels, **shape: Any) -> None:
        super().__init__(**shape, tiles=(0,))
        self.kernels, self.tiles, self._bands = kernels, (), {}
        self._spans = self._whole = np.empty((0, 5), np.int64)  # `_whole`: all rows are wanted
        self._tables: dict[int | None, np.ndarray[Any, np.dtype[np.int32]]] = {}

    def _lay_out(self, prefill: Sequence[Span], decode: Sequence[Span]) -> None:
        spans = [*prefill, *decode]
        counts = [-(-span.stop // self.block_size) for span in spans]
        starts = np.cumsum([0, *counts])[:-1]
        rows = [
            (span.row, span.start, span.stop, span.wanted_from, first)
            for span, first in zip(spans, starts.tolist(), strict=True)
        ]
        self._spans = np.array(rows, np.int64).reshape(-1, 5)
        self._whole = self._spans.copy()
        self._whole[:, 3] = self._whole[:, 1]
        self._tables = {}
        for window in dict.fromkeys(self.windows):
            tables = [span.table_of(window)[:count] for span, count in zip(spans, counts, strict=True)]
            self._tables[window] = np.ascontiguousarray(np.concatenate(tables), np.int32)

    def _attend(self, layer: int, q: torch.Tensor, scale: float, wanted_only: bool) -> None:
        window = self.windows[layer]
        if q.stride(2) != 1 or q.stride(1) != self.head_dim:
            q = q.contiguous()
        cache = self._caches[layer].view(-1, self.tensors, self.block_size, self.kv_heads, self.head_dim)
        self.kernels.attention(
            q,
            cache,
            self._output,
            self._spans if wanted_only else self._whole,
            self._tables[window],
            scale=scale,
            window=window,
            first_position=self.first_position,
        )


class NativeLatentAttention(NativeAttention, LatentAttention):
    """`LatentAttention` by the native kernel: values are the keys, for the one KV head of all query heads."""

    kernel = "native latent"
