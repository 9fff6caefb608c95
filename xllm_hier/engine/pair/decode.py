"""A decode instance's side: room for requests that prefill instances compute, and their generation.

::

    QUEUED -> PLACED -> (PULLING) -> RUNNING -> end        Cancel, a lost peer, a failed pull end it in each phase

Blocks that a peer may be writing to, or that a read of ours may still fill, are not given to anybody else, whatever
became of the request: they are held until the peer says that it writes no more, or until its process has ended and
the bytes that it had on the wire must have come.
"""

from __future__ import annotations

import dataclasses
import logging
import time
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
from ...plans import LinkPeer, PullBlocks, PullDone, RemoteBlocks, UnlinkPeer
from ...request_messages import RequestOutput
from ..blocks.moves import RankAnswers, draft_part
from ..blocks.sequence import Sequence, SequenceState
from ..blocks.types import Places
from ..steps.limits import RequestLimits
from ..steps.scheduler import Scheduler
from .handover import numbered, places_of
from .links import PeerEvent, PeerLinks
from .role import Role

log = logging.getLogger("xllm.peers")

# A call that ran past its limit, or a process that was killed, may have bytes on the wire. A worker ends a call after
# five seconds, notices its engine's end in a fifth of one, and is killed six seconds later if it does not end. An
# instance that does not hear that it was given up begins calls until it takes the silence for a loss.
LATE_WRITES_S = 15.0
_LAST_CALL_S = 10.0


class InboundPhase(Enum):
    """Where a request stands that a prefill instance computes."""

    QUEUED = "queued"
    PLACED = "placed"
    PULLING = "pulling"
    READ = "read"
    RUNNING = "generating"


@dataclass(eq=False)
class _Inbound:
    """One request of `peer`, which calls it `request_id`; here it has a `key` of its own, as names may meet.

    `places` are the blocks that are filled from there; `answers` are those of the ranks to the pull. `cancelled`: the
    peer does not want the request any more. `orphaned`: the peer's process has ended.
    """

    peer: str
    request_id: str
    sequence: Sequence
    answers: RankAnswers[PullDone]
    phase: InboundPhase = InboundPhase.QUEUED
    places: Places = field(default_factory=dict)
    first: FirstGeneration | None = None
    pull_id: int = 0
    cancelled: str = ""
    orphaned: bool = False
    num_sent: int = 0

    @property
    def key(self) -> str:
        return self.sequence.request.request_id


@dataclass(eq=False)
class _Withheld:
    """Blocks of a request that is over: `until` a point in time, or None until `peer` is heard of."""

    peer: str
    sequence: Sequence
    until: float | None


