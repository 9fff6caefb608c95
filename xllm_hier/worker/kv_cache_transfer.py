"""HierarchyKVCacheTransfer: every byte a worker moves between device, host and store goes through here.

Cache domains register first; then host caches, copier and store are built together, so that target and draft share
one layout of host blocks and one store client. Loads and offloads run on a thread each, store reads and writes on a
thread each: none of them delays a forward that does not need it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from ..block import BlockType, CacheRole
from ..config import EngineConfig
from ..errors import InvariantError, StoreError, TransferError
from ..hashing import HASH_BYTES
from ..host_memory import HostMemory
from ..plans import (
    BlockMapping,
    OffloadCopied,
    OffloadStored,
    PrefetchAnswer,
    PrefetchFromStorage,
    TransferBlocks,
    TransferKvBlocks,
)
from .cache_domain import CacheDomain
from .kv_cache_store import KVCacheStore, write_trailer
from .layer_copy import LayerSynchronizer, TorchCopier, layer_groups
from .transfer_stats import TransferStats

log = logging.getLogger("xllm.transfer")


def split_hashes(raw: bytes) -> list[bytes]:
    """The 16-byte hashes of a plan. Raises TransferError when it is cut short."""
    if len(raw) % HASH_BYTES:
        raise TransferError(f"{len(raw)} bytes are no list of {HASH_BYTES}-byte hashes")
    return [raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES)]


def _one_thread(name: str) -> ThreadPoolExecutor:
    """A thread whose torch calls start no OpenMP team of their own.

    With more such threads than cores libgomp stops spinning at barriers for good, and every forward becomes 1.4 times
    slower. torch sets some of this for the whole process, so the caller's count is set again behind it.
    """
    count = torch.get_num_threads()
    thread = ThreadPoolExecutor(1, thread_name_prefix=name)
    thread.submit(torch.set_num_threads, 1).result()
    torch.set_num_threads(count)
    return thread


class HierarchyKVCacheTransfer:
    """Transfers of one worker; `answer` sends a message to the engine and may be called from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        stats: TransferStats,
        answer: Callable[[Any], None],
        *,
        numerics_id: str = "",
        copier: Any = None,
    ) -> None:
        self._config = config
        self._numerics_id = numerics_id
        self._rank = rank
        self._stats = stats
        self._answer = answer
        self._copier = copier or TorchCopier()
        self._domains: dict[CacheRole, CacheDomain] = {}
        self._memory: HostMemory | None = None
        self.store: KVCacheStore | None = None
        self._synchronizers: dict[int, LayerSynchronizer] = {}
        self._lock = threading.Lock()
        self._threads = {name: _one_thread(name) for name in ("h2d", "d2h", "store-get", "store-put")}

    # ----------------------------------------------------------------------------------------------- set-up

    def register(self, domain: CacheDomain) -> None:
        """Add a model's caches; only before `build`. Raises InvariantError for a second domain of one role."""
        if domain.role in self._domains or self._memory is not None:
            raise InvariantError(f"the {domain.role.value} domain comes twice or too late")
        self._domains[domain.role] = domain

    def build(self, num_host_blocks: int) -> None:
        """Create the host caches of all registered domains, and the store client when the store is enabled.

        Raises:
            ConfigError: the host memory does not fit.
        """
        if not num_host_blocks:
            return
        caches = [cache for domain in self._domains.values() for cache in domain.caches.values()]
        host_bytes = num_host_blocks * sum(cache.layout.object_bytes for cache in caches)
        address = None
        if self._config.enable_kvcache_store:
            self.store = KVCacheStore(self._config, self._rank, self._stats, numerics_id=self._numerics_id)
            address = self.store.connect(host_bytes)
        self._memory = HostMemory.at(address, host_bytes) if address else HostMemory.create(host_bytes)
        offset = 0
        for cache in caches:
            nbytes = num_host_blocks * cache.layout.object_bytes
            part = torch.from_numpy(self._memory.array[offset : offset + nbytes])
            cache.host = part.view(num_host_blocks, cache.layout.object_bytes)
            offset += nbytes
        if self.store is not None:
            self.store.start(list(self._domains.values()), self._memory.address, host_bytes)

    @property
    def store_state(self) -> str:
        return "detached" if self.store is None else self.store.state

    # ------------------------------------------------------------------------------------------ H2D (load)

    def load_from_host(self, plan: TransferBlocks) -> int:
        """Register a layered load and start it; returns the blocks scheduled, without waiting for any copy.

        Raises:
            InvariantError: the batch id is alive.
        """
        if plan.draft_mappings:
            raise TransferError("this worker has no draft domain")
        groups = layer_groups(len(self._any_layers()), self._config.layers_wise_copy_batchs)
        synchronizer = LayerSynchronizer(plan.batch_id, groups)
        with self._lock:
            if plan.batch_id in self._synchronizers:
                raise InvariantError(f"batch id {plan.batch_id} is in use")
            self._synchronizers[plan.batch_id] = synchronizer
        self._threads["h2d"].submit(self._load, plan, synchronizer, groups)
        return sum(len(mapping.device) for mapping in plan.target_mappings)

    def _any_layers(self) -> tuple[int, ...]:
        return self._domains[CacheRole.TARGET].layout.blocks[0].layers

    def _load(self, plan: TransferBlocks, synchronizer: LayerSynchronizer, groups: list[range]) -> None:
        domain = self._domains[CacheRole.TARGET]
        try:
            nbytes = sum(self._payload_bytes(domain, mapping) for mapping in plan.target_mappings)
            with self._stats.timed("h2d", nbytes):
                for number, layers in enumerate(groups):
                    for mapping in plan.target_mappings:
                        self._copier.load(domain, mapping, layers)
                    synchronizer.complete(number)
        except Exception as error:  # whatever went wrong, the forward must not wait for ever
            log.exception("load %d failed", plan.batch_id)
            self._stats.fail("h2d", "copy")
            synchronizer.abort(f"{type(error).__name__}: {error}")

    @staticmethod
    def _payload_bytes(domain: CacheDomain, mapping: BlockMapping) -> int:
        return len(mapping.device) * domain.layout.of(BlockType(mapping.block_type)).payload_bytes

    def attach_loads(self) -> list[LayerSynchronizer]:
        """The loads no forward has waited for yet; the caller's forward must wait for all of them."""
        with self._lock:
            attached, self._synchronizers = list(self._synchronizers.values()), {}
            return attached

    # -------------------------------------------------------------------------------- D2H2G (write-back)

    def offload(self, plan: TransferKvBlocks) -> None:
        """Start a write-back; every forward ordered before it must have ended its writes on the device.

        Answers OffloadCopied when the host has the blocks, OffloadStored when the store writes have ended.
        """
        self._threads["d2h"].submit(self._offload, plan)

    def _offload(self, plan: TransferKvBlocks) -> None:
        copied = 0
        try:
            if plan.draft_mappings:
                raise TransferError("this worker has no draft domain")
            domain = self._domains[CacheRole.TARGET]
            for mapping in plan.target_mappings:
                self._offload_mapping(domain, mapping)
            copied = sum(len(mapping.device) for mapping in plan.target_mappings)
        except Exception:  # the engine rolls back on a short count; the worker lives on
            log.exception("write-back %d failed", plan.transfer_id)
            self._stats.fail("d2h", "copy")
        self._answer(OffloadCopied(plan.transfer_id, self._rank, copied))
        if copied and plan.put and self.store is not None:
            self._threads["store-put"].submit(self._put, plan)
        else:
            self._answer(OffloadStored(plan.transfer_id, self._rank, 0))

    def _offload_mapping(self, domain: CacheDomain, mapping: BlockMapping) -> None:
        cache = domain.caches[BlockType(mapping.block_type)]
        with self._stats.timed("d2h", self._payload_bytes(domain, mapping)):
            self._copier.offload(domain, mapping, range(len(cache.device)))
            hashes = split_hashes(mapping.hashes)
            for block, block_hash in zip(mapping.host.tolist(), hashes, strict=True):
                write_trailer(cache, block, block_hash)

    def _put(self, plan: TransferKvBlocks) -> None:
        stored = 0
        try:
            assert self.store is not None
            for mapping in plan.target_mappings:
                hashes = split_hashes(mapping.hashes)
                stored += self.store.put(BlockType(mapping.block_type), mapping.host.tolist(), hashes)
        except Exception:  # a write-back that does not reach the store is a later miss, nothing else
            log.exception("store writes of %d failed", plan.transfer_id)
            self._stats.fail("h2g", "exception")
        self._answer(OffloadStored(plan.transfer_id, self._rank, stored))

    # ------------------------------------------------------------------------------------ G2H (prefetch)

    def prefetch(self, plan: PrefetchFromStorage) -> None:
        """Start reading a batch of the store into host blocks; answers a PrefetchAnswer in any case."""
        self._threads["store-get"].submit(self._prefetch, plan)

    def _prefetch(self, plan: PrefetchFromStorage) -> None:
        hits = bytes(len(plan.host))
        try:
            if self.store is not None:
                hashes = split_hashes(plan.hashes)
                hits = self.store.prefetch(BlockType(plan.block_type), plan.host.tolist(), hashes)
        except Exception:  # a failed read is a miss
            log.exception("prefetch %d failed", plan.prefetch_id)
            self._stats.fail("g2h", "exception")
        self._answer(PrefetchAnswer(plan.prefetch_id, plan.offset, self._rank, hits))

    # ------------------------------------------------------------------------------------------------- end

    def clear_store(self, done: Callable[[dict[str, Any]], None]) -> None:
        """Remove this name space from the store after the writes submitted before; `done` gets `removed` or `error`."""

        def work() -> None:
            try:
                done({"removed": 0 if self.store is None or self._rank else self.store.clear()})
            except StoreError as error:
                done({"removed": 0, "error": str(error)})

        self._threads["store-put"].submit(work)

    def close(self) -> bool:
        """End all threads and the store client; False when the store library is stuck in a call (then `os._exit`)."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        return self.store is None or self.store.close()
