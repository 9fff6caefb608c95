"""Decoded blocks computed once more as a prompt, so that they have the bits that their hashes promise.

Where rows computed by the decode path have other bits than a prompt's (`decode_kv_reuse` canonical), a finished
sequence keeps its blocks and has those of its generated tokens written again by the prefill path. Where they have a
prompt's bits, or count as such, at most the last token is left to compute: it has been an output, but no input yet.
"""

from __future__ import annotations

from ...plans import HOLE
from .ledger import Ledger
from .sequence import Sequence


class CanonicalBlocks:
    """Prepares the blocks of finished sequences."""

    def __init__(self, ledger: Ledger) -> None:
        self._pools, self._settings = ledger.pools, ledger.settings
        self._prefix, self._checkpoints = ledger.prefix, ledger.checkpoints

    def begin(self, sequence: Sequence) -> bool:
        """Prepare a finished sequence to have its decoded blocks computed as a prompt; False when none is worth it.

        The sequence keeps its KV blocks, others are allocated step by step; positions before `canonical_end` will be
        computed.
        """
        if not self._settings.tags_decoded:
            return self._begin_last(sequence)
        size = self._pools.block_size
        first, end = sequence.prompt_length // size, len(sequence.tokens) // size
        wanted = self._settings.prefix_cache and self._settings.decode_kv_reuse == "canonical"
        if not wanted or end <= first or sequence.num_published < first:
            return False
        if not self.hold_again(sequence, first) or not self._own_blocks(sequence, first, end):
            return False
        sequence.use_canonical_hashes()
        first = self._skip_known(sequence, first, end)
        if first == end:
            return False
        sequence.num_published = first
        sequence.num_computed = max(0, first * size - self._settings.drafting.needs_hidden)
        sequence.write_from = sequence.draft_from = first * size
        sequence.canonical_end = end * size
        sequence.boundaries.add(end)
        if self._checkpoints is not None:
            self._checkpoints.drop_from(sequence, first)
            self._checkpoints.begin(sequence, first)
        self._prefix.claim(sequence, first, end)
        return True

    def _begin_last(self, sequence: Sequence) -> bool:
        """Prepare the last token alone, where it completes a block that nobody has yet."""
        size, length = self._pools.block_size, len(sequence.tokens)
        last = length // size - 1
        kept = self._settings.prefix_cache and self._checkpoints is None and not self._settings.drafting.by_model
        if not kept or length % size or sequence.num_published != last or sequence.num_computed != length - 1:
            return False
        if self._pools.first.device.find(sequence.hash_of(last)) is not None:
            return False
        sequence.canonical_end = length
        sequence.boundaries.add(last + 1)
        self._prefix.claim(sequence, last, last + 1)
        return True

    def _skip_known(self, sequence: Sequence, first: int, end: int) -> int:
        """Another sequence had the same conversation: go on from its blocks. Returns the first block to compute."""
        if not self._pools.prefix_only:
            return first
        pools = self._pools.first
        while first < end and (same := pools.device.find(sequence.hash_of(first))) is not None:
            pools.device.pin(same)
            pools.device.unpin([sequence.device_blocks[first]])
            sequence.held[pools.type].put(first, same)
            first += 1
        return first

    def hold_again(self, sequence: Sequence, boundary: int) -> bool:
        """Hold all blocks that going on behind block `boundary` needs, also those released; False when one is gone."""
        for pools in self._pools.values():
            held = sequence.held[pools.type]
            for index in pools.rule.needed(boundary * self._pools.block_size):
                if held.block(index) != HOLE:
                    continue
                block = pools.device.find(sequence.hash_of(index))
                if block is None:
                    return False
                pools.device.pin(block)
                held.put(index, block)
        return True

    def _own_blocks(self, sequence: Sequence, first: int, end: int) -> bool:
        """Give the sequence KV blocks `first` to `end` that no other sequence holds or finds, and take its SWA blocks
        from `first` on; False when there is no room."""
        for pools in self._pools.tables:
            held, device = sequence.held[pools.type], pools.device
            if pools.rule.span:
                pools.release(held.cut(first))
                continue
            lacking = [
                index
                for index in range(first, end)
                if held.block(index) == HOLE or device.references(held.block(index)) > 1
            ]
            blocks = device.allocate(len(lacking))
            if blocks is None:
                return False
            for index, block in zip(lacking, blocks, strict=True):
                pools.release([held.block(index)])
                held.put(index, block)
            for block in held.blocks[first:end]:
                device.withdraw(block)
        return True
