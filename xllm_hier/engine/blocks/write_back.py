"""The D2H2G half of the block books: write-backs queued, under way, and ended well or not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ...block import BlockType
from ...plans import BlockMapping, OffloadCopied, OffloadStored, RemoteBlocks, TransferKvBlocks, ints
from .journal import CacheJournal
from .types import TypePools

log = logging.getLogger("xllm.engine")


class WorkerLink(Protocol):
    """The way to all workers: what is sent first arrives first."""

    num_workers: int

    def broadcast(self, message: Any) -> None:
        """Send one plan to every worker."""


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


def _now() -> float:
    return time.monotonic()


@dataclass(eq=False)
class _Offload:
    """A D2H2G plan under way and which ranks have answered its two parts."""

    pairs: list[_Pair]
    copied: dict[int, int] = field(default_factory=dict)
    stored: dict[int, int] = field(default_factory=dict)
    started: float = field(default_factory=_now)


class Move(Protocol):
    """One block of a plan that moves blocks between device and host."""

    @property
    def type(self) -> BlockType: ...
    @property
    def device(self) -> int: ...
    @property
    def host(self) -> int: ...
    @property
    def block_hash(self) -> bytes: ...


MappingT = TypeVar("MappingT", BlockMapping, RemoteBlocks)


def block_mappings(moves: Iterable[Move]) -> list[BlockMapping]:
    """The plan's form of moves, one mapping for each type among them."""
    by_type: dict[BlockType, list[Move]] = {}
    for move in moves:
        by_type.setdefault(move.type, []).append(move)
    return [
        BlockMapping(
            block_type.value,
            ints([move.device for move in those]),
            ints([move.host for move in those]),
            b"".join(move.block_hash for move in those),
        )
        for block_type, those in by_type.items()
    ]


def draft_part(mappings: list[MappingT], types: Iterable[str]) -> list[MappingT]:
    """Those that the blocks of a draft model follow, which has blocks of `types`."""
    return [mapping for mapping in mappings if mapping.block_type in types]


class WriteBack:
    """Copies of READY device blocks to the host pool and on to the store.

    A block is copied once: not while the host holds it or another pair carries it. `store_works` is what the last
    answers said; a block whose write did not reach the store is written again once they are good again.
    `draft_types`: the draft model's blocks of these types and the same numbers go along.
    """

    def __init__(
        self,
        link: WorkerLink,
        pools: Mapping[BlockType, TypePools],
        new_id: Callable[[], int],
        *,
        store_enabled: bool,
        draft_types: tuple[str, ...] = (),
        journal: CacheJournal | None = None,
    ) -> None:
        self._draft_types = draft_types
        self._journal = journal
        self._link = link
        self._pools = pools
        self._new_id = new_id
        self.store_enabled = store_enabled
        self._pairs: list[_Pair] = []
        self._offloading: set[tuple[BlockType, bytes]] = set()
        self._offloads: dict[int, _Offload] = {}
        self._unstored: set[tuple[BlockType, bytes]] = set()
        self.store_works = True
        self.num_failed = 0

    def begin_anew(self) -> None:
        """A store was attached: it may lack whatever the host has."""
        self.store_works = True
        self._unstored |= {(kind, found) for kind, pools in self._pools.items() for found in pools.host.hashes()}

    def store_answers(self) -> None:
        """The store was seen to work: what did not reach it may be tried again."""
        self.store_works = True

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
        works, content, pools = (
            self.store_enabled and self.store_works,
            (block_type, block_hash),
            self._pools[block_type],
        )
        again = put and works and content in self._unstored and content not in self._offloading
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
        """Send what was queued since the last call."""
        pairs, self._pairs = self._pairs, []
        for put in (True, False):
            chosen = [pair for pair in pairs if pair.put is put]
            if not chosen:
                continue
            transfer_id = self._new_id()
            self._offloads[transfer_id] = _Offload(chosen)
            target = block_mappings(chosen)
            draft = draft_part(target, self._draft_types)
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
        for kind, pools in self._pools.items():
            pools.device.unpin(pair.device for pair in offload.pairs if pair.type is kind)
        for pair in offload.pairs:
            self._offloading.discard(pair.content)
            if complete:
                self._pools[pair.type].host.publish(pair.host, pair.block_hash, pair.parent_hash)
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
            contents = dict.fromkeys(pair.content for pair in offload.pairs)
            stored = min(offload.stored.values()) == len(contents)  # one rank's miss is a miss for all
            self.store_works = stored or not self.store_enabled
            if stored:
                self._unstored.difference_update(contents)
                if self._journal is not None:
                    for kind, block_hash in contents:
                        self._journal.in_store(kind, [block_hash])
            elif len(self._unstored) < sum(pools.host.num_blocks for pools in self._pools.values()):
                self._unstored.update(contents)
        self._finish(answer.transfer_id, offload)

    def _finish(self, transfer_id: int, offload: _Offload) -> None:
        if len(offload.copied) == self._link.num_workers == len(offload.stored):
            for kind, pools in self._pools.items():
                pools.host.unpin(pair.host for pair in offload.pairs if pair.type is kind)
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
