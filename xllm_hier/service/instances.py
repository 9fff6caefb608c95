"""The table of instances: their states, and whether they may be sent a request.

::

    ACTIVE      registered and alive
      | its key is gone from the registry, or it is silent: /health is asked, twice
      +-- answers -----> LEASE_LOST   still scheduled, as long as it shows signs of life  --+
      +-- does not ----> SUSPECT      not scheduled                                         |
             |                            <------------------- silent for too long ---------+
             |                            (it drains: its requests stay there)
             +-- answers again: back;  for `deregister_after_s` nothing: forgotten, its place in the index too

A registration of another incarnation under the same name replaces the old one at once. While the registry itself does
not answer nothing is concluded from it: its last answer holds, and signs of life decide.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ..kv_events import InstanceLoad
from ..registry import InstanceInfo
from .config import ServiceConfig

log = logging.getLogger("xllm.service")

_PROBE_EVERY_S = 1.0


class State(str, Enum):
    """The state of an instance, as the service sees it."""

    ACTIVE = "ACTIVE"
    LEASE_LOST = "LEASE_LOST"
    SUSPECT = "SUSPECT"


@dataclass(eq=False)
class Instance:
    """One incarnation of an instance; times are those of the caller's clock. `heard`: its last sign of life. `doubted`:
    a request did not get through. `drains`: it finishes its requests and takes no more."""

    info: InstanceInfo
    heard: float
    state: State = State.ACTIVE
    leased: bool = True
    suspect_since: float = 0.0
    probing: bool = False
    drains: bool = False
    doubted: bool = False
    probe_at: float = 0.0
    load: InstanceLoad | None = None

    @property
    def schedulable(self) -> bool:
        return self.state is not State.SUSPECT

    @property
    def publishes(self) -> bool:
        """It shows signs of life by itself."""
        return bool(self.info.events)


class Instances:
    """The instances of a cluster by name, used by one thread.

    `on_join` and `on_leave` are told of each incarnation that comes and goes, `on_suspect` of one that does not answer.
    """

    def __init__(
        self,
        config: ServiceConfig,
        on_join: Callable[[Instance], None],
        on_leave: Callable[[Instance], None],
        on_suspect: Callable[[Instance], None] = lambda instance: None,
    ) -> None:
        self._silence_s = config.heart_beat_timeout_s
        self._forget_s = config.deregister_after_s
        self._on_join, self._on_leave, self._on_suspect = on_join, on_leave, on_suspect
        self.by_name: dict[str, Instance] = {}

    def registered(self, found: dict[str, InstanceInfo], now: float) -> None:
        """Take the registry's instances, as just read."""
        for name, info in found.items():
            known = self.by_name.get(name)
            if known is not None and known.info.incarnation_id != info.incarnation_id:
                if info.register_ts_ms < known.info.register_ts_ms and now - known.heard < self._silence_s:
                    continue  # of a process that was here before
                log.info("%s is another process now", name)
                self._leave(known)
                known = None
            if known is None:
                self._join(Instance(info, now))
                continue
            moved = (known.info.store_blocks, known.info.type) != (info.store_blocks, info.type)
            known.info, known.leased = info, True
            if moved:  # the index has its blocks under the other store
                self._on_leave(known)
                self._on_join(known)
            if known.state is State.LEASE_LOST:
                self._to(known, State.ACTIVE, now, "it is registered again")
        for name, instance in self.by_name.items():
            if name not in found and instance.leased:
                instance.leased, instance.probe_at = False, now

    def _join(self, instance: Instance) -> None:
        log.info("%s instance %s has come", instance.info.role, instance.info.name)
        self.by_name[instance.info.name] = instance
        self._on_join(instance)

    def _leave(self, instance: Instance) -> None:
        del self.by_name[instance.info.name]
        self._on_leave(instance)

    def alive(self, name: str, incarnation: str, now: float) -> Instance | None:
        """A sign of life; None for one that is not this incarnation's."""
        instance = self.by_name.get(name)
        if instance is None or instance.info.incarnation_id != incarnation:
            return None
        instance.heard = now
        if instance.state is State.SUSPECT:
            instance.probe_at = min(instance.probe_at, now)
        return instance

    def unreachable(self, name: str, now: float) -> None:
        """A request could not be brought to it: look after it now."""
        if (instance := self.by_name.get(name)) is not None:
            instance.doubted = True
            instance.probe_at = min(instance.probe_at, now)

    def due(self, now: float) -> list[Instance]:
        """Those whose /health is to be asked now; each is answered by one `probed`. Those silent for too long leave."""
        for instance in list(self.by_name.values()):
            silent = now - instance.heard >= self._silence_s
            if instance.state is State.LEASE_LOST and instance.publishes and silent:
                self._to(instance, State.SUSPECT, now, "neither registered nor heard of")
        for instance in self.hopeless(now):
            if not instance.leased:
                log.warning("%s is gone", instance.info.name)
                self._leave(instance)
        found = [one for one in self.by_name.values() if self._wants_probe(one, now)]
        for instance in found:
            instance.probing, instance.probe_at = True, now + _PROBE_EVERY_S
        return found

    def hopeless(self, now: float) -> list[Instance]:
        """Those that have not answered for so long that nothing of what they were asked is waited for any more, also
        while something of theirs keeps them registered."""
        return [
            one
            for one in self.by_name.values()
            if one.state is State.SUSPECT and not one.drains and now - one.suspect_since >= self._forget_s
        ]

    def _wants_probe(self, instance: Instance, now: float) -> bool:
        if instance.probing or now < instance.probe_at:
            return False
        silent = now - instance.heard >= self._silence_s
        unsure = instance.state is State.ACTIVE and not instance.leased
        return unsure or silent or instance.doubted or instance.state is State.SUSPECT

    def probed(self, instance: Instance, healthy: bool, now: float, *, drains: bool = False) -> None:
        """Take the outcome of a question for its /health; `drains`: it says that it finishes what it has and takes
        nothing."""
        instance.probing = instance.doubted = False
        drained, instance.drains = instance.drains, drains
        if self.by_name.get(instance.info.name) is not instance:
            return
        if not healthy:
            if instance.state is not State.SUSPECT or (drained and not drains):
                self._to(instance, State.SUSPECT, now, "it drains" if drains else "its /health does not answer")
            return
        if not instance.publishes:
            instance.heard = now
        if instance.leased:
            if instance.state is not State.ACTIVE:
                self._to(instance, State.ACTIVE, now, "it answers again")
        elif instance.state is not State.LEASE_LOST and now - instance.heard < self._silence_s:
            self._to(instance, State.LEASE_LOST, now, "it lives, and is not registered any more")

    def _to(self, instance: Instance, state: State, now: float, why: str) -> None:
        log.warning("%s: %s -> %s, %s", instance.info.name, instance.state.value, state.value, why)
        instance.state = state
        if state is State.SUSPECT:
            instance.suspect_since = now
            if not instance.drains:
                self._on_suspect(instance)
