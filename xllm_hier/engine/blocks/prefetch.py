"""The ranks' answers to one request's prefetch: a matrix of workers x blocks, joined by the AND over ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ...plans import HIT, UNKNOWN
from .moves import RankAnswers, and_over_ranks, unknown_blocks


@dataclass(eq=False)
class _Batch:
    length: int
    answers: RankAnswers[bytes]


@dataclass(frozen=True)
class AbandonedBatch:
    """A batch that nobody waits for any more: `ranks` may still read into its targets, `unknown` are the columns
    (counted from `offset`) that an answer has left open already."""

    offset: int
    length: int
    ranks: set[int]
    unknown: set[int]


class PrefetchResult:
    """Result matrix of one request's G2H prefetch, with its stop request and its time limit.

    Batches are issued one after the other; a batch is complete when every worker answered it. A block that some
    worker does not report is a miss. A block of which some worker says UNKNOWN, or whose batch was abandoned, is a miss
    whose target may still be written to. `timeout_ms` 0 waits without limit. `timed_out`: a time limit kept blocks from
    being asked for, or from being waited for; it runs from `started` (None: from now).
    """

    def __init__(
        self, num_workers: int, num_blocks: int, batch_size: int, timeout_ms: int, started: float | None = None
    ) -> None:
        self.num_workers = num_workers
        self.num_blocks = num_blocks
        self.batch_size = batch_size
        self._joined = bytearray(num_blocks)  # MISS until the block's batch is complete
        self._abandoned = bytearray(num_blocks)
        self._in_flight: dict[int, _Batch] = {}  # by offset
        self._num_issued = 0
        self._stop = False
        self._missed = False
        self._started = time.monotonic() if started is None else started
        self._timeout_s = timeout_ms / 1000
        self.timed_out = False

    def next_batch(self, max_blocks: int) -> tuple[int, int] | None:
        """(offset, length) of the next batch to issue, or None when no more is to be issued, now or ever.

        `max_blocks` is the number of targets that can be had; 0 ends the prefetch, because waiting for room could be
        for ever.
        """
        if self._timeout_s and not self.timed_out and time.monotonic() - self._started >= self._timeout_s:
            self.timed_out = self._num_issued < self.num_blocks
            self._stop = True
        if self._stop or self._missed or self._num_issued >= self.num_blocks:
            return None
        if max_blocks <= 0:
            self._stop = True
            return None
        offset = self._num_issued
        length = min(self.batch_size, self.num_blocks - offset, max_blocks)
        self._num_issued += length
        self._in_flight[offset] = _Batch(length, RankAnswers(self.num_workers))
        return offset, length

    @property
    def num_in_flight(self) -> int:
        """Batches that some rank has not answered yet."""
        return len(self._in_flight)

    @property
    def num_blocks_in_flight(self) -> int:
        return sum(batch.length for batch in self._in_flight.values())

    def record(self, rank: int, offset: int, hits: bytes) -> bool:
        """Take one worker's answer to one batch; False when it is not awaited (late, twice, unknown): it is ignored.

        An answer of the wrong length counts as all missed.
        """
        batch = self._in_flight.get(offset)
        if batch is None or not batch.answers.add(rank, bytes(hits)):
            return False
        if batch.answers.complete:
            del self._in_flight[offset]
            joined = and_over_ranks(batch.answers.by_rank.values(), batch.length)
            self._joined[offset : offset + batch.length] = joined
            self._missed |= any(said != HIT for said in joined)
        return True

    def request_stop(self) -> bool:
        """No further batch is issued; True the first time, False when a stop had been requested before."""
        first, self._stop = not self._stop, True
        return first

    def abandon(self) -> list[AbandonedBatch]:
        """Wait for no answer any more. Returns the batches that were in flight."""
        self._stop = True
        left = []
        for offset, batch in self._in_flight.items():
            self._abandoned[offset : offset + batch.length] = b"\1" * batch.length
            unknown = unknown_blocks(batch.answers.by_rank.values(), batch.length)
            left.append(AbandonedBatch(offset, batch.length, batch.answers.missing, unknown))
        self._in_flight.clear()
        return left

    def is_hit(self, column: int) -> bool:
        """Every rank has the block, whole and verified."""
        return self._joined[column] == HIT and not self._abandoned[column]

    def is_unknown(self, column: int) -> bool:
        """A read that has failed may still write to the block's target."""
        return self._joined[column] == UNKNOWN

    def is_abandoned(self, column: int) -> bool:
        """Nobody waits for the answer about this block any more."""
        return bool(self._abandoned[column])

    def completed(self) -> bool:
        """No batch is in flight and none will follow."""
        return not self._in_flight and (self._stop or self._missed or self._num_issued >= self.num_blocks)

    def merged_hits(self) -> list[bool]:
        """Logical AND over all workers, one entry per block."""
        return [self.is_hit(column) for column in range(self.num_blocks)]
