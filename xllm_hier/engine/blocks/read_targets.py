"""Host blocks that store reads hold: targets, mounted hits, and targets that a failed read may still write to.

A target whose read was given up belongs to nobody until every rank has ended that read (an orphan). A target whose read
failed in a way that leaves the end open is quarantined for some minutes. Both count against the share of the host pool
that reads may hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...block import BlockType
from ...clock import now
from ...plans import PrefetchAnswer
from .moves import unknown_blocks
from .prefetch import AbandonedBatch
from .sequence import Sequence
from .types import PoolSet

PREFETCH_SHARE = 0.5  # of the host pool may be read targets at once: a slow store must not starve write-backs
QUARANTINE_S = 180.0  # three times the longest store call seen; a client that stalls longer meets the trailer check


@dataclass(eq=False)
class _Orphan:
    """Targets of a batch that nobody waits for any more, while `ranks` may still be reading into them."""

    type: BlockType
    ranks: set[int]
    targets: list[int]
    unknown: set[int] = field(default_factory=set)


class ReadTargets:
    """The host blocks of all reads of one instance; a block that a read may still write to is given to nobody."""

    def __init__(self, pools: PoolSet) -> None:
        self._pools = pools
        self._num_targets = dict.fromkeys(pools, 0)
        self._num_mounted = dict.fromkeys(pools, 0)
        self._orphans: dict[tuple[int, int], _Orphan] = {}  # by prefetch id and offset of the batch
        self.quarantine: deque[tuple[float, BlockType, int]] = deque()  # (release time, type, host block)

    # --------------------------------------------------------------------------------------------- targets

    def room(self, block_type: BlockType) -> int:
        """Host blocks of one type that reads may still take as targets."""
        return min(self._share_left(block_type), self._pools[block_type].host.num_available)

    def _share_left(self, block_type: BlockType) -> int:
        taken = self._num_targets[block_type] + self._num_mounted[block_type] + self.left_alone(block_type)
        return int(self._pools[block_type].host.num_blocks * PREFETCH_SHARE) - taken

    def reserve(self, block_type: BlockType, count: int) -> list[int]:
        """`count` targets, of which there is `room`."""
        targets = self._pools[block_type].host.allocate(count)
        assert targets is not None, "no more targets than there is room for may be reserved"
        self._num_targets[block_type] += count
        return targets

    def release(self, block_type: BlockType, target: int, *, unknown: bool) -> None:
        """A target holds nothing of use; `unknown`: a read may still write to it."""
        self._num_targets[block_type] -= 1
        self._give_back(block_type, target, unknown)

    def _give_back(self, block_type: BlockType, target: int, unknown: bool) -> None:
        if unknown:
            self.quarantine.append((now() + QUARANTINE_S, block_type, target))
        else:
            self._pools[block_type].host.unpin([target])

    # ---------------------------------------------------------------------------------------------- mounts

    def mount(self, sequence: Sequence, boundary: int) -> None:
        """Pin the host blocks that going on behind block `boundary` needs and the device lacks, so that they are still
        there when the sequence is scheduled."""
        for kind, pools in self._pools.items():
            held = sequence.held[kind]
            for index in pools.rule.needed(boundary * pools.rule.block_size):
                block_hash = sequence.hash_of(index)
                block = pools.host.find(block_hash)
                if block is None or index in held.mounted or pools.device.find(block_hash) is not None:
                    continue
                if self._share_left(kind) <= 0:
                    break  # best effort: the block may be evicted before this sequence runs
                pools.host.pin(block)
                held.mounted[index] = block
                self._num_mounted[kind] += 1

    def mount_target(self, sequence: Sequence, block_type: BlockType, index: int, target: int) -> None:
        """A target has block `index` of the sequence now: publish it to the host prefix, and keep it mounted."""
        pools, held = self._pools[block_type], sequence.held[block_type]
        pools.host.publish(target, sequence.hash_of(index), pools.parent(sequence.parent_of(index)))
        held.mounted[index] = target
        held.from_store.add(index)
        self._num_targets[block_type] -= 1
        self._num_mounted[block_type] += 1

    def unmount(self, sequence: Sequence, boundary: int = 0) -> None:
        """Release the mounted blocks that going on behind block `boundary` does not need."""
        for kind, pools in self._pools.items():
            held, needed = sequence.held[kind], pools.rule.needed(boundary * pools.rule.block_size)
            indices = [index for index in held.mounted if index not in needed]
            self._num_mounted[kind] -= len(indices)
            pools.host.unpin(held.mounted.pop(index) for index in indices)

    # ----------------------------------------------------------------------------------- reads given up

    def orphan(self, prefetch_id: int, block_type: BlockType, batch: AbandonedBatch, targets: list[int]) -> None:
        """Nobody waits for this batch any more; its targets stay taken until the last of its ranks has answered."""
        self._orphans[prefetch_id, batch.offset] = _Orphan(block_type, batch.ranks, targets, batch.unknown)

    def forget_orphan_target(self, block_type: BlockType) -> None:
        """A target that is an orphan's counts as left alone from now on."""
        self._num_targets[block_type] -= 1

    def on_late_answer(self, answer: PrefetchAnswer) -> bool:
        """A read that was given up has ended after all on one rank; with the last rank's answer its targets may be used
        again. False when no such answer is awaited."""
        place = answer.prefetch_id, answer.offset
        orphan = self._orphans.get(place)
        if orphan is None or answer.rank not in orphan.ranks:
            return False
        orphan.ranks.discard(answer.rank)
        orphan.unknown |= unknown_blocks([bytes(answer.hits)], len(orphan.targets))
        if not orphan.ranks:
            del self._orphans[place]
            for column, target in enumerate(orphan.targets):
                self._give_back(orphan.type, target, column in orphan.unknown)
        return True

    def release_quarantine(self) -> None:
        """Give back the targets of failed reads that have been left alone for long enough."""
        while self.quarantine and self.quarantine[0][0] <= now():
            _, kind, target = self.quarantine.popleft()
            self._pools[kind].host.unpin([target])

    def left_alone(self, block_type: BlockType) -> int:
        """Host blocks of one type that a read which failed, or was given up, may still write to."""
        orphans = sum(len(orphan.targets) for orphan in self._orphans.values() if orphan.type is block_type)
        return orphans + sum(kind is block_type for _, kind, _ in self.quarantine)

    @property
    def num_left_alone(self) -> int:
        """As `left_alone`, of all types."""
        return sum(self.left_alone(block_type) for block_type in self._pools)

    @property
    def held(self) -> Mapping[BlockType, int]:
        """Targets and mounted blocks of each type."""
        return {kind: self._num_targets[kind] + self._num_mounted[kind] for kind in self._pools}
