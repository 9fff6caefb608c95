"""The objects of a logical block: their keys in the store, and the host bytes that go there.

A logical block is one physical object per cache domain that has its BlockType: the target's, and with a draft model the
draft's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...block import BlockType
from ...config import EngineConfig
from ...errors import StoreError
from ...store_key import group_id, key_prefix, origin
from ..tiers.cache_domain import BlockCache, CacheDomain


def name_blocks(domain: CacheDomain, config: EngineConfig, rank: int, identity: str = "") -> None:
    """Set the key prefix of a rank's blocks of a domain, and the origin in their trailers.

    `identity` is that of the domain's weights.
    """
    for block_type, cache in domain.caches.items():
        cache.prefix = key_prefix(
            config.name_space,
            domain.key_component,
            block_type,
            cache.layout.schema_hash,
            tp_size=config.tp_size,
            tp_rank=rank,
            mla=cache.layout.replicated,
        )
        cache.origin = origin(cache.prefix, identity)


@dataclass(frozen=True)
class StoreObject:
    """One physical object of a batch; `row` is its logical block's place in the batch, `block` its host block."""

    row: int
    block: int
    block_hash: bytes
    cache: BlockCache

    @property
    def key(self) -> str:
        return self.cache.prefix + self.block_hash.hex()

    @property
    def address(self) -> int:
        """The host block's address."""
        assert self.cache.host is not None
        return self.cache.host.data_ptr() + self.block * self.nbytes

    @property
    def nbytes(self) -> int:
        return self.cache.layout.object_bytes

    def group(self, name_space: str) -> str:
        """The group under which the store keeps or evicts all objects of the logical block."""
        return group_id(name_space, self.cache.layout.block_type, self.block_hash)


class ObjectIndex:
    """The caches of one rank whose blocks go to the store, by BlockType."""

    def __init__(self) -> None:
        self._caches: dict[BlockType, list[BlockCache]] = {}

    def add(self, domain: CacheDomain, rank: int) -> None:
        """Add the blocks of a domain that are `rank`'s to read and write: those all ranks hold alike are rank 0's.

        Raises:
            StoreError: two domains would use the same keys.
        """
        for block_type, cache in domain.caches.items():
            if not cache.layout.kept_by(rank):
                continue
            caches = self._caches.setdefault(block_type, [])
            if any(other.prefix == cache.prefix for other in caches):
                raise StoreError(f"two cache domains are both {domain.key_component} for {block_type.value}")
            caches.append(cache)

    @property
    def first(self) -> BlockCache:
        """The target's blocks of the model's first type."""
        return next(iter(self._caches.values()))[0]

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest object."""
        return max(cache.layout.object_bytes for caches in self._caches.values() for cache in caches)

    def objects(self, block_type: BlockType, blocks: Sequence[int], hashes: Sequence[bytes]) -> list[StoreObject]:
        """All objects of these logical blocks, block after block; empty when none of this type is this rank's."""
        caches = self._caches.get(block_type, [])
        return [
            StoreObject(row, block, block_hash, cache)
            for row, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True))
            for cache in caches
        ]
