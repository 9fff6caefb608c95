"""Copies between host and device, layer group by layer group; `layered_wait.py` says how a forward waits for them.

Two copiers have the same face: `NativeCopier` over the C++ extension (cpu threads with streaming stores, CUDA and
Ascend copy engines), and `TorchCopier`, plain torch, the reference the native one is tested against.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ...block import BlockType
from ...errors import ConfigError, TransferError
from ...host_memory import HostMemory
from ...plans import BlockMapping
from .cache_domain import BlockCache, CacheDomain, Part
from .layered_wait import LayerSynchronizer

if TYPE_CHECKING:
    from ... import _native

log = logging.getLogger("xllm.transfer")


def end_of_layers(parts: Sequence[Part]) -> int:
    """The number behind that of the last layer which some of `parts` has blocks for."""
    return max(domain.caches[BlockType(mapping.block_type)].layout.layers[-1] + 1 for domain, mapping in parts)


class Copier(Protocol):
    """Copies of one worker; each method is called by one thread at a time."""

    name: str

    def attach(self, domains: Sequence[CacheDomain], memories: Sequence[HostMemory]) -> None:
        """Learn where the blocks of `domains` lie in both tiers; once, before the first copy. `memories` hold all their
        host blocks; each is pinned as one region where the device wants that."""

    def load(self, batch_id: int, parts: Sequence[Part], groups: Sequence[range]) -> LayerSynchronizer:
        """Start copying host blocks to device blocks, group by group; returns at once."""

    def offload(self, parts: Sequence[Part]) -> Callable[[float], None]:
        """Start copying device blocks to host blocks, after all that the compute stream has been given so far.

        The answer waits for the end; it raises TransferError when the copy failed or took longer than its argument.
        """

    def close(self) -> None:
        """Wait for the copies under way and release the memory."""


# ------------------------------------------------------------------------------------------------- torch


class TorchCopier:
    """Gathers and scatters with torch on a thread of its own."""

    name = "torch"

    def __init__(self) -> None:
        self._thread = one_thread("h2d")

    def attach(self, domains: Sequence[CacheDomain], memories: Sequence[HostMemory]) -> None:
        pass

    def load(self, batch_id: int, parts: Sequence[Part], groups: Sequence[range]) -> LayerSynchronizer:
        synchronizer = LayerSynchronizer(batch_id, groups)
        self._thread.submit(self._load, synchronizer, parts, groups)
        return synchronizer

    def _load(self, synchronizer: LayerSynchronizer, parts: Sequence[Part], groups: Sequence[range]) -> None:
        try:
            for number, layers in enumerate(groups):
                for domain, mapping in parts:
                    self.load_layers(domain, mapping, layers)
                synchronizer.complete(number)
        except Exception as error:  # whatever went wrong, the forward must not wait for ever
            log.exception("load %d failed", synchronizer.batch_id)
            synchronizer.abort(f"{type(error).__name__}: {error}")

    def load_layers(self, domain: CacheDomain, mapping: BlockMapping, layers: range) -> None:
        """Host blocks to device blocks for `layers` of one domain, those of them that it has, now."""
        cache = domain.caches[BlockType(mapping.block_type)]
        source, target = _indices(mapping.host), _indices(mapping.device)
        for place, layer in enumerate(cache.layout.layers):
            if layer in layers:
                device = cache.device[place]
                pieces = cache.host_piece(place).index_select(0, source).to(device.device)
                device.index_copy_(0, target.to(device.device), pieces)

    def offload(self, parts: Sequence[Part]) -> Callable[[float], None]:
        def work(_timeout_s: float) -> None:
            for domain, mapping in parts:
                cache = domain.caches[BlockType(mapping.block_type)]
                source, target = _indices(mapping.device), _indices(mapping.host)
                for layer, device in enumerate(cache.device):
                    pieces = device.index_select(0, source.to(device.device)).cpu()
                    cache.host_piece(layer).index_copy_(0, target, pieces)

        return work

    def close(self) -> None:
        self._thread.shutdown(wait=True)


def _indices(ids: object) -> torch.Tensor:
    return torch.as_tensor(ids, dtype=torch.int64)


def one_thread(name: str) -> ThreadPoolExecutor:
    """A thread whose torch calls start no OpenMP team of their own.

    With more such threads than cores libgomp stops spinning at barriers for good, and every forward becomes 1.4 times
    slower. torch sets some of this for the whole process, so the caller's count is set again behind it.
    """
    count = torch.get_num_threads()
    thread = ThreadPoolExecutor(1, thread_name_prefix=name)
    thread.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(count)
    return thread


# ------------------------------------------------------------------------------------------------ native


class NativeSynchronizer(LayerSynchronizer):
    """A load of the native copier: waits without the GIL, on the device where the device can wait by itself."""

    def __init__(self, batch_id: int, groups: Sequence[range], transfer: _native.Transfer, stream: int | None) -> None:
        super().__init__(batch_id, groups)
        self._transfer = transfer
        self._stream = stream

    @property
    def error(self) -> str | None:
        return self._transfer.error

    def wait(self, layer: int, timeout_s: float) -> None:
        stream = self._stream
        if stream is None:
            super().wait(layer, timeout_s)
            return
        group = self._group_of[layer]
        self._guarded(lambda: self._transfer.stream_wait_group(group, stream, timeout_s))

    def _wait_group(self, group: int, timeout_s: float) -> None:
        self._guarded(lambda: self._transfer.wait_group(group, timeout_s))

    def wait_all(self, timeout_s: float) -> None:
        self._guarded(lambda: self._transfer.wait_all(timeout_s))

    def _guarded(self, wait: Callable[[], None]) -> None:
        native = _extension()
        try:
            wait()
        except native.TransferTimeout as error:
            raise TransferError(f"load {self.batch_id}: {error}") from error
        except native.NativeError:
            if self._transfer.error is None:  # not the copy but the wait itself failed
                raise


class NativeCopier:
    """Copies of the C++ extension; see `_native.pyi` for its face and docs/native.md for what runs where.

    `stream` gives the handle of the compute stream (None on cpu): copies run after what it was given before them, and
    loads are waited for on it.

    Raises:
        ConfigError: the extension is not built, or the device's library is not there.
    """

    def __init__(self, backend: str, *, threads: int, device: int, stream: Callable[[], int | None]) -> None:
        native = _extension()
        self.name = f"native-{backend}"
        try:
            self._copier: _native.Copier = native.Copier(backend, threads=threads, device=device)
        except native.BackendUnavailable as error:
            raise ConfigError("device", backend, f"a device whose driver is installed ({error})") from error
        self._stream = stream
        self._tables: dict[tuple[CacheDomain, str], _native.Table] = {}

    def attach(self, domains: Sequence[CacheDomain], memories: Sequence[HostMemory]) -> None:
        for memory in memories:
            self._copier.register_region(memory.address, memory.array.nbytes, kind="host", owner=memory)
        for domain in domains:
            for block_type, cache in domain.caches.items():
                self._tables[domain, block_type.value] = self._table(cache)

    def _table(self, cache: BlockCache) -> _native.Table:
        assert cache.host is not None
        for layer in cache.device:
            self._copier.register_region(layer.data_ptr(), layer.nbytes, kind="device", owner=layer)
        first = cache.device[0]
        return self._copier.table(
            [layer.data_ptr() for layer in cache.device],
            device_stride=first.stride(0),
            device_blocks=first.shape[0],
            host_base=cache.host.data_ptr(),
            host_stride=cache.host.stride(0),
            host_blocks=cache.host.shape[0],
            piece_bytes=cache.layout.layer_bytes,
            layers=cache.layout.layers,
        )

    def _submit(
        self, direction: str, parts: Sequence[Part], groups: Sequence[range], stream: int | None
    ) -> _native.Transfer:
        tables = [
            (self._tables[domain, mapping.block_type], _int64(mapping.device), _int64(mapping.host))
            for domain, mapping in parts
        ]
        spans = [(group.start, group.stop) for group in groups]
        try:
            return self._copier.submit(direction, tables, spans, owners=self, after_stream=stream)
        except _extension().NativeError as error:
            raise TransferError(f"{direction}: {error}") from error

    def load(self, batch_id: int, parts: Sequence[Part], groups: Sequence[range]) -> LayerSynchronizer:
        stream = self._stream()  # once per load: on an NPU reading it drains the launch queue
        try:
            transfer = self._submit("load", parts, groups, stream)
        except (TransferError, ValueError) as error:  # a failed load, which the forward reports
            refused = LayerSynchronizer(batch_id, groups)
            refused.abort(str(error))
            return refused
        return NativeSynchronizer(batch_id, groups, transfer, stream)

    def offload(self, parts: Sequence[Part]) -> Callable[[float], None]:
        try:
            transfer = self._submit("offload", parts, [range(end_of_layers(parts))], self._stream())
        except ValueError as error:
            raise TransferError(f"offload: {error}") from error

        def wait(timeout_s: float) -> None:
            try:
                transfer.wait_all(timeout_s)
            except _extension().NativeError as error:
                raise TransferError(f"offload: {error}") from error

        return wait

    def close(self) -> None:
        self._copier.close()


def _int64(ids: Any) -> Any:
    return np.asarray(ids, dtype=np.int64)


def _extension() -> ModuleType | Any:
    try:
        from ... import _native
    except ImportError as error:
        raise ConfigError("copy_backend", "native", f"auto or torch (the extension is not built: {error})") from error
    return _native
