"""Device blocks on their way between the ranks of two instances, as the Transfer Engine moves them, or fails to.

What is written to is poison from the moment a transfer begins until it has arrived. A call that a peer keeps waiting
gives up after `CALL_LIMIT_S`; what it was to write arrives once the peer goes on. What a process had on the wire when
it was killed may still arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from xllm_hier.block import BlockType
from xllm_hier.plans import LinkPeer, PullBlocks, PullDone, PushBlocks, PushFailure, RemoteBlocks, UnlinkPeer

from .contents import DRAFT, POISON, TARGET, Part, Values
from .domains import Domain

if TYPE_CHECKING:
    from .ranks import Rank

CALL_LIMIT_S = 5.0
LATE_S = 12.0  # what was on the wire has arrived so long after its sender's end, or its receiver's return
MEAN_S = 0.01


class Copy(NamedTuple):
    """One block of one part on its way."""

    part: Part
    source: int
    target: int


@dataclass(eq=False)
class Transfer:
    """A push or a pull of one rank: `copies` go from `source` to `target`. `done` is called once, with what went wrong
    and whether that is certain.

    `said`: it was called. `late`: nobody waits for it any more, and it may still write. `on_wire`: its bytes have left
    a sender that is stopped or killed. `ends`: that one was killed, and it has the moment of its arrival. `over`: it
    writes no more. `early`: what a pull read at its beginning; None: it reads at its end.
    """

    who: str
    source: Rank
    target: Rank
    copies: list[Copy]
    caller: Rank
    done: Callable[[str, bool], None]
    said: bool = False
    late: bool = False
    on_wire: bool = False
    over: bool = False
    ends: bool = False
    early: dict[Copy, Values] | None = None

    @property
    def other(self) -> Rank:
        return self.target if self.caller is self.source else self.source

    def domain(self, copy: Copy) -> Domain:
        return self.target.domains[copy.part]


class Mover:
    """The transfers of one rank. `sessions` are all ranks that can be reached, by the name they give themselves."""

    def __init__(self, rank: Rank, sessions: dict[str, Rank]) -> None:
        self._rank = rank
        self._sessions = sessions
        self._peers: dict[str, str] = {}
        self._under_way: list[Transfer] = []

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def died(self) -> None:
        """The process of this rank was killed: what it had on the wire arrives after a while, the rest never."""
        for transfer in list(self._under_way):
            if transfer.on_wire and transfer.caller is transfer.source:
                transfer.late = transfer.ends = True
                self._after(self._rank.all.dice.random() * LATE_S, partial(self._arrive, transfer))
            else:
                self._end(transfer)

    # ------------------------------------------------------------------------------------------------ plans

    def receive(self, plan: LinkPeer | UnlinkPeer | PullBlocks) -> None:
        if isinstance(plan, LinkPeer):
            (self._peers[plan.peer],) = [one.session for one in plan.endpoints if one.rank == self._rank.number]
        elif isinstance(plan, UnlinkPeer):
            self._peers.pop(plan.peer, None)
        else:
            self._pull(plan)

    def _peer(self, name: str) -> Rank | None:
        found = self._sessions.get(self._peers.get(name, ""))
        return found if found is not None and not found.deaf else None

    def _copies(self, plan: PushBlocks | PullBlocks, *, push: bool) -> list[Copy]:
        contents = self._rank.all.contents
        kinds = [mapping.block_type for mapping in plan.target_mappings]
        assert len(set(kinds)) == len(kinds), "two mappings of one type"
        followed = [one for one in plan.target_mappings if BlockType(one.block_type) in contents.draft_types]
        same = [(one.block_type, one.local.tolist(), one.remote.tolist()) for one in followed]
        drafts = [(one.block_type, one.local.tolist(), one.remote.tolist()) for one in plan.draft_mappings]
        assert same == drafts, "the draft's blocks are not the target's"
        rows = [(TARGET, one) for one in plan.target_mappings] + [(DRAFT, one) for one in plan.draft_mappings]
        return [copy for role, mapping in rows for copy in _copies_of(role, mapping, push=push)]

    # ----------------------------------------------------------------------------------------------- pushes

    def push(self, pushes: list[PushBlocks], then: Callable[[list[PushFailure]], None]) -> None:
        """Send what a step has computed; `then` is told of the failures once all have ended."""
        failures: list[PushFailure] = []
        waiting = {push.push_id for push in pushes}
        assert len(waiting) == len(pushes), "one push id twice"

        def ended(push_id: int, error: str, certain: bool) -> None:
            waiting.discard(push_id)
            if error:
                failures.append(PushFailure(push_id, error, certain))
            if not waiting:
                then(failures)

        if not pushes:
            then(failures)
        for push in pushes:
            target = self._peer(push.peer)

            def done(error: str, certain: bool, push_id: int = push.push_id) -> None:
                ended(push_id, error, certain)

            copies = self._copies(push, push=True)
            if target is None:
                self._rank.later(0.001, partial(done, "the peer is unknown or gone", True))
                continue
            who = f"push {push.push_id} of {self._rank.name}"
            self._begin(Transfer(who, self._rank, target, copies, self._rank, done), "push")

    def _pull(self, plan: PullBlocks) -> None:
        source = self._peer(plan.peer)

        def done(error: str, certain: bool) -> None:
            self._rank.answer("pull", PullDone(plan.pull_id, self._rank.number, error or None, certain))

        copies = self._copies(plan, push=False)
        if source is None:
            self._rank.later(0.001, lambda: done("the peer is unknown or gone", True))
            return
        who = f"pull {plan.pull_id} of {self._rank.name}"
        self._begin(Transfer(who, source, self._rank, copies, self._rank, done), "pull")

    # --------------------------------------------------------------------------------------------- transfers

    def _begin(self, transfer: Transfer, kind: str) -> None:
        dice, rank = self._rank.all.dice, self._rank
        self._under_way.append(transfer)
        for copy in transfer.copies:
            transfer.domain(copy).device_claims.write(copy.target, transfer.who)
            transfer.domain(copy).device[copy.target] = [POISON] * transfer.domain(copy).size
        transfer.on_wire = dice.random() < 0.5
        fails = rank.all.take(kind, rank.number) is not None
        limit = rank.all.take(f"{kind} limit", rank.number)
        seconds = dice.random() * 2 * MEAN_S * rank.all.pace + (rank.all.take(f"slow {kind}", rank.number) or 0.0)
        if kind == "pull" and dice.random() < 0.5:
            transfer.early = {copy: _held(transfer, copy) for copy in transfer.copies}
        if limit is not None:
            seconds = CALL_LIMIT_S + limit
        if fails and limit is None:
            self._after(seconds, lambda: self._break(transfer))
            return
        self._after(seconds, lambda: self._arrive(transfer))
        rank.later(CALL_LIMIT_S, lambda: self._give_up(transfer))

    def _after(self, seconds: float, work: Callable[[], None]) -> None:
        self._rank.all.timeline.after(seconds, work)

    def _say(self, transfer: Transfer, error: str, certain: bool) -> None:
        """Tell the caller, unless it was told, or has ended."""
        if transfer.said:
            return
        transfer.said = True
        self._rank.later(0.0, lambda: transfer.done(error, certain))

    def _give_up(self, transfer: Transfer) -> None:
        if not transfer.said:
            transfer.late = True
            self._say(transfer, "a call ran past its limit", False)

    def _end(self, transfer: Transfer) -> None:
        self._under_way.remove(transfer)
        transfer.over = True
        for copy in transfer.copies:
            transfer.domain(copy).device_claims.end_write(copy.target)

    def _break(self, transfer: Transfer) -> None:
        """It fails for certain, with a part of it done."""
        if transfer.over or self._waits(transfer, lambda: self._break(transfer)):
            return
        for copy in transfer.copies:
            if not transfer.target.deaf and self._rank.all.dice.random() < 0.5:
                transfer.domain(copy).device[copy.target] = list(_held(transfer, copy))
        self._end(transfer)
        self._say(transfer, "simulated", True)

    def _waits(self, transfer: Transfer, again: Callable[[], None]) -> bool:
        """Somebody who has to do something for the transfer is stopped: it goes on after that one does."""
        for rank in (transfer.target, transfer.source):
            on_wire = transfer.on_wire and rank is transfer.source is transfer.caller
            if rank.stopped and not rank.deaf and not on_wire:
                late = transfer.late and rank is transfer.other
                delay = self._rank.all.dice.random() * (LATE_S if late else MEAN_S)
                rank.when_continued.append(partial(self._after, delay, again))
                return True
        return False

    def _arrive(self, transfer: Transfer) -> None:
        if transfer.over or self._waits(transfer, lambda: self._arrive(transfer)):
            return
        if transfer.other.deaf:
            self._end(transfer)
            self._say(transfer, "the peer is gone", True)
        elif transfer.caller.deaf and not transfer.ends:
            return  # it has another moment now
        else:
            for copy in transfer.copies:
                held = (transfer.early or {}).get(copy) or _held(transfer, copy)
                transfer.domain(copy).device[copy.target] = list(held)
            self._end(transfer)
            self._say(transfer, "", True)


def _copies_of(role: str, mapping: RemoteBlocks, *, push: bool) -> list[Copy]:
    local, remote = mapping.local.tolist(), mapping.remote.tolist()
    assert len(local) == len(remote) == len(set(remote)) == len(set(local)), "a block is moved twice in one transfer"
    part = Part(role, BlockType(mapping.block_type))
    pairs = zip(local, remote, strict=True) if push else zip(remote, local, strict=True)
    return [Copy(part, source, target) for source, target in pairs]


def _held(transfer: Transfer, copy: Copy) -> Values:
    """What the source has there now; of what comes late nobody knows."""
    domain = transfer.source.domains[copy.part]
    return domain.garbage if transfer.late else tuple(domain.device[copy.source])
