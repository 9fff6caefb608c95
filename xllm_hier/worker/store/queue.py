"""Store calls in order on a thread of their own; a caller may give up a call that takes too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ..tiers.layer_copy import one_thread


class _Task:
    """One call: `answer` gets what `work` returns, unless `give_up` was told before that nobody waits."""

    def __init__(
        self, work: Callable[[], Any], answer: Callable[[Any], None], give_up: Callable[[bool], None] | None
    ) -> None:
        self.work, self.answer, self.give_up = work, answer, give_up
        self.started: float | None = None
        self.answered = False


class StoreQueue:
    """Runs tasks one after the other."""

    def __init__(self, name: str) -> None:
        self._thread = one_thread(name)
        self._lock = threading.Lock()
        self._tasks: list[_Task] = []

    def submit(
        self, work: Callable[[], Any], answer: Callable[[Any], None], give_up: Callable[[bool], None] | None = None
    ) -> None:
        """Run `work` after the tasks submitted before, and give `answer` its result.

        In its place `give_up` may be called, by the method of that name, with True when `work` was under way; None: it
        is waited for in any case.
        """
        task = _Task(work, answer, give_up)
        with self._lock:
            self._tasks.append(task)
        self._thread.submit(self._run, task)

    def _run(self, task: _Task) -> None:
        with self._lock:
            if task.answered:
                return
            task.started = time.monotonic()
        result = task.work()
        if self._take(task):
            task.answer(result)

    def _take(self, task: _Task) -> bool:
        """The right to answer, which the first who asks has."""
        with self._lock:
            first, task.answered = not task.answered, True
            if task in self._tasks:
                self._tasks.remove(task)
            return first

    def give_up(self, running_s: float) -> None:
        """Answer for all that waits, and for a task that has been running for longer than `running_s`."""
        now = time.monotonic()
        with self._lock:
            late = [task for task in self._tasks if task.started is None or now - task.started > running_s]
        for task in late:
            if task.give_up is not None and self._take(task):
                task.give_up(task.started is not None)

    def close(self) -> None:
        """Run nothing more; a task that hangs is left behind."""
        self._thread.shutdown(wait=False, cancel_futures=True)
