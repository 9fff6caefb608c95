"""A prefill or decode instance among others: a world of its own on the clock of all, with real links to its peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xllm_hier.block import BlockType
from xllm_hier.config import EngineConfig
from xllm_hier.engine.blocks.sequence import Sequence, SequenceState
from xllm_hier.engine.build import new_links
from xllm_hier.engine.core import EngineCore
from xllm_hier.engine.pair import decode as decode_role
from xllm_hier.engine.pair.decode import DecodeRole
from xllm_hier.engine.pair.handover import Handover
from xllm_hier.engine.pair.prefill import PrefillRole
from xllm_hier.engine.steps.step import Advanced
from xllm_hier.errors import EngineDeadError
from xllm_hier.figures import WorkerReady
from xllm_hier.plans import PrefetchFromStorage, ProbeStorage, PushBlocks, TransferBlocks
from xllm_hier.request_messages import RequestOutput

from . import invariants
from .contents import Contents
from .network import Network
from .processes import Process, SharedTimeline
from .ranks import Rank
from .world import Asked, Settings, World

HEARTBEAT_S, PEER_TIMEOUT_S, WAIT_S = 0.5, 4.0, 40.0


@dataclass(frozen=True)
class Place:
    """An instance's name, role and port, for all its incarnations."""

    name: str
    prefill: bool
    port: int
    peers: tuple[int, ...]
    mode: str

    def config(self, settings: Settings) -> EngineConfig:
        return dataclasses.replace(
            settings.config(),
            enable_disagg_pd=True,
            instance_role="PREFILL" if self.prefill else "DECODE",
            kv_cache_transfer_mode=self.mode,
            decode_instances=",".join(f"127.0.0.1:{port}" for port in self.peers) if self.prefill else "",
            disagg_pd_port=self.port,
            heart_beat_interval=HEARTBEAT_S,
            peer_timeout_s=PEER_TIMEOUT_S,
            peer_wait_s=WAIT_S,
        )


class Instance(World):
    """One life of an instance. `allowed` says which errors its clients may get for want of a peer that works."""

    def __init__(
        self,
        place: Place,
        settings: Settings,
        network: Network,
        contents: Contents,
        sessions: dict[str, Rank],
        life: int,
        allowed: Callable[[Instance], dict[int, bool]],
        salt_of: Callable[[str], str],
    ) -> None:
        self.place = place
        self.network = network
        self.process = Process(place.name)
        self._allowed = allowed
        self._salt_of = salt_of
        self._sent: dict[Handover, set[tuple[BlockType, int]]] = {}
        assert isinstance(network.timeline, SharedTimeline)
        self._clock = network.timeline
        super().__init__(
            settings, timeline=network.timeline, contents=contents, name=f"{place.name}#{life}", sessions=sessions
        )
        if isinstance(self.role, PrefillRole):
            self._watch_pushes(self.role)
        self._clock.start(self.process, self._body)

    def _new_core(self, ready: list[WorkerReady]) -> EngineCore:
        config = self.place.config(self.settings)
        links = new_links(self.network.context(self.process), config, ready)  # type: ignore[arg-type]
        return EngineCore(config, self.api, self.workers, ready, links)  # type: ignore[arg-type]

    @property
    def role(self) -> PrefillRole | DecodeRole:
        assert self.core.role is not None
        return self.core.role

    def _body(self) -> None:
        while self.dead is None:
            try:
                self.core.turn()
            except EngineDeadError as error:
                assert self.ranks.doom, f"the instance ends without need: {error}"
                self.core.answer_all_open(error)
                self.dead = error
                return
            invariants.check_after_turn(self)
            claimed = self.manager.ledger.prefix.claims.values()
            assert all(one.state is not SequenceState.FINISHED for one in claimed), "others wait for one that is over"

    # ---------------------------------------------------------------------------------- what the books know

    def elsewhere(self) -> list[Sequence]:
        if isinstance(self.role, PrefillRole):
            ours = dict.fromkeys(request.sequence for request in self.role._requests.values())
            ours |= dict.fromkeys(self.scheduler.homeless)
            return [sequence for sequence in ours if sequence.state is SequenceState.REMOTE]
        return self.not_begun()

    def not_begun(self) -> list[Sequence]:
        if isinstance(self.role, PrefillRole):
            return []
        running = decode_role.InboundPhase.RUNNING
        waiting = [request.sequence for request in self.role._requests.values() if request.phase is not running]
        return [*waiting, *(held.sequence for held in self.role._held)]

    def salt_of(self, request_id: str) -> str:
        return self._salt_of(request_id.rpartition("/")[2])

    def _allowed_errors(self, asked: Asked) -> dict[int, bool]:
        allowed, more = super()._allowed_errors(asked), self._allowed(self)
        return {status: allowed[status] or more.get(status, False) for status in allowed}

    def _take(self, output: RequestOutput) -> None:
        asked = self.asked[output.request_id]
        assert output.usage is None or asked.usage is None or not output.token_ids, "usage is told twice"
        super()._take(output)

    # -------------------------------------------------------------------------------------- what is pushed

    def _watch_pushes(self, role: PrefillRole) -> None:
        """Each block that the decode instance lacks is sent once, unless it was in vain; with the first token all are
        there."""
        push, step_ended = role._push, role.step_ended

        def watched_push(sequence: Sequence, end: int) -> PushBlocks | None:
            found = push(sequence, end)
            request = role._requests.get(sequence.request.request_id)
            if found is not None:
                assert request is not None and request.handover is not None
                sent = self._sent.setdefault(request.handover, set())
                again = sent & {(kind, n) for kind, numbers in request.handover.pushing.items() for n in numbers}
                assert not again, f"{sequence.request.request_id}: {again} are pushed again"
            return found

        def check_sent(sequence: Sequence, drawn: bool) -> None:
            request = role._requests.get(sequence.request.request_id)
            handover = request.handover if request is not None and not request.lost else None
            if handover is not None:
                sent = self._sent.setdefault(handover, set())
                sent |= {(kind, n) for kind, numbers in handover.pushing.items() for n in numbers}
                left = {
                    kind: set(numbers) - {n for of, n in sent if of is kind}
                    for kind, numbers in handover.lacking.items()
                }
                if drawn and self.place.mode == "PUSH":
                    assert not any(left.values()), f"{sequence.request.request_id}: {left} were never pushed"

        def watched_step_ended(advanced: list[Advanced]) -> None:
            for one in advanced:
                check_sent(one.sequence, one.drawn)
            step_ended(advanced)

        role._push, role.step_ended = watched_push, watched_step_ended  # type: ignore[method-assign]

    # -------------------------------------------------------------------------------------------- the end

    def what_is_left(self) -> dict[str, Any]:
        left = invariants.what_is_left(self)
        role = self.role
        if isinstance(role, PrefillRole):
            more: dict[str, Any] = {"outbound": dict(role._requests), "pushes": role._by_push}
        else:
            more = {"inbound": dict(role._requests), "pulls": role._by_pull, "held": role._held, "said": role._events}
        under_way = sum(rank.mover.num_under_way for rank in self.ranks.ranks)
        return left | {name: what for name, what in (more | {"moves": under_way}).items() if what}

    def check_at_the_end(self) -> None:
        invariants.check_at_the_end(self)
        reads = self.sent(TransferBlocks) or self.sent(PrefetchFromStorage) or self.sent(ProbeStorage)
        if not self.place.prefill and not self.scheduler.num_preemptions and not self.ranks.done["load"]:
            assert not reads, "a decode instance looks at host or store to admit"
