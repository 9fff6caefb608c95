"""Prefill and decode instances with their clients on one fake clock: killed, stopped, cut off, started again."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from xllm_hier.request_messages import AbortRequest

from .instance import WAIT_S, Instance, Place
from .moving import CALL_LIMIT_S
from .network import Network
from .processes import SharedTimeline
from .ranks import Rank
from .world import PATIENCE_S, Asked, Settings

SLACK_S = 25.0  # what a peer that has come back needs to be of use: its blocks are held for so long


@dataclass(frozen=True)
class Pair:
    """Settings of a cluster: `prefill` those of each prefill instance, `decode` of each decode instance."""

    prefill: Settings = field(default_factory=Settings)
    decode: Settings = field(default_factory=Settings)
    num_prefill: int = 1
    num_decode: int = 1
    mode: str = "PUSH"

    def places(self) -> list[Place]:
        decode = tuple(7100 + number for number in range(self.num_decode))
        return [
            *(Place(f"D{number}", False, port, (), self.mode) for number, port in enumerate(decode)),
            *(Place(f"P{number}", True, 7000 + number, decode, self.mode) for number in range(self.num_prefill)),
        ]


class Cluster:
    """`run` lets time pass until all is at rest."""

    def __init__(self, settings: Pair) -> None:
        self.settings = settings
        self.timeline = SharedTimeline(settings.prefill.seed)
        self.network = Network(self.timeline, settings.prefill.seed)
        self.contents = settings.prefill.contents()
        self.sessions: dict[str, Rank] = {}
        self.places = {place.name: place for place in settings.places()}
        self.lives: Counter[str] = Counter()
        self.instances: dict[str, Instance] = {}
        self.past: list[Instance] = []
        self.asked: dict[str, tuple[Instance, Asked]] = {}
        self.num_events_left = 0
        self.num_absent = 0  # instances that are to be started again
        self.met: Counter[str] = Counter()
        self._calm: dict[str, float] = {}  # by place: since when nothing has been wrong with it

    # ----------------------------------------------------------------------------------------------- lives

    def start(self, name: str) -> None:
        place = self.places[name]
        settings = self.settings.prefill if place.prefill else self.settings.decode
        self.lives[name] += 1
        life, shared = self.lives[name], (self.network, self.contents, self.sessions)
        instance = Instance(place, settings, *shared, life, self._allowed, lambda of: self.asked[of][1].salt)
        self.instances[name] = instance
        self._disturb(name)

    def kill(self, name: str, restart_s: float | None = None) -> None:
        """All processes of an instance end at once; it comes again after a while, or never."""
        instance = self.instances.pop(name, None)
        if instance is None:
            return
        self.met["kill"] += 1
        self.past.append(instance)
        self.timeline.kill(instance.process)
        self.network.ended(instance.process)
        for rank in instance.ranks.ranks:
            rank.die()
            rank.mover.died()
            waiting, rank.when_continued = rank.when_continued, []
            for work in waiting:
                work()
        self._disturb(name)
        if restart_s is not None:
            self.num_absent += 1

            def again() -> None:
                self.num_absent -= 1
                self.start(name)

            self.timeline.after(restart_s, again)

    def stop(self, name: str, seconds: float, who: str = "all") -> None:
        """As by SIGSTOP and SIGCONT: of `all` processes, of the `engine`, or of the `ranks`."""
        instance = self.instances.get(name)
        if instance is None or instance.process.stopped or any(rank.stopped for rank in instance.ranks.ranks):
            return
        self.met[f"stop {who}"] += 1
        if who in ("all", "ranks"):
            for rank in instance.ranks.ranks:
                rank.stopped = True
            if seconds > instance.settings.limit_s - CALL_LIMIT_S - 1.0:
                instance.ranks.doom = instance.ranks.doom or "ranks were stopped for too long"
        instance.process.stopped = who != "ranks"
        self._disturb(name, seconds)

        def go_on() -> None:
            if self.instances.get(name) is instance:
                instance.process.stopped = False
                for rank in instance.ranks.ranks:
                    rank.go_on()
                self.network.went_on()
                self._disturb(name)

        self.timeline.after(seconds, go_on)

    def cut_off(self, one: str, other: str, seconds: float, how: str) -> None:
        """Lines `break` in both directions, `break one way`, or `stall`."""
        self.met[how] += 1
        if how == "stall":
            self.network.stall_lines(one, other, seconds)
        else:
            self.network.break_lines(one, other, seconds)
            if how == "break":
                self.network.break_lines(other, one, seconds)
        for name in (one, other):
            self._disturb(name, seconds)

    def _disturb(self, name: str, seconds: float = 0.0) -> None:
        self._calm[name] = max(self._calm.get(name, 0.0), self.timeline.now + seconds)

    def fault(self, name: str, kind: str, ranks: Iterable[int], amount: float) -> None:
        instance = self.instances.get(name)
        if instance is not None:
            instance.ranks.arm(kind, [rank for rank in ranks if rank < instance.settings.num_ranks], amount)

    def _allowed(self, instance: Instance) -> dict[int, bool]:
        """A request may fail for want of a decode instance only if none has been at peace for long enough."""
        since = self.timeline.now - WAIT_S + SLACK_S
        at_peace = [
            name
            for name, other in self.instances.items()
            if not other.place.prefill and not other.draining and not other.ranks.doom
            if max(self._calm[name], self._calm[instance.place.name]) < since and not self._failed_moves()
        ]
        everybody = [*self.instances.values(), *self.past]
        return {503: not at_peace, 500: any(other.ranks.num_failed_forwards for other in everybody)}

    def _failed_moves(self) -> bool:
        kinds = ("push limit", "pull limit", "push", "pull")
        return any(one.ranks.done[kind] for one in (*self.instances.values(), *self.past) for kind in kinds)

    # --------------------------------------------------------------------------------------------- clients

    def add(self, where: str, name: str, prompt: Iterable[int], max_tokens: int, **more: Any) -> None:
        """A client asks a prefill instance, if there is one."""
        instance = self.instances.get(where)
        if instance is not None:
            self.asked[name] = instance, instance.add(name, prompt, max_tokens, **more)

    def abort(self, name: str) -> None:
        if name in self.asked and self.asked[name][1].end is None:
            instance, asked = self.asked[name]
            asked.aborted = True
            instance.api.inbox.append(AbortRequest(name))

    # ------------------------------------------------------------------------------------------------ time

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Until `until` holds, else until nobody waits and nothing is under way or held."""
        logger = logging.getLogger("xllm.peers")
        level, logger.level = logger.level, logging.CRITICAL
        self.timeline.latest = self.timeline.now + PATIENCE_S
        try:
            with next(iter(self.instances.values())).installed():
                self.timeline.run(until or self._is_over)
        except AssertionError as error:
            if str(error) == "something waits for ever":
                left = {
                    name: {what: _short(one) for what, one in of.items()} for name, of in self.what_is_left().items()
                }
                raise AssertionError(f"for ever: {left}") from error
            raise
        finally:
            logger.level = level
        if until is None:
            for instance in self.instances.values():
                instance.check_at_the_end()

    def _is_over(self) -> bool:
        for name, instance in list(self.instances.items()):
            if instance.dead is not None:
                self.met["ends"] += 1
                self.kill(name)
        return not self.what_is_left()

    def what_is_left(self) -> dict[str, dict[str, Any]]:
        """What is not at rest, by instance."""
        if self.num_events_left or self.num_absent:
            return {"script": {"events": self.num_events_left, "absent": self.num_absent}}
        left = {name: instance.what_is_left() for name, instance in self.instances.items()}
        left |= {f"{name} is stopped": {"": 1} for name, one in self.instances.items() if one.process.stopped}
        on_wire = sum(rank.mover.num_under_way for one in self.past for rank in one.ranks.ranks)
        left |= {"on the wire": {"": on_wire}} if on_wire else {}
        return {name: what for name, what in left.items() if what}

    def end(self) -> None:
        """Leave no thread behind."""
        self.timeline.end()


def _short(what: Any) -> str:
    """A table by its phases and keys."""
    if isinstance(what, dict):
        return ", ".join(f"{name}: {getattr(one, 'phase', one)}" for name, one in what.items())
    return f"{len(what)} of them" if isinstance(what, list) else str(what)
