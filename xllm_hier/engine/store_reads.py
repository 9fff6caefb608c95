"""The G2H half of the block books: reads of the store begun, under way, and ended well, badly, or not at all."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from ..block import BlockType
from ..plans import PrefetchAnswer, PrefetchFromStorage, ints
from .block_pool import BlockPool
from .prefetch import PrefetchResult
from .restore_policy import RestorePolicy
from .sequence import Sequence
from .write_back import WorkerLink

log = logging.getLogger("xllm.engine")

PREFETCH_SHARE = 0.5  # of the host pool may be read targets at once: a slow store must not starve write-backs
PREFETCH_DEPTH = 2  # batches in flight per request: one is read while the answer to the other travels
QUARANTINE_S = 180.0  # three times the longest store call seen; a client that stalls longer meets the trailer check


@dataclass(frozen=True)
class ReadLimits:
    """The settings `prefetch_batch_size`, `prefetch_timeout` and `prefetch_deadline_ms` (0 = none), and for how many
    seconds without an answer a read is waited for."""

    batch_size: int = 8
    timeout_ms: int = 30000
    deadline_ms: int = 0
    silence_s: float = 300.0


def _now() -> float:
    return time.monotonic()


@dataclass(eq=False)
class _Prefetch:
    """One G2H operation: block `indices[c]` of the sequence is column c of the result, read into `targets[c]`."""

    prefetch_id: int
    sequence: Sequence
    indices: list[int]
    result: PrefetchResult
    targets: list[int] = field(default_factory=list)
    missed: set[bytes] = field(default_factory=set)
    started: float = field(default_factory=_now)
    last_progress: float = field(default_factory=_now)
    given_up: bool = False  # by the policy: computing the rest takes less time
    company: int = 1  # most operations under way at once during its life: they share one thread of each worker


@dataclass(eq=False)
class _Orphan:
    """Targets of a batch that nobody waits for any more, while `ranks` may still be reading into them."""

    ranks: set[int]
    targets: list[int]
    unknown: set[int] = field(default_factory=set)


class StoreReads:
    """Reads of one instance; host blocks that a read may still write to are given to nobody.

    `restorable` says how many blocks of a sequence device and host can provide, `candidates` how many it could use;
    `on_found` is called when the store gave something.
    """

    def __init__(
        self,
        link: WorkerLink,
        device: BlockPool,
        host: BlockPool,
        new_id: Callable[[], int],
        *,
        limits: ReadLimits,
        policy: RestorePolicy,
        candidates: Callable[[Sequence], int],
        restorable: Callable[[Sequence], int],
        on_found: Callable[[], None],
    ) -> None:
        self._link = link
        self._device = device
        self._host = host
        self._new_id = new_id
        self._limits = limits
        self._policy = policy
        self._candidates = candidates
        self._restorable = restorable
        self._on_found = on_found
        self._prefetches: dict[int, _Prefetch] = {}
        self._prefetch_of: dict[Sequence, _Prefetch] = {}
        self._fetching: dict[bytes, _Prefetch] = {}
        self._awaited: dict[Sequence, _Prefetch] = {}
        self._orphans: dict[tuple[int, int], _Orphan] = {}
        self._num_targets = 0
        self._num_mounted = 0
        self.quarantine: deque[tuple[float, int]] = deque()  # (release time, host block)
        self.num_timeouts = 0

    @property
    def busy(self) -> bool:
        return bool(self._prefetches)

    @property
    def num_left_alone(self) -> int:
        """Host blocks that a read which failed, or was given up, may still write to."""
        return len(self.quarantine) + sum(len(orphan.targets) for orphan in self._orphans.values())

    def concerns(self, sequence: Sequence) -> bool:
        """Something is read for this sequence, or for another that it waits for."""
        return sequence in self._prefetch_of or sequence in self._awaited

    # ---------------------------------------------------------------------------------------------- begin

    def begin(self, sequence: Sequence, known_missing: Collection[bytes] = ()) -> bool:
        """Begin to read what device and host lack of the prompt; False when there is nothing to wait for.

        When another request reads a missing block already, this one waits for that read and then looks again, knowing
        what that read did not find.
        """
        holes = []
        for index in range(self._candidates(sequence)):
            block_hash = sequence.hash_of(index)
            if self._device.find(block_hash) is not None or self._host.find(block_hash) is not None:
                continue
            if block_hash in known_missing:
                break
            running = self._fetching.get(block_hash)
            if running is not None:
                self._awaited[sequence] = running
                return True
            holes.append(index)
        self._mount(sequence)
        if not holes:
            return False
        if not self._policy.reading_pays(len(holes)):
            self._policy.count("store", "recomputed")
            return False
        limits = self._limits
        result = PrefetchResult(self._link.num_workers, len(holes), limits.batch_size, limits.timeout_ms)
        operation = _Prefetch(self._new_id(), sequence, holes, result)
        self._prefetches[operation.prefetch_id] = operation
        self._prefetch_of[sequence] = operation
        for under_way in self._prefetches.values():
            under_way.company = max(under_way.company, len(self._prefetches))
        for index in holes:
            self._fetching.setdefault(sequence.hash_of(index), operation)
        self._issue(operation)
        return True

    def _share_left(self) -> int:
        """Host blocks that reads and mounts may still take; what reads that were given up hold counts as theirs."""
        taken = self._num_targets + self._num_mounted + self.num_left_alone
        return int(self._host.num_blocks * PREFETCH_SHARE) - taken

    def _mount(self, sequence: Sequence) -> None:
        """Pin the host blocks that the device lacks, so that they are still there when the sequence is scheduled."""
        for index in range(self._candidates(sequence)):
            block_hash = sequence.hash_of(index)
            block = self._host.find(block_hash)
            if block is None or index in sequence.mounted or self._device.find(block_hash) is not None:
                continue
            if self._share_left() <= 0:
                return  # best effort: it may be evicted before this sequence runs
            self._host.pin(block)
            sequence.mounted[index] = block
            self._num_mounted += 1

    def unmount(self, sequence: Sequence, first: int = 0) -> None:
        """Let go of the mounted blocks from block `first` on."""
        indices = [index for index in sequence.mounted if index >= first]
        self._num_mounted -= len(indices)
        self._host.unpin(sequence.mounted.pop(index) for index in indices)

    def _issue(self, operation: _Prefetch) -> None:
        """Send batches until enough are in flight. Targets are reserved batch by batch, so that a prompt the store
        has never seen evicts no more than its first batches' worth of host blocks."""
        result, sequence = operation.result, operation.sequence
        self._give_up_what_does_not_pay(operation)
        while result.num_in_flight < PREFETCH_DEPTH:
            batch = result.next_batch(min(self._share_left(), self._host.num_available))
            if batch is None:
                return
            offset, length = batch
            targets = self._host.allocate(length)
            assert targets is not None  # no more than are available were asked for
            operation.targets.extend(targets)
            self._num_targets += length
            columns = operation.indices[offset : offset + length]
            hashes = b"".join(sequence.hash_of(index) for index in columns)
            self._link.broadcast(
                PrefetchFromStorage(operation.prefetch_id, offset, BlockType.KV.value, ints(targets), hashes)
            )

    def _give_up_what_does_not_pay(self, operation: _Prefetch) -> None:
        """Issue no more once computing the blocks not asked for yet takes less time than reading them, at the pace so
        far; what is in flight is awaited."""
        result = operation.result
        asked = len(operation.targets)
        left, answered = result.num_blocks - asked, asked - result.num_blocks_in_flight
        if not asked or not left or operation.given_up:
            return
        # Before the first answer the pace is at best this one.
        pace = (_now() - operation.started) / (answered or asked) / operation.company
        if not self._policy.reading_pays(left, pace):
            operation.given_up = result.request_stop()

    # ------------------------------------------------------------------------------------------------ end

    def on_answer(self, answer: PrefetchAnswer) -> None:
        """Take a worker's bitmap; an answer nobody waits for is logged and ignored."""
        operation = self._prefetches.get(answer.prefetch_id)
        if operation is not None and operation.result.record(answer.rank, answer.offset, answer.hits):
            operation.last_progress = _now()
            self._issue(operation)
            return
        orphan = self._orphans.get((answer.prefetch_id, answer.offset))
        if orphan is not None and answer.rank in orphan.ranks:
            self._on_late_answer(orphan, answer)
            return
        log.warning("ignored a prefetch answer of rank %d for %d at %d", answer.rank, answer.prefetch_id, answer.offset)

    def _on_late_answer(self, orphan: _Orphan, answer: PrefetchAnswer) -> None:
        """The read has ended after all; with the last rank's answer its targets may be used again."""
        orphan.ranks.discard(answer.rank)
        orphan.unknown |= PrefetchResult.unknown_columns(answer.hits, len(orphan.targets))
        if orphan.ranks:
            return
        del self._orphans[answer.prefetch_id, answer.offset]
        self._leave_alone(target for column, target in enumerate(orphan.targets) if column in orphan.unknown)
        self._host.unpin(target for column, target in enumerate(orphan.targets) if column not in orphan.unknown)

    def update(self, sequence: Sequence) -> bool:
        """True when nothing of the store is pending for this sequence: its hits are mounted, it may be scheduled."""
        awaited = self._awaited.get(sequence)
        if awaited is not None:
            enough = sequence.aborted or self._too_late(sequence)
            if awaited.prefetch_id in self._prefetches and not enough:
                return False
            self._forget_awaited(sequence)
            return enough or not self.begin(sequence, awaited.missed)
        operation = self._prefetch_of.get(sequence)
        if operation is None:
            return True
        if sequence.aborted:
            operation.result.request_stop()
        self._abandon_late(operation)
        self._issue(operation)  # also where the time limit is noticed
        if not operation.result.completed():
            return False
        self._finish(operation)
        return True

    def _forget_awaited(self, sequence: Sequence) -> None:
        del self._awaited[sequence]

    def _too_late(self, sequence: Sequence) -> bool:
        """The deadline of this request's reads, its own and those of others that it waits for, has passed."""
        return bool(self._limits.deadline_ms) and _now() - sequence.arrived_at > self._limits.deadline_ms / 1000

    def _abandon_late(self, operation: _Prefetch) -> None:
        """Wait no longer for what is in flight, when a limit says so; its targets are nobody's until it has ended."""
        now, limits = _now(), self._limits
        too_long = self._too_late(operation.sequence)
        if not too_long and now - operation.last_progress <= limits.silence_s:
            return
        if not too_long:
            log.error("a store read got no answer within %g s and is given up", limits.silence_s)
        operation.result.timed_out = True
        for offset, length, ranks in operation.result.abandon():
            targets = operation.targets[offset : offset + length]
            unknown = {column for column in range(length) if operation.result.is_unknown(offset + column)}
            self._orphans[operation.prefetch_id, offset] = _Orphan(ranks, targets, unknown)

    def _finish(self, operation: _Prefetch) -> None:
        """Publish the hits to the host prefix, release the misses, keep mounted what is contiguous."""
        sequence, result = operation.sequence, operation.result
        del self._prefetches[operation.prefetch_id]
        del self._prefetch_of[sequence]
        for index in operation.indices:
            if self._fetching.get(sequence.hash_of(index)) is operation:
                del self._fetching[sequence.hash_of(index)]
        self.num_timeouts += result.timed_out
        self._num_targets -= len(operation.targets)
        num_hits = 0
        for column, (index, target) in enumerate(zip(operation.indices, operation.targets, strict=False)):
            if result.is_hit(column):
                self._host.publish(target, sequence.hash_of(index), sequence.parent_of(index))
                sequence.mounted[index] = target
                sequence.from_store.add(index)
                num_hits += 1
                continue
            operation.missed.add(sequence.hash_of(index))
            if result.is_abandoned(column):
                continue  # an orphan's
            if result.is_unknown(column):
                self._leave_alone([target])
            else:
                self._host.unpin([target])
        self._num_mounted += num_hits
        if num_hits:
            self._on_found()
        self._judge(operation, num_hits)
        self.unmount(sequence, 0 if sequence.aborted else self._restorable(sequence))

    def _judge(self, operation: _Prefetch, num_hits: int) -> None:
        # A few blocks, or none, take as long as a batch of them; what was not waited for took at least until now.
        end = _now() if operation.result.timed_out else operation.last_progress
        seconds = (end - operation.started) / operation.company
        self._policy.read.add(max(num_hits, self._limits.batch_size), seconds)
        if num_hits:
            self._policy.count("store", "partly" if operation.given_up else "restored")
        elif operation.given_up:
            self._policy.count("store", "recomputed")

    # ----------------------------------------------------------------------------------------- quarantine

    def _leave_alone(self, targets: Iterable[int]) -> None:
        release = _now() + QUARANTINE_S
        self.quarantine.extend((release, target) for target in targets)

    def release_quarantine(self) -> None:
        """Give back the targets of failed reads that have been left alone for long enough."""
        while self.quarantine and self.quarantine[0][0] <= _now():
            self._host.unpin([self.quarantine.popleft()[1]])
