"""The D2H2G half of the block books: write-backs queued, under way, and ended well or not."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ...block import BlockType
from ...clock import now
from ...plans import OffloadCopied, OffloadStored, TransferKvBlocks
from .ledger import Ledger
from .moves import Orders, RankAnswers, block_mappings, draft_part

log = logging.getLogger("xllm.engine")


@dataclass(eq=False)
class StoreUse:
    """Whether this instance uses the store.

    `wanted`: somebody attached it. `enabled`: it is read from and written to. `works`: its last answers were good; a
    block whose write failed is written again once they are.
    """

    wanted: bool
    enabled: bool
    works: bool = True


@dataclass(frozen=True)
class _Pair:
    """One D2H block on its way: both blocks carry one reference of this pair."""

    type: BlockType
    device: int
    host: int
    block_hash: bytes
    parent_hash: bytes
    put: bool

    @property
    def content(self) -> tuple[BlockType, bytes]:
        return self.type, self.block_hash


@dataclass(eq=False)
class _Offload:
    """A D2H2G plan under way, and the ranks' answers to its two parts: logical blocks copied, and stored."""

    pairs: list[_Pair]
    copied: RankAnswers[int]
    stored: RankAnswers[int]
    started: float = field(default_factory=now)


class WriteBack:
    """Copies of READY device blocks to the host pool and on to the store.

    A block is copied once: not while the host holds it or another pair carries it. The draft
    model's blocks of the same numbers go along.
    """

    def __init__(self, orders: Orders, ledger: Ledger, store: StoreUse) -> None:
        self._orders = orders
        self._pools, self._journal = ledger.pools, ledger.journal
        self._draft_types = ledger.settings.drafting.moved_types
        self._store = store
        self._pairs: list[_Pair] = []
        self._offloading: set[tuple[BlockType, bytes]] = set()
        self._offloads: dict[int, _Offload] = {}
        self._unstored: set[tuple[BlockType, bytes]] = set()
        self.num_failed = 0

    def begin_anew(self) -> None:
        """A store was attached: it may lack every block that the host has."""
        self._store.works = True
        self._unstored |= {(kind, found) for kind, pools in self._pools.items() for found in pools.host.hashes()}

    def is_missing(self, block_type: BlockType, block_hash: bytes) -> bool:
        """The host neither holds this block nor is about to."""
        pools = self._pools[block_type]
        return (block_type, block_hash) not in self._offloading and pools.host.find(block_hash) is None

    def queue(
        self,
        block_type: BlockType,
        block: int,
        block_hash: bytes,
        parent_hash: bytes,
        target: int | None,
        *,
        put: bool,
    ) -> None:
        """Write device block `block` back unless that is needless; takes over `target`, a reserved host block.

        Without a target one is allocated; without room on the host nothing happens. `put` False: to the host only.
        """
        content, pools = (block_type, block_hash), self._pools[block_type]
        may_store = put and self._store.enabled and self._store.works
        again = may_store and content in self._unstored and content not in self._offloading
        if not self.is_missing(*content) and not again:
            if target is not None:
                pools.host.unpin([target])
            return
        if target is None:
            targets = pools.host.allocate(1)
            if targets is None:
                return
            target = targets[0]
        pools.device.pin(block)
        self._offloading.add(content)
        self._pairs.append(_Pair(block_type, block, target, block_hash, pools.parent(parent_hash), put))

    def send(self) -> None:
        """Send the write-backs queued since the last call."""
        pairs, self._pairs = self._pairs, []
        for put in (True, False):
            chosen = [pair for pair in pairs if pair.put is put]
            if not chosen:
                continue
            transfer_id, num_workers = self._orders.new_id(), self._orders.num_workers
            self._offloads[transfer_id] = _Offload(chosen, RankAnswers(num_workers), RankAnswers(num_workers))
            target = block_mappings(chosen)
            draft = draft_part(target, self._draft_types)
            self._orders.send(TransferKvBlocks(transfer_id, target, draft, put=put and self._store.enabled))

    def on_copied(self, answer: OffloadCopied) -> None:
        """One rank's D2H has ended; with the last one the host prefix is published or the host blocks are released."""
        offload = self._offloads.get(answer.transfer_id)
        if offload is None or not offload.copied.add(answer.rank, answer.num_blocks):
            log.warning("ignored an offload answer of rank %d for %d", answer.rank, answer.transfer_id)
        elif offload.copied.complete:
            self._commit_copy(answer.transfer_id, offload)

    def _commit_copy(self, transfer_id: int, offload: _Offload) -> None:
        """The write-back commit: with the word of every rank for every block the host blocks become findable."""
        for kind, pools in self._pools.items():
            pools.device.unpin(pair.device for pair in offload.pairs if pair.type is kind)
        complete = offload.copied.all_equal(len(offload.pairs))
        for pair in offload.pairs:
            self._offloading.discard(pair.content)
            if complete:
                self._pools[pair.type].host.publish(pair.host, pair.block_hash, pair.parent_hash)
        if not complete:
            self.num_failed += 1
            by_rank = offload.copied.by_rank
            log.warning("a write-back of %d blocks failed; copied per rank: %s", len(offload.pairs), by_rank)
        self._end(transfer_id, offload)

    def on_stored(self, answer: OffloadStored) -> None:
        """One rank's store writes have ended, well or not: with the last one the host blocks may be reused."""
        offload = self._offloads.get(answer.transfer_id)
        if offload is None or not offload.stored.add(answer.rank, answer.num_stored):
            return
        if offload.pairs[0].put and offload.stored.complete:
            self._note_stored(offload)
        self._end(answer.transfer_id, offload)

    def _note_stored(self, offload: _Offload) -> None:
        contents = dict.fromkeys(pair.content for pair in offload.pairs)
        stored = offload.stored.all_equal(len(contents))  # one rank's miss is a miss for all
        self._store.works = stored or not self._store.enabled
        if stored:
            self._unstored.difference_update(contents)
            if self._journal is not None:
                for kind, block_hash in contents:
                    self._journal.in_store(kind, [block_hash])
        elif len(self._unstored) < sum(pools.host.num_blocks for pools in self._pools.values()):
            self._unstored.update(contents)

    def _end(self, transfer_id: int, offload: _Offload) -> None:
        if offload.copied.complete and offload.stored.complete:
            for kind, pools in self._pools.items():
                pools.host.unpin(pair.host for pair in offload.pairs if pair.type is kind)
            del self._offloads[transfer_id]

    @property
    def store_works(self) -> bool:
        """The store's last answers were good."""
        return self._store.works

    @property
    def busy(self) -> bool:
        """Something is queued or under way: more host blocks will become free."""
        return bool(self._offloads or self._pairs)

    @property
    def pins_device(self) -> bool:
        """A copy still has to read device blocks: they come back by themselves."""
        return bool(self._pairs) or any(not offload.copied.complete for offload in self._offloads.values())

    def oldest_copy(self) -> tuple[float, list[int]]:
        """Age in seconds of the write-back that has waited longest for its copy to the host, and the ranks whose
        answers it lacks; 0 and none without one.

        Store writes do not count: a slow or hung store is no reason to doubt the worker.
        """
        waiting = [offload for offload in self._offloads.values() if not offload.copied.complete]
        if not waiting:
            return 0.0, []
        oldest = min(waiting, key=lambda offload: offload.started)
        return now() - oldest.started, sorted(oldest.copied.missing)
