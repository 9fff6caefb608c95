"""Which blocks each instance can have from which tier, as its events tell, and how much of a prompt that spares it.

Device and host belong to one incarnation of one instance and go with it. A store belongs to all instances that read it
and outlives them. The index may be behind the caches: an answer says whether no event was missed (`EXACT`), whether
some may have been (`STALE`), or whether none ever came (`UNKNOWN`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice, takewhile
from typing import Any

from ..block import BlockType, RestoreRule, common_boundary
from ..kv_events import Cleared, Event, Stored

MOST_BLOCKS = 2_000_000  # of one type in one store: some 200 MB
_Blocks = dict[BlockType, set[bytes]]
_TIERS = ("device", "host", "store")  # the slowest last


class IndexState(str, Enum):
    """How far the index of an instance can be relied on."""

    EXACT = "exact"
    STALE = "stale"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Match:
    """Tokens of a prompt that need not be computed on one instance, by the tier that would give them."""

    device: int = 0
    host: int = 0
    store: int = 0
    state: IndexState = IndexState.UNKNOWN

    @property
    def cached(self) -> int:
        """Tokens of all tiers; the rest of the prompt is computed."""
        return self.device + self.host + self.store


@dataclass(frozen=True)
class UnderWay:
    """How many leading blocks of a prompt are on the device as soon as the requests under way there have been computed.

    `whole` KV blocks are. Blocks of the other types are left where a prompt ends, the last time behind `ended` blocks.
    """

    whole: int = 0
    ended: int = 0


NOTHING_UNDER_WAY = UnderWay()


class StoreIndex:
    """Which logical blocks one store holds, by type.

    `state` is EXACT from `replace` until `invalidate`, and STALE when all that is known comes from events, since
    nobody tells of what a store evicts.
    """

    def __init__(self) -> None:
        self.state = IndexState.UNKNOWN
        self._blocks: _Blocks = {}
        self._since: list[tuple[bool, BlockType, list[bytes]]] | None = None

    def of(self, block_type: BlockType) -> set[bytes]:
        """The hashes of one type, to be read only."""
        return self._blocks.setdefault(block_type, set())

    def begin_listing(self) -> None:
        """Events from now on are newer than the list that `replace` will bring."""
        self._since = []

    def _note(self, there: bool, block_type: BlockType, hashes: Iterable[bytes]) -> None:
        if self._since is not None:
            self._since.append((there, block_type, list(hashes)))

    def add(self, block_type: BlockType, hashes: Iterable[bytes]) -> None:
        """These were written or read just now."""
        if len(self.of(block_type)) >= MOST_BLOCKS:  # nobody tells what it has evicted: begin anew
            self._blocks[block_type] = set()
            self.invalidate()
        self.of(block_type).update(hashes)
        self._note(True, block_type, hashes)
        self._told()

    def discard(self, block_type: BlockType, hashes: Iterable[bytes]) -> None:
        """These were asked for in vain; where they were thought to be there, something is not as it was told: they may
        have been evicted, or the store was away and has them still."""
        if not self.of(block_type).isdisjoint(hashes):
            self.invalidate()
        self.of(block_type).difference_update(hashes)
        self._note(False, block_type, hashes)
        self._told()

    def _told(self) -> None:
        if self.state is IndexState.UNKNOWN:
            self.state = IndexState.STALE

    def replace(self, blocks: Mapping[BlockType, set[bytes]]) -> None:
        """The store holds exactly these."""
        self._blocks = {block_type: set(hashes) for block_type, hashes in blocks.items()}
        since, self._since = self._since or (), None
        for there, block_type, hashes in since:
            (self.add if there else self.discard)(block_type, hashes)
        self.state = IndexState.EXACT

    def invalidate(self) -> None:
        """The store may have evicted something."""
        if self.state is IndexState.EXACT:
            self.state = IndexState.STALE

    def describe(self) -> dict[str, Any]:
        return {"state": self.state.value} | _sizes(self._blocks)


@dataclass(eq=False)
class _Instance:
    """The blocks of one incarnation; `blocks[tier]` are those of device and host."""

    incarnation: str
    rules: Sequence[RestoreRule]
    store: str
    state: IndexState = IndexState.UNKNOWN
    blocks: dict[str, _Blocks] = field(default_factory=lambda: {"device": {}, "host": {}})

    @property
    def prefix_only(self) -> bool:
        """Each block needs all blocks before it, and no others."""
        return len(self.rules) == 1 and not self.rules[0].span


class PrefixIndex:
    """Blocks of all instances by name; used by one thread."""

    def __init__(self) -> None:
        self._instances: dict[str, _Instance] = {}
        self._stores: dict[str, StoreIndex] = {}

    # --------------------------------------------------------------------------------------------- who there is

    def join(self, name: str, incarnation: str, rules: Sequence[RestoreRule], store: str = "") -> None:
        """Begin anew with an instance of which nothing is known yet, also when it is the same incarnation once more.

        `rules` are those of its block types in the model's order, all of one block size; instances that name the same
        `store` read each other's blocks there; empty: it has none.
        """
        self._instances[name] = _Instance(incarnation, tuple(rules), store)

    def leave(self, name: str) -> None:
        """Forget an instance: nothing of its device and host can be had any more. Unknown names are ignored."""
        self._instances.pop(name, None)

    def store(self, store: str) -> StoreIndex:
        """The index of one store; of one not heard of before, an UNKNOWN one."""
        return self._stores.setdefault(store, StoreIndex())

    def invalidate_stores(self) -> None:
        """Stores may have lost something."""
        for store in self._stores.values():
            store.invalidate()

    def set_state(self, name: str, state: IndexState) -> None:
        """Say how far the instance's events can be relied on from now on. Unknown names are ignored."""
        if name in self._instances:
            self._instances[name].state = state

    def state(self, name: str) -> IndexState:
        """UNKNOWN for unknown names, too."""
        return self._instances[name].state if name in self._instances else IndexState.UNKNOWN

    # --------------------------------------------------------------------------------------------- what it has

    def apply(self, name: str, incarnation: str, events: Iterable[Event]) -> bool:
        """Take what an instance tells, in order; False and nothing changed when it is not the incarnation that joined.

        Events of an instance in state UNKNOWN are kept, but count only once its state is another.
        """
        instance = self._instances.get(name)
        if instance is None or instance.incarnation != incarnation:
            return False
        for event in events:
            if isinstance(event, Cleared):
                for blocks in instance.blocks.values():
                    blocks.clear()
            elif event.tier == "store":
                self._apply_to_store(instance.store, event)
            else:
                known = instance.blocks[event.tier].setdefault(event.block_type, set())
                change = known.update if isinstance(event, Stored) else known.difference_update
                change(event.hashes)
        return True

    def _apply_to_store(self, store: str, event: Event) -> None:
        if not store or isinstance(event, Cleared):
            return
        index = self.store(store)
        change = index.add if isinstance(event, Stored) else index.discard
        change(event.block_type, event.hashes)

    def match(
        self, name: str, hashes: Sequence[bytes], prompt_tokens: int, under_way: UnderWay = NOTHING_UNDER_WAY
    ) -> Match:
        """The tokens that the instance would take from its caches for a prompt with these hashes of its full blocks.

        The last token is always computed. Of a state UNKNOWN only the store's part counts, which others have told of;
        what is `under_way` counts as the device's in any case.
        """
        instance = self._instances.get(name)
        if instance is None or not instance.rules:
            return Match()
        end = min(len(hashes), _candidates(instance.rules, prompt_tokens))
        if instance.prefix_only:
            tiers = self._walk(instance, instance.rules[0].block_type, hashes, end, min(under_way.whole, end))
        else:
            tiers = self._search(instance, hashes, end, min(under_way.ended, end))
        device, host, store = _tokens(tiers, instance.rules[0].block_size, prompt_tokens - 1)
        return Match(device, host, store, self._reliance(instance))

    def _reliance(self, instance: _Instance) -> IndexState:
        if instance.state is IndexState.EXACT and instance.store:
            return IndexState.EXACT if self.store(instance.store).state is IndexState.EXACT else IndexState.STALE
        return instance.state

    def _known(self, instance: _Instance, block_type: BlockType) -> tuple[set[bytes], set[bytes], set[bytes]]:
        """The blocks of one type in device, host and store."""
        nothing: set[bytes] = set()
        known = instance.blocks if instance.state is not IndexState.UNKNOWN else {"device": {}, "host": {}}
        store = self.store(instance.store).of(block_type) if instance.store else nothing
        return known["device"].get(block_type, nothing), known["host"].get(block_type, nothing), store

    def _walk(
        self, instance: _Instance, block_type: BlockType, hashes: Sequence[bytes], end: int, start: int
    ) -> bytearray:
        """The tiers of the leading blocks that are there, one byte a block; the first `start` are the device's."""
        known = self._known(instance, block_type)
        tiers = bytearray(start)
        while (index := len(tiers)) < end:
            found = next((tier for tier, blocks in enumerate(known) if hashes[index] in blocks), None)
            if found is None:
                break
            # Without a Python call for each block: every instance is asked before a request goes anywhere.
            count = len(list(takewhile(known[found].__contains__, islice(hashes, index, end))))
            if any(not faster.isdisjoint(hashes[index : index + count]) for faster in known[:found]):
                count = 1  # seldom so, since eviction leaves prefixes
            tiers += bytes([found]) * count
        return tiers

    def _search(self, instance: _Instance, hashes: Sequence[bytes], end: int, start: int) -> bytearray:
        """As `_walk`, with several rules; of a block's types the slowest counts, for a block of which nothing is needed
        that of the block behind it, as in the engine's account."""
        size, slowest = instance.rules[0].block_size, bytearray()
        if any(not rule.span for rule in instance.rules):  # of KV blocks all are needed
            slowest = self._walk(instance, BlockType.KV, hashes, end, start)
            end = len(slowest)
        spans = [rule for rule in instance.rules if rule.span]
        known = {rule.block_type: self._known(instance, rule.block_type) for rule in spans}

        def tier_of(block_type: BlockType, index: int) -> int:
            block, (device, host, store) = hashes[index], known[block_type]
            return 0 if index < start or block in device else 1 if block in host else 2 if block in store else 3

        count = common_boundary(spans, lambda kind, index: tier_of(kind, index) < 3, end * size) // size
        needed = [(rule.block_type, index) for rule in spans for index in rule.needed(count * size)]
        if not slowest and needed:
            slowest = bytearray(count)
            first = min(index for _, index in needed)
            slowest[:first] = bytes([max(tier_of(kind, index) for kind, index in needed if index == first)]) * first
        for kind, index in needed:
            slowest[index] = max(slowest[index], tier_of(kind, index))
        return slowest[:count]

    def describe(self) -> dict[str, Any]:
        """For people: `instances` and `stores`, each with its state and how many blocks of each type it has."""
        return {
            "instances": {
                name: {"state": instance.state.value, "incarnation": instance.incarnation, "store": instance.store}
                | {tier: _sizes(blocks) for tier, blocks in instance.blocks.items()}
                for name, instance in self._instances.items()
            },
            "stores": {name: index.describe() for name, index in self._stores.items()},
        }


def _sizes(blocks: Mapping[BlockType, set[bytes]]) -> dict[str, int]:
    return {block_type.value: len(hashes) for block_type, hashes in blocks.items()}


def _candidates(rules: Sequence[RestoreRule], prompt_tokens: int) -> int:
    """Full blocks that could spare computing anything, as in the engine: a recurrent state lies only behind a block."""
    size, limit = rules[0].block_size, prompt_tokens - 1
    if any(rule.block_type is BlockType.LINEAR for rule in rules):
        return limit // size
    return min(prompt_tokens // size, -(-limit // size))


def _tokens(tiers: bytearray, block_size: int, limit: int) -> tuple[int, int, int]:
    """Tokens of blocks by tier, of which together at most `limit` count: the last block may be cut."""
    paid = [tiers.count(tier) * block_size for tier in range(len(_TIERS))]
    if tiers:
        paid[tiers[-1]] -= max(0, len(tiers) * block_size - limit)
    return paid[0], paid[1], paid[2]
