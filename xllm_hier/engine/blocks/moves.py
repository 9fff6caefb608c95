"""Parts that all plans that move blocks share: the way to the workers, ids, the form of mappings, and the AND over
ranks.

Every rank carries out every plan, and says so for itself. A block counts only if all ranks have it: `RankAnswers`
collects one answer of each rank, `and_over_ranks` joins their bitmaps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Generic, Protocol, TypeVar

from ...block import BlockType
from ...ints import ints
from ...plans import HIT, MISS, UNKNOWN, BlockMapping, RemoteBlocks

AnswerT = TypeVar("AnswerT")
MappingT = TypeVar("MappingT", BlockMapping, RemoteBlocks)


class WorkerLink(Protocol):
    """The way to all workers; plans arrive in the order in which they were sent."""

    num_workers: int

    def broadcast(self, message: Any) -> None:
        """Send one plan to every worker."""


class Orders:
    """Plans to all workers of one instance, and their ids, which only grow."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        self._next_id = 1

    @property
    def num_workers(self) -> int:
        return self._link.num_workers

    def new_id(self) -> int:
        """An id that no other plan of this engine has."""
        self._next_id += 1
        return self._next_id

    def send(self, plan: Any) -> None:
        """Send one plan to every worker."""
        self._link.broadcast(plan)


class RankAnswers(Generic[AnswerT]):
    """One answer of each rank to one plan."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self.by_rank: dict[int, AnswerT] = {}

    def add(self, rank: int, answer: AnswerT) -> bool:
        """Take one rank's answer; False when this rank has answered already or does not exist: it is ignored."""
        if rank in self.by_rank or not 0 <= rank < self._num_workers:
            return False
        self.by_rank[rank] = answer
        return True

    @property
    def complete(self) -> bool:
        """Every rank has answered."""
        return len(self.by_rank) == self._num_workers

    @property
    def missing(self) -> set[int]:
        """Ranks that have not answered."""
        return set(range(self._num_workers)) - set(self.by_rank)

    def all_equal(self, value: AnswerT) -> bool:
        """Every rank has answered, and all of them `value`."""
        return self.complete and all(answer == value for answer in self.by_rank.values())


def and_over_ranks(bitmaps: Collection[bytes], num_blocks: int) -> bytes:
    """The ranks' bitmaps of one batch as one: HIT where every rank says HIT, UNKNOWN where some rank leaves open
    whether its target may still be written to, else MISS. A bitmap of another length counts as all missed."""
    whole = [bitmap for bitmap in bitmaps if len(bitmap) == num_blocks]
    lacking = not bitmaps or len(whole) < len(bitmaps)
    return bytes(
        UNKNOWN if UNKNOWN in said else MISS if lacking or any(one != HIT for one in said) else HIT
        for said in (zip(*whole, strict=True) if whole else [()] * num_blocks)
    )


def unknown_blocks(bitmaps: Iterable[bytes], num_blocks: int) -> set[int]:
    """Blocks of one batch whose targets may still be written to, by the answers of some ranks."""
    return {
        number
        for bitmap in bitmaps
        if len(bitmap) == num_blocks
        for number, said in enumerate(bitmap)
        if said == UNKNOWN
    }


class Move(Protocol):
    """One block of a plan that moves blocks between device and host."""

    @property
    def type(self) -> BlockType: ...
    @property
    def device(self) -> int: ...
    @property
    def host(self) -> int: ...
    @property
    def block_hash(self) -> bytes: ...


def block_mappings(moves: Iterable[Move]) -> list[BlockMapping]:
    """The plan's form of moves, one mapping for each type among them."""
    by_type: dict[BlockType, list[Move]] = {}
    for move in moves:
        by_type.setdefault(move.type, []).append(move)
    return [
        BlockMapping(
            block_type.value,
            ints([move.device for move in those]),
            ints([move.host for move in those]),
            b"".join(move.block_hash for move in those),
        )
        for block_type, those in by_type.items()
    ]


def draft_part(mappings: list[MappingT], types: Iterable[str]) -> list[MappingT]:
    """Those mappings that the draft model's blocks follow; it has blocks of `types`."""
    return [mapping for mapping in mappings if mapping.block_type in types]
