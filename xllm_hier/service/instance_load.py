"""How much each instance has to do and how fast it is, as its heartbeats say; what it has not measured is guessed."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

DEFAULT_COMPUTE_S = 1e-4  # of a token, where nobody has measured anything
LOAD_SHARE, READ_SHARE = 0.05, 0.25  # of computing a token: what nobody has measured of restoring it
SHARED_SHARE = 0.5  # of a step does not grow with its sequences: weights are read once


@dataclass(frozen=True)
class InstanceLoad:
    """How much an instance has to do and how fast it is, as its heartbeats say; None where it has measured nothing.

    ===================  ===========================================================================================
    num_open             requests somebody waits for; some are `num_waiting`, some `num_running`
    backlog_tokens       prompt tokens of its open requests that are still to be computed
    compute_s            of one prompt token
    load_s, read_s       of one block from host to device, from store to host
    step_s               between two tokens of a running answer
    ttft_s               recent median from arrival to first token
    store_state          `detached`: it reads nothing of its store; empty: not told
    ===================  ===========================================================================================
    """

    num_open: int = 0
    num_waiting: int = 0
    num_running: int = 0
    backlog_tokens: int = 0
    compute_s: float | None = None
    load_s: float | None = None
    read_s: float | None = None
    step_s: float | None = None
    ttft_s: float | None = None
    store_state: str = ""

    @classmethod
    def from_dict(cls, raw: object) -> InstanceLoad:
        """What of `raw` can be used: unknown names, wrong types and impossible numbers count as not told."""
        told: dict[str, Any] = raw if isinstance(raw, dict) else {}
        values: dict[str, Any] = {}
        for item in dataclasses.fields(cls):
            value = told.get(item.name)
            if isinstance(item.default, str):
                good = isinstance(value, str)
            elif item.default is None:
                good = isinstance(value, int | float) and math.isfinite(value) and value > 0
            else:
                good = isinstance(value, int) and value >= 0
            if good and not isinstance(value, bool):
                values[item.name] = value
        return cls(**values)


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
    """Of each instance; what it has not measured is as with the others, and what none has in the order of the tiers."""
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
        # An engine computes what would take longer to bring back.
        rates[one.name] = Rates(own, min(host, own), min(store, own), one.load.step_s or step)
    return rates


def with_one_more(step_s: float, num_running: int, num_open: int) -> float:
    """Length of a step once all that are open and one more run, of which so many ran when it took `step_s`."""
    return step_s * (SHARED_SHARE + (1 - SHARED_SHARE) * (num_open + 1) / max(1, num_running))
