"""The circuit breaker before the store: the last calls decide which calls may be made now.

    detached --attach--> open <---------- a call failed as a whole, or takes longer than its limit,
                          |                or the last MAX_BAD calls went badly
                     a probe works
                          v
                       degraded  <--- a call went badly: objects unreadable or not written, or slow
                          |
                 GOOD good calls in a row
                          v
                       attached

In `open` only a probe calls, once a second, on a thread that no request waits for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ATTACHED, DEGRADED, OPEN, DETACHED = "attached", "degraded", "open", "detached"
MAX_BAD = 3
GOOD = 3


class StoreCircuit:
    """State of one worker's store; any thread may call.

    A call longer than `limit_s` is a bad one, and opens the circuit while it still runs (`check`). `on_open` is called
    with the reason, on the thread that found it, each time the circuit opens.
    """

    def __init__(self, limit_s: float, on_open: Callable[[str], None] = lambda why: None) -> None:
        self._limit_s = limit_s
        self._on_open = on_open
        self._lock = threading.Lock()
        self._state = DETACHED
        self._bad = self._good = 0
        self.hung = False  # a call hung since the store was last trusted: one that answers a look may hang again
        self._calls: dict[int, float] = {}
        self._next_call = 0

    @property
    def state(self) -> str:
        return self._state

    @property
    def closed(self) -> bool:
        """The store may be asked."""
        return self._state in (ATTACHED, DEGRADED)

    def wanted(self) -> None:
        """A store is wanted; a probe finds out whether there is one. A store in use stays so."""
        if self._state == DETACHED:
            self._move(OPEN)

    def works(self, *, at_start: bool = False) -> None:
        """A look at it went well: it may be asked, and after some good calls, or at the start at once, is trusted."""
        with self._lock:
            if self._state == OPEN:
                self._bad = self._good = 0
                self._state = ATTACHED if at_start else DEGRADED

    def detach(self) -> None:
        self._move(DETACHED)

    def fail(self, why: str) -> bool:
        """A call failed as a whole. True when this opened the circuit."""
        with self._lock:
            opens = self.closed
            if opens:
                self._state = OPEN
        if opens:
            self._on_open(why)
        return opens

    def judge(self, *, good: bool) -> None:
        """How a call that came back went."""
        opens = False
        with self._lock:
            if not self.closed:
                return
            self._bad, self._good = (0, self._good + 1) if good else (self._bad + 1, 0)
            if not good:
                opens = self._bad >= MAX_BAD
                self._state = OPEN if opens else DEGRADED
            elif self._good >= GOOD:
                self._state, self.hung = ATTACHED, False
        if opens:
            self._on_open(f"{MAX_BAD} calls in a row went badly")

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call, so that one that hangs is noticed."""
        with self._lock:
            self._next_call += 1
            number = self._next_call
            self._calls[number] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                slow = time.monotonic() - self._calls.pop(number) > self._limit_s
            if slow:
                self.judge(good=False)

    def check(self) -> None:
        """Open the circuit when a call has been under way for too long; call it now and then."""
        with self._lock:
            oldest = min(self._calls.values(), default=None)
        if oldest is not None and time.monotonic() - oldest > self._limit_s:
            self.hung = True
            self.fail(f"a call has not come back for {self._limit_s:g} s")

    @property
    def busy(self) -> bool:
        """A call is under way."""
        return bool(self._calls)

    def _move(self, state: str) -> None:
        with self._lock:
            self._state, self._bad, self._good = state, 0, 0
