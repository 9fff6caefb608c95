"""Facts and figures that processes tell each other: a worker of itself, an engine of its instance.

A fact stays as long as its process lives (`WorkerReady`, `EngineInfo`), a figure grows (`WorkerStats`, `EngineStats`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from .plans import TransferEndpoint

# ------------------------------------------------------------------------------------------ of one worker


@dataclass(frozen=True)
class ModelDetails:
    """How one rank computes a model.

    ==================  ============================================================================================
    implementation      `own` decoder, or transformers' code (`hf`)
    batch_invariant     a row's bits are known not to depend on the rows beside it
    rows_invariant      nor on threads, or on whether it was a prompt's row or a generated one
    cpu_kernels         name of the native row kernels; empty: torch computes
    experts             the model routes tokens to experts
    attention           name of the attention kernel; `query_tiles` are its tile sizes
    prefill_tiles       tile sizes of each kind of linear, by its label; `decode_rows` are those of the decode path
    scan_tokens         prompt steps end at multiples of this; None for a model without recurrent layers
    numerics_id         digest of all of these: workers with equal ids and weights compute equal bits
    ==================  ============================================================================================
    """

    family: str = ""
    implementation: str = ""
    dtype: str = ""
    device: str = ""
    threads: int = 0
    tp_size: int = 1
    experts: bool = False
    cpu_capability: str = ""
    packed_weights: bool = False
    batch_invariant: bool = False
    rows_invariant: bool = False
    cpu_kernels: str = ""
    attention: str = ""
    query_tiles: list[int] = field(default_factory=list)
    prefill_tiles: dict[str, list[int]] = field(default_factory=dict)
    decode_rows: dict[str, list[int]] = field(default_factory=dict)
    parameter_bytes: int = 0
    scan_tokens: int | None = None
    numerics_id: str = ""


@dataclass(frozen=True)
class DraftDetails:
    """The model that drafts in a worker: `component` names its caches, which have blocks of `types`.

    `needs_hidden`: it goes on from the target's hidden state of the last restored token, which no cache holds.
    `identity`: see `WorkerReady`.
    """

    component: str
    types: list[str]
    needs_hidden: bool
    identity: str = ""
    model: ModelDetails = field(default_factory=ModelDetails)


@dataclass(frozen=True)
class TypeSizes:
    """Blocks of one BlockType on one rank: how many in each tier, of `block_bytes` each on the device in all domains
    together, and the `span` of its restore rule."""

    block_type: str
    span: int
    num_device_blocks: int
    num_host_blocks: int
    block_bytes: int


@dataclass(frozen=True)
class WorkerReady:
    """The first message of a worker: sizes that are known once the model is loaded.

    ==================  ============================================================================================
    types               blocks of each BlockType of the model, the first one's first
    draft               None: drafts need no model, or there are none
    strides             tokens between two boundaries worth keeping, by BlockType, of types with a partial restore rule
    store_keys          prefixes of the store keys that this rank writes, by BlockType
    host_bytes          host memory that this rank alone writes
    identity            text that names the weights, with PD only; else empty
    endpoint            address at which peers reach its device blocks; None without PD
    ==================  ============================================================================================
    """

    rank: int
    types: list[TypeSizes]
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int] = field(default_factory=list)
    model: ModelDetails = field(default_factory=ModelDetails)
    draft: DraftDetails | None = None
    strides: dict[str, int] = field(default_factory=dict)
    store_keys: dict[str, list[str]] = field(default_factory=dict)
    store_state: str = "detached"
    host_bytes: int = 0
    identity: str = ""
    endpoint: TransferEndpoint | None = None


@dataclass(frozen=True)
class WorkerState:
    """Answer to a ping: the step under way, the collectives begun, the loads so far, and the state of the store.

    `mixed_numerics`: the store's blocks may have other bits. `store_state` empty: not told.
    """

    doing: str = ""
    collectives: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    mixed_numerics: bool = False
    store_state: str = ""


@dataclass(frozen=True)
class Histogram:
    """Times in seconds: `buckets` are pairs of a border and the number of times up to it, the last border infinite."""

    buckets: list[tuple[float, int]]
    sum: float
    count: int


@dataclass(frozen=True)
class TransferFailures:
    """Blocks that transfers of one kind could not move, for one cause."""

    kind: str
    cause: str
    count: int


@dataclass(frozen=True)
class WorkerStats:
    """Counters of one worker, or of all ranks of an instance; maps are by kind of transfer (`h2d`, `g2h`, ...).

    `store` has the named counters of the store. `store_refused`: the reason why the store must not be used; else empty.
    """

    transfer_bytes: dict[str, int] = field(default_factory=dict)
    transfer_seconds: dict[str, Histogram] = field(default_factory=dict)
    transfer_failures: list[TransferFailures] = field(default_factory=list)
    store: dict[str, int] = field(default_factory=dict)
    store_state: str = "detached"
    store_refused: str = ""


# ---------------------------------------------------------------------------------------- of an instance


@dataclass(frozen=True)
class TypeInfo:
    """Blocks of one BlockType in each tier, all ranks' smallest; `block_bytes` of one on the device, all ranks summed;
    `span` of its restore rule."""

    device: int
    host: int
    block_bytes: int
    span: int


@dataclass(frozen=True)
class EngineInfo:
    """The facts of an instance: names, limits, sizes, addresses.

    `pd_address`, `events` and `replay` are empty where nothing listens there. `transfer_endpoints` are the sessions of
    the ranks' Transfer Engines, with PD.
    """

    model: str
    model_id: str
    version: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    block_types: dict[str, TypeInfo] = field(default_factory=dict)
    store_state: str = "detached"
    tp_size: int = 1
    tier_bytes: dict[str, int] = field(default_factory=dict)
    details: ModelDetails = field(default_factory=ModelDetails)
    pd_address: str = ""
    incarnation: str = ""
    events: str = ""
    replay: str = ""
    store_keys: dict[str, list[str]] = field(default_factory=dict)
    transfer_endpoints: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PairStats:
    """Figures of an instance that is one half of a pair. None: figures of the other role.

    `peers` has the state of each peer by its address, `phases` the number of requests in each phase of a handover.
    """

    role: str
    address: str
    peers: dict[str, str]
    push_wait_s: float
    handed_over: int | None = None
    moved: int | None = None
    failed_pushes: int | None = None
    taken_over: int | None = None
    failed_pulls: int | None = None
    held: int | None = None
    phases: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineStats:
    """The figures behind /cache/stats and /metrics; maps of tokens and requests are by tier or origin.

    `blocks` counts by tier, type and state. `pd`: None for an instance that stands alone.
    """

    workers: WorkerStats = field(default_factory=WorkerStats)
    blocks: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    tier_bytes: dict[str, int] = field(default_factory=dict)
    prefix_tokens: dict[str, int] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    prefetching: int = 0
    canonical: int = 0
    preemptions: int = 0
    generation_tokens: int = 0
    steps: int = 0
    compute_s: float = 0.0
    draft_s: float = 0.0
    load_wait_s: float = 0.0
    failed_loads: int = 0
    restore_decisions: dict[str, dict[str, int]] = field(default_factory=dict)
    audits: dict[str, int] = field(default_factory=dict)
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    draft_steps: dict[str, int] = field(default_factory=dict)
    accept_length: dict[str, float] = field(default_factory=dict)
    accept_alarm: bool = False
    cache_alarm: bool = False
    failed_offloads: int = 0
    uptime_s: float = 0.0
    pd: PairStats | None = None

    def to_json(self) -> dict[str, Any]:
        """The body of /cache/stats: the workers' figures stand beside the engine's, a failure is a list of three."""
        values = dataclasses.asdict(self)
        workers = values.pop("workers")
        workers["transfer_failures"] = [list(failure.values()) for failure in workers["transfer_failures"]]
        pair = values.pop("pd")
        if pair is not None:
            values["pd"] = {name: value for name, value in pair.items() if value is not None}
        return {**workers, **values}
