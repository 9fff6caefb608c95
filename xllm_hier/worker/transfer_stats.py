"""Counters of a worker's transfers: bytes, seconds, failures by cause; shared by all its threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from ..figures import Histogram, TransferFailures, WorkerStats

KINDS = ("g2h", "h2d", "d2h", "h2g")
PD_KINDS = ("push", "pull")  # to and from a PD peer
_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class TransferStats:
    """Counters of one worker for some `kinds` of transfers; every method may be called from any thread."""

    def __init__(self, kinds: Sequence[str] = KINDS) -> None:
        self._lock = threading.Lock()
        self._bytes = dict.fromkeys(kinds, 0)
        self._counts = {kind: [0] * (len(_BUCKETS_S) + 1) for kind in kinds}
        self._seconds = dict.fromkeys(kinds, 0.0)
        self._failures: dict[tuple[str, str], int] = {}
        self._named: dict[str, int] = {}

    def add(self, kind: str, nbytes: int, seconds: float) -> None:
        """One finished transfer of `nbytes`."""
        bucket = sum(seconds > limit for limit in _BUCKETS_S)
        with self._lock:
            self._bytes[kind] += nbytes
            self._seconds[kind] += seconds
            self._counts[kind][bucket] += 1

    def total(self, kind: str) -> tuple[int, float]:
        """Bytes and seconds of all finished transfers."""
        with self._lock:
            return self._bytes[kind], self._seconds[kind]

    @contextmanager
    def timed(self, kind: str, nbytes: int) -> Iterator[None]:
        """Count the enclosed copy if it does not raise."""
        start = time.perf_counter()
        yield
        self.add(kind, nbytes, time.perf_counter() - start)

    def fail(self, kind: str, cause: str, count: int = 1) -> None:
        """`count` blocks that `kind` could not move, and why; causes are few and fixed."""
        if count:
            with self._lock:
                self._failures[kind, cause] = self._failures.get((kind, cause), 0) + count

    def count(self, name: str, amount: int = 1) -> None:
        """A named counter of the store: hits, misses, puts."""
        with self._lock:
            self._named[name] = self._named.get(name, 0) + amount

    def snapshot(self) -> WorkerStats:
        """All counters as they are now."""
        with self._lock:
            return WorkerStats(
                dict(self._bytes),
                {kind: self._histogram(kind) for kind in self._counts},
                [TransferFailures(kind, cause, count) for (kind, cause), count in self._failures.items()],
                dict(self._named),
            )

    def _histogram(self, kind: str) -> Histogram:
        totals = list(accumulate(self._counts[kind]))
        buckets = list(zip((*_BUCKETS_S, float("inf")), totals, strict=True))
        return Histogram(buckets, self._seconds[kind], totals[-1])
