"""A sequence on its way from a prefill to a decode instance: which blocks go where.

The decode instance allocates first: device blocks for all that is needed to go on behind the known tokens, except what
its device prefix has. Which those are is said by number, type by type, so that any part of them may be there already;
of a sliding window they are its last blocks, of recurrent layers the one state behind the last token::

    KV      0   1   2   3   4        D has 0 and 1: 2, 3 and 4 are to be filled
    SWA     .   .   .   3   4        the window before the last token; nothing else is ever looked at
    LINEAR                  0        by convention the state is number 0

The prefill instance sends each of them once, as soon as it is complete. Its draft model's blocks go along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...block import BlockType
from ...errors import InvariantError
from ...peer_plans import NumberedBlocks
from ...plans import HOLE, RemoteBlocks, ints
from ..blocks.books import HierarchyBlockManagerPool
from ..blocks.sequence import Sequence

Places = dict[BlockType, dict[int, int]]  # of each type device blocks by number
STATE = 0  # the number of a recurrent state


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


# ------------------------------------------------------------------------------------------- at prefill


@dataclass(eq=False)
class Handover:
    """What a decode instance still lacks of one sequence, and where it wants it; `pushing` is the part that the step
    under way sends."""

    lacking: Places
    pushing: Places = field(default_factory=dict)

    def due(self, sequence: Sequence, end: int) -> list[RemoteBlocks]:
        """What a step over the tokens up to `end` completes; not sent again once `push_ended` was called."""
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
        """What the step was to send has arrived."""
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
        raise InvariantError(f"block {number} of type {kind.value} was let go of before it was handed over")
    return block


# -------------------------------------------------------------------------------------------- at decode


def allocate(manager: HierarchyBlockManagerPool, sequence: Sequence) -> Places | None:
    """Device blocks to go on behind the known tokens of a sequence without blocks; None and nothing changed without
    room. Returns those to be filled; the others are found in the device prefix, which alone is looked at.

    Unlike a restore each type goes by itself: whoever computes the rest has all types.
    """
    size, known = manager.block_size, len(sequence.tokens)
    end = -(-(known + manager.drafting.ahead) // size)
    # Only blocks that `publish_filled` counts as published may be found.
    reach = sequence.prompt_length if sequence.tag_decoded else known
    found: Places = {}
    lacking: dict[BlockType, list[int]] = {}
    for pools in manager.tables:
        first = pools.rule.needed(known - known % size).start
        last = reach // size if manager.shares(sequence) else 0
        there = {n: b for n in range(first, last) if (b := pools.device.find(sequence.hash_of(n))) is not None}
        found[pools.type] = there
        lacking[pools.type] = [n for n in range(first, end) if n not in there]
    for kind, blocks in found.items():
        for block in blocks.values():
            manager.pools[kind].device.pin(block)
    live = BlockType.LINEAR in manager.pools
    counts = {kind: len(numbers) for kind, numbers in lacking.items()}
    new = manager.allocate_all(counts | ({BlockType.LINEAR: 1 + manager.drafting.num_tokens} if live else {}))
    if new is None:
        for kind, blocks in found.items():
            manager.pools[kind].device.unpin(blocks.values())
        return None
    places = {kind: dict(zip(numbers, new[kind], strict=True)) for kind, numbers in lacking.items()}
    for kind, blocks in places.items():
        for number, block in sorted((found[kind] | blocks).items()):
            sequence.held[kind].put(number, block)
    if live:
        sequence.live_states.extend(new[BlockType.LINEAR])
        places[BlockType.LINEAR] = {STATE: sequence.live_states[0]}
    sequence.probed = True
    manager.claim(sequence, num_shared(sequence, places))
    return places


def num_shared(sequence: Sequence, places: Places) -> int:
    """Leading blocks of the first type that need not be sent."""
    return min(places.get(sequence.types[0], {}), default=len(sequence.device_blocks))


def take_over(
    manager: HierarchyBlockManagerPool, sequence: Sequence, places: Mapping[BlockType, Mapping[int, int]]
) -> None:
    """The `places` of all known tokens but the newest are filled: they are found and written back like any others, and
    the sequence goes on from there."""
    known = len(sequence.tokens) - 1
    sequence.num_computed = sequence.write_from = known
    sequence.draft_from = known + 1
    if sequence.live_states:
        sequence.states = {known: sequence.live_states[0]}
    manager.publish_filled(sequence, places)
    sequence.num_restored = sequence.prompt_length // manager.block_size