class DecodeRole(Role):
    """Finds room, takes over, sends tokens back; used by the engine's thread.

    Messages of peers wait for `poll`, when no step is under way.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler, links: PeerLinks, limits: RequestLimits) -> None:
        self._mode = config.kv_cache_transfer_mode
        self._late_s = config.peer_late_writes_s or max(LATE_WRITES_S, config.peer_timeout_s + _LAST_CALL_S)
        self._scheduler = scheduler
        self._manager = scheduler.manager
        self._links = links
        self._limits = limits
        self._requests: dict[str, _Inbound] = {}
        self._by_pull: dict[int, _Inbound] = {}
        self._events: list[PeerEvent | PullDone] = []
        self._held: list[_Withheld] = []
        self._alarm = False  # of the audit, seen already
        self.num_taken = self.num_failed_pulls = 0

    @property
    def refuses_clients(self) -> str:
        return "this instance decodes for PREFILL instances: send requests to one of those"

    def load(self) -> Heartbeat:
        queued = sum(request.phase is InboundPhase.QUEUED for request in self._requests.values())
        return Heartbeat(len(self._requests), queued, self._manager.num_available)

    @property
    def busy(self) -> bool:
        return bool(self._events or self._held) or any(r.phase is InboundPhase.QUEUED for r in self._requests.values())

    @property
    def num_elsewhere(self) -> int:
        """Requests that do not generate yet."""
        return sum(request.phase is not InboundPhase.RUNNING for request in self._requests.values())

    def stats(self) -> dict[str, Any]:
        phases = [request.phase for request in self._requests.values()]
        return {
            "taken_over": self.num_taken,
            "failed_pulls": self.num_failed_pulls,
            "held": len(self._held),
            "phases": {phase.value: phases.count(phase) for phase in InboundPhase},
        }

    # ------------------------------------------------------------------------------------- messages of peers

    def on_event(self, event: PeerEvent) -> None:
        self._events.append(event)

    def on_pull_done(self, done: PullDone) -> None:
        self._events.append(done)

    def poll(self, *, settled: bool) -> None:
        events, self._events = self._events, []
        for event in events:
            if isinstance(event, PullDone):
                self._on_pull_done(event)
            elif event.linked is not None:
                self._manager.send(LinkPeer(event.peer, event.linked.endpoints))
                self._hear_of(event.peer, self._late_s if event.linked.uncertain or self._mode == "PULL" else 0.0)
            elif event.answers:
                self._doubt_the_end_of(event.peer)
            elif event.message is None:
                self._on_lost(event)
            else:
                self._on_message(event.peer, event.message)
        self._leave_what_is_distrusted()
        self._place_queued()
        self._release_held(settled)

    def _leave_what_is_distrusted(self) -> None:
        """An audit found a wrong block: requests placed beside found blocks must be placed anew, with none of them."""
        before, self._alarm = self._alarm, self._scheduler.auditor.alarm
        if before or not self._alarm:
            return
        for request in self._requests.values():
            if request.phase not in (InboundPhase.QUEUED, InboundPhase.RUNNING):
                self._links.send(
                    request.peer, Cancel(request.request_id, "an audit found that cached blocks are wrong")
                )

    def _on_message(self, peer: str, message: Any) -> None:
        if isinstance(message, AddNewRequests):
            for new in message.requests:
                self._on_new(peer, new)
            return
        request = self._requests.get(_key(peer, str(getattr(message, "request_id", ""))))
        if isinstance(message, FirstGeneration):
            self._on_first(peer, request, message)
        elif isinstance(message, Release):
            if request is not None and request.phase is InboundPhase.READ:
                self._take_over(request)
        elif isinstance(message, Cancel):
            if request is not None:
                self._cancel(request, message.why or "cancelled")
        else:
            log.warning("a prefill instance sent a %s", type(message).__name__)

    def _on_new(self, peer: str, new: NewRequest) -> None:
        own = dataclasses.replace(new.request, request_id=_key(peer, new.request.request_id))
        problem: tuple[str, int] | None = ("an earlier request of this id is still being ended", 503)
        if own.request_id not in self._requests:
            problem = self._limits.refusal(own, self.num_elsewhere)
        if problem is not None:
            self._links.send(peer, Allocated(new.request.request_id, error=problem[0], status=problem[1]))
            return
        sequence = self._manager.new_sequence(own, remote=True)
        sequence.tokens.extend(new.generated.tolist())
        sequence.state, sequence.usage_sent = SequenceState.REMOTE, True
        sequence.arrival = self._scheduler.new_arrival()
        answers: RankAnswers[PullDone] = RankAnswers(self._manager.num_workers)
        self._requests[own.request_id] = _Inbound(peer, new.request.request_id, sequence, answers)

    def _place_queued(self) -> None:
        """Place requests first come, first served. A request that shares blocks which another one is getting waits for
        them, and all wait for requests that were preempted here."""
        if self._scheduler.waiting:
            return
        queued = [request for request in self._requests.values() if request.phase is InboundPhase.QUEUED]
        for request in sorted(queued, key=lambda waiting: waiting.sequence.order):
            if self._manager.is_being_computed(request.sequence):
                continue
            places = self._manager.allocate_for_peer(request.sequence) if self._scheduler.leaves_room() else None
            while places is None and self._scheduler.free_spare_blocks():
                places = self._manager.allocate_for_peer(request.sequence)
            if places is None:
                return
            request.places, request.phase = places, InboundPhase.PLACED
            shared = request.sequence.num_shared(places)
            self._links.send(request.peer, Allocated(request.request_id, numbered(places), shared))

    def _on_first(self, peer: str, request: _Inbound | None, first: FirstGeneration) -> None:
        problem = "the request is not known here"
        if request is not None:
            problem = self._mismatch(request, first)
        if problem or request is None:
            self._links.send(peer, FirstGenerationDone(first.request_id, problem))
            if request is not None:
                self._cancel(request, problem)
            return
        request.first = first
        if first.mode == "PUSH":
            self._take_over(request)
            self._links.send(peer, FirstGenerationDone(request.request_id))
        else:
            self._pull(request, first)

    def _mismatch(self, request: _Inbound, first: FirstGeneration) -> str:
        """The reason for which the request cannot go on with this message; nothing has been moved yet."""
        if request.phase is not InboundPhase.PLACED:
            return f"the request is {request.phase.value} and waits for no first token"
        if first.mode != self._mode:
            return f"kv_cache_transfer_mode is {first.mode} at prefill and {self._mode} at decode"
        if first.mode == "PUSH":
            return ""
        try:
            source = places_of(first.source)
        except ValueError as error:
            return str(error)
        if {kind: set(numbers) for kind, numbers in source.items()} != {
            kind: set(numbers) for kind, numbers in request.places.items()
        }:
            return "the blocks to be read are not those that are lacking"
        return ""

    # ------------------------------------------------------------------------------------- pull and go on

    def _pull(self, request: _Inbound, first: FirstGeneration) -> None:
        source = places_of(first.source)
        target = [
            RemoteBlocks(kind.value, ints(list(places.values())), ints([source[kind][number] for number in places]))
            for kind, places in request.places.items()
            if places
        ]
        request.pull_id, request.phase = self._manager.new_id(), InboundPhase.PULLING
        self._by_pull[request.pull_id] = request
        draft = draft_part(target, self._manager.settings.drafting.moved_types)
        self._manager.send(PullBlocks(request.pull_id, request.peer, target, draft))

    def _on_pull_done(self, done: PullDone) -> None:
        request = self._by_pull.get(done.pull_id)
        if request is None:
            return
        request.answers.add(done.rank, done)
        if not request.answers.complete:
            return
        del self._by_pull[done.pull_id]
        answers = request.answers.by_rank.values()
        errors = [answer.error for answer in answers if answer.error is not None]
        if not errors and not request.cancelled:
            request.phase = InboundPhase.READ
            self._links.send(request.peer, FirstGenerationDone(request.request_id))
            return
        self.num_failed_pulls += bool(errors)
        why = f"a pull failed: {errors[0]}" if errors else request.cancelled
        self._links.send(request.peer, FirstGenerationDone(request.request_id, why))
        certain = all(answer.certain for answer in answers)
        self._end(request, certain=certain)
        if request.orphaned:
            self._hear_of(request.peer, self._late_s)
        elif not certain:  # once it links again, nothing that it wrote before is still on its way here
            self._links.lose(request.peer, why)

    def _take_over(self, request: _Inbound) -> None:
        sequence, first = request.sequence, request.first
        assert first is not None
        sequence.tokens.append(first.token)
        sequence.usage, sequence.remote = first.usage, False
        self._manager.take_over(sequence, request.places)
        if self._manager.settings.drafting.by_model:
            sequence.drafts = first.drafts.tolist()
        request.num_sent = sequence.num_generated
        request.phase = InboundPhase.RUNNING
        self._scheduler.adopt(sequence)
        self.num_taken += 1

    def deliver(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Send the outputs of peers' requests to them; returns the others."""
        own: list[RequestOutput] = []
        by_peer: dict[str, Tokens] = {}
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                own.append(output)
                continue
            tokens = by_peer.setdefault(request.peer, Tokens([], []))
            tokens.outputs.append(dataclasses.replace(output, request_id=request.request_id, usage=None))
            tokens.starts.append(request.num_sent)
            request.num_sent += len(output.token_ids)
            if output.finish_reason is not None:
                del self._requests[request.key]
        for peer, tokens in by_peer.items():
            self._links.send(peer, tokens)
        return own

    # ------------------------------------------------------------------------------------------------ ends

    def _cancel(self, request: _Inbound, why: str) -> None:
        """The peer does not want it, and writes nothing of it any more."""
        if request.phase is InboundPhase.RUNNING:
            self._scheduler.abort(request.key)
        elif request.phase is InboundPhase.PULLING:
            request.cancelled = why
        else:
            self._end(request)

    def _on_lost(self, event: PeerEvent) -> None:
        self._manager.send(UnlinkPeer(event.peer))
        for request in [request for request in self._requests.values() if request.peer == event.peer]:
            request.orphaned |= event.gone
            if request.phase is InboundPhase.PLACED:
                self._end(request, certain=self._mode == "PULL")
            else:
                self._cancel(request, event.why)
        if event.gone:
            self._hear_of(event.peer, self._late_s)

    def _end(self, request: _Inbound, *, certain: bool = True) -> None:
        """Its blocks are free, or are held where something may still be written to them."""
        del self._requests[request.key]
        request.sequence.state = SequenceState.FINISHED
        if certain or not request.places:
            self._manager.deallocate(request.sequence)
        else:
            self._manager.disclaim(request.sequence)
            self._held.append(_Withheld(request.peer, request.sequence, None))

    def _hear_of(self, peer: str, wait_s: float) -> None:
        """All bytes that this peer may have been writing have come in `wait_s` seconds."""
        until = time.monotonic() + wait_s
        for held in self._held:
            if held.peer == peer:
                held.until = max(held.until or 0.0, until)

    def _doubt_the_end_of(self, peer: str) -> None:
        """Somebody is at its address: perhaps only the way to it was broken, and it will go on to write."""
        for held in self._held:
            if held.peer == peer:
                held.until = None
        for request in self._requests.values():
            if request.peer == peer:
                request.orphaned = False

    def _release_held(self, settled: bool) -> None:
        now = time.monotonic()
        for held in list(self._held):
            if held.until is not None and not settled:
                held.until = max(held.until, now + self._late_s)
            if held.until is not None and now >= held.until:
                self._held.remove(held)
                self._manager.deallocate(held.sequence)


def _key(peer: str, request_id: str) -> str:
    return f"{peer}/{request_id}"
