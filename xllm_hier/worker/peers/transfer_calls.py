"""Calls to peers on one thread, of which none keeps others waiting for longer than a limit, and what failed calls mean.

A call that failed ends the engine it was made with, and with it all that the library had still queued; the next one
opens another. A call that hangs is left behind with its thread and engine, and a new thread goes on with all the rest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ...errors import XllmError
from ...plans import TransferRegion
from ...wire import Deadline
from ..transfer_stats import TransferStats
from .pieces import Pieces
from .transfer_engine import TransferEngine, call_limit_s

log = logging.getLogger("xllm.transfer")

_MARGIN_S = 2.0  # beyond the library's own limit
_CLOSE_S = 10.0
_LOOK_S = 0.01


@dataclass(frozen=True)
class Problem:
    """Why something was not moved: `cause` for the statistics, `text` for people; `certain` as in PushFailure."""

    cause: str
    text: str
    certain: bool = True


LEFT = Problem("left", "another thread goes on with this")


@dataclass(eq=False)
class Peer:
    """This rank's counterpart in one instance. `problem`: why nothing is moved with it until it is linked anew; None:
    there is no reason."""

    name: str
    session: str
    regions: dict[tuple[str, str], TransferRegion]
    problem: Problem | None = None

    def refusal(self) -> Problem | None:
        """Why a move must not even begin; None: it may."""
        if self.problem is None or self.problem.cause in {"mismatch", "unlinked"}:
            return self.problem
        return Problem("peer_failed", f"nothing is moved with {self.name} until it is linked anew: {self.problem.text}")


TransferCall = Callable[[str, Peer, Pieces], Problem | None]


class Job(Protocol):
    """Calls that belong together."""

    def run(self, call: TransferCall) -> None:
        """Make them with `call(kind, peer, pieces)`: None when all pieces are there; return at once when it is LEFT.

        The first call to a peer takes 0.2 s more; it may be one of no pieces.
        """

    def give_up(self, peer: Peer | None, problem: Problem) -> bool:
        """The call to `peer` hangs, or (None) all is over; whether there is more to `run`, which begins anew."""


class _Caller:
    """A thread and its engine; `began`: when the call to `peer` for `job` began that is under way, None: none is. While
    it is `greeting` it moves nothing of value."""

    def __init__(self, engine: TransferEngine | None = None) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="pd")
        self.engine = engine
        self.left = self.greeting = False
        self.began: float | None = None
        self.peer: Peer | None = None
        self.job: Job | None = None


class PeerCalls:
    """The calls of one worker. `kind` is `push` (write) or `pull` (read). Raises as `open_engine` does, which makes an
    engine with all of this worker's memory."""

    def __init__(self, open_engine: Callable[[], TransferEngine], stats: TransferStats) -> None:
        self._open_engine = open_engine
        self._stats = stats
        self._lock = threading.Lock()
        self._jobs: list[Job] = []
        engine = open_engine()
        self.session = engine.session
        self._caller = _Caller(engine)
        self._callers = [self._caller]  # this one, and those left behind
        self.limit_s = call_limit_s() + _MARGIN_S

    def submit(self, job: Job) -> None:
        """Run `job` after those submitted before."""
        with self._lock:
            self._jobs.append(job)
            caller = self._caller
            caller.thread.submit(self._run, caller, job)

    def _run(self, caller: _Caller, job: Job) -> None:
        try:
            job.run(lambda kind, peer, pieces: self._call(caller, job, kind, peer, pieces))
        except Exception as error:  # whoever waits for the job must not wait for ever
            log.exception("moves to or from a peer failed")
            job.give_up(None, Problem("exception", f"{type(error).__name__}: {error}", certain=False))
        with self._lock:
            if not caller.left and job in self._jobs:
                self._jobs.remove(job)

    def _call(self, caller: _Caller, job: Job, kind: str, peer: Peer, pieces: Pieces) -> Problem | None:
        with self._lock:
            if caller.left:
                return LEFT
            refusal = peer.refusal()
            if refusal is not None:
                return refusal
            caller.began, caller.peer, caller.job = time.monotonic(), peer, job
        try:
            problem = self._move(caller, kind, peer, pieces)
        finally:
            with self._lock:
                caller.began = None
                left = caller.left
        if problem is not None and not left:
            log.error("%s", problem.text)
            peer.problem = problem
        if (problem is not None or left) and caller.engine is not None:
            caller.engine.close()
            caller.engine = None
        return LEFT if left else problem

    def _move(self, caller: _Caller, kind: str, peer: Peer, pieces: Pieces) -> Problem | None:
        caller.greeting = True
        try:
            engine = caller.engine = caller.engine or self._open_engine()
        except XllmError as error:
            return Problem("engine", str(error))
        code, seconds = engine.greet(peer.session, next(iter(peer.regions.values())).addresses[0])
        with self._lock:
            if caller.left:
                return LEFT
            caller.greeting = False
        if code != 0:
            return self._failure("a first call to", peer, code, seconds, harmless=True)
        if not len(pieces.sizes):
            return None
        move = engine.write if kind == "push" else engine.read
        code, seconds = move(peer.session, pieces.local.tolist(), pieces.remote.tolist(), pieces.sizes.tolist())
        if code != 0:
            # A read lands here through the engine, which ends now; a write may still wait in the peer's kernel.
            return self._failure(
                f"a {kind} of {pieces.nbytes} bytes with", peer, code, seconds, harmless=kind == "pull"
            )
        self._stats.add(kind, pieces.nbytes, seconds)
        return None

    @staticmethod
    def _failure(what: str, peer: Peer, code: int, seconds: float, *, harmless: bool) -> Problem:
        in_time = seconds < call_limit_s() / 2
        text = f"{what} {peer.name} ({peer.session}) failed after {seconds:.1f} s with code {code}"
        return Problem("call" if in_time else "timeout", text, in_time or harmless)

    def watch(self) -> None:
        """Leave a call behind that hangs; to be called now and then by a thread that makes none."""
        with self._lock:
            caller = self._caller
            if caller.began is None or time.monotonic() - caller.began < self.limit_s:
                return
            caller.left = True
            caller.thread.shutdown(wait=False, cancel_futures=True)
            self._caller = _Caller()
            self._callers.append(self._caller)
            peer, stuck, jobs = caller.peer, caller.job, self._jobs
            self._jobs = []
        assert peer is not None and stuck is not None
        text = f"a call to {peer.name} ({peer.session}) has not returned within {self.limit_s:g} s"
        log.error("%s", text)
        peer.problem = Problem("hangs", text, certain=caller.greeting)
        for job in jobs:
            if job is not stuck or job.give_up(peer, peer.problem):
                self.submit(job)

    def close(self) -> bool:
        """Run nothing more; False when a call is still under way: the process must then end by `os._exit`."""
        with self._lock:
            jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.give_up(None, Problem("closed", "this worker ends"))
        for caller in self._callers:
            caller.thread.shutdown(wait=False, cancel_futures=True)
        end = Deadline(_CLOSE_S)
        while any(caller.began is not None for caller in self._callers):
            if end.passed():
                return False
            time.sleep(_LOOK_S)
        for caller in self._callers:
            caller.thread.shutdown()
            if caller.engine is not None:
                caller.engine.close()
        return True
