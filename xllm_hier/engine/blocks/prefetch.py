"""What the workers say of a prefetch: a matrix of workers x blocks, whose columns count only if all rows agree."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...plans import HIT, UNKNOWN


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
        self._hits = [bytearray(num_blocks) for _ in range(num_workers)]
        self._unknown = bytearray(num_blocks)
        self._abandoned = bytearray(num_blocks)
        self._answered: dict[int, set[int]] = {}  # offset of a batch in flight -> ranks that answered
        self._batch_blocks: dict[int, int] = {}
        self._num_issued = 0
        self._stop = False
        self._missed = False
        self._started = time.monotonic() if started is None else started
        self._timeout_s = timeout_ms / 1000
        self.timed_out = False

    def next_batch(self, max_blocks: int) -> tuple[int, int] | None:
        """(offset, length) of the next batch to issue, or None when no more is to be issued, now or ever.

        `max_blocks` is how many targets can be had; 0 ends the prefetch, since waiting for room could be for ever.
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
        self._answered[offset] = set()
        self._batch_blocks[offset] = length
        return offset, length

    @property
    def num_in_flight(self) -> int:
        return len(self._answered)

    @property
    def num_blocks_in_flight(self) -> int:
        return sum(self._batch_blocks[offset] for offset in self._answered)

    def record(self, rank: int, offset: int, hits: Sequence[int]) -> bool:
        """Take one worker's answer to one batch; False when it is not awaited (late, twice, unknown): it is ignored.

        An answer of the wrong length counts as all missed.
        """
        waiting = self._answered.get(offset)
        if waiting is None or rank in waiting or not 0 <= rank < self.num_workers:
            return False
        length = self._batch_blocks[offset]
        if len(hits) == length:
            self._hits[rank][offset : offset + length] = bytes(1 if hit == HIT else 0 for hit in hits)
            for column in self.unknown_columns(hits, length):
                self._unknown[offset + column] = 1
        waiting.add(rank)
        if len(waiting) == self.num_workers:
            del self._answered[offset]
            if not all(self._merged(offset, length)):
                self._missed = True
        return True

    def request_stop(self) -> bool:
        """No further batch is issued; True the first time, False when it had been asked before."""
        first, self._stop = not self._stop, True
        return first

    def abandon(self) -> list[tuple[int, int, set[int]]]:
        """Wait for no answer any more. Returns (offset, length, ranks that have not answered) of what is in flight."""
        self._stop = True
        left = []
        for offset, answered in self._answered.items():
            length = self._batch_blocks[offset]
            self._abandoned[offset : offset + length] = b"\1" * length
            left.append((offset, length, set(range(self.num_workers)) - answered))
        self._answered.clear()
        return left

    @staticmethod
    def unknown_columns(hits: Sequence[int], length: int) -> set[int]:
        """Columns of one answer whose target may still be written to; none when it has another length."""
        return {column for column, hit in enumerate(hits) if hit == UNKNOWN} if len(hits) == length else set()

    def is_hit(self, column: int) -> bool:
        """Logical AND over all workers, for one block."""
        return self._merged(column, 1)[0]

    def is_unknown(self, column: int) -> bool:
        """The block's target may still be written to by a read that was given up."""
        return bool(self._unknown[column])

    def is_abandoned(self, column: int) -> bool:
        """Nobody waits for the answer about this block any more."""
        return bool(self._abandoned[column])

    def completed(self) -> bool:
        """No batch is in flight and none will follow."""
        return not self._answered and (self._stop or self._missed or self._num_issued >= self.num_blocks)

    def _merged(self, offset: int, length: int) -> list[bool]:
        return [
            all(row[column] for row in self._hits) and not self._unknown[column] and not self._abandoned[column]
            for column in range(offset, offset + length)
        ]

    def merged_hits(self) -> list[bool]:
        """Logical AND over all workers, one entry per block."""
        return self._merged(0, self.num_blocks)
