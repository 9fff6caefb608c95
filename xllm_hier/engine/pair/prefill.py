"""A prefill instance's side of its requests: a place for each on a decode instance, the way there, and the answer back.

::

    takes -> SEEKING -> ASKED -> PLACED -> HANDED -> REMOTE -> end
                ^         |        |          |         |
                +---------+--------+----------+---------+   the decode instance is lost, or refuses

A request keeps its tokens here, also those that the decode instance generates. So when that one is lost, also in the
middle of an answer, another goes on where it stopped: the prompt comes from the caches, generated tokens are replayed
as after a preemption, and the tokens that follow are those that would have followed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ...config import EngineConfig
from ...ints import ints
from ...peer_plans import (
    AddNewRequests,
    Allocated,
    Cancel,
    FirstGeneration,
    FirstGenerationDone,
    Heartbeat,
    NewRequest,
    Release,
    Tokens,
)
from ...plans import LinkPeer, PullDone, PushBlocks, PushFailure, UnlinkPeer
from ...request_messages import RequestOutput
from ...wire import Deadline
from ..blocks.moves import draft_part
from ..blocks.sequence import Home, Sequence, SequenceState
from ..steps.scheduler import Scheduler
from ..steps.step import Advanced, Step
from .handover import Handover, places_of
from .links import Peer, PeerEvent, PeerLinks
from .role import Role

log = logging.getLogger("xllm.peers")

_MOST_MOVES = 8  # of one request: whatever it is that it meets everywhere must not be carried on for ever
_PAUSE_S = 0.1  # before those decode instances that had no room are asked again
_NO_ROOM = (429, 503)


class OutboundPhase(Enum):
    """Where a request stands that is to be, or was, handed over."""

    SEEKING = "seeking"
    ASKED = "asked"
    PLACED = "placed"
    HANDED = "handed"
    REMOTE = "remote"


@dataclass(eq=False)
class _Outbound:
    """One request; `avoid`: the incarnations that had no room lately. `lost`: its peer, or its place there, is gone."""

    sequence: Sequence
    deadline: Deadline
    phase: OutboundPhase = OutboundPhase.SEEKING
    peer: str = ""
    handover: Handover | None = None
    avoid: set[str] = field(default_factory=set)
    pause: Deadline = field(default_factory=lambda: Deadline(0))
    num_moves: int = 0
    lost: str = ""
    cancelled: bool = False

    @property
    def request_id(self) -> str:
        return self.sequence.request.request_id

    @property
    def seeks(self) -> bool:
        """It waits for a decode instance to take it, and for nothing else."""
        return self.phase is OutboundPhase.SEEKING and self.sequence.state is SequenceState.REMOTE


class PrefillRole(Role):
    """Finds places, hands over, relays answers; used by the engine's thread.

    `on_event` may be called while a step is computed: events of sequences of that step wait for `poll`.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler, links: PeerLinks) -> None:
        self._mode = config.kv_cache_transfer_mode
        self._wait_s = config.peer_wait_s
        self._scheduler = scheduler
        self._manager = scheduler.manager
        self._links = links
        self._requests: dict[str, _Outbound] = {}
        self._by_push: dict[int, _Outbound] = {}
        self.num_handed = self.num_moved = self.num_failed_pushes = 0

    def load(self) -> Heartbeat:
        scheduler = self._scheduler
        return Heartbeat(scheduler.num_open, len(scheduler.waiting), self._manager.num_available)

    @property
    def busy(self) -> bool:
        return any(request.seeks for request in self._requests.values())

    def stats(self) -> dict[str, Any]:
        phases = [request.phase for request in self._requests.values()]
        return {
            "handed_over": self.num_handed,
            "moved": self.num_moved,
            "failed_pushes": self.num_failed_pushes,
            "phases": {phase.value: phases.count(phase) for phase in OutboundPhase},
        }

    def use_decode_instances(self, instances: Mapping[str, str]) -> None:
        self._links.ask(instances)

    # ---------------------------------------------------------------------------------------- around a step

    def begin_step(self, step: Step) -> None:
        """Push the blocks that the step completes, with PUSH."""
        for sequence, count in step.rows if self._mode == "PUSH" else ():
            if sequence.state is SequenceState.RUNNING:
                push = self._push(sequence, sequence.num_computed + count)
                if push is not None:
                    step.plan.pushes.append(push)

    def _push(self, sequence: Sequence, end: int) -> PushBlocks | None:
        """The blocks to be sent of a step over the sequence's tokens up to `end`."""
        request = self._requests.get(sequence.request.request_id)
        if request is None or request.handover is None or request.lost:
            return None
        blocks = request.handover.due(sequence, end)
        if not blocks:
            return None
        push_id = self._manager.new_id()
        self._by_push[push_id] = request
        draft = draft_part(blocks, self._manager.settings.drafting.moved_types)
        return PushBlocks(push_id, request.peer, blocks, draft)

    def pushes_ended(self, failures: list[PushFailure], *, void: bool) -> None:
        """A peer that cannot be written to is given up, and its requests with it. In a step that is `void` nothing was
        written, which is no fault of a peer's."""
        by_push, self._by_push = self._by_push, {}
        for failure in [failure for failure in failures if not (void and failure.certain)]:
            request = by_push[failure.push_id]
            request.lost = f"a push failed: {failure.error}"
            self._links.lose(request.peer, request.lost, uncertain=not failure.certain)
            self.num_failed_pushes += 1

    def step_ended(self, advanced: list[Advanced]) -> None:
        """Mark the blocks that were sent; with its first token a sequence goes."""
        for one in advanced:
            request = self._requests.get(one.sequence.request.request_id)
            if request is None or request.handover is None or request.lost:
                continue
            request.handover.push_ended()
            if one.drawn:
                self._hand_over(request, request.handover)

    def _hand_over(self, request: _Outbound, handover: Handover) -> None:
        sequence = request.sequence
        source = handover.source(sequence) if self._mode == "PULL" else []
        token, drafts = sequence.tokens[-1], ints(sequence.drafts)
        first = FirstGeneration(request.request_id, token, self._mode, sequence.usage, drafts, source)
        self._links.send(request.peer, first)
        self._scheduler.take_out(sequence)
        request.phase = OutboundPhase.HANDED

    # ------------------------------------------------------------------------------------- messages of peers

    def on_event(self, event: PeerEvent) -> None:
        message = event.message
        if event.linked is not None:
            self._manager.send(LinkPeer(event.peer, event.linked.endpoints))
        elif event.answers:
            pass  # nobody writes here
        elif message is None:
            self._manager.send(UnlinkPeer(event.peer))
            for concerned in self._requests.values():
                if concerned.peer == event.peer:
                    concerned.lost = event.why
        elif isinstance(message, Tokens):
            for output, start in zip(message.outputs, message.starts, strict=True):
                self._on_tokens(event.peer, output, start)
        else:
            request_id = str(getattr(message, "request_id", ""))
            request = self._requests.get(request_id)
            if request is None or request.peer != event.peer:
                log.debug("%s of %s is about nothing that is open", type(message).__name__, request_id)
            elif isinstance(message, Allocated):
                self._on_allocated(request, message)
            elif isinstance(message, FirstGenerationDone):
                self._on_first_done(request, message)
            elif isinstance(message, Cancel):
                request.lost = message.why

    def on_pull_done(self, done: PullDone) -> None:
        log.error("a worker answered pull %d, which was never sent", done.pull_id)

    def _on_allocated(self, request: _Outbound, message: Allocated) -> None:
        if request.phase is not OutboundPhase.ASKED or request.lost:
            return
        if message.error is not None:
            if message.status in _NO_ROOM:
                request.avoid.add(request.peer)
                request.lost = message.error
            else:
                request.peer = ""  # it has nothing of the request: there is nothing to cancel
                self._end(request, "error", message.error, message.status)
            return
        try:
            request.handover = Handover(places_of(message.blocks))
        except ValueError as error:
            self._links.lose(request.peer, f"its answer is wrong: {error}")
            request.lost = str(error)
            return
        request.phase, request.sequence.home = OutboundPhase.PLACED, Home.FOUND
        self._scheduler.admit(request.sequence)

    def _on_first_done(self, request: _Outbound, message: FirstGenerationDone) -> None:
        if request.phase is not OutboundPhase.HANDED or request.lost:
            return
        if message.error is not None:
            request.avoid.add(request.peer)
            request.lost = message.error
            return
        if self._mode == "PULL":
            self._links.send(request.peer, Release(request.request_id))
        request.phase, request.handover = OutboundPhase.REMOTE, None
        self._scheduler.hand_over(request.sequence)
        self.num_handed += 1

    def _on_tokens(self, peer: str, output: RequestOutput, start: int) -> None:
        request = self._requests.get(output.request_id)
        if request is None or request.peer != peer or request.lost or request.phase is not OutboundPhase.REMOTE:
            return
        sequence = request.sequence
        if sequence.aborted:
            return  # `poll` ends it
        if start != sequence.num_generated:
            request.lost = f"tokens from number {sequence.num_generated} on are missing"
            return
        sequence.tokens.extend(output.token_ids)
        self._scheduler.replies.add(output)
        if output.finish_reason is not None:
            del self._requests[request.request_id]
            self._scheduler.forget(sequence)

    # ------------------------------------------------------------------------------------ between two steps

    def poll(self, *, settled: bool) -> None:
        self._links.say_hello()
        self._forget_ended()
        for sequence in self._scheduler.take_homeless():
            if sequence.request.request_id not in self._requests:
                self._requests[sequence.request.request_id] = _Outbound(sequence, Deadline(self._wait_s))
        for request in list(self._requests.values()):
            if request.lost:
                self._move(request)
            elif request.sequence.aborted:
                self._abort(request)
        self._seek_all()
        for late in [request for request in self._requests.values() if request.seeks and request.deadline.passed()]:
            why = "; ".join(self._links.refusals) or "none is there, or none has room"
            self._end(late, "error", f"no decode instance takes the request: {why}", 503)

    def _forget_ended(self) -> None:
        """Requests that have ended here, or whose first tokens were their last: the rest concerns no peer."""
        over = (SequenceState.FINISHED, SequenceState.CANONICAL)
        for request in [request for request in self._requests.values() if request.sequence.state in over]:
            self._cancel(request)

    def _end(self, request: _Outbound, reason: str, error: str | None = None, status: int = 500) -> None:
        self._cancel(request)
        self._scheduler.end(request.sequence, reason, error, status)

    def _cancel(self, request: _Outbound) -> None:
        """Forget the request; its place at the decode instance is free."""
        del self._requests[request.request_id]
        if request.peer:
            self._links.send(request.peer, Cancel(request.request_id, "it is over"))

    def _seek_all(self) -> None:
        asked: dict[str, list[NewRequest]] = {}
        burdens = Counter(request.peer for request in self._requests.values())
        for request in self._requests.values():
            if request.seeks and request.pause.passed():
                self._seek(request, asked, burdens)
        for peer, requests in asked.items():
            self._links.send(peer, AddNewRequests(requests))

    def _seek(self, request: _Outbound, asked: dict[str, list[NewRequest]], burdens: Counter[str]) -> None:
        """Ask the decode instance that the router chose, else that with the fewest open requests, `burdens` being ours
        by peer."""

        def burden(peer: Peer) -> int:
            return max(peer.load.num_open, burdens[peer.incarnation])

        peers = [peer for peer in self._links.linked if peer.incarnation not in request.avoid]
        if not peers:
            request.avoid.clear()
            request.pause = Deadline(_PAUSE_S)
            return
        sequence = request.sequence
        wanted = self._links.named(sequence.request.decode_instance)
        chosen = next((peer for peer in peers if peer.address == wanted), None) or min(peers, key=burden)
        request.peer, request.phase = chosen.incarnation, OutboundPhase.ASKED
        burdens[request.peer] += 1
        generated = ints(sequence.tokens[sequence.prompt_length :])
        asked.setdefault(request.peer, []).append(NewRequest(sequence.request, generated))

    def _move(self, request: _Outbound) -> None:
        """Its place is gone: it seeks another one, and goes on from its blocks in the caches."""
        sequence, phase = request.sequence, request.phase
        log.warning("%s (%s) leaves its decode instance: %s", request.request_id, phase.value, request.lost)
        self._links.send(request.peer, Cancel(request.request_id, request.lost))
        why, refused = request.lost, phase is OutboundPhase.ASKED and bool(request.avoid)
        request.peer = request.lost = ""
        request.handover = None
        if phase is OutboundPhase.PLACED:
            self._scheduler.take_out(sequence)
        if phase in (OutboundPhase.PLACED, OutboundPhase.HANDED):
            self._scheduler.hand_over(sequence)
        request.phase, sequence.home = OutboundPhase.SEEKING, Home.SOUGHT
        if not refused:
            request.num_moves += 1
            self.num_moved += 1
            request.deadline = Deadline(self._wait_s)
        if request.num_moves > _MOST_MOVES:
            self._end(request, "error", f"{request.num_moves} decode instances were lost: {why}", 503)
        elif phase is not OutboundPhase.ASKED:
            self._scheduler.readmit(sequence)

    def _abort(self, request: _Outbound) -> None:
        """The client is gone. Blocks that a decode instance may be reading stay until it says that it has ended."""
        if request.phase is OutboundPhase.HANDED:
            if not request.cancelled:
                request.cancelled = True
                self._links.send(request.peer, Cancel(request.request_id, "the client is gone"))
        elif request.seeks or request.phase in (
            OutboundPhase.ASKED,
            OutboundPhase.REMOTE,
        ):  # others stand in the scheduler's queues
            self._end(request, "abort")
