"""The G2H half of the block books: reads of the store begun, under way, and ended well, badly, or not at all.

KV blocks alone are read batch by batch until one is missing. With blocks of several types the store is first asked
which of them it has (`ProbeStorage`); the answers say which boundary can be reached, and only the blocks that the
restore rules need there are read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ...block import BlockType
from ...clock import now
from ...ints import ints
from ...plans import HIT, PrefetchAnswer, PrefetchFromStorage, ProbeAnswer, ProbeStorage
from .ledger import Ledger
from .moves import Orders, RankAnswers, and_over_ranks
from .prefetch import PrefetchResult
from .prefix import Column
from .read_targets import ReadTargets
from .sequence import Sequence
from .write_back import StoreUse

log = logging.getLogger("xllm.engine")

PREFETCH_DEPTH = 2  # batches in flight per request: one is read while the answer to the other travels


@dataclass(eq=False)
class _Probe:
    """A question to the ranks before anything is read: which of `columns` does the store have?"""

    columns: list[Column]
    answers: RankAnswers[bytes]

    def found(self) -> set[Column]:
        """The blocks that all ranks have found."""
        said = and_over_ranks(self.answers.by_rank.values(), len(self.columns))
        return {column for column, hit in zip(self.columns, said, strict=True) if hit == HIT}


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
    started: float = field(default_factory=now)
    last_progress: float = field(default_factory=now)
    given_up: bool = False  # by the policy: computing the rest takes less time
    company: int = 1  # most operations under way at once during its life: they share one thread of each worker


class StoreReads:
    """Reads of one instance, at most one under way for each sequence."""

    def __init__(self, orders: Orders, ledger: Ledger, store: StoreUse) -> None:
        self._orders = orders
        self._pools, self._prefix = ledger.pools, ledger.prefix
        self._limits, self._policy, self._journal = ledger.settings.limits, ledger.policy, ledger.journal
        self._store = store
        self.targets = ReadTargets(ledger.pools)
        self._prefetches: dict[int, _Prefetch] = {}
        self._prefetch_of: dict[Sequence, _Prefetch] = {}
        self._fetching: dict[tuple[BlockType, bytes], _Prefetch] = {}
        self._awaited: dict[Sequence, _Prefetch] = {}
        self.num_timeouts = 0

    @property
    def busy(self) -> bool:
        """Some read is under way that a sequence waits for."""
        return bool(self._prefetches)

    def concerns(self, sequence: Sequence) -> bool:
        """Something is read for this sequence, or for another that it waits for."""
        return sequence in self._prefetch_of or sequence in self._awaited

    # ---------------------------------------------------------------------------------------------- begin

    def begin(self, sequence: Sequence, known_missing: Collection[tuple[BlockType, bytes]] = ()) -> bool:
        """Begin to read the blocks of the prompt that device and host lack; False when there is nothing to wait for.

        When another request reads a missing block already, this one waits for that read and then looks again, knowing
        the blocks that read did not find.
        """
        kind = self._pools.first.type
        holes: list[Column] = []
        for index in range(self._prefix.num_candidates(sequence)):
            content = kind, sequence.hash_of(index)
            if self._prefix.is_here(sequence, (kind, index)):
                continue
            if content in known_missing:
                break
            if content in self._fetching:
                self._awaited[sequence] = self._fetching[content]
                return True
            holes.append((kind, index))
        if self._pools.prefix_only:
            return self._read_holes(sequence, holes)
        return self._ask_first(sequence, known_missing)

    def _read_holes(self, sequence: Sequence, holes: list[Column]) -> bool:
        """KV blocks alone: read batch by batch until one is missing."""
        self.targets.mount(sequence, self._prefix.num_candidates(sequence))
        if not holes:
            return False
        if not self._policy.reading_pays(len(holes)):
            self._policy.count("store", "recomputed")
            return False
        self._issue(self._start(sequence, holes))
        return True

    def _start(self, sequence: Sequence, columns: list[Column]) -> _Prefetch:
        operation = _Prefetch(self._orders.new_id(), sequence, columns, self._new_result(len(columns)))
        self._prefetches[operation.prefetch_id] = operation
        self._prefetch_of[sequence] = operation
        for under_way in self._prefetches.values():
            under_way.company = max(under_way.company, len(self._prefetches))
        self._claim(operation, columns)
        return operation

    def _claim(self, operation: _Prefetch, columns: Iterable[Column]) -> None:
        """Make other sequences that need these blocks wait for this operation."""
        for kind, index in columns:
            claim = kind, operation.sequence.hash_of(index)
            if self._fetching.setdefault(claim, operation) is operation:
                operation.claims.add(claim)

    def _new_result(self, num_columns: int, started: float | None = None) -> PrefetchResult:
        limits = self._limits
        return PrefetchResult(self._orders.num_workers, num_columns, limits.batch_size, limits.timeout_ms, started)

    # ------------------------------------------------------------------------------- several types: probe

    def _ask_first(self, sequence: Sequence, known_missing: Collection[tuple[BlockType, bytes]]) -> bool:
        """Ask all ranks which of the missing blocks the store has, before anything is read."""
        here = self._prefix.hit(sequence).boundary
        self.targets.mount(sequence, here)
        columns = self._unseen(sequence, here, known_missing)
        if not columns:
            return False
        operation = self._start(sequence, [])
        operation.probe = _Probe(columns, RankAnswers(self._orders.num_workers))
        self._claim(operation, columns)
        kinds = list(dict.fromkeys(kind for kind, _ in columns))
        hashes = [b"".join(sequence.hash_of(index) for kind, index in columns if kind is of) for of in kinds]
        self._orders.send(ProbeStorage(operation.prefetch_id, [kind.value for kind in kinds], hashes))
        return True

    def _unseen(
        self, sequence: Sequence, here: int, known_missing: Collection[tuple[BlockType, bytes]]
    ) -> list[Column]:
        """Blocks of all types that could move the boundary beyond block `here` and that neither device nor host has."""
        end = self._prefix.num_candidates(sequence)
        columns: list[Column] = []
        if here >= end:
            return columns
        for kind, pools in self._pools.items():
            start = pools.rule.needed((here + 1) * pools.rule.block_size).start
            wanted = [(kind, index) for index in range(start, end)]
            columns += [column for column in wanted if not self._prefix.is_here(sequence, column)]
        # Blocks that another request has asked for in vain are worth a question only beside something new.
        return columns if any((kind, sequence.hash_of(index)) not in known_missing for kind, index in columns) else []

    def on_probe(self, answer: ProbeAnswer) -> None:
        """Take one rank's bitmaps; with the last rank's the boundary is chosen and its blocks are read."""
        operation = self._prefetches.get(answer.prefetch_id)
        probe = operation.probe if operation is not None else None
        if operation is None or probe is None or not probe.answers.add(answer.rank, b"".join(answer.hits)):
            log.debug("ignored a probe's answer of rank %d for %d", answer.rank, answer.prefetch_id)
            return
        operation.last_progress = now()
        if probe.answers.complete:
            self._choose(operation, probe)
            self._issue(operation)

    def _choose(self, operation: _Prefetch, probe: _Probe) -> None:
        """Find the largest boundary that device, host and store reach together, and read the blocks that it needs of
        the store."""
        sequence, found, prefix = operation.sequence, probe.found(), self._prefix
        operation.probe = None
        boundary = prefix.boundary_with(sequence, found)
        needed = [
            (rule.block_type, index)
            for rule in self._pools.rules
            for index in rule.needed(boundary * self._pools.block_size)
        ]
        operation.columns = [column for column in needed if not prefix.is_here(sequence, column)]
        gain = boundary - prefix.hit(sequence).boundary
        if gain <= 0:
            operation.columns, boundary = [], 0
        elif not self._pays(gain, self._pools.weight(kind for kind, _ in operation.columns)):
            operation.columns, boundary = [], 0
            self._policy.count("store", "recomputed")
        operation.missed |= {(kind, sequence.hash_of(index)) for kind, index in set(probe.columns) - found}
        for kind, index in probe.columns:
            self._note(kind, sequence, index, found=(kind, index) in found)
        operation.result = self._new_result(len(operation.columns), operation.started)
        self.targets.mount(sequence, boundary)

    def _pays(self, gain: int, weight: float) -> bool:
        """Reading blocks of this weight is not slower than computing `gain` blocks."""
        rate = self._policy.read.value
        return self._policy.reading_pays(gain, None if rate is None else rate * weight / gain)

    # ---------------------------------------------------------------------------------------------- batches

    def _issue(self, operation: _Prefetch) -> None:
        """Send batches until enough are in flight. Targets are reserved batch by batch, so that a prompt the store
        has never seen evicts no more than its first batches' worth of host blocks."""
        result, sequence = operation.result, operation.sequence
        if operation.probe is not None:
            return
        self._give_up_slow(operation)
        while result.num_in_flight < PREFETCH_DEPTH:
            left = operation.columns[len(operation.targets) :]
            kind = left[0][0] if left else self._pools.first.type
            of_kind = sum(of is kind for of, _ in left)  # a batch is of one type
            batch = result.next_batch(min(self.targets.room(kind), of_kind))
            if batch is None:
                return
            offset, length = batch
            targets = self.targets.reserve(kind, length)
            operation.targets.extend(targets)
            hashes = b"".join(sequence.hash_of(index) for _, index in operation.columns[offset : offset + length])
            self._orders.send(PrefetchFromStorage(operation.prefetch_id, offset, kind.value, ints(targets), hashes))

    def _give_up_slow(self, operation: _Prefetch) -> None:
        """Issue no more once computing the blocks not asked for yet takes less time than reading them, at the pace so
        far; batches in flight are awaited."""
        result = operation.result
        asked = len(operation.targets)
        left, answered = result.num_blocks - asked, asked - result.num_blocks_in_flight
        if not asked or not left or operation.given_up or not self._pools.prefix_only:
            return  # a part of the blocks that several types need together is worth nothing
        # Before the first answer the pace is at best this one.
        pace = (now() - operation.started) / (answered or asked) / operation.company
        if not self._policy.reading_pays(left, pace):
            operation.given_up = result.request_stop()

    def on_answer(self, answer: PrefetchAnswer) -> None:
        """Take a worker's bitmap; an answer that is not awaited is logged and ignored."""
        operation = self._prefetches.get(answer.prefetch_id)
        if operation is not None and operation.result.record(answer.rank, answer.offset, answer.hits):
            operation.last_progress = now()
            self._issue(operation)
        elif not self.targets.on_late_answer(answer):
            place = answer.rank, answer.prefetch_id, answer.offset
            log.warning("ignored a prefetch answer of rank %d for %d at %d", *place)

    # ------------------------------------------------------------------------------------------------ end

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
        return bool(self._limits.deadline_ms) and now() - sequence.arrived_at > self._limits.deadline_ms / 1000

    def _abandon_late(self, operation: _Prefetch) -> None:
        """Wait no longer for batches in flight, when a limit says so; each stays an orphan until it has ended."""
        limits = self._limits
        too_long = self._too_late(operation.sequence)
        if not too_long and now() - operation.last_progress <= limits.silence_s:
            return
        if not too_long:
            log.error("a store read got no answer within %g s and is given up", limits.silence_s)
        operation.result.timed_out = True
        operation.probe = None
        for batch in operation.result.abandon():
            kind, targets = operation.columns[batch.offset][0], operation.targets[batch.offset :][: batch.length]
            self.targets.orphan(operation.prefetch_id, kind, batch, targets)

    def _finish(self, operation: _Prefetch) -> None:
        """Publish the hits to the host prefix, release the misses, keep the contiguous ones mounted."""
        sequence, result = operation.sequence, operation.result
        del self._prefetches[operation.prefetch_id]
        del self._prefetch_of[sequence]
        for claim in operation.claims:
            del self._fetching[claim]
        self.num_timeouts += result.timed_out
        hits = []
        for column, ((kind, index), target) in enumerate(zip(operation.columns, operation.targets, strict=False)):
            if result.is_hit(column):
                self._note(kind, sequence, index, found=True)
                self.targets.mount_target(sequence, kind, index, target)
                hits.append(kind)
                continue
            operation.missed.add((kind, sequence.hash_of(index)))
            if result.is_abandoned(column):
                self.targets.forget_orphan_target(kind)
                continue
            unknown = result.is_unknown(column)
            self.targets.release(kind, target, unknown=unknown)
            if not unknown:
                self._note(kind, sequence, index, found=False)
        self._store.works |= bool(hits)
        self._judge(operation, len(hits), self._pools.weight(hits))
        self.targets.unmount(sequence, 0 if sequence.aborted else self._prefix.hit(sequence).boundary)

    def _note(self, block_type: BlockType, sequence: Sequence, index: int, *, found: bool) -> None:
        if self._journal is None:
            return
        if found:
            self._journal.learn(sequence, index)
            self._journal.in_store(block_type, [sequence.hash_of(index)])
        else:
            self._journal.not_in_store(block_type, [sequence.hash_of(index)])

    def _judge(self, operation: _Prefetch, num_hits: int, weight: float) -> None:
        # A few blocks, or none, take as long as a batch of them; a read that was not awaited took at least until now.
        end = now() if operation.result.timed_out else operation.last_progress
        seconds = (end - operation.started) / operation.company
        self._policy.read.add(max(weight, self._limits.batch_size), seconds)
        if num_hits:
            self._policy.count("store", "partly" if operation.given_up else "restored")
        elif operation.given_up:
            self._policy.count("store", "recomputed")
