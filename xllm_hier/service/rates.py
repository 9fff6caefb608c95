"""The rates of each instance, as its heartbeats tell them; a rate that it has not measured is guessed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..kv_events import InstanceLoad

DEFAULT_COMPUTE_S = 1e-4  # of a token, where no instance has measured anything
LOAD_SHARE, READ_SHARE = 0.05, 0.25  # of computing a token: restoring it, where no instance has measured that
SHARED_SHARE = 0.5  # of a step does not grow with its sequences: weights are read once


@dataclass(frozen=True)
class Candidate:
    """One instance that may be given requests; `role` as in the registry: DEFAULT, PREFILL, DECODE or MIX."""

    name: str
    role: str
    incarnation: str
    block_size: int
    load: InstanceLoad = field(default_factory=InstanceLoad)

    @property
    def book(self) -> tuple[str, str]:
        return self.name, self.incarnation


@dataclass(frozen=True)
class Rates:
    """Seconds of one instance: for a prompt token by what it comes from, and for a step."""

    compute: float
    host: float
    store: float
    step: float


def rates_of(candidates: Iterable[Candidate]) -> dict[str, Rates]:
    """By instance; a rate it has not measured is the others' median, one that none has follows the tiers' order."""
    those = list(candidates)

    def measured(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    def per_token(seconds: float | None, one: Candidate) -> float | None:
        return None if seconds is None else seconds / one.block_size

    compute = measured(one.load.compute_s for one in those) or DEFAULT_COMPUTE_S
    load = measured(per_token(one.load.load_s, one) for one in those)
    read = measured(per_token(one.load.read_s, one) for one in those)
    step = measured(one.load.step_s for one in those) or 0.0
    rates = {}
    for one in those:
        own = one.load.compute_s or compute
        host = per_token(one.load.load_s, one) or load or LOAD_SHARE * own
        store = host + (per_token(one.load.read_s, one) or read or READ_SHARE * own)
        if one.load.store_state == "detached":
            store = own
        # An engine computes blocks whose restoring would take longer.
        rates[one.name] = Rates(own, min(host, own), min(store, own), one.load.step_s or step)
    return rates


def with_one_more(step_s: float, num_running: int, num_open: int) -> float:
    """Length of a step once all that are open and one more run, of which so many ran when it took `step_s`."""
    return step_s * (SHARED_SHARE + (1 - SHARED_SHARE) * (num_open + 1) / max(1, num_running))
