"""HierarchyKVCacheTransfer: every byte that a worker moves between device, host and store goes through here.

==============  ==================================================================================================
`h2d.py`        loads, which a forward waits for layer by layer (`layered_wait.py`)
`d2h.py`        offloads, whose blocks get their trailers (`proof.py`)
`store_tier.py` G2H reads and H2G writes, and the switch between stores
`host_tier.py`  the memory of the host blocks, which ranks may share
`layer_copy.py` the copies themselves, native or by torch
==============  ==================================================================================================

Cache domains register first; `build` then makes host caches, copier and store together, so that target and draft share
one layout of host blocks and one store client. Loads, their proofs, offloads, store reads and store writes have a
thread each: none of them delays a forward that does not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...block import BlockType, CacheRole
from ...calls import StoreCleared, StorePlace, StoreState
from ...config import EngineConfig
from ...errors import InvariantError
from ...models.identity import ModelIdentity
from ...plans import PrefetchFromStorage, ProbeStorage, TransferBlocks, TransferKvBlocks
from ..store.kv_cache_store import KVCacheStore
from ..store.objects import name_blocks
from ..store.store_tier import StoreTier
from ..transfer_stats import TransferStats
from .cache_domain import CacheDomain
from .d2h import Offloads
from .h2d import HostLoads
from .host_tier import HostTier
from .layer_copy import Copier, TorchCopier
from .layered_wait import HostLoad


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
        self._rank = rank
        self._identities = identities
        self._copier: Copier = copier or TorchCopier()
        self.domains: dict[CacheRole, CacheDomain] = {}
        self.host = HostTier(config, rank, self.domains, meeting)
        self.store_tier = StoreTier(
            config,
            rank,
            self.host,
            self.domains,
            stats,
            answer=answer,
            numerics_id=numerics_id,
            identities=identities,
        )
        self.loads = HostLoads(config, rank, self.domains, self._copier, stats)
        self.offloads = Offloads(
            config, rank, self.domains, self._copier, stats, answer=answer, copied=self.store_tier.put_behind
        )

    # ----------------------------------------------------------------------------------------------- set-up

    def register(self, domain: CacheDomain) -> None:
        """Add a model's caches; only before `build`. Raises InvariantError for a second domain of one role."""
        if domain.role in self.domains or self.host.memories:
            raise InvariantError(f"the {domain.role.value} domain comes twice or too late")
        identity = (self._identities or {}).get(domain.key_component)
        name_blocks(domain, self._config, self._rank, identity.text if identity else "")
        self.domains[domain.role] = domain

    def build(self, num_host_blocks: Mapping[BlockType, int]) -> None:
        """Create the host caches of all registered domains, so many blocks of each type, and the store client when the
        store is enabled.

        Raises:
            ConfigError: the host memory does not fit.
            StartupError: the ranks could not share theirs.
        """
        if not any(num_host_blocks.values()):
            return
        self.host.build(num_host_blocks, self.store_tier.open())
        self._copier.attach(list(self.domains.values()), self.host.memories)
        self.store_tier.start()

    @property
    def host_bytes(self) -> int:
        """Bytes of the host memory that this rank alone writes."""
        return self.host.host_bytes

    @property
    def store(self) -> KVCacheStore | None:
        return self.store_tier.store

    @property
    def mixed_numerics(self) -> bool:
        """Blocks of the store may have been computed by an instance with other bits."""
        return self.store is not None and self.store.mixed_numerics

    @property
    def store_state(self) -> str:
        """`attached`, `degraded`, `open` or `detached`, see `StoreTier.state`."""
        return self.store_tier.state

    @property
    def store_refused(self) -> str:
        """The reason why the store must not be used: it holds another model's blocks under our model id; else empty."""
        return self.store.refused if self.store is not None else ""

    # ---------------------------------------------------------------------------------------------- transfers

    def load_from_host(self, plan: TransferBlocks) -> int:
        """Register a layered load and start it; returns the logical blocks scheduled, without waiting for any copy.

        Raises:
            InvariantError: the batch id is alive.
        """
        return self.loads.load(plan)

    def attach_loads(self) -> list[HostLoad]:
        """The loads that no forward has waited for yet; the caller's forward must wait for all of them."""
        return self.loads.pending.attach()

    def offload(self, plan: TransferKvBlocks) -> None:
        """Start a write-back of the blocks that the forwards ordered before it have written.

        Answers OffloadCopied when the host has the blocks, OffloadStored when the store writes have ended.
        """
        self.offloads.offload(plan)

    def prefetch(self, plan: PrefetchFromStorage) -> None:
        """Start reading a batch of the store into host blocks; answers a PrefetchAnswer in any case."""
        self.store_tier.prefetch(plan)

    def probe(self, plan: ProbeStorage) -> None:
        """Look up which blocks the store has; answers a ProbeAnswer in any case."""
        self.store_tier.probe(plan)

    # -------------------------------------------------------------------------------------------------- store

    def watch_store(self) -> None:
        """Look for a store call that hangs; the receiving thread calls it now and then."""
        self.store_tier.watch()

    def switch_store(self, place: StorePlace | None, done: Callable[[StoreState], None]) -> None:
        """Use another store, the last one again, or none, see `StoreTier.switch`."""
        self.store_tier.switch(place, done)

    def clear_store(self, done: Callable[[StoreCleared], None]) -> None:
        """Remove this name space from the store after the writes submitted before, see `StoreTier.clear`."""
        self.store_tier.clear(done)

    def close(self) -> bool:
        """End all threads and the store client; False when the store library is stuck in a call (then `os._exit`)."""
        self.loads.close()
        self.offloads.close()
        self.store_tier.stop()
        self._copier.close()
        return self.store_tier.close()
