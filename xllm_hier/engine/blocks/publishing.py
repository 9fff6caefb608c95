"""Publishing: blocks that a step completed become findable, are written back, and are released at the end.

Each complete block is offered to the device prefix and, if the host lacks it and it is worth keeping, queued for its
write-back, which holds references of its own: the sequence may end before the copy does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from ...block import BlockType
from ...plans import HOLE
from .ledger import Ledger
from .sequence import Sequence
from .store_reads import StoreReads
from .types import HeldCheckpoints, TypePools
from .write_back import WriteBack


class Publishing:
    """Publishes, keeps and releases the blocks of sequences."""

    def __init__(self, ledger: Ledger, reads: StoreReads, write_back: WriteBack) -> None:
        self._pools, self._prefix, self._checkpoints = ledger.pools, ledger.prefix, ledger.checkpoints
        self._keeping, self._journal = ledger.keeping, ledger.journal
        self._windows = ledger.pools.get(BlockType.SWA)
        self._size = ledger.pools.block_size
        self._reads = reads
        self._write_back = write_back

    # --------------------------------------------------------------------------------------------- publish

    def publish_computed(self, sequence: Sequence) -> None:
        """Offer the blocks completed by the last forward to the device prefix and queue their write-back; release
        those that no later token needs."""
        if self._checkpoints is not None:
            self._checkpoints.note_written(sequence)
        end = self.num_publishable(sequence)
        if end > sequence.num_published:
            self.publish(sequence, end, put=True)
        if self._windows is not None:
            self._release_slid(sequence, self._windows)
        if self._checkpoints is not None and (needless := self._checkpoints.needless(sequence)):
            self._release(sequence, self._pools[BlockType.LINEAR], needless)

    def _release_slid(self, sequence: Sequence, pools: TypePools) -> None:
        """Release the blocks that have slid out of the window."""
        boundary = sequence.num_computed - sequence.num_computed % self._size
        slid = sequence.held[BlockType.SWA].take_before(pools.rule.needed(boundary).start)
        if slid:
            self._release(sequence, pools, slid)

    def _release(self, sequence: Sequence, pools: TypePools, blocks: Mapping[int, int]) -> None:
        """Give back references of device blocks, by number; blocks before no boundary worth keeping are evicted
        first."""
        kept = {number for number in blocks if self._keeping.is_kept(sequence, pools, number)}
        pools.device.unpin([block for number, block in blocks.items() if number not in kept], oldest=True)
        pools.release([blocks[number] for number in sorted(kept)])

    def num_publishable(self, sequence: Sequence) -> int:
        """Leading blocks that are complete and have the bits that their hashes promise."""
        complete = sequence.num_computed // self._size
        if sequence.tag_decoded:  # decoded blocks have other bits than a prompt's
            complete = min(complete, sequence.prompt_length // self._size)
        return complete

    def publish(self, sequence: Sequence, end: int, *, put: bool) -> None:
        """Publish the sequence's blocks below number `end`; `put` False keeps them out of the store."""
        if not self._prefix.shares(sequence):
            return
        for index in range(sequence.num_published, end):
            for pools in self._pools.values():
                if self._is_written(sequence, pools, index):
                    self._publish_block(sequence, pools, index, put)
            self._prefix.unclaim(sequence.hash_of(index), sequence)
        sequence.num_published = max(sequence.num_published, end)

    def _is_written(self, sequence: Sequence, pools: TypePools, index: int) -> bool:
        """The sequence holds block `index`, complete; a checkpoint only if a step was told to write it."""
        held = sequence.held[pools.type]
        return index in held.written if isinstance(held, HeldCheckpoints) else held.block(index) != HOLE

    def _publish_block(self, sequence: Sequence, pools: TypePools, index: int, put: bool) -> None:
        held, block_hash = sequence.held[pools.type], sequence.hash_of(index)
        block = held.block(index)
        if self._journal is not None:
            self._journal.learn(sequence, index)
        if not pools.device.publish(block, block_hash, pools.parent(sequence.parent_of(index))):
            same = pools.device.find(block_hash)  # go on from the block that is found: two copies help nobody
            if same is not None and same != block:
                pools.device.pin(same)
                pools.device.unpin([block])
                held.put(index, same)
                if pools.type is BlockType.LINEAR:
                    sequence.states[(index + 1) * self._size] = same
        if self._keeping.is_kept(sequence, pools, index):
            self._queue_write_back(sequence, pools, index, put)

    def _queue_write_back(self, sequence: Sequence, pools: TypePools, index: int, put: bool) -> None:
        held, block_hash = sequence.held[pools.type], sequence.hash_of(index)
        target = held.targets.pop(index, None)
        self._write_back.queue(pools.type, held.block(index), block_hash, sequence.parent_of(index), target, put=put)

    def take_over(self, sequence: Sequence, places: Mapping[BlockType, Iterable[int]]) -> None:
        """Another instance has filled the blocks of the numbers `places` of all known tokens but the newest: publish
        them like computed ones, and go on from there. The blocks between them were found on the device."""
        known = len(sequence.tokens) - 1
        sequence.num_computed = sequence.write_from = known
        sequence.draft_from = known + 1
        if sequence.live_states:
            sequence.states = {known: sequence.live_states[0]}
        end = self.num_publishable(sequence)
        if self._prefix.shares(sequence):
            for pools in self._pools.tables:
                for index in sorted(number for number in places[pools.type] if number < end):
                    self._publish_block(sequence, pools, index, put=True)
            for index in range(end):
                self._prefix.unclaim(sequence.hash_of(index), sequence)
        sequence.num_published = end
        sequence.num_restored = sequence.prompt_length // self._size

    # --------------------------------------------------------------------------------------------- release

    def deallocate(self, sequence: Sequence, *, resume: bool = False) -> None:
        """Give back all blocks of a sequence; queued write-backs keep their own references.

        `resume`: the sequence was preempted, so its complete decoded blocks are offloaded too, to the host only.
        """
        if resume:
            self._keep_live_state(sequence)
        if resume or sequence.in_prefill or not sequence.tag_decoded:
            sequence.boundaries.add(self._num_resumable(sequence))
        if resume:
            self.publish(sequence, self._num_resumable(sequence), put=not sequence.tag_decoded)
        self._write_back_rest(sequence)
        if self._reads.concerns(sequence):
            raise RuntimeError("a sequence is deallocated only after its prefetch ended")
        self._prefix.disclaim(sequence)
        self._reads.targets.unmount(sequence)
        for kind, pools in self._pools.items():
            held = sequence.held[kind]
            blocks = {n: held.block(n) for n in held.numbers(sys.maxsize) if held.block(n) != HOLE}
            self._release(sequence, pools, blocks)
            pools.host.unpin(held.targets.values())
        if sequence.live_states:
            self._pools[BlockType.LINEAR].device.unpin(sequence.live_states)
        sequence.forget_blocks()

    def _keep_live_state(self, sequence: Sequence) -> None:
        if self._checkpoints is None or not self._prefix.shares(sequence):
            return
        index = self._checkpoints.keep_live(sequence)
        if index is not None:
            self._publish_block(sequence, self._pools[BlockType.LINEAR], index, put=True)

    def _num_resumable(self, sequence: Sequence) -> int:
        """Complete blocks that are of use when the sequence goes on: with recurrent layers it needs a state, too."""
        complete = sequence.num_computed // self._size
        return complete if self._checkpoints is None else min(complete, self._checkpoints.num_resumable(sequence))

    def _write_back_rest(self, sequence: Sequence) -> None:
        """Queue the blocks whose write-back was skipped when they were completed, or did not reach the store."""
        if not self._pools.first.host.num_blocks:
            return
        end = sequence.num_published
        if sequence.tag_decoded:
            end = min(end, sequence.prompt_length // self._size)
        for pools in self._pools.values():
            held = sequence.held[pools.type]
            for index in held.numbers(end):
                block = held.block(index)
                findable = block != HOLE and pools.device.find(sequence.hash_of(index)) == block
                if findable and self._keeping.is_kept(sequence, pools, index):
                    self._queue_write_back(sequence, pools, index, put=True)
