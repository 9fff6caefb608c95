"""The proof of a host block: 64 bytes behind its payload that say which block it is and what its payload sums to.

Bytes can go wrong on their way through three tiers: a store client that stalled writes after its call has returned, a
segment damages an object, a process maps another one's memory. The trailer turns each of these into a miss, or into a
load that fails, and never into a wrong answer.

=====================  =============================================================================================
the trailer proves     the block's hash (its tokens and all tokens before them), the layout of its tensors
                       (`schema_hash`), its origin (model, weights, cache domain, rank) and its bytes (XXH3-64)
written                by the D2H offload, once the payload is whole (`write_trailer`); it goes to the store with the
                       block
checked                - before a load begins: the 64 bytes alone, against the hashes of the plan (`misnamed`)
                       - beside the copies of a load: the payload too (`disproofs`), with `verify_host_blocks`; a step
                       that computed from a block without a proof is thrown away
                       - after each read from the store: a block without a proof is a miss, its object is removed,
                       and its key is left alone for a while
=====================  =============================================================================================

A proof shows that a block is the one that was written. The audit alone (`engine/steps/audit.py`) shows that the
right thing was written.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from ...block import TRAILER_BYTES
from ...hashing import split_hashes
from .cache_domain import BlockCache, Part, cache_of


class Trailer:
    """The 64 bytes themselves, little endian::

        magic 8 | version u32 | origin u32 | block_hash 16 | schema_hash 16 | payload checksum 8 | payload bytes u64

    `origin` is a digest of the facts that the block hash leaves out: model, weights, domain, rank (`store_key.origin`).
    """

    MAGIC = b"XLLMKV3\0"
    VERSION = 2
    _FORMAT = struct.Struct("<8sII16s16s8sQ")

    @classmethod
    def pack(
        cls, block_hash: bytes, schema_hash: str, checksum: bytes, payload_bytes: int, *, origin: int = 0
    ) -> bytes:
        """The trailer of a payload of `payload_bytes`; `checksum` is 8 bytes, `schema_hash` 32 hex digits."""
        return cls._FORMAT.pack(
            cls.MAGIC, cls.VERSION, origin, block_hash, bytes.fromhex(schema_hash), checksum, payload_bytes
        )

    @classmethod
    def block_hash(cls, raw: bytes) -> bytes:
        """The hash that a trailer claims; empty when `raw` is no trailer."""
        magic, _, _, block_hash, *_ = cls._FORMAT.unpack(raw)
        return bytes(block_hash) if magic == cls.MAGIC else b""

    @classmethod
    def mismatch(
        cls, raw: bytes, block_hash: bytes, schema_hash: str, checksum: bytes, payload_bytes: int, *, origin: int = 0
    ) -> str | None:
        """Name of the first field of `raw` that differs from the expected block's; None when all agree."""
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


def checksum(cache: BlockCache, block: int) -> bytes:
    """XXH3-64 over the payload of a host block, 8 bytes; hashing releases the interpreter's lock."""
    return xxhash.xxh3_64_digest(cache.payload(block).numpy().data)


def write_trailer(cache: BlockCache, block: int, block_hash: bytes) -> None:
    """Make host block `block` prove that it is `block_hash`; its payload must be whole."""
    layout = cache.layout
    digest = checksum(cache, block)
    raw = Trailer.pack(block_hash, layout.schema_hash, digest, layout.payload_bytes, origin=cache.origin)
    cache.trailer(block).numpy()[:] = np.frombuffer(raw, dtype=np.uint8)


def trailer_mismatch(cache: BlockCache, block: int, block_hash: bytes) -> str | None:
    """Name of the first field by which host block `block` is not `block_hash`; None when it proves itself."""
    layout = cache.layout
    raw = cache.trailer(block).numpy().tobytes()
    assert len(raw) == TRAILER_BYTES
    digest = checksum(cache, block)
    return Trailer.mismatch(raw, block_hash, layout.schema_hash, digest, layout.payload_bytes, origin=cache.origin)


def misnamed(parts: Sequence[Part]) -> str | None:
    """The reason why a load must not begin: some trailer claims another block than the plan names. None: all agree.

    Payloads are left out: 64 bytes a block cost nothing, and `disproofs` reads the rest beside the copies.
    """
    for part in parts:
        cache, mapping = cache_of(part), part[1]
        assert cache.host is not None
        if len(mapping.host) and int(mapping.host.max()) >= cache.host.shape[0]:
            return f"host block {int(mapping.host.max())} is out of range"
        trailers = cache.host.numpy()[mapping.host, cache.layout.object_bytes - TRAILER_BYTES :]
        if b"".join(Trailer.block_hash(raw.tobytes()) for raw in trailers) != mapping.hashes:
            return "a host block is not the block the plan names"
    return None


def disproofs(parts: Sequence[Part]) -> list[str]:
    """The mismatch of each host block of `parts` that is not the plan's, payloads included; empty: all are proven."""
    problems = []
    for part in parts:
        cache, mapping = cache_of(part), part[1]
        for block, block_hash in zip(mapping.host.tolist(), split_hashes(mapping.hashes), strict=True):
            problem = trailer_mismatch(cache, block, block_hash)
            if problem is not None:
                problems.append(problem)
    return problems
