"""The G2H half of the block books: reads of the store begun, under way, and ended well, badly, or not at all.

With blocks of several types the store is first asked which of them it has; that says which boundary can be reached, and
only what the restore rules need there is read. KV blocks alone are read batch by batch until one is missing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ...block import BlockType, common_boundary
from ...plans import HIT, PrefetchAnswer, PrefetchFromStorage, ProbeAnswer, ProbeStorage, ints
from .journal import CacheJournal
from .policy import RestorePolicy
from .prefetch import PrefetchResult
from .sequence import Sequence
from .types import TypePools
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


Column = tuple[BlockType, int]  # type and number of a block of a sequence


@dataclass(eq=False)
class _Probe:
    """What the ranks were asked for, and said, before anything is read: which of `columns` the store has."""

    columns: list[Column]
    answers: dict[int, list[bytes]] = field(default_factory=dict)

    def found(self) -> set[Column]:
        """The blocks that all ranks have found."""
        found = set(self.columns)
        for hits in self.answers.values():
            said = b"".join(hits)
            if len(said) != len(self.columns):
                return set()
            found -= {column for column, hit in zip(self.columns, said, strict=True) if hit != HIT}
        return found


@dataclass(eq=False)
class _Prefetch:
    """One G2H operation: block `columns[c]` of the sequence is column c of the result, read into `targets[c]`; while
    there is a `probe`, no column is chosen yet."""

    prefetch_id: int
    sequence: Sequence
    columns: list[Column]
    result: PrefetchResult
    probe: _Probe | None = None
    targets: list[int] = field(default_factory=list)
    missed: set[tuple[BlockType, bytes]] = field(default_factory=set)
    claims: set[tuple[BlockType, bytes]] = field(default_factory=set)  # blocks for which others wait for this one
    started: float = field(default_factory=_now)
    last_progress: float = field(default_factory=_now)
    given_up: bool = False  # by the policy: computing the rest takes less time
    company: int = 1  # most operations under way at once during its life: they share one thread of each worker


@dataclass(eq=False)
class _Orphan:
    """Targets of a batch that nobody waits for any more, while `ranks` may still be reading into them."""

    type: BlockType
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
        pools: Mapping[BlockType, TypePools],
        new_id: Callable[[], int],
        *,
        limits: ReadLimits,
        policy: RestorePolicy,
        candidates: Callable[[Sequence], int],
        restorable: Callable[[Sequence], int],
        on_found: Callable[[], None],
        journal: CacheJournal | None = None,
    ) -> None:
        self._journal = journal
        self._link = link
        self._pools = pools
        self._new_id = new_id
        self._limits = limits
        self._policy = policy
        self._candidates = candidates
        self._restorable = restorable
        self._on_found = on_found
        self._prefetches: dict[int, _Prefetch] = {}
        self._prefetch_of: dict[Sequence, _Prefetch] = {}
        self._fetching: dict[tuple[BlockType, bytes], _Prefetch] = {}
        self._awaited: dict[Sequence, _Prefetch] = {}
        self._orphans: dict[tuple[int, int], _Orphan] = {}
        self._first = next(iter(pools))
        self._prefix_only = len(pools) == 1 and not pools[self._first].rule.span  # all blocks up to the first missing
        self._num_targets = dict.fromkeys(pools, 0)
        self._num_mounted = dict.fromkeys(pools, 0)
        self.quarantine: deque[tuple[float, BlockType, int]] = deque()  # (release time, type, host block)
        self.num_timeouts = 0

    @property
    def busy(self) -> bool:
        return bool(self._prefetches)

    def left_alone(self, block_type: BlockType) -> int:
        """Host blocks of one type that a read which failed, or was given up, may still write to."""
        orphans = sum(len(orphan.targets) for orphan in self._orphans.values() if orphan.type is block_type)
        return orphans + sum(kind is block_type for _, kind, _ in self.quarantine)

    @property
    def num_left_alone(self) -> int:
        """As `left_alone`, of all types."""
        return sum(self.left_alone(block_type) for block_type in self._pools)

    def concerns(self, sequence: Sequence) -> bool:
        """Something is read for this sequence, or for another that it waits for."""
        return sequence in self._prefetch_of or sequence in self._awaited

    # ---------------------------------------------------------------------------------------------- begin

    def begin(self, sequence: Sequence, known_missing: Collection[tuple[BlockType, bytes]] = ()) -> bool:
        """Begin to read what device and host lack of the prompt; False when there is nothing to wait for.

        When another request reads a missing block already, this one waits for that read and then looks again, knowing
        what that read did not find.
        """
        first = self._first
        holes: list[int] = []
        for index in range(self._candidates(sequence)):
            block_hash = sequence.hash_of(index)
            if self._is_here((first, index), sequence):
                continue
            if (first, block_hash) in known_missing:
                break
            running = self._fetching.get((first, block_hash))
            if running is not None:
                self._awaited[sequence] = running
                return True
            holes.append(index)
        self._mount(sequence, self._candidates(sequence) if self._prefix_only else self._restorable(sequence))
        columns = [(first, index) for index in holes] if self._prefix_only else self._unseen(sequence, known_missing)
        if not columns:
            return False
        if self._prefix_only and not self._policy.reading_pays(len(holes)):
            self._policy.count("store", "recomputed")
            return False
        operation = self._start(sequence, columns if self._prefix_only else [])
        if self._prefix_only:
            self._issue(operation)
        else:
            self._ask(operation, columns)
        return True

    def _is_here(self, column: Column, sequence: Sequence) -> bool:
        pools, block_hash = self._pools[column[0]], sequence.hash_of(column[1])
        return pools.device.find(block_hash) is not None or pools.host.find(block_hash) is not None

    def _unseen(self, sequence: Sequence, known_missing: Collection[tuple[BlockType, bytes]]) -> list[Column]:
        """Blocks of all types that could move the boundary and are neither on the device nor on the host."""
        here, end = self._restorable(sequence), self._candidates(sequence)
        columns: list[Column] = []
        if here >= end:
            return columns
        for kind, pools in self._pools.items():
            start = pools.rule.needed((here + 1) * pools.rule.block_size).start
            indices = range(start, end)
            columns += [(kind, index) for index in indices if not self._is_here((kind, index), sequence)]
        # What another request has asked for in vain is worth a question only beside something new.
        return columns if any((kind, sequence.hash_of(index)) not in known_missing for kind, index in columns) else []

    def _start(self, sequence: Sequence, columns: list[Column]) -> _Prefetch:
        operation = _Prefetch(self._new_id(), sequence, columns, self._new_result(len(columns)))
        self._prefetches[operation.prefetch_id] = operation
        self._prefetch_of[sequence] = operation
        for under_way in self._prefetches.values():
            under_way.company = max(under_way.company, len(self._prefetches))
        self._claim(operation, columns)
        return operation

    def _claim(self, operation: _Prefetch, columns: Iterable[Column]) -> None:
        """Others who need these blocks wait for this operation."""
        for kind, index in columns:
            claim = kind, operation.sequence.hash_of(index)
            if self._fetching.setdefault(claim, operation) is operation:
                operation.claims.add(claim)

    def _new_result(self, num_columns: int, started: float | None = None) -> PrefetchResult:
        limits = self._limits
        return PrefetchResult(self._link.num_workers, num_columns, limits.batch_size, limits.timeout_ms, started)

    def _ask(self, operation: _Prefetch, columns: list[Column]) -> None:
        """Ask all ranks which of these blocks the store has."""
        operation.probe = _Probe(columns)
        self._claim(operation, columns)
        kinds = list(dict.fromkeys(kind for kind, _ in columns))
        hashes = [b"".join(operation.sequence.hash_of(index) for kind, index in columns if kind is of) for of in kinds]
        self._link.broadcast(ProbeStorage(operation.prefetch_id, [kind.value for kind in kinds], hashes))

    def on_probe(self, answer: ProbeAnswer) -> None:
        """One rank's word on what the store has; with the last one the boundary is chosen and its blocks are read."""
        operation = self._prefetches.get(answer.prefetch_id)
        if operation is None or operation.probe is None or answer.rank in operation.probe.answers:
            log.debug("ignored a probe's answer of rank %d for %d", answer.rank, answer.prefetch_id)
            return
        operation.probe.answers[answer.rank] = answer.hits
        operation.last_progress = _now()
        if len(operation.probe.answers) == self._link.num_workers:
            self._choose(operation, operation.probe)
            self._issue(operation)

    def _choose(self, operation: _Prefetch, probe: _Probe) -> None:
        """The largest boundary that device, host and store reach together; what it needs of the store is to be read."""
        sequence, found = operation.sequence, probe.found()
        operation.probe = None
        rules = [pools.rule for pools in self._pools.values()]
        size = rules[0].block_size

        def has(kind: BlockType, index: int) -> bool:
            return (kind, index) in found or self._is_here((kind, index), sequence)

        boundary = common_boundary(rules, has, self._candidates(sequence) * size) // size
        needed = [(rule.block_type, index) for rule in rules for index in rule.needed(boundary * size)]
        operation.columns = [column for column in needed if not self._is_here(column, sequence)]
        gain = boundary - self._restorable(sequence)
        if gain <= 0:
            operation.columns, boundary = [], 0
        elif not self._pays(gain, self._weight(operation.columns)):
            operation.columns, boundary = [], 0
            self._policy.count("store", "recomputed")
        operation.missed |= {(kind, sequence.hash_of(index)) for kind, index in set(probe.columns) - found}
        for kind, index in probe.columns:
            self._note(kind, sequence, index, found=(kind, index) in found)
        operation.result = self._new_result(len(operation.columns), operation.started)
        self._mount(sequence, boundary)

    def _weight(self, columns: Iterable[Column]) -> float:
        """Bytes of these blocks, in blocks of the first type."""
        return sum(self._pools[kind].weight for kind, _ in columns)

    def _pays(self, gain: int, weight: float) -> bool:
        """Reading blocks of this weight is not slower than computing `gain` blocks."""
        rate = self._policy.read.value
        return self._policy.reading_pays(gain, None if rate is None else rate * weight / gain)

    def _share_left(self, block_type: BlockType) -> int:
        """Host blocks of one type that reads and mounts may still take; what reads that were given up hold counts as
        theirs."""
        taken = self._num_targets[block_type] + self._num_mounted[block_type] + self.left_alone(block_type)
        return int(self._pools[block_type].host.num_blocks * PREFETCH_SHARE) - taken

    def _mount(self, sequence: Sequence, boundary: int) -> None:
        """Pin the host blocks that the device lacks of what block `boundary` needs, so that they are still there when
        the sequence is scheduled."""
        for kind, pools in self._pools.items():
            held = sequence.held[kind]
            for index in pools.rule.needed(boundary * pools.rule.block_size):
                block_hash = sequence.hash_of(index)
                block = pools.host.find(block_hash)
                if block is None or index in held.mounted or pools.device.find(block_hash) is not None:
                    continue
                if self._share_left(kind) <= 0:
                    break  # best effort: it may be evicted before this sequence runs
                pools.host.pin(block)
                held.mounted[index] = block
                self._num_mounted[kind] += 1

    def unmount(self, sequence: Sequence, boundary: int = 0) -> None:
        """Let go of the mounted blocks that block `boundary` does not need."""
        for kind, pools in self._pools.items():
            held, needed = sequence.held[kind], pools.rule.needed(boundary * pools.rule.block_size)
            indices = [index for index in held.mounted if index not in needed]
            self._num_mounted[kind] -= len(indices)
            pools.host.unpin(held.mounted.pop(index) for index in indices)

    def _issue(self, operation: _Prefetch) -> None:
        """Send batches until enough are in flight. Targets are reserved batch by batch, so that a prompt the store
        has never seen evicts no more than its first batches' worth of host blocks."""
        result, sequence = operation.result, operation.sequence
        if operation.probe is not None:
            return
        self._give_up_what_does_not_pay(operation)
        while result.num_in_flight < PREFETCH_DEPTH:
            left = operation.columns[len(operation.targets) :]
            kind = left[0][0] if left else self._first
            of_kind = sum(of is kind for of, _ in left)  # a batch is of one type
            batch = result.next_batch(min(self._share_left(kind), self._pools[kind].host.num_available, of_kind))
            if batch is None:
                return
            offset, length = batch
            targets = self._pools[kind].host.allocate(length)
            assert targets is not None  # no more than are available were asked for
            operation.targets.extend(targets)
            self._num_targets[kind] += length
            hashes = b"".join(sequence.hash_of(index) for _, index in operation.columns[offset : offset + length])
            self._link.broadcast(PrefetchFromStorage(operation.prefetch_id, offset, kind.value, ints(targets), hashes))

    def _give_up_what_does_not_pay(self, operation: _Prefetch) -> None:
        """Issue no more once computing the blocks not asked for yet takes less time than reading them, at the pace so
        far; what is in flight is awaited."""
        result = operation.result
        asked = len(operation.targets)
        left, answered = result.num_blocks - asked, asked - result.num_blocks_in_flight
        if not asked or not left or operation.given_up or not self._prefix_only:
            return  # a part of what several types need together is worth nothing
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
        for column, target in enumerate(orphan.targets):
            if column in orphan.unknown:
                self._leave_alone(orphan.type, target)
            else:
                self._pools[orphan.type].host.unpin([target])

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
            operation.probe = None  # nothing is read into yet
        self._abandon_late(operation)
        self._issue(operation)  # also where the time limit is noticed
        if operation.probe is not None or not operation.result.completed():
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
        operation.probe = None
        for offset, length, ranks in operation.result.abandon():
            targets, kind = operation.targets[offset : offset + length], operation.columns[offset][0]
            unknown = {column for column in range(length) if operation.result.is_unknown(offset + column)}
            self._orphans[operation.prefetch_id, offset] = _Orphan(kind, ranks, targets, unknown)

    def _finish(self, operation: _Prefetch) -> None:
        """Publish the hits to the host prefix, release the misses, keep mounted what is contiguous."""
        sequence, result = operation.sequence, operation.result
        del self._prefetches[operation.prefetch_id]
        del self._prefetch_of[sequence]
        for claim in operation.claims:
            del self._fetching[claim]
        self.num_timeouts += result.timed_out
        num_hits, weight = 0, 0.0
        for column, ((kind, index), target) in enumerate(zip(operation.columns, operation.targets, strict=False)):
            pools, held = self._pools[kind], sequence.held[kind]
            self._num_targets[kind] -= 1
            if result.is_hit(column):
                self._note(kind, sequence, index, found=True)
                pools.host.publish(target, sequence.hash_of(index), pools.parent(sequence.parent_of(index)))
                held.mounted[index] = target
                held.from_store.add(index)
                self._num_mounted[kind] += 1
                num_hits += 1
                weight += pools.weight
                continue
            operation.missed.add((kind, sequence.hash_of(index)))
            if result.is_abandoned(column):
                continue  # an orphan's
            if result.is_unknown(column):
                self._leave_alone(kind, target)
            else:
                self._note(kind, sequence, index, found=False)
                pools.host.unpin([target])
        if num_hits:
            self._on_found()
        self._judge(operation, num_hits, weight)
        self.unmount(sequence, 0 if sequence.aborted else self._restorable(sequence))

    def _note(self, block_type: BlockType, sequence: Sequence, index: int, *, found: bool) -> None:
        if self._journal is None:
            return
        if found:
            self._journal.learn(sequence, index)
            self._journal.in_store(block_type, [sequence.hash_of(index)])
        else:
            self._journal.not_in_store(block_type, [sequence.hash_of(index)])

    def _judge(self, operation: _Prefetch, num_hits: int, weight: float) -> None:
        # A few blocks, or none, take as long as a batch of them; what was not waited for took at least until now.
        end = _now() if operation.result.timed_out else operation.last_progress
        seconds = (end - operation.started) / operation.company
        self._policy.read.add(max(weight, self._limits.batch_size), seconds)
        if num_hits:
            self._policy.count("store", "partly" if operation.given_up else "restored")
        elif operation.given_up:
            self._policy.count("store", "recomputed")

    # ----------------------------------------------------------------------------------------- quarantine

    def _leave_alone(self, block_type: BlockType, target: int) -> None:
        self.quarantine.append((_now() + QUARANTINE_S, block_type, target))

    def release_quarantine(self) -> None:
        """Give back the targets of failed reads that have been left alone for long enough."""
        while self.quarantine and self.quarantine[0][0] <= _now():
            _, kind, target = self.quarantine.popleft()
            self._pools[kind].host.unpin([target])
