"""The hit rule: which part of a sequence the caches have, and which part another sequence is computing.

A hit is the largest boundary, in tokens, from which computing can go on: every BlockType has the blocks that its
restore rule needs there (`RestoreRule`), on the device or on the host, in all domains and on all ranks (a block is in
the index only if they all have it). The last known token is never part of a hit, because its logits are needed.

    tokens      0        64       128       192       256        window 100, blocks of 32 tokens
    KV          |  0  |  1  |  2  |  3  |  4  |  5  |  6  |      0 to 3 on the device, 4 to 6 on the host
    SWA                     |  2  |  3  |  4  |  5  |            2 to 5 on the device
    hit         |<---------------- 192 ------------>|            KV reaches to 224, the window to 192

Admission, store reads and the decode side's allocation all ask here. A waiting sequence's hit is worked out once and
kept until the indices or the sequence change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from ...block import BlockType, common_boundary
from .policy import RestorePolicy
from .sequence import Sequence
from .settings import BookSettings
from .types import Found, Hit, PoolSet, TypePools

Column = tuple[BlockType, int]  # type and number of a block of a sequence


class Prefix:
    """The hit rule over the indices of one instance, and the claims of running sequences; changes no pool."""

    def __init__(self, pools: PoolSet, settings: BookSettings, policy: RestorePolicy) -> None:
        self._pools = pools
        self._settings = settings
        self._policy = policy
        self._size = pools.block_size
        self._claims: dict[bytes, Sequence] = {}  # hash of a block -> the running sequence that computes it
        self.num_lookups = 0  # hits worked out so far

    # ---------------------------------------------------------------------------------------- the hit rule

    def shares(self, sequence: Sequence) -> bool:
        """The sequence takes blocks that others left, and leaves its own."""
        return self._settings.prefix_cache and not sequence.private

    def num_candidates(self, sequence: Sequence) -> int:
        """Full blocks of the known tokens that could spare computing anything."""
        if not self.shares(sequence):
            return 0
        limit = sequence.reuse_limit
        if sequence.num_generated or self._pools.linear is not None:
            # The decode path writes its last row, which must not be in a shared block; and no state lies before a
            # block's end.
            return limit // self._size
        return min(len(sequence.tokens) // self._size, -(-limit // self._size))

    def hit(self, sequence: Sequence) -> Hit:
        """The hit on device and host now; nothing is changed."""
        mounted = sum(len(held.mounted) for held in sequence.held.values())
        state = (self._pools.version, self._policy.loading_pays(), len(sequence.tokens), mounted, sequence.remote)
        if sequence.hit is None or sequence.hit_state != state:
            sequence.hit, sequence.hit_state = self._look_up(sequence), state
        return sequence.hit

    def _look_up(self, sequence: Sequence) -> Hit:
        self.num_lookups += 1

        def has(block_type: BlockType, index: int) -> bool:
            return self._has(sequence, self._pools[block_type], index)

        boundary = self.boundary(sequence, has)
        matched, end = boundary, self.num_candidates(sequence)
        while len(self._pools) > 1 and matched < end and self._has(sequence, self._pools.first, matched):
            matched += 1
        return Hit(boundary, matched, self.num_hit_tokens(sequence, boundary))

    def boundary(self, sequence: Sequence, has: Callable[[BlockType, int], bool]) -> int:
        """Largest number of candidate blocks behind which every type's restore rule holds, by what `has` says."""
        limit = self.num_candidates(sequence) * self._size
        return common_boundary(self._pools.rules, has, limit) // self._size

    def num_hit_tokens(self, sequence: Sequence, boundary: int) -> int:
        """Tokens that need not be computed with `boundary` blocks restored."""
        end = boundary * self._size - self._settings.drafting.needs_hidden
        return max(0, min(end, sequence.reuse_limit))

    # --------------------------------------------------------------------------------- where one block is

    def _has(self, sequence: Sequence, pools: TypePools, index: int) -> bool:
        on_device = pools.device.find(sequence.hash_of(index)) is not None
        return on_device or self._host_block(sequence, pools, index) is not None

    def _host_block(self, sequence: Sequence, pools: TypePools, index: int) -> int | None:
        """The host block that a load would take; None also where loading takes longer than computing."""
        if sequence.remote or not self._policy.loading_pays():
            return None
        mounted = sequence.held[pools.type].mounted.get(index)
        return mounted if mounted is not None else pools.host.find(sequence.hash_of(index))

    def needed(self, sequence: Sequence, boundary: int) -> list[Found]:
        """The blocks that going on behind block `boundary` needs, each where it is; no reference is taken."""
        found = []
        for pools in self._pools.values():
            for index in pools.rule.needed(boundary * self._size):
                device = pools.device.find(sequence.hash_of(index))
                host = self._host_block(sequence, pools, index) if device is None else None
                found.append(Found(pools, index, device, host))
        return found

    def is_here(self, sequence: Sequence, column: Column) -> bool:
        """Device or host have this block, whether or not loading it pays."""
        pools, block_hash = self._pools[column[0]], sequence.hash_of(column[1])
        return pools.device.find(block_hash) is not None or pools.host.find(block_hash) is not None

    def boundary_with(self, sequence: Sequence, in_store: Collection[Column]) -> int:
        """As `Hit.boundary`, with device, host and these blocks of the store together."""

        def has(block_type: BlockType, index: int) -> bool:
            return (block_type, index) in in_store or self.is_here(sequence, (block_type, index))

        return self.boundary(sequence, has)

    def on_device(self, sequence: Sequence, pools: TypePools, first: int, end: int) -> dict[int, int]:
        """Device blocks by number, of those from `first` to `end` that the device prefix has."""
        if not self.shares(sequence):
            return {}
        found = ((index, pools.device.find(sequence.hash_of(index))) for index in range(first, end))
        return {index: block for index, block in found if block is not None}

    def host_has(self, sequence: Sequence, index: int) -> bool:
        """The host has block `index` of the first type, and it could spare computing something."""
        if index >= self.num_candidates(sequence):
            return False
        return self._pools.first.host.find(sequence.hash_of(index)) is not None

    # -------------------------------------------------------------------------------------------- claims

    def is_being_computed(self, sequence: Sequence) -> bool:
        """A running sequence computes the first block that `sequence` misses: waiting for it costs less.

        The sequence then waits for the last block of that owner it can share, so that a crowd behind one prompt is not
        looked through at every step.
        """
        if sequence.waits_for is not None and sequence.waits_for in self._claims:
            return True
        sequence.waits_for = None
        end, index = self.num_candidates(sequence), self.hit(sequence).matched
        owner = self._claims.get(sequence.hash_of(index)) if index < end else None
        if owner is None or owner is sequence:
            return False
        while index < end and self._claims.get(sequence.hash_of(index)) is owner:
            sequence.waits_for = sequence.hash_of(index)
            index += 1
        return True

    def claim(self, sequence: Sequence, first: int, end: int | None = None) -> None:
        """Make others that want full blocks of this prompt from number `first` on wait for it; `end` None: to its
        prompt's end."""
        if self.shares(sequence):
            for index in range(first, sequence.prompt_length // self._size if end is None else end):
                self._claims.setdefault(sequence.hash_of(index), sequence)

    def disclaim(self, sequence: Sequence) -> None:
        """Undo `claim`: nobody waits for this sequence any more."""
        for block_hash in sequence.hashes:
            self.unclaim(block_hash, sequence)

    def unclaim(self, block_hash: bytes, sequence: Sequence) -> None:
        """The sequence has computed this block, or will not."""
        if self._claims.get(block_hash) is sequence:
            del self._claims[block_hash]

    @property
    def claims(self) -> dict[bytes, Sequence]:
        """A copy of the claims: which running sequence computes which block."""
        return dict(self._claims)
