"""HierarchyKVCacheTransfer: every byte a worker moves between device, host and store goes through here.

Cache domains register first; then host caches, copier and store are built together, so that target and draft share
one layout of host blocks and one store client. Loads and offloads run on a thread each, store reads and writes on a
thread each: none of them delays a forward that does not need it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..block import TRAILER_BYTES, BlockType, CacheRole, Trailer
from ..config import EngineConfig
from ..errors import InvariantError, StoreError, TransferError
from ..hashing import HASH_BYTES
from ..host_memory import HostMemory
from ..plans import (
    OffloadCopied,
    OffloadStored,
    PrefetchAnswer,
    PrefetchFromStorage,
    TransferBlocks,
    TransferKvBlocks,
)
from .cache_domain import CacheDomain
from .kv_cache_store import KVCacheStore, write_trailer
from .layer_copy import Copier, LayerSynchronizer, Part, TorchCopier, layer_groups, one_thread
from .transfer_stats import TransferStats

log = logging.getLogger("xllm.transfer")


def split_hashes(raw: bytes) -> list[bytes]:
    """The 16-byte hashes of a plan. Raises TransferError when it is cut short."""
    if len(raw) % HASH_BYTES:
        raise TransferError(f"{len(raw)} bytes are no list of {HASH_BYTES}-byte hashes")
    return [raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES)]


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
        copier: Copier | None = None,
    ) -> None:
        self._config = config
        self._numerics_id = numerics_id
        self._rank = rank
        self._stats = stats
        self._answer = answer
        self._copier: Copier = copier or TorchCopier()
        self._domains: dict[CacheRole, CacheDomain] = {}
        self._memory: HostMemory | None = None
        self.store: KVCacheStore | None = None
        self._synchronizers: dict[int, LayerSynchronizer] = {}
        self._lock = threading.Lock()
        self._threads = {name: one_thread(name) for name in ("h2d", "d2h", "store-get", "store-put")}

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
        if address:
            self._memory = HostMemory.at(address, host_bytes)
        else:
            self._memory = HostMemory.create(host_bytes, huge_pages=self._config.host_huge_pages)
        offset = 0
        for cache in caches:
            nbytes = num_host_blocks * cache.layout.object_bytes
            part = torch.from_numpy(self._memory.array[offset : offset + nbytes])
            cache.host = part.view(num_host_blocks, cache.layout.object_bytes)
            offset += nbytes
        self._copier.attach(list(self._domains.values()), self._memory)
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
        with self._lock:
            if plan.batch_id in self._synchronizers:
                raise InvariantError(f"batch id {plan.batch_id} is in use")
        parts = self._parts(plan)
        num_layers = len(self._domains[CacheRole.TARGET].layout.blocks[0].layers)
        groups = layer_groups(num_layers, self._config.layers_wise_copy_batchs)
        most = max((len(d.caches[BlockType(m.block_type)].device) for d, m in parts), default=num_layers)
        groups[-1] = range(groups[-1].start, max(groups[-1].stop, most))  # a draft may be deeper than its target
        start = time.perf_counter()
        problem = self._disproof(parts)
        if problem is None:
            synchronizer = self._copier.load(plan.batch_id, parts, groups)
        else:
            synchronizer = LayerSynchronizer(plan.batch_id, groups)
            synchronizer.abort(problem)
        with self._lock:
            self._synchronizers[plan.batch_id] = synchronizer
        self._threads["h2d"].submit(self._see_load_end, synchronizer, self._payload_bytes(parts), start)
        return sum(len(mapping.device) for _, mapping in parts)

    def _parts(self, plan: TransferBlocks | TransferKvBlocks) -> list[Part]:
        """The mappings of a plan with the domain each belongs to."""
        if plan.draft_mappings and CacheRole.DRAFT not in self._domains:
            raise TransferError("this worker has no draft domain")
        by_role = ((CacheRole.TARGET, plan.target_mappings), (CacheRole.DRAFT, plan.draft_mappings))
        return [(self._domains[role], mapping) for role, mappings in by_role for mapping in mappings]

    @staticmethod
    def _disproof(parts: list[Part]) -> str | None:
        """Why a load must not happen: a host block whose trailer says it holds something else than the plan wants.

        The payload's checksum was verified when the block came from the store; this looks at the 64 bytes only.
        """
        for domain, mapping in parts:
            cache = domain.caches[BlockType(mapping.block_type)]
            assert cache.host is not None
            if len(mapping.host) and int(mapping.host.max()) >= cache.host.shape[0]:
                return f"host block {int(mapping.host.max())} is out of range"
            start = cache.layout.object_bytes - TRAILER_BYTES
            trailers = cache.host.numpy()[mapping.host, start:]
            if b"".join(Trailer.block_hash(raw.tobytes()) for raw in trailers) != mapping.hashes:
                return "a host block is not the block the plan names"
        return None

    def _see_load_end(self, synchronizer: LayerSynchronizer, nbytes: int, start: float) -> None:
        try:
            synchronizer.wait_all(self._config.worker_timeout_s)
        except TransferError as error:
            log.error("%s", error)
            self._stats.fail("h2d", "timeout")
            return
        if synchronizer.error is not None:
            log.error("load %d failed: %s", synchronizer.batch_id, synchronizer.error)
            self._stats.fail("h2d", "copy")
        else:
            self._stats.add("h2d", nbytes, time.perf_counter() - start)

    @staticmethod
    def _payload_bytes(parts: Sequence[Part]) -> int:
        return sum(
            len(mapping.device) * domain.layout.of(BlockType(mapping.block_type)).payload_bytes
            for domain, mapping in parts
        )

    def attach_loads(self) -> list[LayerSynchronizer]:
        """The loads no forward has waited for yet; the caller's forward must wait for all of them."""
        with self._lock:
            attached, self._synchronizers = list(self._synchronizers.values()), {}
            return attached

    # -------------------------------------------------------------------------------- D2H2G (write-back)

    def offload(self, plan: TransferKvBlocks) -> None:
        """Start a write-back of what the forwards ordered before it have written.

        Answers OffloadCopied when the host has the blocks, OffloadStored when the store writes have ended.
        """
        try:
            parts = self._parts(plan)
            wait = self._copier.offload(parts)
        except (TransferError, RuntimeError) as error:  # the engine rolls back on a short count; the worker lives on
            self._offload_failed(plan, error)
            return
        self._threads["d2h"].submit(self._finish_offload, plan, parts, wait, time.perf_counter())

    def _offload_failed(self, plan: TransferKvBlocks, error: object) -> None:
        log.error("write-back %d failed: %s", plan.transfer_id, error)
        self._stats.fail("d2h", "copy")
        self._answer(OffloadCopied(plan.transfer_id, self._rank, 0))
        self._answer(OffloadStored(plan.transfer_id, self._rank, 0))

    def _finish_offload(
        self, plan: TransferKvBlocks, parts: list[Part], wait: Callable[[float], None], start: float
    ) -> None:
        try:
            wait(self._config.worker_timeout_s)
            for domain, mapping in parts:
                cache = domain.caches[BlockType(mapping.block_type)]
                hashes = split_hashes(mapping.hashes)
                for block, block_hash in zip(mapping.host.tolist(), hashes, strict=True):
                    write_trailer(cache, block, block_hash)
        except Exception as error:
            self._offload_failed(plan, error)
            return
        self._stats.add("d2h", self._payload_bytes(parts), time.perf_counter() - start)
        copied = sum(len(mapping.device) for mapping in plan.target_mappings)
        self._answer(OffloadCopied(plan.transfer_id, self._rank, copied))
        if plan.put and self.store is not None:
            self._threads["store-put"].submit(self._put, plan)
        else:
            self._answer(OffloadStored(plan.transfer_id, self._rank, 0))

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
        self._copier.close()
        return self.store is None or self.store.close()
