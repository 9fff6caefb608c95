"""Plans and their answers: the messages between engine and workers that compute or move something, packed by `wire`.

The worker keeps no block bookkeeping: each plan carries all that it needs. Questions and orders beside them are in
`calls.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .ints import Ints
from .request_messages import SamplingSpec, TokenLogprob

# ---------------------------------------------------------------------------------------- engine -> worker


@dataclass(frozen=True)
class BlockMapping:
    """Blocks to move between device and host of one BlockType: `device[i]` <-> `host[i]`, of content `hashes[i]`.

    `hashes` is the concatenation of 16-byte block hashes.
    """

    block_type: str
    device: Ints
    host: Ints
    hashes: bytes


@dataclass(frozen=True)
class PrefetchFromStorage:
    """G2H batch: read logical blocks `hashes` of the store into `host`; answered by one `PrefetchAnswer`.

    `offset` is the batch's first column in the request's result matrix.
    """

    prefetch_id: int
    offset: int
    block_type: str
    host: Ints
    hashes: bytes


@dataclass(frozen=True)
class ProbeStorage:
    """Which of these blocks does the store have? Asked for all types of one request's blocks before anything is read;
    answered by one `ProbeAnswer`. `hashes[t]` are those of type `block_types[t]`."""

    prefetch_id: int
    block_types: list[str]
    hashes: list[bytes]


@dataclass(frozen=True)
class TransferBlocks:
    """Layered H2D load, registered before the forward that needs it; answered by one `TransferAck` at once.

    `draft_mappings` travel under the same batch_id and synchroniser. Batch ids only grow; a live one is never reused.
    """

    batch_id: int
    target_mappings: list[BlockMapping]
    draft_mappings: list[BlockMapping] = field(default_factory=list)


@dataclass(frozen=True)
class TransferKvBlocks:
    """D2H2G write-back, ordered after every forward sent before it; answered by `OffloadCopied`, then `OffloadStored`.

    `put` False keeps the blocks out of the store: blocks that only a resumed sequence may read stay on the host.
    """

    transfer_id: int
    target_mappings: list[BlockMapping]
    draft_mappings: list[BlockMapping] = field(default_factory=list)
    put: bool = True


HOLE = -1  # the place of a block in an int32 table that is not there


@dataclass(frozen=True)
class StateMoves:
    """A sequence's recurrent state in one step: block `source` holds it before the first token (HOLE: there is none
    yet), and after `positions[i]` tokens of the sequence it goes to block `blocks[i]`; positions ascend.

    A source that is not among `blocks` is only read: a checkpoint that others share is never written.
    """

    source: int
    positions: Ints
    blocks: Ints


@dataclass(frozen=True)
class SequenceRows:
    """The tokens of one sequence at positions `start .. start + len(token_ids)`, which a step computes.

    Rows of `Forward.prefill` take the prefill path, those of `Forward.decode` the decode path: one query row each over
    its own context. A decode path of several rows is a replay after preemption, or verifies drafts (the KV of all rows
    is written before any row attends).

    ==================  ============================================================================================
    block_table         device blocks of positions i * block_size ..., as many as the rows need
    window_table        the same for SWA blocks, HOLE where a block has slid out; None: the model has no such blocks
    states              moves of LINEAR blocks; None: the model has none
    write_from          KV is written from this position on: a full hit computes its last token again without touching
                        the shared block
    sampling            None: nothing is sampled. Else one token is drawn from the last row that is no draft, and one
                        from each draft; a draft is accepted when the token drawn before it is the draft
    draw                number of the first draw, which is the number of tokens generated before; draft j has draw + j
    num_drafts          so many of the last tokens are drafts (decode path only)
    prompt_logprobs     as in AddRequest, for the tokens that follow each of these positions (prefill path only)
    next_token          the known token behind these; None: it is not known yet
    next_generated      that token is a generated one, which a draft model computes by the decode path
    draft_from          first position without KV of the draft model; None: no draft model follows this sequence.
                        It computes up to and with the token behind these rows, which `block_table` then covers too
    num_proposals       drafts wanted from the draft model behind a sampled token, at most
    ==================  ============================================================================================
    """

    start: int
    token_ids: Ints
    block_table: Ints
    write_from: int = 0
    sampling: SamplingSpec | None = None
    draw: int = 0
    num_drafts: int = 0
    prompt_logprobs: int | None = None
    next_token: int | None = None
    next_generated: bool = False
    draft_from: int | None = None
    num_proposals: int = 0
    window_table: Ints | None = None
    states: StateMoves | None = None


@dataclass(frozen=True)
class RemoteBlocks:
    """Blocks of one BlockType that move between this instance's device and a peer's: `local[i]` <-> `remote[i]`."""

    block_type: str
    local: Ints
    remote: Ints


@dataclass(frozen=True)
class PushBlocks:
    """Write these device blocks into those of peer `peer`, each layer group once the forward has computed it.

    `draft_mappings` are those of the draft model's caches, which are complete when it has drafted.
    """

    push_id: int
    peer: str
    target_mappings: list[RemoteBlocks]
    draft_mappings: list[RemoteBlocks] = field(default_factory=list)


@dataclass(frozen=True)
class Forward:
    """One step of the model. It waits, layer group by layer group, for every load sent before it that no forward has
    attached yet; `batch_ids` names those the engine knows of, as a cross-check. Its answer waits for its `pushes`.
    """

    step_id: int
    batch_ids: list[int]
    prefill: list[SequenceRows]
    decode: list[SequenceRows]
    pushes: list[PushBlocks] = field(default_factory=list)


@dataclass(frozen=True)
class PullBlocks:
    """Read these device blocks from those of peer `peer`, at once and beside all forwards; answer: `PullDone`."""

    pull_id: int
    peer: str
    target_mappings: list[RemoteBlocks]
    draft_mappings: list[RemoteBlocks] = field(default_factory=list)


@dataclass(frozen=True)
class TransferRegion:
    """Where the device blocks of one type and domain lie on one rank: layer l of block b at
    `addresses[l] + b * layer_bytes`, of `num_blocks` blocks whose layout is `schema_hash`."""

    role: str
    block_type: str
    layer_bytes: int
    num_blocks: int
    addresses: list[int]
    schema_hash: str = ""


@dataclass(frozen=True)
class TransferEndpoint:
    """The address of the Transfer Engine of one rank, and the memory that it may read and write there."""

    rank: int
    session: str
    regions: list[TransferRegion]


@dataclass(frozen=True)
class LinkPeer:
    """From now on `peer` names the instance with these endpoints, one for each rank; sent before any move names it."""

    peer: str
    endpoints: list[TransferEndpoint]


@dataclass(frozen=True)
class UnlinkPeer:
    """Nothing is moved to or from this peer any more: queued moves fail, moves under way end by their limit."""

    peer: str


EQUAL, ROUNDING, DIFFERENT = 0, 1, 2


@dataclass(frozen=True)
class CompareBlocks:
    """Compare device blocks `first[i]` and `second[i]`, after the forwards sent before; answer: `BlocksCompared`."""

    compare_id: int
    block_type: str
    first: Ints
    second: Ints


# ---------------------------------------------------------------------------------------- worker -> engine


MISS, HIT, UNKNOWN = 0, 1, 2


@dataclass(frozen=True)
class PrefetchAnswer:
    """Rank-local result of one G2H batch, one byte per logical block.

    HIT: whole and verified in `host`. MISS: nothing was read, or the read has ended. UNKNOWN: the read failed in a way
    that leaves open whether something still writes to the target (measured: a store client that stalled wrote after
    its call had returned an error), so the target must not be used for anything yet.
    """

    prefetch_id: int
    offset: int
    rank: int
    hits: bytes


@dataclass(frozen=True)
class ProbeAnswer:
    """Rank-local result of a `ProbeStorage`, one byte per block: HIT where every object of this rank is there."""

    prefetch_id: int
    rank: int
    hits: list[bytes]


@dataclass(frozen=True)
class TransferAck:
    """A load is registered; the copy runs. `num_blocks` = logical blocks scheduled, each in all domains."""

    batch_id: int
    rank: int
    num_blocks: int


@dataclass(frozen=True)
class OffloadCopied:
    """D2H of a write-back has ended: device blocks may go. `num_blocks` is below the asked number when it failed."""

    transfer_id: int
    rank: int
    num_blocks: int


@dataclass(frozen=True)
class OffloadStored:
    """The store part of a write-back has ended, well or not: host blocks may be reused. `num_stored` counts logical
    blocks with every object present; it is informative only."""

    transfer_id: int
    rank: int
    num_stored: int


@dataclass(frozen=True)
class PushFailure:
    """A push that did not arrive whole. `certain`: nothing of it is being written any more; else a call ran past its
    limit, and its bytes may still come when the peer goes on."""

    push_id: int
    error: str
    certain: bool


@dataclass(frozen=True)
class PullDone:
    """A pull has ended on one rank; `error` None: every block is there. `certain` as in PushFailure."""

    pull_id: int
    rank: int
    error: str | None = None
    certain: bool = True


@dataclass(frozen=True)
class ForwardOutput:
    """Answer to a Forward: tokens of each sequence that had `sampling`, prefill sequences first, in plan order.

    `num_tokens` says how many each has, one and those its accepted drafts brought; None: one each. `proposals` are what
    the worker's draft model drafts behind them, one array for each of these sequences; empty without such a model.
    `draft_s` are the seconds of drafting beyond the draft model's share of the step's own tokens; not in `compute_s`.

    `logprobs[i]` is None where the sequence did not ask. `prompt_logprobs` holds one list per prefill sequence that
    asked. `failed_batches`: loads that this forward waited for in vain; the rows computed from them are void.
    `push_wait_s`: the answer waited so long for `pushes` after all was computed; not in `compute_s`.
    `error`: the forward itself failed; nothing of it is valid. `view`: all facts that the rank's cache depends on,
    as words and a digest (see PlanDigest); it is the same on all ranks, or their caches have gone apart.
    """

    step_id: int
    rank: int
    token_ids: Ints
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: list[list[TokenLogprob]]
    failed_batches: list[int]
    compute_s: float
    wait_s: float
    error: str | None = None
    view: str = ""
    num_tokens: Ints | None = None
    proposals: list[Ints] = field(default_factory=list)
    draft_s: float = 0.0
    failed_pushes: list[PushFailure] = field(default_factory=list)
    push_wait_s: float = 0.0


@dataclass(frozen=True)
class BlocksCompared:
    """A rank's verdict on each pair: EQUAL bit for bit, ROUNDING (near), or DIFFERENT."""

    compare_id: int
    rank: int
    verdicts: bytes
