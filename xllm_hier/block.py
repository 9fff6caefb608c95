"""The layout of a block and the rule of a restore: block types, tensors per block, restore rule.

A block is `block_size` tokens of one `BlockType`, for all layers of that type, on one rank, in one cache domain.

Host object, block first, so that one physical object is one contiguous buffer::

    | layer 0: tensor 0 | layer 0: tensor 1 | layer 1: tensor 0 | ... | trailer (64 bytes) |
    |<----- layer_bytes: one copy piece --->|                         |
    |<------------------------- payload_bytes ----------------------->|
    |<------------------------------- object_bytes -------------------------------------->|

All tensors of one layer of one block are adjacent on the device too, so a layered copy moves one piece per layer and
block. The trailer makes a block prove itself: see `worker/tiers/proof.py`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}
TRAILER_BYTES = 64


class BlockType(str, Enum):
    """Kind of cache a block belongs to; the name is part of the store key.

    KV: attention over all tokens. SWA: attention over a sliding window. LINEAR: a checkpoint, which is the recurrent
    state behind the block's last token.
    """

    KV = "KV"
    SWA = "SWA"
    LINEAR = "LINEAR"


class CacheRole(str, Enum):
    """The owner of a domain's caches: the model that answers, or the one that drafts for it."""

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
    `span`: the reach of the type's restore rule, see `RestoreRule`.
    """

    block_type: BlockType
    block_size: int
    layers: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    replicated: bool = False
    span: int = 0

    @property
    def rule(self) -> RestoreRule:
        return RestoreRule(self.block_type, self.block_size, self.span)

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

    @property
    def num_layers(self) -> int:
        """Layers of the model, counted over all types."""
        return max(layout.layers[-1] + 1 for layout in self.blocks)

    def of(self, block_type: BlockType) -> BlockLayout:
        """The layout of one type. Raises KeyError when this domain has no blocks of that type."""
        for layout in self.blocks:
            if layout.block_type is block_type:
                return layout
        raise KeyError(block_type)


@dataclass(frozen=True)
class RestoreRule:
    """Which blocks of one type must be present so that computing can go on from a boundary.

    Those that cover the last `span` tokens before it: a sliding window's length for SWA, 1 for LINEAR, whose block is
    the state behind its last token; 0 stands for all tokens (KV). With a window of w tokens the next row sees w - 1 of
    them; the one more serves a last token that is computed again.
    """

    block_type: BlockType
    block_size: int
    span: int = 0

    def needed(self, boundary: int) -> range:
        """Block numbers that must be present to go on from `boundary` tokens, a multiple of the block size."""
        first = max(0, boundary - self.span) // self.block_size if self.span else 0
        return range(first, boundary // self.block_size)

    def needed_at(self, index: int) -> range:
        """The boundaries, in blocks, that need block `index`, of a type with a span."""
        return range(index + 1, index + 1 + -(-self.span // self.block_size))


def common_boundary(rules: Sequence[RestoreRule], has: Callable[[BlockType, int], bool], limit: int) -> int:
    """Largest boundary of at most `limit` tokens at which the rules of all types hold; 0 when nothing can be restored.

    `has(t, i)` says whether block i of type t can be had, in every domain, on every rank. It is asked for every block
    up to the first that is missing only where a rule needs all; the rules with a span are tried from there downwards,
    since a rule that holds at a boundary may not hold at a smaller one.
    """
    step = math.lcm(*(rule.block_size for rule in rules))
    boundary = limit
    for rule in rules:
        if not rule.span:
            count = boundary // rule.block_size
            present = next((index for index in range(count) if not has(rule.block_type, index)), count)
            boundary = min(boundary, present * rule.block_size)
    spans = [rule for rule in rules if rule.span]
    boundary -= boundary % step
    while boundary:
        missing = _last_missing(spans, has, boundary)
        if missing is None:
            break
        # Each boundary between the missing block and this one would need that block, too.
        boundary = missing - missing % step
    return boundary


def _last_missing(rules: Sequence[RestoreRule], has: Callable[[BlockType, int], bool], boundary: int) -> int | None:
    """First token of the last block that some rule needs at `boundary` and that is missing; None: nothing is."""
    for rule in rules:
        for index in reversed(rule.needed(boundary)):
            if not has(rule.block_type, index):
                return index * rule.block_size
    return None
