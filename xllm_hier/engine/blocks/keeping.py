"""Which blocks are worth keeping: of windows and states only those that a restore at some likely boundary needs."""

from __future__ import annotations

import sys

from .sequence import Sequence
from .settings import BookSettings
from .types import TypePools


class Keeping:
    """Answers for blocks of all types.

    A KV block is always worth keeping. A block of a type with a span is, if a restore needs it at a multiple of the
    type's stride or at one of the sequence's own `boundaries`: its prompt's end, where its prompt left another's, where
    it was interrupted.
    """

    def __init__(self, settings: BookSettings) -> None:
        size = settings.block_size
        self._stride_blocks = {kind: -(-tokens // size) for kind, tokens in settings.strides.items()}

    def is_kept(self, sequence: Sequence, pools: TypePools, index: int) -> bool:
        """A restore at some boundary worth keeping needs block `index` of this type."""
        if not pools.rule.span:
            return True
        boundaries, stride = pools.rule.needed_at(index), self._stride_blocks.get(pools.type, sys.maxsize)
        on_stride = (boundaries.stop - 1) // stride * stride
        return on_stride >= boundaries.start or any(boundary in boundaries for boundary in sequence.boundaries)
