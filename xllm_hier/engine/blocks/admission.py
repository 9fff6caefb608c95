"""Allocation: a sequence's cached prefix is joined, its next tokens get blocks, host blocks are reserved.

Everything is all or nothing: an allocation that fails leaves the sequence and the pools as they were.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...block import BlockType
from ...plans import HOLE
from .host_loads import Load, Loads
from .ledger import Ledger
from .read_targets import ReadTargets
from .sequence import Sequence
from .types import STATE, Found, Hit, Places
from .write_back import WriteBack


class Admission:
    """Allocates for sequences that run here and for those that another instance computes."""

    def __init__(self, ledger: Ledger, loads: Loads, mounts: ReadTargets, write_back: WriteBack) -> None:
        self._ledger = ledger
        self._pools, self._prefix, self._checkpoints = ledger.pools, ledger.prefix, ledger.checkpoints
        self._num_live_states = 1 + ledger.settings.drafting.num_tokens
        self._loads = loads
        self._mounts = mounts
        self._write_back = write_back

    # -------------------------------------------------------------------------------------- sequences here

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Device blocks for the first `num_tokens` tokens; on a sequence without blocks, the cached prefix first.

        Joins device prefix and mounted host prefix, reserves host blocks for the later write-back (best effort, all or
        none), publishes the metadata of restored blocks up to the token cursor, and plans their load. False and
        nothing changed when the device has not enough blocks of some type.
        """
        count = -(-num_tokens // self._pools.block_size)
        if sequence.probed:
            allocated = self._has_blocks(sequence, count) or self._grow(sequence, count)
        else:
            allocated = self._begin(sequence, count)
        if allocated:
            self._reserve(sequence, num_tokens)
        return allocated

    def _has_blocks(self, sequence: Sequence, count: int) -> bool:
        """The sequence holds `count` blocks of each type that has a table; the common case of a step that decodes."""
        for pools in self._pools.tables:
            if len(sequence.held[pools.type].blocks) < count:
                return False
        return self._checkpoints is None or bool(sequence.live_states)

    def _lacking(self, sequence: Sequence, count: int, boundary: int = 0) -> dict[BlockType, int]:
        """Blocks of each type that the sequence lacks to hold `count`, of which `boundary` come from the prefix."""
        lacking = {
            pools.type: max(0, count - max(boundary, len(sequence.held[pools.type].blocks)))
            for pools in self._pools.tables
        }
        if self._checkpoints is not None and not sequence.live_states:
            lacking[BlockType.LINEAR] = self._num_live_states
        return lacking

    def _grow(self, sequence: Sequence, count: int) -> bool:
        blocks = self._pools.allocate_device(self._lacking(sequence, count))
        if blocks is not None:
            self._take(sequence, blocks)
        return blocks is not None

    @staticmethod
    def _take(sequence: Sequence, blocks: dict[BlockType, list[int]]) -> None:
        for kind, new in blocks.items():
            (sequence.live_states if kind is BlockType.LINEAR else sequence.held[kind].blocks).extend(new)

    def _begin(self, sequence: Sequence, count: int) -> bool:
        """The first blocks of a sequence: its prefix, and new ones beyond it."""
        hit = self._prefix.hit(sequence)
        found = self._prefix.needed(sequence, hit.boundary)
        self._pin(found)
        new = self._lacking(sequence, count, hit.boundary)
        loads = {kind: sum(item.device is None and item.pools.type is kind for item in found) for kind in new}
        blocks = self._pools.allocate_device({kind: new[kind] + loads[kind] for kind in new})
        if blocks is None:
            self._unpin(found)
            return False
        self._join(sequence, hit, found, {kind: blocks[kind][: loads[kind]] for kind in new})
        self._take(sequence, {kind: blocks[kind][loads[kind] :] for kind in new})
        return True

    @staticmethod
    def _pin(found: Iterable[Found]) -> None:
        """One more reference of each block where it is."""
        for item in found:
            if item.device is not None:
                item.pools.device.pin(item.device)
            elif item.host is not None:
                item.pools.host.pin(item.host)

    @staticmethod
    def _unpin(found: Iterable[Found]) -> None:
        for item in found:
            if item.device is not None:
                item.pools.device.unpin([item.device])
            elif item.host is not None:
                item.pools.host.unpin([item.host])

    def _join(self, sequence: Sequence, hit: Hit, found: list[Found], targets: dict[BlockType, list[int]]) -> None:
        """The sequence goes on behind its prefix: blocks on the device are shared, those on the host are loaded into
        `targets`."""
        boundary, size = hit.boundary, self._pools.block_size
        # Other prompts will part where this one does, too; and can go on where this one could.
        sequence.boundaries |= {boundary, hit.matched} - {0}
        free = {kind: iter(blocks) for kind, blocks in targets.items()}
        for item in found:
            pools, block_hash = item.pools, sequence.hash_of(item.index)
            block = next(free[pools.type]) if item.device is None else item.device
            if item.host is not None:
                if self._ledger.journal is not None:
                    self._ledger.journal.learn(sequence, item.index)
                self._loads.plan(Load(pools.type, item.host, block, block_hash))
                pools.device.publish(block, block_hash, pools.parent(sequence.parent_of(item.index)))
            sequence.held[pools.type].put(item.index, block)
        self._mounts.unmount(sequence)
        sequence.num_computed = hit.tokens
        sequence.write_from = sequence.draft_from = boundary * size
        sequence.num_published = boundary
        if self._checkpoints is not None:
            self._checkpoints.begin(sequence, boundary)
        sequence.probed = True
        self._ledger.account.open(sequence, found, hit.tokens)
        if any(targets.values()):
            # Decoded blocks, which a preempted request gets back, have bits that no prompt gives.
            sequence.num_restored = min(boundary, sequence.prompt_length // size)
            self._ledger.policy.count("host", "restored")
        elif not self._ledger.policy.loading_pays() and self._prefix.host_has(sequence, boundary):
            self._ledger.policy.count("host", "recomputed")
        self._prefix.claim(sequence, boundary)

    # ------------------------------------------------------------------------------- reserved, best effort

    def _reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Reserve blocks that the next tokens can do without."""
        if not self._prefix.shares(sequence):
            return
        if self._checkpoints is not None:
            self._checkpoints.reserve(sequence, num_tokens)
        last = min(num_tokens, sequence.prompt_length) // self._pools.block_size
        if last > sequence.num_published:
            self._reserve_host_targets(sequence, last)

    def _reserve_host_targets(self, sequence: Sequence, last: int) -> None:
        for kind, pools in self._pools.items():
            if not pools.host.num_blocks:
                continue
            held = sequence.held[kind]
            wanted = [
                index
                for index in range(sequence.num_published, last)
                if index not in held.targets
                and held.block(index) != HOLE
                and self._ledger.keeping.is_kept(sequence, pools, index)
                and self._write_back.is_missing(kind, sequence.hash_of(index))
            ]
            targets = pools.host.allocate(len(wanted))
            if targets is not None:
                held.targets.update(zip(wanted, targets, strict=True))

    # ----------------------------------------------------------------------------- sequences computed elsewhere

    def allocate_for_peer(self, sequence: Sequence) -> Places | None:
        """Device blocks to go on behind the known tokens of a sequence without blocks that another instance computes;
        None and nothing changed without room.

        Returns the blocks to be filled; the others are found in the device prefix, which alone is looked at. Unlike a
        restore each type goes by itself, since the instance that computes the rest has all types.
        """
        size, known = self._pools.block_size, len(sequence.tokens)
        end = -(-(known + self._ledger.settings.drafting.ahead) // size)
        # Only blocks that `take_over` counts as published may be found.
        reach = sequence.prompt_length if sequence.tag_decoded else known
        found: Places = {}
        lacking: dict[BlockType, list[int]] = {}
        for pools in self._pools.tables:
            first = pools.rule.needed(known - known % size).start
            there = self._prefix.on_device(sequence, pools, first, reach // size)
            found[pools.type] = there
            lacking[pools.type] = [number for number in range(first, end) if number not in there]
        for kind, blocks in found.items():
            for block in blocks.values():
                self._pools[kind].device.pin(block)
        counts = {kind: len(numbers) for kind, numbers in lacking.items()}
        if self._checkpoints is not None:
            counts[BlockType.LINEAR] = self._num_live_states
        new = self._pools.allocate_device(counts)
        if new is None:
            for kind, blocks in found.items():
                self._pools[kind].device.unpin(blocks.values())
            return None
        places = {kind: dict(zip(numbers, new[kind], strict=True)) for kind, numbers in lacking.items()}
        for kind, blocks in places.items():
            for number, block in sorted((found[kind] | blocks).items()):
                sequence.held[kind].put(number, block)
        if self._checkpoints is not None:
            sequence.live_states.extend(new[BlockType.LINEAR])
            places[BlockType.LINEAR] = {STATE: sequence.live_states[0]}
        sequence.probed = True
        self._prefix.claim(sequence, sequence.num_shared(places))
        return places
