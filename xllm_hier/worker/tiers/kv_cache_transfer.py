"""HierarchyKVCacheTransfer: every byte a worker moves between device, host and store goes through here.

Cache domains register first; then host caches, copier and store are built together, so that target and draft share
one layout of host blocks and one store client. Loads, their proofs and offloads run on a thread each, store reads and
writes on a thread each: none of them delays a forward that does not need it.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from ...block import TRAILER_BYTES, BlockType, CacheRole, Trailer
from ...config import EngineConfig
from ...errors import InvariantError, StoreError, TransferError
from ...hashing import HASH_BYTES
from ...host_memory import HostMemory
from ...models.identity import ModelIdentity
from ...plans import (
    HIT,
    MISS,
    UNKNOWN,
    OffloadCopied,
    OffloadStored,
    PrefetchAnswer,
    PrefetchFromStorage,
    ProbeAnswer,
    ProbeStorage,
    TransferBlocks,
    TransferKvBlocks,
)
from ...wire import Deadline
from ..store.circuit import ATTACHED, DETACHED
from ..store.kv_cache_store import KVCacheStore, name_blocks, trailer_mismatch, write_trailer
from ..store.queue import StoreQueue
from ..transfer_stats import TransferStats
from .cache_domain import BlockCache, CacheDomain
from .host_load import HostLoad
from .layer_copy import Copier, LayerSynchronizer, Part, TorchCopier, end_of_layers, layer_groups, one_thread

log = logging.getLogger("xllm.transfer")

_HOST_SOCKET = "host-memory"
_LOOK_S = 0.01


def split_hashes(raw: bytes) -> list[bytes]:
    """The 16-byte hashes of a plan. Raises TransferError when it is cut short."""
    if len(raw) % HASH_BYTES:
        raise TransferError(f"{len(raw)} bytes are no list of {HASH_BYTES}-byte hashes")
    return [raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES)]


def disproofs(parts: Sequence[Part]) -> list[str]:
    """What is wrong with each host block of `parts` that is not what the plan says, payload included."""
    problems = []
    for domain, mapping in parts:
        cache = domain.caches[BlockType(mapping.block_type)]
        for block, block_hash in zip(mapping.host.tolist(), split_hashes(mapping.hashes), strict=True):
            problem = trailer_mismatch(cache, block, block_hash)
            if problem is not None:
                problems.append(problem)
    return problems


def _nothing_to_wait_for(_timeout_s: float) -> None:
    pass


def _host_bytes(caches: Sequence[BlockCache], counts: Mapping[BlockType, int]) -> int:
    return sum(counts[cache.layout.block_type] * cache.layout.object_bytes for cache in caches)


def _place(caches: Sequence[BlockCache], memory: HostMemory, counts: Mapping[BlockType, int]) -> None:
    """Give each cache its host blocks, one cache after the other from the start of `memory`."""
    offset = 0
    for cache in caches:
        count, size = counts[cache.layout.block_type], cache.layout.object_bytes
        cache.host = torch.from_numpy(memory.array[offset : offset + count * size]).view(count, size)
        offset += count * size


class HierarchyKVCacheTransfer:
    """Transfers of one worker; `answer` sends a message to the engine and may be called from any thread.

    `meeting` is a folder that all ranks see, where they share host memory; None only with one rank.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        stats: TransferStats,
        answer: Callable[[Any], None],
        *,
        numerics_id: str = "",
        identities: Mapping[str, ModelIdentity] | None = None,
        copier: Copier | None = None,
        meeting: Path | None = None,
    ) -> None:
        self._config = config
        self._meeting = meeting
        self._numerics_id = numerics_id
        self._identities = identities
        self._rank = rank
        self._stats = stats
        self._answer = answer
        self._copier: Copier = copier or TorchCopier()
        self._domains: dict[CacheRole, CacheDomain] = {}
        self._memories: list[HostMemory] = []
        self.host_bytes = 0
        self.store: KVCacheStore | None = None
        self._loads: dict[int, HostLoad] = {}
        self._lock = threading.Lock()
        self._threads = {name: one_thread(name) for name in ("h2d", "proof", "d2h")}
        self._reads, self._puts, self._control = (
            StoreQueue(name) for name in ("store-get", "store-put", "store-control")
        )
        self._retired: list[KVCacheStore] = []
        self._own_memory: HostMemory | None = None

    # ----------------------------------------------------------------------------------------------- set-up

    def register(self, domain: CacheDomain) -> None:
        """Add a model's caches; only before `build`. Raises InvariantError for a second domain of one role."""
        if domain.role in self._domains or self._memories:
            raise InvariantError(f"the {domain.role.value} domain comes twice or too late")
        identity = (self._identities or {}).get(domain.key_component)
        name_blocks(domain, self._config, self._rank, identity.text if identity else "")
        self._domains[domain.role] = domain

    def build(self, num_host_blocks: Mapping[BlockType, int]) -> None:
        """Create the host caches of all registered domains, so many blocks of each type, and the store client when the
        store is enabled.

        Raises:
            ConfigError: the host memory does not fit.
            StartupError: the ranks could not share theirs.
        """
        if not any(num_host_blocks.values()):
            return
        caches = [cache for domain in self._domains.values() for cache in domain.caches.values()]
        shared = [cache for cache in caches if cache.layout.replicated and self._config.tp_size > 1]
        kept = [cache for cache in caches if cache.layout.kept_by(self._rank)]
        kept.sort(key=lambda cache: cache not in shared)  # what is shared lies first, so that peers need no offset
        self.host_bytes = _host_bytes(kept, num_host_blocks)
        address = None
        if self._config.enable_kvcache_store and kept:
            self.store = self._new_store(self._config)
            address = self.store.connect(self.host_bytes)
        if kept:
            own = self._make_memory(address)
            if shared and self._rank == 0:
                own = self._offer(own)
            _place(kept, own, num_host_blocks)
            self._own_memory = own
        if shared and self._rank != 0:
            assert self._meeting is not None
            nbytes = _host_bytes(shared, num_host_blocks)
            memory = HostMemory.receive(self._meeting / _HOST_SOCKET, nbytes, self._config.startup_timeout_s)
            self._memories.append(memory)
            _place(shared, memory, num_host_blocks)
        self._copier.attach(list(self._domains.values()), self._memories)
        if self.store is not None:
            self.store.start(list(self._domains.values()), own.address, self.host_bytes)

    def _new_store(self, config: EngineConfig) -> KVCacheStore:
        return KVCacheStore(
            config,
            self._rank,
            self._stats,
            numerics_id=self._numerics_id,
            identities=self._identities,
            on_open=self._give_up_store_calls,
        )

    def _make_memory(self, address: int | None) -> HostMemory:
        """This rank's own host memory: at `address`, when the store client gives it, else made here."""
        if address:
            memory = HostMemory.at(address, self.host_bytes)
        else:
            memory = HostMemory.create(self.host_bytes, huge_pages=self._config.host_huge_pages)
        self._memories.append(memory)
        return memory

    def _offer(self, memory: HostMemory) -> HostMemory:
        """Let the other ranks map the memory; returns the one to use, since not every store client's can be shared."""
        assert self._meeting is not None
        peers, path = self._config.tp_size - 1, self._meeting / _HOST_SOCKET
        try:
            memory.offer(path, peers, self._config.startup_timeout_s)
        except LookupError as error:
            log.warning("the store client's memory cannot be shared (%s): its objects take one more copy", error)
            assert self.store is not None
            self.store.keep_apart()
            self._memories.remove(memory)
            memory = self._make_memory(None)
            memory.offer(path, peers, self._config.startup_timeout_s)
        return memory

    @property
    def mixed_numerics(self) -> bool:
        """What the store gives may have been computed by an instance with other bits."""
        return self.store is not None and self.store.mixed_numerics

    def _keeps(self, block_type: BlockType) -> bool:
        """Some domain's blocks of this type are this rank's to write and to read."""
        layouts = (domain.layout.of(block_type) for domain in self._domains.values() if block_type in domain.caches)
        return any(layout.kept_by(self._rank) for layout in layouts)

    @property
    def store_state(self) -> str:
        """`attached`, `degraded` or `detached`; a rank that has nothing of its own to store is never the weak one."""
        if self.store is not None:
            return self.store.state
        return ATTACHED if self._config.enable_kvcache_store else DETACHED

    @property
    def store_refused(self) -> str:
        """Why the store must not be used: it holds another model's blocks under our model id; empty otherwise."""
        return self.store.refused if self.store is not None else ""

    # ------------------------------------------------------------------------------------------ H2D (load)

    def load_from_host(self, plan: TransferBlocks) -> int:
        """Register a layered load and start it; returns the logical blocks scheduled, without waiting for any copy.

        Raises:
            InvariantError: the batch id is alive.
        """
        with self._lock:
            if plan.batch_id in self._loads:
                raise InvariantError(f"batch id {plan.batch_id} is in use")
        parts = self._parts(plan)
        groups = layer_groups(self._domains[CacheRole.TARGET].layout.num_layers, self._config.layers_wise_copy_batchs)
        last = groups[-1]  # a draft may be deeper than its target
        groups[-1] = range(last.start, max(last.stop, end_of_layers(parts) if parts else 0))
        start = time.perf_counter()
        problem = self._disproof(parts)
        if problem is None:
            copies = self._copier.load(plan.batch_id, parts, groups)
            load = HostLoad(copies, self._start_proof(plan.batch_id, parts))
            self._threads["h2d"].submit(self._see_load_end, copies, self._payload_bytes(parts), start)
        else:
            log.error("load %d was not begun: %s", plan.batch_id, problem)
            self._stats.fail("h2d", "block_hash")
            copies = LayerSynchronizer(plan.batch_id, groups)
            copies.abort(problem)
            load = HostLoad(copies)
        with self._lock:
            self._loads[plan.batch_id] = load
        return sum(len(mapping.device) for mapping in plan.target_mappings)

    def _start_proof(self, batch_id: int, parts: list[Part]) -> Future[str | None] | None:
        """Verify the host blocks of a load beside its copies; those that all ranks map are rank 0's to verify."""
        kept = [part for part in parts if self._cache_of(part).layout.kept_by(self._rank)]
        if not kept or not self._config.verify_host_blocks:
            return None
        return self._threads["proof"].submit(self._prove, batch_id, kept)

    def _prove(self, batch_id: int, parts: list[Part]) -> str | None:
        """What is wrong with the host blocks, None when all prove themselves. Hashing releases the interpreter."""
        try:
            problems = disproofs(parts)
        except Exception as error:  # what is not proven must not count, and the forward must not wait for ever
            log.exception("load %d could not be verified", batch_id)
            problems = [type(error).__name__]
        if not problems:
            return None
        for problem in problems:
            self._stats.fail("h2d", problem)
        wrong = f"{len(problems)} host blocks are not what was written there ({', '.join(sorted(set(problems)))})"
        log.error("load %d is thrown away: %s", batch_id, wrong)
        return wrong

    def _parts(self, plan: TransferBlocks | TransferKvBlocks) -> list[Part]:
        """The mappings of a plan with the domain each belongs to."""
        if plan.draft_mappings and CacheRole.DRAFT not in self._domains:
            raise TransferError("this worker has no draft domain")
        by_role = ((CacheRole.TARGET, plan.target_mappings), (CacheRole.DRAFT, plan.draft_mappings))
        return [(self._domains[role], mapping) for role, mappings in by_role for mapping in mappings]

    @staticmethod
    def _cache_of(part: Part) -> BlockCache:
        domain, mapping = part
        return domain.caches[BlockType(mapping.block_type)]

    @staticmethod
    def _disproof(parts: list[Part]) -> str | None:
        """Why a load must not happen: a host block whose trailer says it holds something else than the plan wants.

        This looks at the 64 bytes only; the payload is verified beside the copy, see `_start_proof`.
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

    def _see_load_end(self, copies: LayerSynchronizer, nbytes: int, start: float) -> None:
        try:
            copies.wait_all(self._config.worker_timeout_s)
        except TransferError as error:
            log.error("%s", error)
            self._stats.fail("h2d", "timeout")
            return
        if copies.error is not None:
            log.error("load %d failed: %s", copies.batch_id, copies.error)
            self._stats.fail("h2d", "copy")
        else:
            self._stats.add("h2d", nbytes, time.perf_counter() - start)

    @staticmethod
    def _payload_bytes(parts: Sequence[Part]) -> int:
        return sum(
            len(mapping.device) * domain.layout.of(BlockType(mapping.block_type)).payload_bytes
            for domain, mapping in parts
        )

    def attach_loads(self) -> list[HostLoad]:
        """The loads no forward has waited for yet; the caller's forward must wait for all of them."""
        with self._lock:
            attached, self._loads = list(self._loads.values()), {}
            return attached

    # -------------------------------------------------------------------------------- D2H2G (write-back)

    def offload(self, plan: TransferKvBlocks) -> None:
        """Start a write-back of what the forwards ordered before it have written.

        Answers OffloadCopied when the host has the blocks, OffloadStored when the store writes have ended.
        """
        try:
            parts = [part for part in self._parts(plan) if self._cache_of(part).layout.kept_by(self._rank)]
            wait = self._copier.offload(parts) if parts else _nothing_to_wait_for
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
                cache = self._cache_of((domain, mapping))
                hashes = split_hashes(mapping.hashes)
                for block, block_hash in zip(mapping.host.tolist(), hashes, strict=True):
                    write_trailer(cache, block, block_hash)
        except Exception as error:
            self._offload_failed(plan, error)
            return
        if parts:
            self._stats.add("d2h", self._payload_bytes(parts), time.perf_counter() - start)
        copied = sum(len(mapping.device) for mapping in plan.target_mappings)
        self._answer(OffloadCopied(plan.transfer_id, self._rank, copied))
        self._put_behind(plan)

    def _put_behind(self, plan: TransferKvBlocks) -> None:
        """Queue the store writes of a write-back whose copy has ended; without a store there are none."""
        if not plan.put or self.store_state == DETACHED:
            self._stored(plan, 0)
        else:
            self._puts.submit(
                lambda: self._put(plan),
                lambda stored: self._stored(plan, stored),
                lambda _running: self._stored(plan, 0),
            )

    def _stored(self, plan: TransferKvBlocks, count: int) -> None:
        self._answer(OffloadStored(plan.transfer_id, self._rank, count))

    def _put(self, plan: TransferKvBlocks) -> int:
        stored, store = 0, self.store
        try:
            for mapping in plan.target_mappings:
                block_type, hashes = BlockType(mapping.block_type), split_hashes(mapping.hashes)
                if store is None or not self._keeps(block_type):
                    stored += len(hashes)
                else:
                    stored += store.put(block_type, mapping.host.tolist(), hashes)
        except Exception:  # a write-back that does not reach the store is a later miss, nothing else
            log.exception("store writes of %d failed", plan.transfer_id)
            self._stats.fail("h2g", "exception")
        return stored

    # ------------------------------------------------------------------------------------ G2H (prefetch)

    def prefetch(self, plan: PrefetchFromStorage) -> None:
        """Start reading a batch of the store into host blocks; answers a PrefetchAnswer in any case."""

        def answer(hits: bytes) -> None:
            self._answer(PrefetchAnswer(plan.prefetch_id, plan.offset, self._rank, hits))

        def give_up(running: bool) -> None:  # a read that hangs may still write
            answer(bytes([UNKNOWN if running else MISS]) * len(plan.host))

        self._reads.submit(lambda: self._prefetch(plan), answer, give_up)

    def _prefetch(self, plan: PrefetchFromStorage) -> bytes:
        block_type, store = BlockType(plan.block_type), self.store
        if not self._keeps(block_type):
            return bytes([HIT]) * len(plan.host)  # rank 0 reads them into the memory that all map
        try:
            if store is not None:
                return store.prefetch(block_type, plan.host.tolist(), split_hashes(plan.hashes))
        except Exception:  # a failed read is a miss
            log.exception("prefetch %d failed", plan.prefetch_id)
            self._stats.fail("g2h", "exception")
            return bytes([UNKNOWN]) * len(plan.host)  # nobody knows how far it got
        return bytes([MISS]) * len(plan.host)

    def probe(self, plan: ProbeStorage) -> None:
        """Look which blocks the store has; answers a ProbeAnswer in any case."""

        def answer(hits: list[bytes]) -> None:
            self._answer(ProbeAnswer(plan.prefetch_id, self._rank, hits))

        def give_up(_running: bool) -> None:
            answer([bytes(len(raw) // HASH_BYTES) for raw in plan.hashes])

        self._reads.submit(lambda: self._probe(plan), answer, give_up)

    def _probe(self, plan: ProbeStorage) -> list[bytes]:
        store, found = self.store, []
        try:
            for name, raw in zip(plan.block_types, plan.hashes, strict=True):
                block_type, hashes = BlockType(name), split_hashes(raw)
                if not self._keeps(block_type):
                    found.append(bytes([HIT]) * len(hashes))  # rank 0 looks
                else:
                    found.append(store.probe(block_type, hashes) if store is not None else bytes(len(hashes)))
        except Exception:  # what cannot be looked for is not there
            log.exception("probe %d failed", plan.prefetch_id)
            self._stats.fail("g2h", "exception")
            return [bytes(len(raw) // HASH_BYTES) for raw in plan.hashes]
        return found

    def watch_store(self) -> None:
        """Look for a store call that hangs, and let nobody wait for one that is left alone; call it now and then."""
        if self.store is not None:
            self.store.circuit.check()
            if not self.store.circuit.closed:
                self._give_up_store_calls()

    def _give_up_store_calls(self) -> None:
        self._reads.give_up(self._config.store_call_limit_ms / 1000)
        self._puts.give_up(float("inf"))  # a write that hangs still reads its host blocks: it is waited for

    # ------------------------------------------------------------------------------- attaching, detaching

    def attach_store(self, addresses: dict[str, Any], done: Callable[[dict[str, Any]], None]) -> None:
        """Use the store at `addresses` (settings of EngineConfig; none: the last one) from now on; `done` gets `state`
        and, when it is not there yet, `error`: it is then attached when it comes, unless it is `refused`."""
        self._control.submit(lambda: self._guarded(lambda: self._attach_store(addresses)), done)

    def _guarded(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Whoever asks gets an answer."""
        try:
            return work()
        except Exception as error:
            log.exception("the store was not attached or detached")
            return {"state": self.store_state, "error": f"{type(error).__name__}: {error}"}

    def _attach_store(self, addresses: dict[str, Any]) -> dict[str, Any]:
        config = dataclasses.replace(self._config, **addresses, enable_kvcache_store=True)
        if not self._memories:
            return {"state": DETACHED, "error": "this instance has no host tier"}
        other = any(getattr(self._config, name) != value for name, value in addresses.items())
        self._config = config
        if self._own_memory is None:
            return {"state": self.store_state}  # another rank talks to the store
        if self.store is not None and other:
            self._retire(self.store)
        if self.store is None or other:
            self.store = self._new_store(config)
            self.store.start(list(self._domains.values()), self._own_memory.address, self.host_bytes)
        else:
            self.store.circuit.wanted()
        try:
            self.store.look()
        except StoreError as error:
            return {"state": self.store.state, "error": str(error), "refused": bool(self.store.refused)}
        return {"state": self.store.state}

    def detach_store(self, done: Callable[[dict[str, Any]], None]) -> None:
        """Ask the store for nothing more; what is under way is awaited, for as long as a call may take."""
        self._control.submit(lambda: self._guarded(self._detach_store), done)

    def _detach_store(self) -> dict[str, Any]:
        self._config = dataclasses.replace(self._config, enable_kvcache_store=False)
        if self.store is not None:
            self.store.circuit.detach()
            self._give_up_store_calls()
            end = Deadline(self._config.store_call_limit_ms / 1000)
            while self.store.circuit.busy and not end.passed():
                time.sleep(_LOOK_S)
        return {"state": self.store_state}

    def _retire(self, store: KVCacheStore) -> None:
        """Have done with a store, but for the memory of its client if the host blocks lie there."""
        store.circuit.detach()
        for calls in (self._reads, self._puts):
            calls.give_up(0.0 if calls is self._reads else float("inf"))
            calls.close()
        # A call that hangs in the old store must not keep the new one's waiting.
        self._reads, self._puts = StoreQueue("store-get"), StoreQueue("store-put")
        if store.lends_memory:
            store.stop_watching()
            self._retired.append(store)
        elif not store.close():
            self._retired.append(store)  # stuck: the end of this process must know

    # ------------------------------------------------------------------------------------------------- end

    def clear_store(self, done: Callable[[dict[str, Any]], None]) -> None:
        """Remove this name space from the store after the writes submitted before; `done` gets `removed` or `error`."""

        def work() -> dict[str, Any]:
            try:
                return {"removed": 0 if self.store is None or self._rank else self.store.clear()}
            except StoreError as error:
                return {"removed": 0, "error": str(error)}

        self._puts.submit(work, done)

    def close(self) -> bool:
        """End all threads and the store client; False when the store library is stuck in a call (then `os._exit`)."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)
        for calls in (self._reads, self._puts, self._control):
            calls.close()
        self._copier.close()
        ended = [store.close() for store in (self.store, *self._retired) if store is not None]
        return all(ended)
