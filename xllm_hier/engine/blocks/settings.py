"""Settings of the block books that never change: sizes of blocks, limits of reads, drafts, reuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...block import BlockType


@dataclass(frozen=True)
class ReadLimits:
    """The settings `prefetch_batch_size`, `prefetch_timeout` and `prefetch_deadline_ms` (0 = none), and the seconds
    without an answer after which a read is given up."""

    batch_size: int = 8
    timeout_ms: int = 30000
    deadline_ms: int = 0
    silence_s: float = 300.0


@dataclass(frozen=True)
class Drafting:
    """Up to `num_tokens` drafts per step and sequence; by a model of the workers with caches of its own (`by_model`),
    else by lookup.

    `needs_hidden`: that model takes the target's hidden state of the token before, which no cache holds, so the last
    token of a restored prefix is computed again. `types`: the BlockTypes that the draft model has blocks of.
    """

    num_tokens: int = 0
    by_model: bool = False
    needs_hidden: bool = False
    types: tuple[str, ...] = (BlockType.KV.value,)

    @property
    def ahead(self) -> int:
        """Tokens beyond those of a step for which a sequence needs a block: the newest one, for the draft model."""
        return int(self.by_model)

    @property
    def moved_types(self) -> tuple[str, ...]:
        """BlockTypes whose blocks the draft model's follow in every transfer; none without a draft model."""
        return self.types if self.by_model else ()


@dataclass(frozen=True)
class BookSettings:
    """Settings of one instance's block books.

    `strides[t]`: tokens after which something of type t is always kept for restores that begin there. Steps over
    prompt tokens end at multiples of `scan_tokens`, or with the prompt. `prefix_cache` False switches all reuse off.
    A draft model's blocks (`drafting`) have the numbers of the target's and move with them.
    """

    block_size: int
    strides: Mapping[BlockType, int] = field(default_factory=dict)
    scan_tokens: int = 1
    prefix_cache: bool = True
    decode_kv_reuse: str = "canonical"
    limits: ReadLimits = field(default_factory=ReadLimits)
    drafting: Drafting = field(default_factory=Drafting)

    @property
    def tags_decoded(self) -> bool:
        """Blocks with decoded tokens get hashes of their own, because their bits are not those of a prompt's blocks."""
        return self.decode_kv_reuse != "as_is"

    def beyond_grid(self, start: int, end: int) -> int:
        """Tokens of a prompt's step over `start .. end` behind the last place where the step may end.

        It ends behind a block, where a state is worth keeping, or at least behind a cell of the scan.
        """
        if self.scan_tokens == 1:
            return 0
        beyond = end % self.block_size
        return beyond if end - beyond > start else min(end % self.scan_tokens, end - start)
