"""A clock that moves only while somebody waits, and channels whose other end is part of the simulation."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any


class Timeline:
    """Events in order of time. `wait` lets them happen; `monotonic` is what the engine is told the time is.

    `tick_s` passes with every look at the clock, so that two looks within one turn differ.
    """

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now = 1000.0
        self.latest = float("inf")  # waiting beyond this is waiting for ever
        self._tick_s = tick_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._watchers: list[tuple[Callable[[], bool], Callable[[], None]]] = []

    def monotonic(self) -> float:
        self.now += self._tick_s
        return self.now

    def at(self, time: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), work))

    def after(self, delay_s: float, work: Callable[[], None]) -> None:
        self.at(self.now + delay_s, work)

    def when(self, condition: Callable[[], bool], work: Callable[[], None]) -> None:
        """Do `work` once, in the first moment in which somebody waits and `condition` holds."""
        self._watchers.append((condition, work))

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def wait(self, lines: Sequence[Line], timeout_s: float) -> list[Line]:
        """Those of `lines` with a message; lets time pass until there is one, `timeout_s` at most."""
        end = self.now + timeout_s
        assert self.now < self.latest, "something waits for ever"
        self._look()
        while not any(line.inbox for line in lines) and self._events and self._events[0][0] <= end:
            self.next_event()
            self._look()
        ready = [line for line in lines if line.inbox]
        if not ready:
            self.now = max(self.now, end)
        return ready

    def next_event(self) -> None:
        """Let the event that is next happen."""
        time, _, work = heapq.heappop(self._events)
        self.now = max(self.now, time)
        work()

    def _look(self) -> None:
        for watcher in list(self._watchers):
            condition, work = watcher
            if condition():
                self._watchers.remove(watcher)
                work()


class Line:
    """The engine's end of a channel: what it sends goes to `deliver` at once, what it is to receive is in `inbox`."""

    def __init__(self, deliver: Callable[[Any], None]) -> None:
        self.inbox: deque[Any] = deque()
        self.gone = False
        self._deliver = deliver

    def send(self, message: Any) -> bool:
        if not self.gone:
            self._deliver(message)
        return not self.gone

    def receive(self, _timeout_s: float) -> Any | None:
        return self.inbox.popleft() if self.inbox else None

    def peer_gone(self) -> bool:
        return self.gone

    def close(self) -> None:
        self.gone = True
