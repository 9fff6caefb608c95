"""The engine's only door to its workers: one ordered plan channel and one answer channel for each rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import zmq

from ..calls import Ping, WorkerCall, WorkerResult
from ..errors import EngineDeadError, StartupError
from ..figures import WorkerReady, WorkerState
from ..wire import Channel, Deadline, HasSocket, wait_readable

POLL_S = 0.2  # how often a silent wait looks whether the other side still lives
_PING = 0  # call id of pings; those of the engine's own questions begin at 1
_PING_PERIOD_S = 1.0


def plan_address(run_dir: str, rank: int) -> str:
    """Where worker `rank` receives its plans, in order."""
    return f"ipc://{run_dir}/worker-{rank}.plan"


def answer_address(run_dir: str, rank: int) -> str:
    """Where worker `rank` answers from any of its threads."""
    return f"ipc://{run_dir}/worker-{rank}.answer"


def _named(ranks: Sequence[int]) -> str:
    return ("worker " if len(ranks) == 1 else "workers ") + ", ".join(str(rank) for rank in sorted(ranks))


class RemoteWorkers:
    """All workers of one instance; the engine binds, the workers connect.

    Each worker is pinged once a second, on a thread of its own that answers while the model runs: one that says
    nothing for `silence_limit_s` is stopped or hangs, also when nothing was asked of it.
    """

    def __init__(
        self, context: zmq.Context[Any], run_dir: str, num_workers: int, silence_limit_s: float = 300.0
    ) -> None:
        self.num_workers = num_workers
        self._plans = [Channel(context, plan_address(run_dir, rank), bind=True) for rank in range(num_workers)]
        self._answers = [Channel(context, answer_address(run_dir, rank), bind=True) for rank in range(num_workers)]
        self._silence_limit_s = silence_limit_s
        self._next_ping = float("inf")
        self._pinged: dict[int, float] = {}  # when a rank was pinged that has said nothing since
        self._states: dict[int, WorkerState] = {}
        self._fresh: set[int] = set()

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
        self._next_ping = time.monotonic()
        return [ready[rank] for rank in range(self.num_workers)]

    def broadcast(self, message: Any) -> None:
        for channel in self._plans:
            channel.send(message)

    def receive(self, timeout_s: float, also: Sequence[HasSocket] = ()) -> list[Any]:
        """All answers that are there, in order per rank; waits up to `timeout_s` for the first, or one of `also`."""
        messages = []
        readable = wait_readable([*self._answers, *also], timeout_s)
        for rank, channel in enumerate(self._answers):
            while channel in readable and (message := channel.receive(0)) is not None:
                self._pinged.pop(rank, None)
                if isinstance(message, WorkerResult) and isinstance(message.answer, WorkerState):
                    self._states[message.rank] = message.answer
                    self._fresh.add(message.rank)
                else:
                    messages.append(message)
        return messages

    def take_states(self) -> list[tuple[int, WorkerState]]:
        """The states that ranks have told since the last call, by rank."""
        fresh, self._fresh = self._fresh, set()
        return [(rank, self._states[rank]) for rank in sorted(fresh)]

    def check_alive(self) -> None:
        """Ping the ranks that are due; call it after `receive`.

        Raises:
            EngineDeadError: a worker process has ended, or has been silent for too long; the message names it.
        """
        for rank, channel in enumerate(self._plans):
            if channel.peer_gone():
                raise EngineDeadError(f"worker {rank} died")
        now = time.monotonic()
        silent = [rank for rank, since in self._pinged.items() if now - since > self._silence_limit_s]
        if silent:
            raise EngineDeadError(f"{_named(silent)} stopped or hangs: no sign of life for {self._silence_limit_s:g} s")
        if now >= self._next_ping:
            self._next_ping = now + min(_PING_PERIOD_S, self._silence_limit_s / 4)
            for rank in range(self.num_workers):
                if rank not in self._pinged:
                    self._pinged[rank] = now
                    self._plans[rank].send(WorkerCall(_PING, Ping()))

    def all_answer(self, limit_s: float) -> bool:
        """No rank has left a ping unanswered for so long."""
        now = time.monotonic()
        return all(now - since <= limit_s for since in self._pinged.values())

    def forgive(self) -> None:
        """This process has not listened for a while: silent ranks are asked anew."""
        now = time.monotonic()
        self._pinged = dict.fromkeys(self._pinged, now)

    def blame(self, silent: Sequence[int]) -> str:
        """The ranks that keep `silent` from answering, as far as can be told: one rank that stands still silences all,
        since they wait for each other in collectives."""
        period = min(_PING_PERIOD_S, self._silence_limit_s / 4)
        deaf = [rank for rank, since in self._pinged.items() if time.monotonic() - since > period]
        if deaf:
            return f"{_named(deaf)} stopped or hangs"
        calls = {rank: self._states[rank].collectives for rank in silent if rank in self._states}
        behind = [rank for rank in calls if calls[rank] == min(calls.values())]
        if len(behind) < len(calls):
            where = ", ".join(f"{rank}: {calls[rank]}" for rank in sorted(calls))
            return f"{_named(behind)} lags behind the others (collectives begun by rank: {where})"
        return _named(silent)

    def close(self) -> None:
        for channel in (*self._plans, *self._answers):
            channel.close()
