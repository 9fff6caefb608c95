"""The store as the third tier of one worker: reads, writes, and the switch from one store to another.

Reads, writes and the switch have a queue with a thread each (`StoreQueue`), so that a store that hangs delays neither a
forward nor a load. Every plan gets its answer, also when the store does not give one.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...block import BlockType, CacheRole
from ...calls import StoreCleared, StorePlace, StoreState
from ...config import EngineConfig
from ...errors import StoreError
from ...hashing import HASH_BYTES, split_hashes
from ...models.identity import ModelIdentity
from ...plans import (
    HIT,
    MISS,
    UNKNOWN,
    OffloadStored,
    PrefetchAnswer,
    PrefetchFromStorage,
    ProbeAnswer,
    ProbeStorage,
    TransferKvBlocks,
)
from ...wire import Deadline
from ..tiers.cache_domain import CacheDomain
from ..tiers.host_tier import HostTier
from ..transfer_stats import TransferStats
from .circuit import ATTACHED, DETACHED
from .kv_cache_store import KVCacheStore
from .queue import StoreQueue

log = logging.getLogger("xllm.transfer")

_LOOK_S = 0.01


class StoreTier:
    """Store transfers of one worker; `answer` sends a message to the engine from any thread.

    `store` is None without a store, and on a rank that keeps no blocks of its own: there rank 0 reads and writes for
    all, and this rank answers at once.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        host: HostTier,
        domains: Mapping[CacheRole, CacheDomain],
        stats: TransferStats,
        *,
        answer: Callable[[Any], None],
        numerics_id: str,
        identities: Mapping[str, ModelIdentity] | None,
    ) -> None:
        self._config, self._rank, self._host, self._domains = config, rank, host, domains
        self._stats, self._answer = stats, answer
        self._numerics_id, self._identities = numerics_id, identities
        self.store: KVCacheStore | None = None
        self._retired: list[KVCacheStore] = []
        self._reads, self._puts, self._control = (
            StoreQueue(name) for name in ("store-get", "store-put", "store-control")
        )

    def open(self) -> KVCacheStore | None:
        """The client of the configured store, not yet connected; None when there is none to be used here."""
        if self._config.enable_kvcache_store and self._host.keeps_any:
            self.store = self._new_store(self._config)
        return self.store

    def start(self) -> None:
        """Serve from the host blocks, which have their places now."""
        if self.store is not None and self._host.own is not None:
            self.store.start(list(self._domains.values()), self._host.own.address, self._host.host_bytes)

    def _new_store(self, config: EngineConfig) -> KVCacheStore:
        return KVCacheStore(
            config,
            self._rank,
            self._stats,
            numerics_id=self._numerics_id,
            identities=self._identities,
            on_open=self._give_up_calls,
        )

    @property
    def state(self) -> str:
        """The circuit's state, or `detached`; a rank without blocks of its own is never the one to worry about."""
        if self.store is not None:
            return self.store.state
        return ATTACHED if self._config.enable_kvcache_store else DETACHED

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
        if not self._host.keeps(block_type):
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
        """Look up which blocks the store has; answers a ProbeAnswer in any case."""

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
                if not self._host.keeps(block_type):
                    found.append(bytes([HIT]) * len(hashes))  # rank 0 looks
                else:
                    found.append(store.probe(block_type, hashes) if store is not None else bytes(len(hashes)))
        except Exception:  # a block that cannot be looked up is a miss
            log.exception("probe %d failed", plan.prefetch_id)
            self._stats.fail("g2h", "exception")
            return [bytes(len(raw) // HASH_BYTES) for raw in plan.hashes]
        return found

    # -------------------------------------------------------------------- H2G (second half of a write-back)

    def put_behind(self, plan: TransferKvBlocks) -> None:
        """Queue the store writes of a write-back whose copy has ended; answers OffloadStored in any case."""
        if not plan.put or self.state == DETACHED:
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
                if store is None or not self._host.keeps(block_type):
                    stored += len(hashes)
                else:
                    stored += store.put(block_type, mapping.host.tolist(), hashes)
        except Exception:  # a write-back that does not reach the store is a later miss, nothing else
            log.exception("store writes of %d failed", plan.transfer_id)
            self._stats.fail("h2g", "exception")
        return stored

    # -------------------------------------------------------------------------------- a store that hangs

    def watch(self) -> None:
        """Look for a store call that hangs, and end all waits for a store that is left alone; call it now and then."""
        if self.store is not None:
            self.store.circuit.check()
            if not self.store.circuit.closed:
                self._give_up_calls()

    def _give_up_calls(self) -> None:
        self._reads.give_up(self._config.store_call_limit_ms / 1000)
        self._puts.give_up(float("inf"))  # a write that hangs still reads its host blocks: it is waited for

    # ------------------------------------------------------------------------- attach, detach, clear, end

    def switch(self, place: StorePlace | None, done: Callable[[StoreState], None]) -> None:
        """Use the store at `place` from now on, or none. `done` gets an `error` when it is not there yet: it is then
        attached when it comes, unless it is `refused`. A detach waits for calls under way, for one call's limit."""
        self._control.submit(lambda: self._guarded(place), done)

    def _guarded(self, place: StorePlace | None) -> StoreState:
        """The state after the switch, or its failure: the engine gets an answer either way."""
        try:
            return self._attach(place.settings) if place is not None else self._detach()
        except Exception as error:
            log.exception("the store was not attached or detached")
            return StoreState(self.state, f"{type(error).__name__}: {error}")

    def _attach(self, settings: dict[str, str]) -> StoreState:
        changes: dict[str, Any] = {**settings, "enable_kvcache_store": True}
        config = dataclasses.replace(self._config, **changes)
        if not self._host.memories:
            return StoreState(DETACHED, "this instance has no host tier")
        other = any(getattr(self._config, name) != value for name, value in settings.items())
        self._config = config
        if self._host.own is None:
            return StoreState(self.state)  # another rank talks to the store
        if self.store is not None and other:
            self._retire(self.store)
        if self.store is None or other:
            self.store = self._new_store(config)
            self.start()
        else:
            self.store.circuit.wanted()
        try:
            self.store.look()
        except StoreError as error:
            return StoreState(self.store.state, str(error), bool(self.store.refused))
        return StoreState(self.store.state)

    def _detach(self) -> StoreState:
        self._config = dataclasses.replace(self._config, enable_kvcache_store=False)
        if self.store is not None:
            self.store.circuit.detach()
            self._give_up_calls()
            end = Deadline(self._config.store_call_limit_ms / 1000)
            while self.store.circuit.busy and not end.passed():
                time.sleep(_LOOK_S)
        return StoreState(self.state)

    def _retire(self, store: KVCacheStore) -> None:
        """End a store, but for the memory of its client if the host blocks lie there."""
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

    def clear(self, done: Callable[[StoreCleared], None]) -> None:
        """Remove this name space from the store after the writes submitted before; rank 0 does so for all."""

        def work() -> StoreCleared:
            try:
                return StoreCleared(0 if self.store is None or self._rank else self.store.clear())
            except StoreError as error:
                return StoreCleared(0, str(error))

        self._puts.submit(work, done)

    def stop(self) -> None:
        """Begin no more calls; calls under way are left to `close`."""
        for calls in (self._reads, self._puts, self._control):
            calls.close()

    def close(self) -> bool:
        """End all clients; False when one is stuck in a call (see `KVCacheStore.close`)."""
        ended = [store.close() for store in (self.store, *self._retired) if store is not None]
        return all(ended)
