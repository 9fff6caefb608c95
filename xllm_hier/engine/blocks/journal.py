"""Events of the caches of one engine, block by block, for routers (`kv_events`)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ...block import BlockType
from ...kv_events import Event, Removed, Stored
from .sequence import Sequence
from .types import TypePools


@dataclass(frozen=True)
class _Content:
    """The content behind a block's hash; `parent` is None for the first block of a prompt."""

    token_ids: list[int]
    parent: bytes | None
    extra: str


_UNKNOWN = _Content([], None, "")


class CacheJournal:
    """Events of all pools of one engine since the last `take`; used by the engine's thread.

    Pools tell of every block that enters or leaves their index. The tokens of a block are learnt from the sequence
    that brings it, and forgotten when no tier of this instance has it any more.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[Event] = []
        self._contents: dict[bytes, _Content] = {}
        self._fresh: set[bytes] = set()
        self._holders: Counter[bytes] = Counter()
        self._pools: Mapping[BlockType, TypePools] = {}

    def watch(self, pools: Mapping[BlockType, TypePools]) -> None:
        """Hear of every block of `pools` from now on."""
        self._pools = pools
        for block_type, both in pools.items():
            for tier, pool in both.tiers.items():
                pool.on_stored = self._teller(self._stored, tier, block_type)
                pool.on_removed = self._teller(self._removed, tier, block_type)

    @staticmethod
    def _teller(
        told: Callable[[str, BlockType, bytes], None], tier: str, block_type: BlockType
    ) -> Callable[[bytes], None]:
        return lambda block_hash: told(tier, block_type, block_hash)

    def learn(self, sequence: Sequence, index: int) -> None:
        """Block `index` of this sequence may enter a pool now."""
        block_hash, size = sequence.hash_of(index), self._block_size
        if block_hash not in self._contents:
            salt = sequence.request.cache_salt
            self._contents[block_hash] = _Content(
                sequence.tokens[index * size : (index + 1) * size],
                sequence.parent_of(index) if index else None,
                hashlib.blake2b(salt.encode(), digest_size=8).hexdigest() if salt else "",
            )
            self._fresh.add(block_hash)

    def _stored(self, tier: str, block_type: BlockType, block_hash: bytes) -> None:
        self._holders[block_hash] += 1
        self._add(tier, block_type, block_hash)

    def _removed(self, tier: str, block_type: BlockType, block_hash: bytes) -> None:
        self._holders[block_hash] -= 1
        if not self._holders[block_hash]:
            del self._holders[block_hash]
            self._fresh.add(block_hash)  # looked at once more when the batch is taken: it may come back before
        self._drop(tier, block_type, [block_hash])

    def in_store(self, block_type: BlockType, hashes: Iterable[bytes]) -> None:
        """The store has these blocks: they were just written, or read."""
        for block_hash in hashes:
            self._add("store", block_type, block_hash)

    def not_in_store(self, block_type: BlockType, hashes: Iterable[bytes]) -> None:
        """The store was asked for these blocks in vain."""
        missing = list(hashes)
        if missing:
            self._drop("store", block_type, missing)

    def _add(self, tier: str, block_type: BlockType, block_hash: bytes) -> None:
        content = self._contents.get(block_hash, _UNKNOWN)
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, Stored)
            and (last.tier, last.block_type, last.extra) == (tier, block_type, content.extra)
            and content is not _UNKNOWN
            and content.parent == last.hashes[-1]
            and last.token_ids
        ):
            last.hashes.append(block_hash)
            last.token_ids.extend(content.token_ids)
            return
        tokens = list(content.token_ids)
        parent, extra = content.parent, content.extra
        self._events.append(Stored(tier, block_type, [block_hash], parent, tokens, self._block_size, extra))

    def _drop(self, tier: str, block_type: BlockType, hashes: list[bytes]) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed) and (last.tier, last.block_type) == (tier, block_type):
            last.hashes.extend(hashes)
        else:
            self._events.append(Removed(tier, block_type, hashes))

    def take(self) -> list[Event]:
        """The events since the last call, in order."""
        for block_hash in self._fresh:
            if block_hash not in self._holders:
                self._contents.pop(block_hash, None)
        self._fresh.clear()
        events, self._events = self._events, []
        return events

    def snapshot(self, most_blocks: int) -> Iterator[list[Event]]:
        """As if all that device and host have now was stored just now, in parts of at most so many blocks. Take a part
        when nothing is left to `take`; between two parts anything may happen. Blocks that have gone by then are left
        out; blocks that came are in later events, and so are those that go afterwards."""
        there = [
            (tier, block_type, block_hash)
            for block_type, both in self._pools.items()
            for tier, pool in both.tiers.items()
            for block_hash in pool.in_order()
        ]
        for start in range(0, len(there), most_blocks):
            assert not self._events, "events that were not sent yet would be told twice"
            for tier, block_type, block_hash in there[start : start + most_blocks]:
                if self._pools[block_type].tiers[tier].find(block_hash) is not None:
                    self._add(tier, block_type, block_hash)
            events, self._events = self._events, []
            yield events
