"""Blocks of one BlockType: the pools of both tiers, and what one sequence holds of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ...block import BlockType, RestoreRule
from ...figures import TypeSizes
from ...plans import HOLE, Ints
from .pool import BlockPool

_NO_TREE = b"none"  # parent of all blocks whose use does not depend on the blocks before them


class TypePools:
    """Device and host blocks of one type, by the books; one weighs as many bytes as `weight` blocks of the first type.

    KV blocks form a tree, of which eviction takes leaves. The others are useful without what lies before them, so each
    is a tree of its own; what is let go of earlier, and of one sequence its head, is evicted first.
    """

    def __init__(self, sizes: TypeSizes, block_size: int, weight: float = 1.0) -> None:
        self.weight = weight
        self.type = BlockType(sizes.block_type)
        self.rule = RestoreRule(self.type, block_size, sizes.span)
        self.device = BlockPool(sizes.num_device_blocks)
        self.host = BlockPool(sizes.num_host_blocks)

    def parent(self, parent_hash: bytes) -> bytes:
        """What a block counts as the child of, whose parent in the chain of hashes is `parent_hash`."""
        return _NO_TREE if self.rule.span else parent_hash

    def let_go(self, blocks: Iterable[int]) -> None:
        """A sequence's device blocks, in its order, have one holder less."""
        held = (block for block in blocks if block != HOLE)
        if not self.rule.span:
            self.device.unpin(held)
            return
        for block in held:  # one after the other: the head counts as used longer ago than the tail
            self.device.unpin([block])

    @property
    def tiers(self) -> dict[str, BlockPool]:
        return {"device": self.device, "host": self.host}


@dataclass(frozen=True)
class Found:
    """A block of a prefix: on the device, or None there and on the host; with one more reference."""

    pools: TypePools
    index: int
    device: int | None
    host: int | None


@dataclass(eq=False)
class Held:
    """What one sequence holds of one type; each block is one reference in its pool.

    ===========  ===================================================================================================
    blocks[i]    device block of tokens i*block_size .. (LINEAR: the state behind them); HOLE where none is held
    mounted[i]   host block found for block i (host prefix or store), referenced until its load has ended
    targets[i]   host block reserved for the write-back of block i, FILLING, handed over to the pair
    from_store   numbers of the blocks that the store gave
    ===========  ===================================================================================================
    """

    blocks: list[int] = field(default_factory=list)
    mounted: dict[int, int] = field(default_factory=dict)
    targets: dict[int, int] = field(default_factory=dict)
    from_store: set[int] = field(default_factory=set)
    _table: np.ndarray = field(default_factory=lambda: np.zeros(8, dtype=np.int32))
    _table_length: int = 0

    def table(self) -> Ints:
        """The device blocks as int32, in order; a copy of nothing but the ids."""
        count = len(self.blocks)
        if count > len(self._table):
            self._table = np.zeros(max(2 * len(self._table), count), dtype=np.int32)
            self._table_length = 0
        if count < self._table_length:
            self._table_length = 0
        self._table[self._table_length : count] = self.blocks[self._table_length :]
        self._table_length = count
        return self._table[:count]

    def block(self, index: int) -> int:
        """Device block `index`; HOLE where none is held."""
        return self.blocks[index] if index < len(self.blocks) else HOLE

    def numbers(self, end: int) -> Iterable[int]:
        """The numbers below `end` of which a block may be held."""
        return range(min(end, len(self.blocks)))

    def put(self, index: int, block: int) -> None:
        """Hold `block` as number `index` from now on; numbers between the last one and this are holes."""
        self.blocks.extend([HOLE] * (index + 1 - len(self.blocks)))
        self.blocks[index] = block
        self._table_length = min(self._table_length, index)

    def take_before(self, end: int) -> dict[int, int]:
        """Leave holes in place of the blocks before number `end`, down to the last hole; returns them by number."""
        taken = {}
        index = min(end, len(self.blocks)) - 1
        while index >= 0 and self.blocks[index] != HOLE:
            taken[index] = self.blocks[index]
            self.put(index, HOLE)
            index -= 1
        return taken

    def cut(self, end: int) -> list[int]:
        """Hold nothing from number `end` on; returns what was held there."""
        taken = self.blocks[end:]
        del self.blocks[end:]
        self._table_length = min(self._table_length, end)
        return taken

    def forget(self) -> None:
        """Nothing is held any more."""
        self.blocks.clear()
        self.mounted.clear()
        self.targets.clear()
        self._table_length = 0


@dataclass(eq=False)
class HeldCheckpoints(Held):
    """As `Held`, for LINEAR blocks, of which a sequence has few: `blocks` are those held, in order, without holes.

    `written` are the numbers of those that hold their state; the others are reserved.
    """

    written: set[int] = field(default_factory=set)
    _by_number: dict[int, int] = field(default_factory=dict)

    def block(self, index: int) -> int:
        return self._by_number.get(index, HOLE)

    def numbers(self, end: int) -> Iterable[int]:
        return sorted(number for number in self._by_number if number < end)

    def put(self, index: int, block: int) -> None:
        """As `Held.put`; a HOLE lets number `index` go."""
        self._by_number[index] = block
        if block == HOLE:
            del self._by_number[index]
            self.written.discard(index)
        self.blocks[:] = [self._by_number[number] for number in sorted(self._by_number)]

    def forget(self) -> None:
        super().forget()
        self.written.clear()
        self._by_number.clear()
