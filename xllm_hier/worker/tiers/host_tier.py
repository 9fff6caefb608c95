"""The host tier of one rank: its memory, the place of each cache in it, and the part that all ranks share.

Blocks that all ranks hold alike (latents) lie on a machine once: rank 0 makes the memory and hands its descriptor to
the others, which map it. They stand first in rank 0's memory, so that its peers need no offset::

    rank 0   | shared caches | its own caches |        made here, or lent by the store's client
    rank n   | shared caches |                         mapped
             | its own caches |                        made here, or lent
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from ...block import BlockType, CacheRole
from ...config import EngineConfig
from ...host_memory import HostMemory
from .cache_domain import BlockCache, CacheDomain

log = logging.getLogger("xllm.transfer")

_SOCKET = "host-memory"


class MemoryLender(Protocol):
    """A store client whose own pool may hold the host blocks, so that the store reaches them without a copy."""

    def connect(self, host_bytes: int) -> int | None:
        """Address of `host_bytes` of the pool; None: the host tier brings its own memory."""

    def keep_apart(self) -> None:
        """The host blocks do not lie in the pool after all."""


class HostTier:
    """Host memory of one rank. `meeting` is a folder that all ranks see; None only with one rank.

    `memories` hold all host blocks that this rank reads or writes, `own` those it alone writes and moves to the store;
    None where it has no such blocks. `host_bytes` are those of `own`.
    """

    def __init__(
        self, config: EngineConfig, rank: int, domains: Mapping[CacheRole, CacheDomain], meeting: Path | None
    ) -> None:
        self._config = config
        self._rank = rank
        self._domains = domains
        self._meeting = meeting
        self.memories: list[HostMemory] = []
        self.own: HostMemory | None = None
        self.host_bytes = 0

    def keeps(self, block_type: BlockType) -> bool:
        """Some domain's blocks of this type are this rank's to write and to move to and from the store."""
        layouts = (domain.layout.of(block_type) for domain in self._domains.values() if block_type in domain.caches)
        return any(layout.kept_by(self._rank) for layout in layouts)

    @property
    def keeps_any(self) -> bool:
        return any(cache.layout.kept_by(self._rank) for cache in self._caches)

    @property
    def _caches(self) -> list[BlockCache]:
        return [cache for domain in self._domains.values() for cache in domain.caches.values()]

    def build(self, num_blocks: Mapping[BlockType, int], lender: MemoryLender | None) -> None:
        """Make or map the memory, and give each cache its `num_blocks` host blocks of its type.

        Raises:
            ConfigError: the host memory does not fit.
            StartupError: the ranks could not share theirs.
        """
        shared = [cache for cache in self._caches if cache.layout.replicated and self._config.tp_size > 1]
        kept = [cache for cache in self._caches if cache.layout.kept_by(self._rank)]
        kept.sort(key=lambda cache: cache not in shared)
        self.host_bytes = _total_bytes(kept, num_blocks)
        if kept:
            address = lender.connect(self.host_bytes) if lender is not None else None
            self.own = self._make(address)
            if shared and self._rank == 0:
                self.own = self._offer(self.own, lender)
            _place(kept, self.own, num_blocks)
        if shared and self._rank != 0:
            assert self._meeting is not None
            nbytes = _total_bytes(shared, num_blocks)
            memory = HostMemory.receive(self._meeting / _SOCKET, nbytes, self._config.startup_timeout_s)
            self.memories.append(memory)
            _place(shared, memory, num_blocks)

    def _make(self, address: int | None) -> HostMemory:
        """This rank's own memory: at `address` where the store's client lends it, else made here."""
        if address:
            memory = HostMemory.at(address, self.host_bytes)
        else:
            memory = HostMemory.create(self.host_bytes, huge_pages=self._config.host_huge_pages)
        self.memories.append(memory)
        return memory

    def _offer(self, memory: HostMemory, lender: MemoryLender | None) -> HostMemory:
        """Let the other ranks map the memory; returns the one to use, since some lent memory cannot be shared."""
        assert self._meeting is not None
        peers, path = self._config.tp_size - 1, self._meeting / _SOCKET
        try:
            memory.offer(path, peers, self._config.startup_timeout_s)
        except LookupError as error:
            log.warning("the store client's memory cannot be shared (%s): its objects take one more copy", error)
            assert lender is not None
            lender.keep_apart()
            self.memories.remove(memory)
            memory = self._make(None)
            memory.offer(path, peers, self._config.startup_timeout_s)
        return memory


def _total_bytes(caches: Sequence[BlockCache], counts: Mapping[BlockType, int]) -> int:
    return sum(counts[cache.layout.block_type] * cache.layout.object_bytes for cache in caches)


def _place(caches: Sequence[BlockCache], memory: HostMemory, counts: Mapping[BlockType, int]) -> None:
    """Give each cache its host blocks, one cache after the other from the start of `memory`."""
    offset = 0
    for cache in caches:
        count, size = counts[cache.layout.block_type], cache.layout.object_bytes
        cache.host = torch.from_numpy(memory.array[offset : offset + count * size]).view(count, size)
        offset += count * size
