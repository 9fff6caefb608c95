"""KVCacheStore: logical blocks in, Mooncake objects out; every failure is a miss.

A logical block (`objects.py`) is a hit only if each of its objects exists, is read whole, and its trailer proves it to
be the block asked for. When the store fails it is left alone until a probe finds it again, so that no request waits for
a store that is not there (see StoreCircuit). When it holds another model's blocks under our name it is not used at all
(see StoreMarks).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from ...block import BlockType
from ...config import EngineConfig
from ...errors import StoreError
from ...models.identity import ModelIdentity
from ...plans import HIT, MISS, UNKNOWN
from ...store_key import name_space_regex
from ..tiers.cache_domain import CacheDomain
from ..tiers.proof import trailer_mismatch
from ..transfer_stats import TransferStats
from .connection import StoreConnection
from .key_quarantine import KeyQuarantine
from .marks import StoreMarks
from .mooncake_client import ENDED_READS, MooncakeClient
from .object_copy import ObjectCopy
from .objects import ObjectIndex, StoreObject

log = logging.getLogger("xllm.store")

_NO_SPACE = -200


class KVCacheStore:
    """The store as one worker sees it; `prefetch` and `put` may run on two threads at once.

    `numerics_id` names the facts on which the bits of this instance depend (see ModelRunner.details): instances with
    different ones may share a name space, but then hits are equal only up to rounding, and all of them say so
    (`mixed_numerics`). `identities` are those of the models by key component: while the store holds another's under our
    name space it is `refused`, with the reason.
    `on_open` is called when the store is left alone from now on.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        stats: TransferStats,
        *,
        numerics_id: str = "",
        identities: Mapping[str, ModelIdentity] | None = None,
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank = rank
        self._name_space = config.name_space
        self.stats = stats
        self.client = MooncakeClient(config, rank)
        self._marks = StoreMarks(self.client, config.name_space, stats, numerics_id, identities or {})
        self._quarantine = KeyQuarantine()
        self._index = ObjectIndex()
        self.connection = StoreConnection(config, self._index, self.client, self._marks, stats=stats, on_open=on_open)
        self.circuit = self.connection.circuit
        self._copy = ObjectCopy(self.connection, config.name_space)

    # ---------------------------------------------------------------------------------------------- set-up

    def connect(self, host_bytes: int) -> int | None:
        """Try to reach the store, see `StoreConnection.connect`."""
        return self.connection.connect(host_bytes)

    def keep_apart(self) -> None:
        """The host blocks lie elsewhere than `connect` said, see `StoreConnection.keep_apart`."""
        self.connection.keep_apart()

    def start(self, domains: Sequence[CacheDomain], address: int, host_bytes: int) -> None:
        """Index the host blocks that are this rank's to read and write, in `host_bytes` at `address`; begin to serve.

        Raises:
            StoreError: two domains would use the same keys.
        """
        for domain in domains:
            self._index.add(domain, self._rank)
        self.connection.start(address, host_bytes)

    def look(self) -> None:
        """Find out now whether the store is there. Raises StoreError: it is not, or must not be used."""
        self.connection.look()

    @property
    def state(self) -> str:
        return self.circuit.state

    @property
    def refused(self) -> str:
        """The reason why this store must not be used; empty when it may."""
        return self.connection.refused

    @property
    def lends_memory(self) -> bool:
        """The host blocks lie in the pool of this store's client, which must stay as long as they do."""
        return self.connection.lends_memory

    @property
    def mixed_numerics(self) -> bool:
        return self._marks.mixed_numerics

    def stop_watching(self) -> None:
        """Look for the store no more; its client goes on to lend its memory."""
        self.connection.stop_watching()

    def close(self) -> bool:
        """Stop; False when a call is stuck in the library (see MooncakeClient.close)."""
        return self.connection.close()

    # --------------------------------------------------------------------------------------------- transfers

    def probe(self, block_type: BlockType, hashes: Sequence[bytes]) -> bytes:
        """HIT for each logical block of which every object is there and may be asked for, else MISS."""
        objects = self._index.objects(block_type, range(len(hashes)), hashes)
        if not self.circuit.closed or not objects:
            return bytes([MISS]) * len(hashes)
        held = self._quarantine.held(item.key for item in objects)
        try:
            with self.circuit.call():
                exist = self.client.exist([item.key for item in objects])
        except StoreError as error:
            self.connection.failed("g2h", error)
            return bytes([MISS]) * len(hashes)
        lacking = {item.row for item, there in zip(objects, exist, strict=True) if not there or item.key in held}
        return bytes(MISS if row in lacking else HIT for row in range(len(hashes)))

    def prefetch(self, block_type: BlockType, blocks: Sequence[int], hashes: Sequence[bytes]) -> bytes:
        """Read logical blocks into host `blocks`; one byte each, see PrefetchAnswer."""
        objects = self._index.objects(block_type, blocks, hashes)
        if not self.circuit.closed or not objects or len({item.key for item in objects}) != len(objects):
            return bytes([MISS]) * len(blocks)
        held = self._quarantine.held(item.key for item in objects)
        alone = {item.row for item in objects if item.key in held}
        self.stats.count("quarantined_reads", len(alone))
        asked = [item for item in objects if item.row not in alone]
        if not asked:
            return bytes([MISS]) * len(blocks)
        return self._prefetch(asked, len(blocks))

    def _prefetch(self, objects: list[StoreObject], num_blocks: int) -> bytes:
        """`objects` are of those blocks that may be asked for; the others are misses."""
        hits = bytearray(num_blocks)
        unknown: set[int] = set()
        try:
            with self.circuit.call():
                exist = self.client.exist([item.key for item in objects])
            absent = set(range(num_blocks)) - {item.row for item in objects}
            absent |= {item.row for item, there in zip(objects, exist, strict=True) if not there}
            wanted = [item for item in objects if item.row not in absent]
            unknown = (
                {item.row for item in wanted} if self.connection.host_usable else set()
            )  # until the read has ended
            lost, unknown = self._read(wanted) if wanted else (set(), set())
        except StoreError as error:
            self.connection.failed("g2h", error)
            return bytes(UNKNOWN if row in unknown else MISS for row in range(num_blocks))
        for row in range(num_blocks):
            hits[row] = MISS if row in absent else UNKNOWN if row in unknown else MISS if row in lost else HIT
        self.stats.count("hit_blocks", hits.count(HIT))
        self.stats.count("missed_blocks", len(hits) - hits.count(HIT))
        return bytes(hits)

    def _read(self, objects: Sequence[StoreObject]) -> tuple[set[int], set[int]]:
        """Get and verify; returns the rows of which some object could not be had, and those among them whose host
        block may still be written to."""
        lost: set[int] = set()
        unknown: set[int] = set()
        start = time.perf_counter()
        codes = self._copy.get(objects)
        nbytes = sum(item.nbytes for item, code in zip(objects, codes, strict=True) if code == item.nbytes)
        self.stats.add("g2h", nbytes, time.perf_counter() - start)
        unreadable = [code for code, item in zip(codes, objects, strict=True) if code != item.nbytes]
        self.circuit.judge(good=len(unreadable) < len(objects))
        for code, item in zip(codes, objects, strict=True):
            if code != item.nbytes:
                lost.add(item.row)
                self.stats.fail("g2h", "unreadable" if code < 0 else "short_read")
                if code < 0 and code not in ENDED_READS and self.connection.host_usable:
                    unknown.add(item.row)
                if code >= 0:
                    self._reject(item)
                continue
            problem = trailer_mismatch(item.cache, item.block, item.block_hash)
            if problem is not None:
                lost.add(item.row)
                self.stats.fail("g2h", problem)
                log.error("a store object is not what its key says (%s): %s", problem, item.key)
                self._reject(item)
        return lost, unknown

    def _reject(self, item: StoreObject) -> None:
        """Take a bad object out of the store, where it would never be replaced, and leave its key alone for a while.

        Else a segment that damages its objects would get the same block again and again.
        """
        self._quarantine.add(item.key)
        self.stats.count("quarantined_keys")
        try:
            self.client.remove(item.key)
            self.stats.count("removed_objects")
        except StoreError as error:
            log.warning("could not remove %s: %s", item.key, error)

    def put(self, block_type: BlockType, blocks: Sequence[int], hashes: Sequence[bytes]) -> int:
        """Write host blocks whose objects the store lacks; returns the number of logical blocks that need no other try:
        each of their objects is there, or its key is in quarantine."""
        objects = self._index.objects(block_type, blocks, hashes)
        if not self.circuit.closed:
            self.stats.fail("h2g", self.state, len(objects))
            return 0
        by_key = {item.key: item for item in objects}
        held = self._quarantine.held(by_key)
        self.stats.count("quarantined_writes", len(held))
        unique = [item for key, item in by_key.items() if key not in held]
        if not unique:
            return len(blocks)
        try:
            with self.circuit.call():
                exist = self.client.exist([item.key for item in unique])
            missing = [item for item, there in zip(unique, exist, strict=True) if not there]
            start = time.perf_counter()
            codes = self._copy.put(missing) if missing else []
        except StoreError as error:
            self.connection.failed("h2g", error)
            return 0
        self.circuit.judge(good=not codes or any(code in (0, _NO_SPACE) for code in codes))
        failed = {item.key for item, code in zip(missing, codes, strict=True) if code != 0}
        nbytes = sum(item.nbytes for item in missing if item.key not in failed)
        self.stats.add("h2g", nbytes, time.perf_counter() - start)
        self.stats.fail("h2g", "no_space", sum(code == _NO_SPACE for code in codes))
        self.stats.fail("h2g", "put", sum(code not in (0, _NO_SPACE) for code in codes))
        self.stats.count("put_objects", len(missing) - len(failed))
        self.stats.count("existing_objects", len(unique) - len(missing))
        return len(blocks) - len({item.row for item in objects if item.key in failed})

    def clear(self) -> int:
        """Remove every object of this model's name space, whoever wrote it; returns how many.

        An instance that uses the store leaves its marks anew at once, so that no other model comes in between. A
        refused instance may clear it, too, and can then attach it.

        Raises:
            StoreError: the store does not work.
        """
        if not self.circuit.closed and not self.refused:
            raise StoreError(f"the store is {self.state}: nothing was removed")
        count = self.client.remove_matching(name_space_regex(self._name_space))
        if not self.refused:
            self.connection.look_at_marks()
        return count
