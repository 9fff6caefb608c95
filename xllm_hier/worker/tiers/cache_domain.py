"""A cache domain: the device caches of one model and its host blocks, as the transfer and the store see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...block import TRAILER_BYTES, BlockLayout, BlockType, CacheLayout, CacheRole
from ...errors import TransferError
from ...plans import BlockMapping

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(eq=False)
class BlockCache:
    """All blocks of one type of a domain in both tiers.

    `device[l]` is layer `layout.layers[l]`: uint8 [num_device_blocks, layer_bytes], a view of the model's own cache.
    `host` is uint8 [num_host_blocks, object_bytes], block first, None without a host tier. `prefix` begins the keys of
    its objects in the store, `origin` stands in every trailer.
    """

    layout: BlockLayout
    device: list[torch.Tensor]
    host: torch.Tensor | None = None
    prefix: str = ""
    origin: int = 0

    def host_piece(self, layer: int) -> torch.Tensor:
        """Layer `layer` of every host block: uint8 [num_host_blocks, layer_bytes], strided by whole objects."""
        assert self.host is not None
        start = layer * self.layout.layer_bytes
        return self.host[:, start : start + self.layout.layer_bytes]

    def payload(self, block: int) -> torch.Tensor:
        assert self.host is not None
        return self.host[block, : self.layout.payload_bytes]

    def trailer(self, block: int) -> torch.Tensor:
        assert self.host is not None
        return self.host[block, self.layout.object_bytes - TRAILER_BYTES :]


@dataclass(eq=False)
class CacheDomain:
    """The target's or the draft's caches under one name in the store."""

    role: CacheRole
    key_component: str
    layout: CacheLayout
    caches: dict[BlockType, BlockCache] = field(default_factory=dict)


Part = tuple[CacheDomain, BlockMapping]
"""The blocks of one type and domain in one transfer."""


def cache_of(part: Part) -> BlockCache:
    """The cache whose blocks a part moves."""
    domain, mapping = part
    return domain.caches[BlockType(mapping.block_type)]


def parts_of(
    domains: Mapping[CacheRole, CacheDomain], target: Sequence[BlockMapping], draft: Sequence[BlockMapping]
) -> list[Part]:
    """The mappings of a plan, each with its domain. Raises TransferError for a draft's without a draft domain."""
    if draft and CacheRole.DRAFT not in domains:
        raise TransferError("this worker has no draft domain")
    by_role = ((CacheRole.TARGET, target), (CacheRole.DRAFT, draft))
    return [(domains[role], mapping) for role, mappings in by_role for mapping in mappings]


def payload_bytes(parts: Sequence[Part]) -> int:
    """Bytes that a transfer of `parts` moves, trailers left out."""
    return sum(len(part[1].device) * cache_of(part).layout.payload_bytes for part in parts)


def allocate_device_cache(layout: BlockLayout, num_blocks: int, device: torch.device) -> list[torch.Tensor]:
    """One zeroed tensor per layer: all tensors of a layer of a block lie together.

    [num_blocks, tensors, *shape] where all tensors are alike (key and value), else uint8 [num_blocks, layer_bytes].
    """
    first = layout.tensors[0]
    if any((tensor.dtype, tensor.shape) != (first.dtype, first.shape) for tensor in layout.tensors):
        mixed = (num_blocks, layout.layer_bytes)
        return [torch.zeros(mixed, dtype=torch.uint8, device=device) for _ in layout.layers]
    shape = (num_blocks, len(layout.tensors), *first.shape)
    return [torch.zeros(shape, dtype=TORCH_DTYPES[first.dtype], device=device) for _ in layout.layers]


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """A layer's cache as uint8 [num_blocks, layer_bytes] without a copy."""
    return cache.view(cache.shape[0], -1).view(torch.uint8)
