"""A sequence on its way from a prefill to a decode instance: which blocks go where.

The decode instance allocates first: device blocks for all that is needed to go on behind the known tokens, except those
that its device prefix has. Which those are is said by number, type by type, so that any part of them may be there
already; of a sliding window they are its last blocks, of recurrent layers the one state behind the last token::

    KV      0   1   2   3   4        D has 0 and 1: 2, 3 and 4 are to be filled
    SWA     .   .   .   3   4        the window before the last token; nothing else is ever looked at
    LINEAR                  0        by convention the state is number 0

The prefill instance sends each of them once, as soon as it is complete. Its draft model's blocks go along.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...block import BlockType
from ...errors import InvariantError
from ...ints import ints
from ...peer_plans import NumberedBlocks
from ...plans import HOLE, RemoteBlocks
from ..blocks.sequence import Sequence
from ..blocks.types import Places


def numbered(places: Places) -> list[NumberedBlocks]:
    """The message's form of `places`."""
    return [
        NumberedBlocks(kind.value, ints(list(blocks)), ints(list(blocks.values()))) for kind, blocks in places.items()
    ]


def places_of(blocks: Iterable[NumberedBlocks]) -> Places:
    """The places a message tells of. Raises ValueError when a type or a number comes twice, or lengths differ."""
    places: Places = {}
    for one in blocks:
        kind, numbers = BlockType(one.block_type), one.numbers.tolist()
        if kind in places or len(set(numbers)) < len(numbers) or len(numbers) != len(one.blocks):
            raise ValueError(f"blocks of type {kind.value} are named twice or not at all")
        places[kind] = dict(zip(numbers, one.blocks.tolist(), strict=True))
    return places


@dataclass(eq=False)
class Handover:
    """The blocks of one sequence that a decode instance still lacks, and their places there; `pushing` is the part that
    the step under way sends."""

    lacking: Places
    pushing: Places = field(default_factory=dict)

    def due(self, sequence: Sequence, end: int) -> list[RemoteBlocks]:
        """The lacking blocks that a step over the tokens up to `end` completes; once `push_ended` was called they lack
        no more."""
        last, complete = end == len(sequence.tokens), end // sequence.block_size
        self.pushing = {
            kind: numbers
            for kind, places in self.lacking.items()
            if (numbers := {n: block for n, block in places.items() if last or (n < complete and _is_table(kind))})
        }
        return [
            RemoteBlocks(
                kind.value, ints([_local(sequence, kind, n, end) for n in places]), ints(list(places.values()))
            )
            for kind, places in self.pushing.items()
        ]

    def push_ended(self) -> None:
        """The blocks that the step was to send have arrived."""
        pushing, self.pushing = self.pushing, {}
        for kind, numbers in pushing.items():
            for number in numbers:
                del self.lacking[kind][number]

    def source(self, sequence: Sequence) -> list[NumberedBlocks]:
        """Where all that is lacking lies, once all known tokens but the newest are computed."""
        end = sequence.num_computed
        return numbered({k: {n: _local(sequence, k, n, end) for n in places} for k, places in self.lacking.items()})


def _is_table(kind: BlockType) -> bool:
    return kind is not BlockType.LINEAR


def _local(sequence: Sequence, kind: BlockType, number: int, end: int) -> int:
    block = sequence.held[kind].block(number) if _is_table(kind) else sequence.states[end]
    if block == HOLE:
        raise InvariantError(f"block {number} of type {kind.value} was released before it was handed over")
    return block
