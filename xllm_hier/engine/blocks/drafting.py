"""How many tokens are drafted, and by whom: the block books reckon with the blocks that this takes."""

from __future__ import annotations

from dataclasses import dataclass

from ...block import BlockType


@dataclass(frozen=True)
class Drafting:
    """Up to `num_tokens` drafts per step and sequence; by a model of the workers with caches of its own (`by_model`),
    else by lookup.

    `needs_hidden`: that model takes the target's hidden state of the token before, which no cache holds: so the last
    token of a restored prefix is computed again. `types`: the BlockTypes it has blocks of.
    """

    num_tokens: int = 0
    by_model: bool = False
    needs_hidden: bool = False
    types: tuple[str, ...] = (BlockType.KV.value,)

    @property
    def ahead(self) -> int:
        """Tokens beyond those of a step for which a sequence needs a block: the newest one, for the draft model."""
        return int(self.by_model)
