"""HierarchyBlockManagerPool: the block books of one instance, and every plan that moves blocks between tiers.

The three phases of the specification are `prefetch_from_storage` / `update_prefetch_result` (G2H), `allocate` /
`transfer_blocks` (H2D), and `deallocate` / `transfer_offload_blocks` (D2H2G). Every transfer begins with its blocks
pinned and ends in one method that commits or rolls back, in `StoreReads`, `Loads` and `WriteBack`.

A request's life, in the verbs below:

    new_sequence -> prefetch_from_storage -> update_prefetch_result -> hit -> allocate -> transfer_blocks
                 -> (the step) -> finish_loads -> publish_computed -> ... -> begin_canonical -> deallocate
                 -> transfer_offload_blocks
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...block import BlockType
from ...figures import TypeSizes
from ...plans import OffloadCopied, OffloadStored, PrefetchAnswer, ProbeAnswer, StateMoves, TransferAck
from ...request_messages import AddRequest
from .admission import Admission
from .canonical import CanonicalBlocks
from .host_loads import Loads
from .journal import CacheJournal
from .ledger import Ledger
from .moves import Orders, WorkerLink
from .policy import RestorePolicy
from .pool import BlockPool
from .publishing import Publishing
from .sequence import Sequence
from .settings import BookSettings
from .store_reads import StoreReads
from .types import DeviceBlocks, Hit, Places, PoolSet
from .write_back import StoreUse, WriteBack


@dataclass(frozen=True)
class BookFigures:
    """Figures of the books for metrics: prompt tokens by the tier that paid, and failures since the start."""

    prefix_tokens: dict[str, int]
    failed_loads: int
    failed_offloads: int
    read_timeouts: int


class HierarchyBlockManagerPool:
    """Device and host blocks of one instance.

    `sizes` are the model's BlockTypes and their blocks in each tier; 0 host blocks switch the host tier off.
    `store_enabled` False switches the store off. `policy` decides about restores; None: all that can be restored is.
    `journal`, where there is one, is told of every block that can be had, or no more.

    The engine uses the verbs only. `ledger`, `reads`, `loads` and `write_back` are the parts behind them.
    """

    def __init__(
        self,
        link: WorkerLink,
        sizes: list[TypeSizes],
        settings: BookSettings,
        *,
        store_enabled: bool = False,
        policy: RestorePolicy | None = None,
        journal: CacheJournal | None = None,
    ) -> None:
        self.settings = settings
        self.pools = PoolSet(sizes, settings.block_size)
        self.policy = policy or RestorePolicy(settings.block_size, measured=False)
        self.orders = Orders(link)
        self.ledger = Ledger.of(self.pools, settings, self.policy, journal)
        has_host = self.pools.first.host.num_blocks > 0
        self._store = StoreUse(wanted=store_enabled and has_host, enabled=store_enabled and has_host)
        self.loads = Loads(self.orders, self.ledger)
        self.write_back = WriteBack(self.orders, self.ledger, self._store)
        self.reads = StoreReads(self.orders, self.ledger, self._store)
        self._admission = Admission(self.ledger, self.loads, self.reads.targets, self.write_back)
        self._publishing = Publishing(self.ledger, self.reads, self.write_back)
        self._canonical = CanonicalBlocks(self.ledger)

    # --------------------------------------------------------------------------------- the life of a request

    def new_sequence(self, request: AddRequest, *, private: bool = False, remote: bool = False) -> Sequence:
        """A sequence without blocks. `private`: it neither takes from any cache nor leaves anything there. `remote`:
        another instance computes it."""
        settings, types = self.settings, self.pools.types
        return Sequence(request, settings.block_size, settings.tags_decoded, types, private=private, remote=remote)

    def prefetch_from_storage(self, sequence: Sequence) -> bool:
        """Begin to read the part of the prompt that device and host lack; False when there is nothing to wait for."""
        return self._store.enabled and self.reads.begin(sequence)

    def update_prefetch_result(self, sequence: Sequence) -> bool:
        """True when nothing of the store is pending for this sequence: its hits are mounted, it may be scheduled."""
        return self.reads.update(sequence)

    def hit(self, sequence: Sequence) -> Hit:
        """The prefix that `allocate` would take from device and host now; worked out once until something changes."""
        return self.ledger.prefix.hit(sequence)

    def is_being_computed(self, sequence: Sequence) -> bool:
        """A running sequence computes the first block that `sequence` misses: waiting for it costs less."""
        return self.ledger.prefix.is_being_computed(sequence)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Device blocks for the first `num_tokens` tokens, the cached prefix first; see `Admission.allocate`."""
        return self._admission.allocate(sequence, num_tokens)

    def allocate_for_peer(self, sequence: Sequence) -> Places | None:
        """Device blocks of a sequence that another instance computes; see `Admission.allocate_for_peer`."""
        return self._admission.allocate_for_peer(sequence)

    def move_states(self, sequence: Sequence, end: int, num_drafts: int = 0) -> StateMoves | None:
        """Source and targets of the sequence's recurrent state in the next step, over the tokens up to `end` and
        `num_drafts` drafts behind them; None for a model without recurrent layers."""
        checkpoints = self.ledger.checkpoints
        return checkpoints.move(sequence, end, num_drafts) if checkpoints is not None else None

    def transfer_blocks(self) -> list[int]:
        """Send the load planned since the last call; its batch ids (none or one) go into the next Forward."""
        return self.loads.send()

    def finish_loads(self, batch_ids: Iterable[int], failed: Iterable[int]) -> DeviceBlocks:
        """The forward that waited for these loads has returned. Returns the device blocks whose load failed."""
        return self.loads.finish(batch_ids, failed)

    def publish_computed(self, sequence: Sequence) -> None:
        """Publish the blocks that the last forward completed, and queue their write-back."""
        self._publishing.publish_computed(sequence)

    def take_over(self, sequence: Sequence, places: Mapping[BlockType, Iterable[int]]) -> None:
        """Publish the blocks that another instance has filled; the sequence goes on from there."""
        self._publishing.take_over(sequence, places)

    def begin_canonical(self, sequence: Sequence) -> bool:
        """Prepare a finished sequence to have its decoded blocks computed as a prompt; False when none is worth it."""
        return self._canonical.begin(sequence)

    def forget_prefix(self, sequence: Sequence) -> None:
        """A failed load's part of the prefix was not there after all: its next admission accounts anew."""
        self.ledger.account.forget(sequence)

    def unmount(self, sequence: Sequence) -> None:
        """Release the host blocks that were mounted for the sequence's admission."""
        self.reads.targets.unmount(sequence)

    def disclaim(self, sequence: Sequence) -> None:
        """Nobody waits for the blocks of this sequence any more."""
        self.ledger.prefix.disclaim(sequence)

    def deallocate(self, sequence: Sequence, *, resume: bool = False) -> None:
        """Give back all blocks of a sequence; `resume`: it was preempted and will go on from the blocks kept now."""
        self._publishing.deallocate(sequence, resume=resume)

    def transfer_offload_blocks(self) -> None:
        """Send the write-backs queued since the last call."""
        self.write_back.send()

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference of these KV blocks on the device, beyond the life of their sequence."""
        for block in blocks:
            self.pools[BlockType.KV].device.pin(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Undo `hold`."""
        self.pools[BlockType.KV].device.unpin(blocks)

    # ------------------------------------------------------------------------------------------ the workers

    @property
    def num_workers(self) -> int:
        """Ranks that answer each plan."""
        return self.orders.num_workers

    def new_id(self) -> int:
        """An id that no other plan of this engine has."""
        return self.orders.new_id()

    def send(self, plan: object) -> None:
        """Send a plan to every worker, in order with those of the books."""
        self.orders.send(plan)

    def on_worker(self, answer: object) -> bool:
        """Take one rank's answer to a plan of the books; False when it is none."""
        if isinstance(answer, PrefetchAnswer):
            self.reads.on_answer(answer)
        elif isinstance(answer, ProbeAnswer):
            self.reads.on_probe(answer)
        elif isinstance(answer, TransferAck):
            self.loads.on_ack(answer)
        elif isinstance(answer, OffloadCopied):
            self.write_back.on_copied(answer)
        elif isinstance(answer, OffloadStored):
            self.write_back.on_stored(answer)
        else:
            return False
        return True

    def begin_step(self) -> None:
        """Decide once for the coming step whether loading pays; give back quarantined blocks that are due."""
        self.policy.settle()
        self.reads.targets.release_quarantine()

    def oldest_copy(self) -> tuple[float, list[int]]:
        """Age in seconds of the oldest copy to the host, and the ranks whose answers it lacks."""
        return self.write_back.oldest_copy()

    # --------------------------------------------------------------------------------------------- the whole

    def use_store(self, enabled: bool) -> None:
        """Read from and write to the store from now on, or no more; transfers under way go on.

        While the cache is distrusted nothing of that happens, but it is remembered.
        """
        self._store.wanted = enabled and self.has_host
        self._store.enabled = self._store.wanted and self.policy.trusted
        if self._store.enabled:
            self.write_back.begin_anew()

    def distrust(self) -> None:
        """Restore nothing any more, forget all that could be restored, and write nothing to the store."""
        self.policy.trusted = False
        self.use_store(self._store.wanted)
        for tier in ("device", "host"):
            self.clear(tier)

    def trust(self) -> None:
        """Undo `distrust`."""
        if not self.policy.trusted:
            self.policy.trusted = True
            self.use_store(self._store.wanted)

    def clear(self, tier: str) -> int:
        """Empty the index of `tier` (device | host); blocks in use stay until released. Returns how many blocks."""
        return sum(pools.tiers[tier].clear() for pools in self.pools.values())

    def check(self) -> None:
        """Raise InvariantError unless every pool's books balance."""
        for pools in self.pools.values():
            pools.device.check()
            pools.host.check()

    @property
    def busy(self) -> bool:
        """Some transfer is planned or under way."""
        return self.reads.busy or self.loads.busy or self.write_back.busy

    @property
    def pins_device(self) -> bool:
        """A write-back still has to read device blocks: they come back by themselves."""
        return self.write_back.pins_device

    @property
    def types(self) -> tuple[BlockType, ...]:
        """The model's BlockTypes, the first one first."""
        return self.pools.types

    @property
    def has_host(self) -> bool:
        """There is a host tier."""
        return self.pools.first.host.num_blocks > 0

    @property
    def num_available(self) -> int:
        """Device blocks that every type with a block table could still give."""
        return min(pools.device.num_available for pools in self.pools.tables)

    @property
    def most_tokens(self) -> int:
        """Longest sequence that the device has blocks for."""
        size = self.settings.block_size
        whole = [pools.device.num_blocks * size for pools in self.pools.tables if not pools.rule.span]
        return min(whole, default=sys.maxsize)

    def figures(self) -> BookFigures:
        """Sums since the start."""
        failed_loads, failed_offloads = self.loads.num_failed, self.write_back.num_failed
        return BookFigures(dict(self.ledger.account.tokens), failed_loads, failed_offloads, self.reads.num_timeouts)

    def block_counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """{tier: {type: {free, pinned, evictable, and for the host quarantined}}} for metrics."""
        counts: dict[str, dict[str, dict[str, int]]] = {"device": {}, "host": {}}
        for kind, pools in self.pools.items():
            left_alone = self.reads.targets.left_alone(kind)
            counts["device"][kind.value] = _counts(pools.device)
            counts["host"][kind.value] = _counts(pools.host) | {
                "pinned": pools.host.num_pinned - left_alone,
                "quarantined": left_alone,
            }
        return counts


def _counts(pool: BlockPool) -> dict[str, int]:
    return {"free": pool.num_free, "pinned": pool.num_pinned, "evictable": pool.num_evictable}
