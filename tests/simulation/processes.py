"""Several processes on one fake clock: each runs in a thread of its own, one at a time, until it waits."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .timeline import Timeline


class Killed(BaseException):
    """Raised within a process, where it waits, when it is killed."""


def inbox_of(line: Any) -> deque[Any]:
    """The messages that wait at a channel, or at the socket of links to peers."""
    found: deque[Any] = line.socket.inbox if hasattr(line, "socket") else line.inbox
    return found


class Process:
    """One thread of the simulation; `stopped` as by SIGSTOP."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped = False
        self.over = False
        self.error: BaseException | None = None
        self.killed = False
        self.lines: Sequence[Any] = ()
        self.until = 0.0
        self.baton = threading.Semaphore(0)

    def can_run(self, now: float) -> bool:
        if self.over or self.stopped:
            return False
        return self.until <= now or any(inbox_of(line) for line in self.lines)


class SharedTimeline(Timeline):
    """The clock of all processes. Which of several that could run goes on is drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.processes: list[Process] = []
        self._dice = random.Random(seed)
        self._running: Process | None = None
        self._conductor = threading.Semaphore(0)

    def wait(self, lines: Sequence[Any], timeout_s: float) -> list[Any]:
        process = self._running
        if process is None:  # nothing has been started yet
            return super().wait(lines, timeout_s)
        process.lines, process.until = lines, self.now + timeout_s
        self._pass_on(process)
        return [line for line in lines if inbox_of(line)]

    def _pass_on(self, process: Process) -> None:
        self._conductor.release()
        process.baton.acquire()
        if process.killed:
            raise Killed

    def start(self, process: Process, body: Callable[[], None]) -> None:
        """Let `body` run as a process from the next moment on."""

        def run() -> None:
            process.baton.acquire()
            try:
                if not process.killed:
                    body()
            except Killed:
                pass
            except BaseException as error:
                process.error = error
            process.over = True
            self._conductor.release()

        self.processes.append(process)
        threading.Thread(target=run, daemon=True).start()

    def kill(self, process: Process) -> None:
        """As by SIGKILL; a process may not kill itself."""
        if not process.over:
            process.killed = True
            self._resume(process)
        if process in self.processes:
            self.processes.remove(process)

    def _resume(self, process: Process) -> None:
        self._running = process
        process.baton.release()
        self._conductor.acquire()
        self._running = None

    def run(self, done: Callable[[], bool]) -> None:
        """Let time pass until `done`; raises what any process raises."""
        while not done():
            assert self.now < self.latest, "something waits for ever"
            self._look()
            if self._events and self._events[0][0] <= self.now:
                self.next_event()
                continue
            ready = [process for process in self.processes if process.can_run(self.now)]
            if ready:
                process = ready[0] if len(ready) == 1 else self._dice.choice(ready)
                self._resume(process)
                if process.error is not None:
                    raise process.error
                continue
            waiting = [process.until for process in self.processes if not process.stopped and not process.over]
            assert waiting or self._events, "nothing will ever happen"
            self.now = min([*waiting, *(self._events[0][:1] if self._events else ())])

    def end(self) -> None:
        """End all processes."""
        for process in list(self.processes):
            self.kill(process)
