"""Blocks by BlockType: the pools of both tiers, and the blocks that one sequence holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...block import BlockType, RestoreRule
from ...figures import TypeSizes
from ...ints import Ints
from ...plans import HOLE
from .pool import BlockPool

_NO_TREE = b"none"  # parent of all blocks whose use does not depend on the blocks before them

Places = dict[BlockType, dict[int, int]]  # of each type device blocks by number
DeviceBlocks = set[tuple[BlockType, int]]  # device blocks with their types
STATE = 0  # the number of a recurrent state among `Places`


class TypePools:
    """Device and host blocks of one type, by the books; one weighs as many bytes as `weight` blocks of the first type.

    KV blocks form a tree, of which eviction takes leaves. Blocks of the other types are useful without the blocks
    before them, so each is a tree of its own; those released earlier, and of one sequence its head, are evicted first.
    """

    def __init__(self, sizes: TypeSizes, block_size: int, weight: float = 1.0) -> None:
        self.weight = weight
        self.type = BlockType(sizes.block_type)
        self.rule = RestoreRule(self.type, block_size, sizes.span)
        self.device = BlockPool(sizes.num_device_blocks)
        self.host = BlockPool(sizes.num_host_blocks)

    def parent(self, parent_hash: bytes) -> bytes:
        """The parent in the pool's tree of a block whose parent in the chain of hashes is `parent_hash`."""
        return _NO_TREE if self.rule.span else parent_hash

    def release(self, blocks: Iterable[int]) -> None:
        """Give one reference of each device block back; `blocks` are in the order of their sequence."""
        held = (block for block in blocks if block != HOLE)
        if not self.rule.span:
            self.device.unpin(held)
            return
        for block in held:  # one after the other: the head counts as used longer ago than the tail
            self.device.unpin([block])

    @property
    def tiers(self) -> dict[str, BlockPool]:
        return {"device": self.device, "host": self.host}


class PoolSet(Mapping[BlockType, TypePools]):
    """The pools of all BlockTypes of a model, the first type first; `sizes` names those types and counts their blocks.

    All types number their blocks alike, `block_size` tokens each, and share one chain of hashes.
    """

    def __init__(self, sizes: Sequence[TypeSizes], block_size: int) -> None:
        unit = sizes[0].block_bytes or 1
        self.block_size = block_size
        self._pools = {BlockType(one.block_type): TypePools(one, block_size, one.block_bytes / unit) for one in sizes}
        self.types = tuple(self._pools)
        self.first = self._pools[self.types[0]]
        self.rules = [pools.rule for pools in self._pools.values()]
        self.tables = [pools for pools in self._pools.values() if pools.type is not BlockType.LINEAR]
        self.linear = self._pools.get(BlockType.LINEAR)
        # All blocks up to the first missing one make a prefix, of any length.
        self.prefix_only = len(self._pools) == 1 and not self.first.rule.span
        self._all = [pool for pools in self._pools.values() for pool in pools.tiers.values()]

    def __getitem__(self, block_type: BlockType) -> TypePools:
        return self._pools[block_type]

    def __iter__(self) -> Iterator[BlockType]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)

    @property
    def version(self) -> int:
        """A number that is another one whenever some block became findable, or no longer is."""
        return sum(pool.version for pool in self._all)

    def allocate_device(self, counts: Mapping[BlockType, int]) -> dict[BlockType, list[int]] | None:
        """`counts[t]` device blocks of each type t, or None and nothing changed."""
        if any(self._pools[kind].device.num_available < count for kind, count in counts.items()):
            return None
        return {kind: self._pools[kind].device.allocate(count) or [] for kind, count in counts.items()}

    def weight(self, kinds: Iterable[BlockType]) -> float:
        """Bytes of blocks of these types, in blocks of the first type."""
        return sum(self._pools[kind].weight for kind in kinds)


@dataclass(frozen=True)
class Hit:
    """The part of a sequence that need not be computed; `prefix` has the rule.

    `boundary`: blocks behind which computing goes on. `matched`: leading blocks of the first type that are there, which
    may reach beyond the boundary that all types allow. `tokens`: the tokens of the hit.
    """

    boundary: int
    matched: int
    tokens: int


@dataclass(frozen=True)
class Found:
    """A block of a prefix: on the device, or None there and on the host; with one more reference."""

    pools: TypePools
    index: int
    device: int | None
    host: int | None


@dataclass(eq=False)
class Held:
    """The blocks of one type that one sequence holds; each is one reference in its pool.

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
        """Hold nothing from number `end` on; returns the blocks held there."""
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
