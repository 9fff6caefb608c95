"""The pushes of one forward: each layer group of their blocks is written once the forward has computed it.

The forward's thread tells how far it is, the thread of `PeerCalls` follows::

    forward     layers 0..6 | layers 7..13 | ... | the draft model drafts |  waits for the rest
    pushes                  | 0..6         | ... |           last group   |  draft's blocks
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...block import CacheRole
from ...plans import PushFailure
from .pieces import MovingBlocks, Pieces
from .transfer_calls import LEFT, Peer, Problem, TransferCall


@dataclass(frozen=True)
class Push:
    """One push: the blocks of each domain. `problem`: why it is not even begun; there may be no peer then."""

    push_id: int
    peer: Peer | None
    blocks: dict[CacheRole, list[MovingBlocks]]
    problem: Problem | None = None


def _no_wait() -> None:
    pass


@dataclass(eq=False)
class _Stage:
    """Layers of one domain that are written together: once `ready` is set and `wait` has returned."""

    role: CacheRole
    layers: range
    ready: threading.Event = field(default_factory=threading.Event)
    wait: Callable[[], None] = _no_wait


class Pushes:
    """Pushes of one forward over the target's layer `groups`; `mark` is that of Platform, `count` gets the cause of
    each failure."""

    def __init__(
        self,
        pushes: Sequence[Push],
        groups: Sequence[range],
        mark: Callable[[], Callable[[], None]],
        count: Callable[[str], None],
    ) -> None:
        self._pushes = list(pushes)
        self._mark, self._count = mark, count
        drafts = [blocks for push in pushes for blocks in push.blocks[CacheRole.DRAFT]]
        layers = range(max((blocks.layers[-1] + 1 for blocks in drafts), default=0))
        self._target = [_Stage(CacheRole.TARGET, group) for group in groups]
        self._stages = [*self._target, *([_Stage(CacheRole.DRAFT, layers)] if layers else [])]
        self._told = 0
        self._peers = list(dict.fromkeys(push.peer for push in pushes if push.peer and push.problem is None))
        self._problems: dict[Peer, Problem] = {}
        self._over: Problem | None = None
        self._ended = threading.Event()
        self.waited_s = 0.0

    @classmethod
    def none(cls) -> Pushes:
        """The pushes of a forward without any."""
        nothing = cls((), (), lambda: _no_wait, lambda _cause: None)
        nothing._ended.set()
        return nothing

    # -------------------------------------------------------------------------------- the forward's thread

    def following(self, wait_for_layer: Callable[[int], None]) -> Callable[[int], None]:
        """`wait_for_layer` of a forward, of which each call tells that the layer before has been computed."""
        if not self._pushes:
            return wait_for_layer

        def before(layer: int) -> None:
            self._tell(sum(stage.layers.stop <= layer for stage in self._target))
            wait_for_layer(layer)

        return before

    def target_computed(self) -> None:
        """All of the target's layers are computed and, on the device, ordered."""
        self._tell(len(self._target))

    def drafted(self) -> None:
        """The draft model, if there is one, has written its blocks of this step."""
        self._tell(len(self._stages))

    def fail(self) -> None:
        """The forward failed: no further write begins, and all its pushes count as failed."""
        self._stop(Problem("forward", "the forward failed"))

    def _stop(self, problem: Problem) -> None:
        self._over = problem
        for stage in self._stages:
            stage.ready.set()

    def _tell(self, num_stages: int) -> None:
        if num_stages > self._told:
            wait = self._mark()
            for stage in self._stages[self._told : num_stages]:
                stage.wait = wait
                stage.ready.set()
            self._told = num_stages

    def finish(self, timeout_s: float) -> list[PushFailure]:
        """Wait for the end of all pushes and name those that failed; after `timeout_s` the rest has failed, too."""
        start = time.perf_counter()
        if not self._ended.wait(timeout_s):
            self._stop(Problem("timeout", f"the push has not ended within {timeout_s:g} s", certain=False))
        self.waited_s = time.perf_counter() - start
        failures = []
        for push in self._pushes:
            problem = push.problem or self._over
            if push.peer is not None and push.peer in self._problems:
                problem = self._problems[push.peer]
            if problem is not None:
                self._count(problem.cause)
                failures.append(PushFailure(push.push_id, problem.text, problem.certain))
        return failures

    # ------------------------------------------------------------------------------- the thread of the calls

    def run(self, call: TransferCall) -> None:
        """Write each stage's blocks once it is ready; after a call was left behind, again from the first stage on."""
        nothing = Pieces.joined([])
        if not all(self._write(call, peer, nothing) for peer in self._peers):  # while the first layers are computed
            return
        left = self._stages
        while left:
            left[0].ready.wait()
            stages = list(itertools.takewhile(lambda stage: stage.ready.is_set(), left))  # fewer calls when late
            left = left[len(stages) :]
            if self._over is None:
                stages[-1].wait()
            for peer in self._peers:
                for part in self._pieces(peer, stages).calls():
                    if not self._write(call, peer, part):
                        return
        self._ended.set()

    def _pieces(self, peer: Peer, stages: Sequence[_Stage]) -> Pieces:
        """The pieces of some stages for one peer."""
        pushes = [push for push in self._pushes if push.peer is peer and push.problem is None]
        blocks = [(stage, each) for stage in stages for push in pushes for each in push.blocks[stage.role]]
        return Pieces.joined([each.pieces(stage.layers) for stage, each in blocks])

    def _write(self, call: TransferCall, peer: Peer, pieces: Pieces) -> bool:
        """Write to a peer, unless moves to it or all have failed before; False: the call was left behind."""
        if self._over is not None or peer in self._problems:
            return True
        problem = call("push", peer, pieces)
        if problem is not None and problem is not LEFT:
            self._problems[peer] = problem
        return problem is not LEFT

    def give_up(self, peer: Peer | None, problem: Problem) -> bool:
        """The call to `peer` hangs, and the other peers' go on; None: nothing is written any more."""
        if peer is None:
            self._stop(problem)
            self._ended.set()
            return False
        self._problems[peer] = problem
        return True
