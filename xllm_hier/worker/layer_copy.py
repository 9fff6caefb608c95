"""Copies between host and device, layer group by layer group, and the synchroniser a forward waits on.

This is the face that every backend has; the copy here is plain torch.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ..block import BlockType
from ..errors import TransferError
from ..plans import BlockMapping
from .cache_domain import CacheDomain


def layer_groups(num_layers: int, num_groups: int) -> list[range]:
    """Layers copied under one event: max(1, layers // n) each, so 30 layers and n = 4 give 7, 7, 7, 7, 2; 0 = one."""
    size = num_layers if num_groups == 0 else max(1, num_layers // num_groups)
    return [range(start, min(start + size, num_layers)) for start in range(0, num_layers, size)]


class LayerSynchronizer:
    """Progress of one batch's load: `wait(layer)` returns when that layer's blocks are on the device.

    One thread completes the groups in order, any may wait. The target's and the draft's copies advance it together.
    """

    def __init__(self, batch_id: int, groups: Sequence[range]) -> None:
        self.batch_id = batch_id
        self._group_of = {layer: number for number, group in enumerate(groups) for layer in group}
        self._events = [threading.Event() for _ in groups]
        self.error: str | None = None

    def complete(self, group: int) -> None:
        self._events[group].set()

    def abort(self, error: str) -> None:
        """The load failed; copies already submitted have ended before this is called. All waiters go on."""
        self.error = error
        for event in self._events:
            event.set()

    def wait(self, layer: int, timeout_s: float) -> None:
        """Block until the group of `layer` is there or the load has failed (see `error`).

        Raises:
            TransferError: neither happened within `timeout_s`.
        """
        number = self._group_of[layer]
        if not self._events[number].wait(timeout_s):
            raise TransferError(f"load {self.batch_id} did not bring layer {layer} within {timeout_s:g} s")

    def wait_all(self, timeout_s: float) -> None:
        for group in sorted(set(self._group_of.values())):
            first = next(layer for layer, number in self._group_of.items() if number == group)
            self.wait(first, timeout_s)


class TorchCopier:
    """Gathers and scatters with torch; the reference every native copier is tested against."""

    def load(self, domain: CacheDomain, mapping: BlockMapping, layers: range) -> None:
        """Host blocks to device blocks for `layers` of one domain."""
        cache = domain.caches[BlockType(mapping.block_type)]
        source, target = _indices(mapping.host), _indices(mapping.device)
        for layer in layers:
            device = cache.device[layer]
            pieces = cache.host_piece(layer).index_select(0, source).to(device.device)
            device.index_copy_(0, target.to(device.device), pieces)

    def offload(self, domain: CacheDomain, mapping: BlockMapping, layers: range) -> None:
        """Device blocks to host blocks for `layers` of one domain."""
        cache = domain.caches[BlockType(mapping.block_type)]
        source, target = _indices(mapping.device), _indices(mapping.host)
        for layer in layers:
            device = cache.device[layer]
            cache.host_piece(layer).index_copy_(0, target, device.index_select(0, source.to(device.device)).cpu())


def _indices(ids: object) -> torch.Tensor:
    return torch.as_tensor(ids, dtype=torch.int64)
