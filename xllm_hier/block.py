"""What a block holds and what a restore needs: block types, per-block tensor layout, trailer, restore rule.

A block is `block_size` tokens of one `BlockType`, for all layers of that type, on one rank, in one cache domain.

Host object, block first, so that one physical object is one contiguous buffer::

    | layer 0: tensor 0 | layer 0: tensor 1 | layer 1: tensor 0 | ... | trailer (64 bytes) |
    |<----- layer_bytes: one copy piece --->|                         |
    |<------------------------- payload_bytes ----------------------->|
    |<------------------------------- object_bytes -------------------------------------->|

All tensors of one layer of one block are adjacent on the device too, so a layered copy moves one piece per layer and
block. The trailer makes a block prove itself: see `Trailer`.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
TRAILER_BYTES = 64


class BlockType(str, Enum):
    """Kind of cache a block belongs to; the name is part of the store key."""

    KV = "KV"


class CacheRole(str, Enum):
    """Whose caches a domain holds: the model that answers, or the one that drafts for it."""

    TARGET = "TARGET"
    DRAFT = "DRAFT"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of one layer of one block: `shape` excludes layers and block count, `dtype` is torch's name."""

    role: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class BlockLayout:
    """Shape of one block of one type in one cache domain on one rank.

    `layers` are the model's layer numbers of this type in order; every one of them has all of `tensors`. `replicated`:
    every rank's blocks hold the same bytes (MLA), so that one host copy per node and one store object serve them all.
    """

    block_type: BlockType
    block_size: int
    layers: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    replicated: bool = False

    def kept_by(self, rank: int) -> bool:
        """`rank` writes these blocks to the host and moves them to and from the store; otherwise it only loads them."""
        return rank == 0 or not self.replicated

    @property
    def layer_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def payload_bytes(self) -> int:
        return self.layer_bytes * len(self.layers)

    @property
    def object_bytes(self) -> int:
        """Bytes of one host block and of its store object: payload and trailer, a multiple of 64."""
        return -(-self.payload_bytes // 64) * 64 + TRAILER_BYTES

    @property
    def schema_hash(self) -> str:
        """32 hex digits over role, dtype and per-block shape of every tensor; host capacity is not part of it."""
        digest = hashlib.blake2b(digest_size=16, person=b"xllm-schema-v1")
        digest.update(f"{self.block_type.value}|{len(self.layers)}".encode())
        for tensor in self.tensors:
            digest.update(f"|{tensor.role},{tensor.dtype},{','.join(map(str, tensor.shape))}".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class CacheLayout:
    """All block layouts of one cache domain of a model; a new BlockType costs one more entry."""

    role: CacheRole
    blocks: tuple[BlockLayout, ...]

    def of(self, block_type: BlockType) -> BlockLayout:
        """The layout of one type. Raises KeyError when this domain has no blocks of that type."""
        for layout in self.blocks:
            if layout.block_type is block_type:
                return layout
        raise KeyError(block_type)


def restorable_blocks(block_type: BlockType, present: Sequence[bool]) -> int:
    """Largest boundary, in blocks, from which computing can go on if exactly the blocks `present` can be had.

    This is the restore rule of the type. KV: every block before the boundary.
    """
    if block_type is not BlockType.KV:
        raise KeyError(block_type)
    for index, here in enumerate(present):
        if not here:
            return index
    return len(present)


def common_boundary(present: Mapping[BlockType, Sequence[bool]], block_sizes: Mapping[BlockType, int]) -> int:
    """Largest boundary in tokens at which every type's restore rule holds; 0 when nothing can be restored.

    `present[t][i]` says whether block i of type t can be had from any tier, in every domain, on every rank.
    """
    return min(
        (restorable_blocks(block_type, have) * block_sizes[block_type] for block_type, have in present.items()),
        default=0,
    )


class Trailer:
    """The last 64 bytes of a host block: what the block is and what its payload sums to.

    Layout, little endian: magic 8 | version u32 | origin u32 | block_hash 16 | schema_hash 16 | payload checksum 8 |
    payload bytes u64. `origin` is a digest of what the hash does not say: model, weights, domain and rank (see
    `store_key.origin`). Written by the D2H offload, stored with the object, checked on each read from the store.
    """

    MAGIC = b"XLLMKV3\0"
    VERSION = 2
    _FORMAT = struct.Struct("<8sII16s16s8sQ")

    @classmethod
    def pack(
        cls, block_hash: bytes, schema_hash: str, checksum: bytes, payload_bytes: int, *, origin: int = 0
    ) -> bytes:
        """64 bytes to be laid behind a payload of `payload_bytes`; `checksum` is 8 bytes."""
        return cls._FORMAT.pack(
            cls.MAGIC, cls.VERSION, origin, block_hash, bytes.fromhex(schema_hash), checksum, payload_bytes
        )

    @classmethod
    def block_hash(cls, raw: bytes) -> bytes:
        """The hash a trailer claims; empty when it is no trailer."""
        magic, _, _, block_hash, *_ = cls._FORMAT.unpack(raw)
        return bytes(block_hash) if magic == cls.MAGIC else b""

    @classmethod
    def mismatch(
        cls, raw: bytes, block_hash: bytes, schema_hash: str, checksum: bytes, payload_bytes: int, *, origin: int = 0
    ) -> str | None:
        """Name of the first part of `raw` that is not what is expected; None when the block is the one asked for."""
        magic, version, got_origin, got_hash, got_schema, got_sum, got_bytes = cls._FORMAT.unpack(raw)
        if magic != cls.MAGIC:
            return "magic"
        if version != cls.VERSION:
            return "version"
        if got_hash != block_hash:
            return "block_hash"
        if got_schema != bytes.fromhex(schema_hash):
            return "schema_hash"
        if got_origin != origin:
            return "origin"
        if got_bytes != payload_bytes:
            return "payload_bytes"
        return None if got_sum == checksum else "checksum"
