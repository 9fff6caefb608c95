"""Questions and orders beside requests and plans: from the api to the engine, and from the engine to its workers.

A question names the type of its answer; each gets exactly one answer, with the id of its call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from .figures import EngineInfo, EngineStats, WorkerState, WorkerStats

A = TypeVar("A")


class Question(Generic[A]):
    """A question whose answer is an `A`."""


@dataclass(frozen=True)
class Done:
    """The order was carried out; there is nothing to tell."""


@dataclass(frozen=True)
class StorePlace:
    """The settings that say where a store is, those that are given; none: the store that was used last."""

    store_master_server_address: str | None = None
    store_client_address: str | None = None
    store_local_hostname: str | None = None

    @property
    def settings(self) -> dict[str, str]:
        """The given ones by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


# -------------------------------------------------------------------------------------------- api -> engine


@dataclass(frozen=True)
class GetInfo(Question[EngineInfo]):
    """The facts of the instance."""


@dataclass(frozen=True)
class GetStats(Question[EngineStats]):
    """The figures of the instance, fresh from all ranks."""


@dataclass(frozen=True)
class Cleared:
    """Blocks that were removed from each tier (of the store: objects)."""

    cleared: dict[str, int]


@dataclass(frozen=True)
class ClearCache(Question[Cleared]):
    """Empty `tiers` (device, host, store); blocks in use stay."""

    tiers: list[str] = field(default_factory=lambda: ["device", "host", "store"])


@dataclass(frozen=True)
class Drain(Question[Done]):
    """Refuse new requests from now on; the answer comes when none is open."""


@dataclass(frozen=True)
class SetDecodeInstances(Question[Done]):
    """The decode instances in the registry: control addresses by name."""

    instances: dict[str, str]


@dataclass(frozen=True)
class StoreSwitched:
    """The store's state after the switch, of the worst rank; `why`: the reason of a rank where it did not work."""

    state: str
    why: str = ""


@dataclass(frozen=True)
class AttachStore(Question[StoreSwitched]):
    """Use the store at `place` from now on."""

    place: StorePlace = field(default_factory=StorePlace)


@dataclass(frozen=True)
class DetachStore(Question[StoreSwitched]):
    """Ask the store for nothing more."""


@dataclass(frozen=True)
class Call:
    """A question to the engine, answered by one `CallResult` with the same `call_id`."""

    call_id: int
    question: Question[Any]


@dataclass(frozen=True)
class CallResult:
    """Answer to a `Call`; `error` None means that it worked, and `answer` is of the question's type."""

    call_id: int
    answer: EngineInfo | EngineStats | Cleared | StoreSwitched | Done | None
    error: str | None = None


# ----------------------------------------------------------------------------------------- engine -> worker


@dataclass(frozen=True)
class Ping(Question[WorkerState]):
    """A question for a sign of life, answered while the model runs."""


@dataclass(frozen=True)
class GetWorkerStats(Question[WorkerStats]):
    """The counters of one worker."""


@dataclass(frozen=True)
class StoreCleared:
    """Objects that one rank has removed from the store; `error` None: it worked."""

    removed: int
    error: str | None = None


@dataclass(frozen=True)
class ClearStore(Question[StoreCleared]):
    """Remove the name space from the store, after the writes submitted before."""


@dataclass(frozen=True)
class StoreState:
    """The store's state on one rank after a switch; `error`: the reason why it is not there, `refused`: it must not be
    used."""

    state: str
    error: str | None = None
    refused: bool = False


@dataclass(frozen=True)
class SwitchStore(Question[StoreState]):
    """Use the store at `place` from now on; None: no store."""

    place: StorePlace | None


@dataclass(frozen=True)
class Stop(Question[Done]):
    """End the process; the one order without an answer."""


@dataclass(frozen=True)
class WorkerCall:
    """A question to one worker outside of the plans, answered at any time."""

    call_id: int
    question: Question[Any]


@dataclass(frozen=True)
class WorkerResult:
    """One rank's answer to a WorkerCall, of the question's type."""

    call_id: int
    rank: int
    answer: WorkerState | WorkerStats | StoreCleared | StoreState
