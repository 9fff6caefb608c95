"""One request in the engine: its tokens, its blocks in each tier, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ...block import BlockType
from ...clock import now
from ...hashing import block_hash, decode_tag, prompt_hashes, root_hash
from ...ints import Ints, ints
from ...request_messages import AddRequest, PromptUsage
from .types import DeviceBlocks, Held, HeldCheckpoints, Hit, Places

_NOTHING = ints([])


class SequenceState(Enum):
    """Queue a sequence stands in.

    CANONICAL: it is answered in full, and its decoded blocks wait to be recomputed. REMOTE: it waits for another
    instance, or is there.
    """

    PREFETCHING = "prefetching"
    WAITING = "waiting"
    RUNNING = "running"
    CANONICAL = "canonical"
    REMOTE = "remote"
    FINISHED = "finished"


class Home(Enum):
    """The instance that generates a sequence's tokens. SOUGHT: a decode instance that has not been found yet; FOUND:
    one that has room for the sequence, which this instance may then compute."""

    HERE = "here"
    SOUGHT = "sought"
    FOUND = "found"


@dataclass(eq=False)
class Sequence:
    """A request's tokens and the blocks it holds; each held block is one reference in its pool.

    ===================  =========================================================================================
    held[t]              blocks of BlockType t; `device_blocks`, `mounted`, `host_targets` are those of the first type
    states[n]            LINEAR device block that holds the state behind n tokens, for the n a step may begin at
    live_states          LINEAR blocks of its own, written by each step, one and one for each draft it may verify
    boundaries           numbers of blocks behind which a restore's blocks are worth keeping
    num_computed         tokens with valid KV on the device (after the loads registered for the next forward)
    num_restored         leading blocks that were there at admission, some of them from host or store; 0 when none was
    num_published        blocks whose device metadata was offered to the prefix index
    draft_from           first position that the draft model has no KV for; num_computed + 1 once a step has run
    drafts               tokens that the draft model drafted behind the last one
    ===================  =========================================================================================
    """

    request: AddRequest
    block_size: int
    tag_decoded: bool  # blocks with decoded tokens get their own hashes (decode_kv_reuse is not as_is)
    types: tuple[BlockType, ...] = (BlockType.KV,)
    private: bool = False  # it neither takes from any cache nor leaves anything there
    remote: bool = False  # another instance computes it: of the caches here only the device's counts
    state: SequenceState = SequenceState.PREFETCHING
    tokens: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    states: dict[int, int] = field(default_factory=dict)
    live_states: list[int] = field(default_factory=list)
    boundaries: set[int] = field(default_factory=set)
    num_computed: int = 0
    num_published: int = 0
    num_restored: int = 0
    write_from: int = 0
    draft_from: int = 0
    drafts: list[int] = field(default_factory=list)
    probed: bool = False  # device and host prefix were joined by `allocate`; once per admission
    waits_for: bytes | None = None  # hash that another sequence is computing and this one will share
    aborted: bool = False
    usage: PromptUsage | None = None
    usage_sent: bool = False
    arrival: int = 0
    canonical_end: int = 0
    num_preemptions: int = 0
    home: Home = Home.HERE
    hit: Hit | None = None  # see `Prefix.hit`; that of the caches and tokens as `hit_state` has them
    hit_state: tuple[object, ...] = ()
    arrived_at: float = field(default_factory=now)

    def __post_init__(self) -> None:
        self.held = {kind: HeldCheckpoints() if kind is BlockType.LINEAR else Held() for kind in self.types}
        self.tokens = self.request.token_ids.tolist()
        self.prompt_length = len(self.tokens)
        self.root = root_hash(self.request.cache_salt)
        self.hashes = prompt_hashes(self.request.token_ids, self.block_size, self.root)
        # The next turn goes on from the prompt's end, the same prompt once more from before its last token.
        self.boundaries = {(self.prompt_length - known) // self.block_size for known in (0, 1)}

    # ---------------------------------------------------------------------------------------------- order

    @property
    def order(self) -> tuple[int, int]:
        """First come first served within a priority; smaller runs first."""
        return self.request.priority, self.arrival

    # --------------------------------------------------------------------------------------------- tokens

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def in_prefill(self) -> bool:
        return self.num_computed < self.prompt_length

    @property
    def reuse_limit(self) -> int:
        """Tokens that may come from a cache: all but the last, whose logits are needed.

        Prompt logprobs need all logits of the prompt, so nothing may be reused.
        """
        if self.request.prompt_logprobs is not None and not self.num_generated:
            return 0
        return len(self.tokens) - 1

    def hash_of(self, index: int) -> bytes:
        """Hash of full block `index`, which must lie within the known tokens."""
        while len(self.hashes) <= index:
            start = len(self.hashes) * self.block_size
            parent = self.hashes[-1] if self.hashes else self.root
            tag = decode_tag(self.prompt_length) if self.tag_decoded else b""
            self.hashes.append(block_hash(parent, self.tokens[start : start + self.block_size], tag))
        return self.hashes[index]

    def parent_of(self, index: int) -> bytes:
        return self.hash_of(index - 1) if index else self.root

    def use_canonical_hashes(self) -> None:
        """From now on all blocks carry the hashes a prompt of these tokens would have."""
        self.tag_decoded = False
        del self.hashes[self.prompt_length // self.block_size :]

    # ---------------------------------------------------------------------------------------------- blocks

    @property
    def device_blocks(self) -> list[int]:
        """Of the model's first BlockType."""
        return self.held[self.types[0]].blocks

    @property
    def mounted(self) -> dict[int, int]:
        return self.held[self.types[0]].mounted

    @property
    def host_targets(self) -> dict[int, int]:
        return self.held[self.types[0]].targets

    def block_table(self) -> Ints:
        """The KV blocks on the device, in order; empty when the model has none."""
        held = self.held.get(BlockType.KV)
        return held.table() if held is not None else _NOTHING

    def window_table(self) -> Ints | None:
        """That of SWA blocks; None when the model has none."""
        return self.held[BlockType.SWA].table() if BlockType.SWA in self.held else None

    def holds_any(self, blocks: DeviceBlocks) -> bool:
        """The sequence holds one of these device blocks."""
        return bool(blocks) and any(
            block in held.blocks for kind, block in blocks if (held := self.held.get(kind)) is not None
        )

    def num_shared(self, places: Places) -> int:
        """Leading blocks of the first type that are not among `places`, of which the rest is to be filled."""
        return min(places.get(self.types[0], {}), default=len(self.device_blocks))

    def forget_blocks(self) -> None:
        """Nothing is held any more; the tokens stay."""
        for held in self.held.values():
            held.forget()
        self.states.clear()
        self.live_states.clear()
        self.drafts.clear()
        self.num_computed = self.num_published = self.num_restored = self.write_from = self.draft_from = 0
        self.probed = False
