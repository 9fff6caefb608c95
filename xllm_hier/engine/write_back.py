"""The D2H2G half of the block books: write-backs queued, under way, and ended well or not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..block import BlockType
from ..plans import BlockMapping, OffloadCopied, OffloadStored, TransferKvBlocks, ints
from .block_pool import BlockPool

log = logging.getLogger("xllm.engine")


class WorkerLink(Protocol):
    """The way to all workers: what is sent first arrives first."""

    num_workers: int

    def broadcast(self, message: Any) -> None:
        """Send one plan to every worker."""


@dataclass(frozen=True)
class _Pair:
    """One D2H block on its way: both blocks carry one reference of this pair."""

    device: int
    host: int
    block_hash: bytes
    parent_hash: bytes
    put: bool


def _now() -> float:
    return time.monotonic()


@dataclass(eq=False)
class _Offload:
    """A D2H2G plan under way and which ranks have answered its two parts."""

    pairs: list[_Pair]
    copied: dict[int, int] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    started: float = field(default_factory=_now)


def block_mapping(rows: Iterable[tuple[int, int, bytes]]) -> BlockMapping:
    """The plan's form of (device block, host block, hash) rows."""
    device, host, hashes = zip(*rows, strict=True)
    return BlockMapping(BlockType.KV.value, ints(device), ints(host), b"".join(hashes))


class WriteBack:
    """Copies of READY device blocks to the host pool and on to the store.

    A block is copied once: not while the host holds it or another pair carries it. `store_works` is what the last
    answers said; a block whose write did not reach the store is written again once they are good again.
    `draft_domain`: the draft model's block of the same number goes along.
    """

    def __init__(
        self,
        link: WorkerLink,
        device: BlockPool,
        host: BlockPool,
        new_id: Callable[[], int],
        *,
        store_enabled: bool,
        draft_domain: bool = False,
    ) -> None:
        self._draft_domain = draft_domain
        self._link = link
        self._device = device
        self._host = host
        self._new_id = new_id
        self.store_enabled = store_enabled
        self._pairs: list[_Pair] = []
        self._offloading: set[bytes] = set()
        self._offloads: dict[int, _Offload] = {}
        self._unstored: set[bytes] = set()
        self.store_works = True
        self.num_failed = 0

    def begin_anew(self) -> None:
        """A store was attached: it may lack whatever the host has."""
        self.store_works = True
        self._unstored |= self._host.hashes()

    def store_answers(self) -> None:
        """The store was seen to work: what did not reach it may be tried again."""
        self.store_works = True

    def is_missing(self, block_hash: bytes) -> bool:
        """The host neither holds this block nor is about to."""
        return block_hash not in self._offloading and self._host.find(block_hash) is None

    def queue(self, block: int, block_hash: bytes, parent_hash: bytes, target: int | None, *, put: bool) -> None:
        """Write device block `block` back unless that is needless; takes over `target`, a reserved host block.

        Without a target one is allocated; without room on the host nothing happens. `put` False: to the host only.
        """
        works = self.store_enabled and self.store_works
        again = put and works and block_hash in self._unstored and block_hash not in self._offloading
        if not self.is_missing(block_hash) and not again:
            if target is not None:
                self._host.unpin([target])
            return
        if target is None:
            targets = self._host.allocate(1)
            if targets is None:
                return
            target = targets[0]
        self._device.pin(block)
        self._offloading.add(block_hash)
        self._pairs.append(_Pair(block, target, block_hash, parent_hash, put))

    def send(self) -> None:
        """Send what was queued since the last call."""
        pairs, self._pairs = self._pairs, []
        for put in (True, False):
            chosen = [pair for pair in pairs if pair.put is put]
            if not chosen:
                continue
            transfer_id = self._new_id()
            self._offloads[transfer_id] = _Offload(chosen)
            target = [block_mapping((pair.device, pair.host, pair.block_hash) for pair in chosen)]
            draft = target if self._draft_domain else []
            self._link.broadcast(TransferKvBlocks(transfer_id, target, draft, put=put and self.store_enabled))

    def on_copied(self, answer: OffloadCopied) -> None:
        """One rank's D2H has ended; with the last one the host prefix is published or the host blocks are released."""
        offload = self._offloads.get(answer.transfer_id)
        if offload is None or answer.rank in offload.copied:
            log.warning("ignored an offload answer of rank %d for %d", answer.rank, answer.transfer_id)
            return
        offload.copied[answer.rank] = answer.num_blocks
        if len(offload.copied) == self._link.num_workers:
            self._finish_copy(answer.transfer_id, offload)

    def _finish_copy(self, transfer_id: int, offload: _Offload) -> None:
        complete = all(count == len(offload.pairs) for count in offload.copied.values())
        self._device.unpin(pair.device for pair in offload.pairs)
        for pair in offload.pairs:
            self._offloading.discard(pair.block_hash)
            if complete:
                self._host.publish(pair.host, pair.block_hash, pair.parent_hash)
        if not complete:
            self.num_failed += 1
            log.warning("a write-back of %d blocks failed; copied per rank: %s", len(offload.pairs), offload.copied)
        self._finish(transfer_id, offload)

    def on_stored(self, answer: OffloadStored) -> None:
        """One rank's store writes have ended, well or not: with the last one the host blocks may be reused."""
        offload = self._offloads.get(answer.transfer_id)
        if offload is None:
            return
        offload.stored[answer.rank] = answer.num_stored
        if offload.pairs[0].put and len(offload.stored) == self._link.num_workers:
            hashes = {pair.block_hash for pair in offload.pairs}
            stored = min(offload.stored.values()) == len(hashes)  # one rank's miss is a miss for all
            self.store_works = stored or not self.store_enabled
            if stored:
                self._unstored -= hashes
            elif len(self._unstored) < self._host.num_blocks:
                self._unstored |= hashes
        self._finish(answer.transfer_id, offload)

    def _finish(self, transfer_id: int, offload: _Offload) -> None:
        if len(offload.copied) == self._link.num_workers == len(offload.stored):
            self._host.unpin(pair.host for pair in offload.pairs)
            del self._offloads[transfer_id]

    @property
    def busy(self) -> bool:
        """Something is queued or under way: more host blocks will become free."""
        return bool(self._offloads or self._pairs)

    @property
    def pins_device(self) -> bool:
        """A copy still has to read device blocks: they come back by themselves."""
        return bool(self._pairs) or any(len(o.copied) < self._link.num_workers for o in self._offloads.values())

    def oldest_copy(self) -> tuple[float, list[int]]:
        """Age in seconds of the write-back that has waited longest for its copy to the host, and the ranks it waits
        for; 0 when there is none.

        Store writes do not count: a slow or hung store is no reason to doubt the worker.
        """
        waiting = [o for o in self._offloads.values() if len(o.copied) < self._link.num_workers]
        if not waiting:
            return 0.0, []
        oldest = min(waiting, key=lambda offload: offload.started)
        ranks = set(range(self._link.num_workers)) - set(oldest.copied)
        return time.monotonic() - oldest.started, sorted(ranks)
