"""One request in the engine: its tokens, its blocks in each tier, and where it stands."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ..hashing import block_hash, decode_tag, prompt_hashes, root_hash
from ..plans import AddRequest, Ints, PromptUsage


class SequenceState(Enum):
    """Queue a sequence stands in. CANONICAL: answered in full, its decoded blocks wait to be recomputed."""

    PREFETCHING = "prefetching"
    WAITING = "waiting"
    RUNNING = "running"
    CANONICAL = "canonical"
    FINISHED = "finished"


def _now() -> float:
    return time.monotonic()


@dataclass(eq=False)
class Sequence:
    """A request's tokens and the blocks it holds; each held block is one reference in its pool.

    ===================  =========================================================================================
    device_blocks[i]     device block of tokens i*block_size .. ; referenced by this sequence
    mounted[i]           host block found for block i (host prefix or store), referenced until its load has ended
    host_targets[i]      host block reserved for the write-back of block i, FILLING, handed over to the pair
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
    state: SequenceState = SequenceState.PREFETCHING
    tokens: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    device_blocks: list[int] = field(default_factory=list)
    mounted: dict[int, int] = field(default_factory=dict)
    host_targets: dict[int, int] = field(default_factory=dict)
    from_store: set[int] = field(default_factory=set)
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
    arrived_at: float = field(default_factory=_now)
    _table: np.ndarray = field(default_factory=lambda: np.zeros(8, dtype=np.int32))
    _table_length: int = 0

    def __post_init__(self) -> None:
        self.tokens = self.request.token_ids.tolist()
        self.prompt_length = len(self.tokens)
        self.root = root_hash(self.request.cache_salt)
        self.hashes = prompt_hashes(self.request.token_ids, self.block_size, self.root)

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

    # ----------------------------------------------------------------------------------------- block table

    def block_table(self) -> Ints:
        """The device blocks as int32, in order; a copy of nothing but the ids."""
        count = len(self.device_blocks)
        if count > len(self._table):
            self._table = np.zeros(max(2 * len(self._table), count), dtype=np.int32)
            self._table_length = 0
        if count < self._table_length:
            self._table_length = 0
        self._table[self._table_length : count] = self.device_blocks[self._table_length :]
        self._table_length = count
        return self._table[:count]

    def replace_block(self, index: int, block: int) -> None:
        self.device_blocks[index] = block
        self._table_length = min(self._table_length, index)

    def forget_blocks(self) -> None:
        """Nothing is held any more; the tokens stay."""
        self.device_blocks.clear()
        self.mounted.clear()
        self.host_targets.clear()
        self._table_length = 0
        self.drafts.clear()
        self.num_computed = self.num_published = self.num_restored = self.write_from = self.draft_from = 0
        self.probed = False
