"""The books of one tier's blocks of one type: references, prefix index, eviction. No bytes are touched here.

One life for every block: FREE -> FILLING (referenced, not in the index) -> READY (in the index) -> FREE. A block is
pinned while it is referenced, or stands before a pinned block in the index; a READY block that is not pinned is
evictable. Eviction takes the least recently used evictable block that has no READY child, so that the index
always holds a set of prefixes.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from enum import IntEnum

from ...errors import InvariantError

NO_HASH = b""


class BlockState(IntEnum):
    """Where a block stands in its life."""

    FREE = 0
    FILLING = 1
    READY = 2


class BlockPool:
    """`num_blocks` block ids, 0 to num_blocks - 1; used by one thread.

    `on_stored` and `on_removed`, where set, are told the hash of each block that enters and leaves the index.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._state = [BlockState.FREE] * num_blocks
        self._references = [0] * num_blocks
        self._hash = [NO_HASH] * num_blocks
        self._parent = [NO_HASH] * num_blocks
        self._last_used = [0] * num_blocks
        self._index: dict[bytes, int] = {}
        self._num_children: dict[bytes, int] = {}
        self._num_pinned_children: dict[bytes, int] = {}
        self._leaves: list[tuple[int, int]] = []  # heap of (last_used, block); entries may be stale
        self._num_evictable = 0
        self._clock = 0
        self.version = 0  # grows with each change of the index
        self.on_stored: Callable[[bytes], None] | None = None
        self.on_removed: Callable[[bytes], None] | None = None

    # ------------------------------------------------------------------------------------------- counts

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        return self._num_evictable

    @property
    def num_pinned(self) -> int:
        return self.num_blocks - len(self._free) - self._num_evictable

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` may hand out: free ones and evictable ones."""
        return len(self._free) + self._num_evictable

    # ---------------------------------------------------------------------------------------- allocation

    def allocate(self, count: int) -> list[int] | None:
        """`count` FILLING blocks with one reference each, or None and nothing changed when there are not enough."""
        if count > self.num_available:
            return None
        while len(self._free) < count:
            self._evict_one()
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._state[block] = BlockState.FILLING
            self._references[block] = 1
        return blocks

    def _evict_one(self) -> None:
        while self._leaves:
            last_used, block = heapq.heappop(self._leaves)
            if self._is_leaf(block) and self._last_used[block] == last_used:
                self._unindex(block)
                self._to_free(block)
                return
        raise InvariantError(f"{self._num_evictable} blocks are evictable and none can be found")

    def _is_leaf(self, block: int) -> bool:
        return (
            self._state[block] is BlockState.READY
            and self._references[block] == 0
            and not self._num_children.get(self._hash[block])
        )

    def _to_free(self, block: int) -> None:
        self._state[block] = BlockState.FREE
        self._free.append(block)

    # ----------------------------------------------------------------------------------------- references

    def pin(self, block: int) -> None:
        """One more holder of an allocated or READY block. Raises InvariantError for a free one."""
        if self._state[block] is BlockState.FREE:
            raise InvariantError(f"block {block} is free and cannot be pinned")
        was_pinned = self._is_pinned(block)
        self._references[block] += 1
        if not was_pinned:
            self._pin_changed(block, +1)

    def unpin(self, blocks: Iterable[int], *, oldest: bool = False) -> None:
        """One holder less of each; the last holder of a FILLING block frees it, of a READY one leaves it evictable.

        All blocks of one call count as used at the same moment, with `oldest` before all others. Raises InvariantError
        for a block nobody holds.
        """
        self._clock += 1
        for block in blocks:
            if self._references[block] <= 0:
                raise InvariantError(f"block {block} is released more often than it was pinned")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._state[block] is BlockState.FILLING:
                self._to_free(block)
                continue
            self._last_used[block] = 0 if oldest else self._clock
            if not self._is_pinned(block):
                self._pin_changed(block, -1)

    def _is_pinned(self, block: int) -> bool:
        return self._references[block] > 0 or self._hash[block] in self._num_pinned_children

    def _pin_changed(self, block: int, change: int) -> None:
        """READY block `block` became pinned (+1) or evictable (-1); so may, for that reason, the blocks before it."""
        while True:
            self._num_evictable -= change
            if change < 0:
                self._offer(block)
            parent = self._index.get(self._parent[block])
            if not self._count_pinned_child(self._parent[block], change) or parent is None or self._references[parent]:
                return
            block = parent

    def _count_pinned_child(self, parent_hash: bytes, change: int) -> bool:
        """True when the parent has its first, or lost its last, pinned child."""
        count = self._num_pinned_children.get(parent_hash, 0) + change
        if count:
            self._num_pinned_children[parent_hash] = count
        else:
            del self._num_pinned_children[parent_hash]
        return count == max(change, 0)

    def _offer(self, block: int) -> None:
        """Let eviction know of a leaf; entries are not withdrawn, so the heap is made anew when most are stale."""
        if not self._is_leaf(block):
            return
        heapq.heappush(self._leaves, (self._last_used[block], block))
        if len(self._leaves) > 4 * self.num_blocks + 64:
            leaves = (leaf for leaf in range(self.num_blocks) if self._is_leaf(leaf))
            self._leaves = [(self._last_used[leaf], leaf) for leaf in leaves]
            heapq.heapify(self._leaves)

    def references(self, block: int) -> int:
        """Holders of a block."""
        return self._references[block]

    # ---------------------------------------------------------------------------------------------- index

    def hashes(self) -> set[bytes]:
        """Of all blocks that can be found."""
        return set(self._index)

    def contents(self) -> dict[bytes, int]:
        """A copy of the index: the block of each hash that can be found."""
        return dict(self._index)

    def in_order(self) -> list[bytes]:
        """As `hashes`, those first that have been there longest: mostly each right behind its parent."""
        return list(self._index)

    def find(self, block_hash: bytes) -> int | None:
        """The READY block with this content; None when there is none."""
        return self._index.get(block_hash)

    def publish(self, block: int, block_hash: bytes, parent_hash: bytes) -> bool:
        """Make a FILLING block findable. False when the content is in the index already: the block stays private.

        Raises:
            InvariantError: the block is not FILLING, or not referenced.
        """
        if self._state[block] is not BlockState.FILLING or self._references[block] == 0:
            raise InvariantError(f"block {block} is {self._state[block].name} and cannot be published")
        if block_hash in self._index:
            return False
        self._state[block] = BlockState.READY
        self._hash[block], self._parent[block] = block_hash, parent_hash
        self._index[block_hash] = block
        self.version += 1
        self._num_children[parent_hash] = self._num_children.get(parent_hash, 0) + 1
        self._num_evictable += 1  # it is pinned, which the next line counts
        self._pin_changed(block, +1)
        if self.on_stored is not None:
            self.on_stored(block_hash)
        return True

    def withdraw(self, block: int) -> None:
        """Take a block out of the index: its bytes cannot be relied on. Its holders keep it; nobody else finds it."""
        if self._state[block] is not BlockState.READY:
            return
        self._unindex(block)
        if self._references[block]:
            self._state[block] = BlockState.FILLING
        else:
            self._to_free(block)

    def clear(self) -> int:
        """Withdraw every READY block; returns how many."""
        blocks = list(self._index.values())
        for block in blocks:
            self.withdraw(block)
        return len(blocks)

    def _unindex(self, block: int) -> None:
        parent_hash = self._parent[block]
        if self._is_pinned(block):
            self._pin_changed(block, -1)
        self._num_evictable -= 1
        del self._index[self._hash[block]]
        self.version += 1
        left = self._num_children[parent_hash] - 1
        if left:
            self._num_children[parent_hash] = left
        else:
            del self._num_children[parent_hash]
            parent = self._index.get(parent_hash)
            if parent is not None:
                self._offer(parent)
        if self.on_removed is not None:
            self.on_removed(self._hash[block])
        self._hash[block] = self._parent[block] = NO_HASH

    # ---------------------------------------------------------------------------------------------- checks

    def check(self) -> None:
        """Raise InvariantError unless the books balance: every id in one state, index = READY, counts exact."""
        problems = [*self._check_states(), *self._check_tree()]
        if problems:
            raise InvariantError("; ".join(problems))

    def _check_states(self) -> list[str]:
        problems: list[str] = []
        free, ready = BlockState.FREE, BlockState.READY
        listed = set(self._free)
        if len(listed) != len(self._free):
            problems.append("an id is free twice")
        num_free = 0
        for block, (state, references) in enumerate(zip(self._state, self._references, strict=True)):
            if state is ready:
                wrong = references < 0
                if self._index.get(self._hash[block]) != block:
                    problems.append(f"READY block {block} is not in the index")
            else:
                num_free += state is free
                wrong = references != 0 if state is free else references <= 0
            if wrong or (state is free) != (block in listed):
                problems.append(f"block {block} is {state.name} with {references} references")
        if num_free != len(self._free):
            problems.append(f"{num_free} blocks are FREE, {len(self._free)} are in the free list")
        if self.num_free + self.num_pinned + self.num_evictable != self.num_blocks:
            problems.append("free + pinned + evictable != total")
        return problems

    def _check_tree(self) -> list[str]:
        problems: list[str] = []
        ready = [block for block, state in enumerate(self._state) if state is BlockState.READY]
        pinned = [block for block in ready if self._is_pinned(block)]
        if len(ready) != len(self._index) or len(ready) - len(pinned) != self._num_evictable:
            problems.append("the index or the evictable count does not match the states")
        parents = self._parent
        if Counter([parents[block] for block in ready]) != self._num_children:
            problems.append("child counts do not match the index")
        if Counter([parents[block] for block in pinned]) != self._num_pinned_children:
            problems.append("counts of pinned children do not match the index")
        evictable = set(ready) - set(pinned)
        heap = set(self._leaves)
        for block in evictable:
            if self._is_leaf(block) and (self._last_used[block], block) not in heap:
                problems.append(f"evictable leaf {block} cannot be found by eviction")
        return problems
