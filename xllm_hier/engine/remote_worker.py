"""The engine's only door to its workers: one ordered plan channel and one answer channel for each rank."""

from __future__ import annotations

from typing import Any

import zmq

from ..errors import EngineDeadError, StartupError
from ..plans import WorkerReady
from ..wire import Channel, Deadline, wait_readable

POLL_S = 0.2  # how often a silent wait looks whether the other side still lives


def plan_address(run_dir: str, rank: int) -> str:
    """Where worker `rank` receives its plans, in order."""
    return f"ipc://{run_dir}/worker-{rank}.plan"


def answer_address(run_dir: str, rank: int) -> str:
    """Where worker `rank` answers from any of its threads."""
    return f"ipc://{run_dir}/worker-{rank}.answer"


class RemoteWorkers:
    """All workers of one instance; the engine binds, the workers connect."""

    def __init__(self, context: zmq.Context[Any], run_dir: str, num_workers: int) -> None:
        self.num_workers = num_workers
        self._plans = [Channel(context, plan_address(run_dir, rank), bind=True) for rank in range(num_workers)]
        self._answers = [Channel(context, answer_address(run_dir, rank), bind=True) for rank in range(num_workers)]

    def wait_ready(self, timeout_s: float) -> list[WorkerReady]:
        """One WorkerReady of each rank, by rank. Raises StartupError after `timeout_s`, naming the missing ranks."""
        deadline = Deadline(timeout_s)
        ready: dict[int, WorkerReady] = {}
        while len(ready) < self.num_workers:
            for message in self.receive(min(POLL_S, deadline.remaining())):
                if isinstance(message, WorkerReady):
                    ready[message.rank] = message
            self.check_alive()
            if deadline.passed():
                missing = sorted(set(range(self.num_workers)) - set(ready))
                raise StartupError(f"worker {missing} did not come up within {timeout_s:g} s")
        return [ready[rank] for rank in range(self.num_workers)]

    def broadcast(self, message: Any) -> None:
        for channel in self._plans:
            channel.send(message)

    def receive(self, timeout_s: float, also: Channel | None = None) -> list[Any]:
        """All answers that are there, in order per rank; waits up to `timeout_s` for the first, or for `also`."""
        channels = self._answers if also is None else [*self._answers, also]
        messages = []
        for channel in wait_readable(channels, timeout_s):
            while channel is not also and (message := channel.receive(0)) is not None:
                messages.append(message)
        return messages

    def check_alive(self) -> None:
        """Raise EngineDeadError when a worker process has ended."""
        for rank, channel in enumerate(self._plans):
            if channel.peer_gone():
                raise EngineDeadError(f"worker {rank} died")

    def close(self) -> None:
        for channel in (*self._plans, *self._answers):
            channel.close()
