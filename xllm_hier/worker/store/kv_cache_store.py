"""KVCacheStore: logical blocks in, Mooncake objects out; every failure is a miss.

A logical block is one physical object per cache domain that has its BlockType. It is a hit only if every one of them
exists, is read whole, and its trailer proves it to be the block asked for. When the store fails it is left alone until
a probe finds it again, so that no request waits for a store that is not there (see StoreCircuit). When it holds
another model's blocks under our name it is not used at all (see StoreMarks).
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from ...block import TRAILER_BYTES, BlockType, Trailer
from ...config import EngineConfig
from ...errors import StoreError
from ...models.identity import ModelIdentity
from ...plans import HIT, MISS, UNKNOWN
from ...store_key import group_id, key_prefix, name_space_regex, origin
from ..tiers.cache_domain import BlockCache, CacheDomain
from ..transfer_stats import TransferStats
from .circuit import ATTACHED, DETACHED, OPEN, StoreCircuit
from .key_quarantine import KeyQuarantine
from .marks import IdentityUnknownError, StoreMarks
from .mooncake_client import ENDED_READS, MooncakeClient

log = logging.getLogger("xllm.store")

PROBE_S = 1.0
LONGEST_PAUSE_S = 8.0  # between looks for a store that was away the last times
LONGEST_CONNECTED_PAUSE_S = 2.0  # while the client finds its way back by itself: a look is one call, no process
MARKS_PROBE_S = 30.0
VAIN_LOOKS = 2  # at a store that answers and moves no bytes, before its client is set up anew
STAGING_BLOCKS = 32
_SPARE_BYTES = 64 << 10  # of the pool, for the note
_NO_SPACE = -200
_NOT_SENT = -703  # among ENDED_READS: nothing was touched
_CALL_BYTES = 64 << 20


@dataclass(frozen=True)
class _Entry:
    """One physical object per logical block: where its bytes lie on the host and what its keys begin with."""

    cache: BlockCache
    prefix: str

    def key(self, block_hash: bytes) -> str:
        return self.prefix + block_hash.hex()

    def address(self, block: int) -> int:
        assert self.cache.host is not None
        return self.cache.host.data_ptr() + block * self.cache.layout.object_bytes


@dataclass(frozen=True)
class _Object:
    """One physical object of a batch; `row` is its logical block's place in the batch."""

    row: int
    block: int
    block_hash: bytes
    entry: _Entry

    @property
    def key(self) -> str:
        return self.entry.key(self.block_hash)

    @property
    def nbytes(self) -> int:
        return self.entry.cache.layout.object_bytes


def checksum(cache: BlockCache, block: int) -> bytes:
    """8 bytes over the payload of a host block (XXH3-64)."""
    return xxhash.xxh3_64_digest(cache.payload(block).numpy().data)


def write_trailer(cache: BlockCache, block: int, block_hash: bytes) -> None:
    """Make host block `block` prove that it is `block_hash`; its payload must be complete."""
    layout = cache.layout
    digest = checksum(cache, block)
    raw = Trailer.pack(block_hash, layout.schema_hash, digest, layout.payload_bytes, origin=cache.origin)
    cache.trailer(block).numpy()[:] = np.frombuffer(raw, dtype=np.uint8)


def trailer_mismatch(cache: BlockCache, block: int, block_hash: bytes) -> str | None:
    """What is wrong with host block `block` as `block_hash`; None when it proves itself."""
    layout = cache.layout
    raw = cache.trailer(block).numpy().tobytes()
    assert len(raw) == TRAILER_BYTES
    digest = checksum(cache, block)
    return Trailer.mismatch(raw, block_hash, layout.schema_hash, digest, layout.payload_bytes, origin=cache.origin)


def name_blocks(domain: CacheDomain, config: EngineConfig, rank: int, identity: str = "") -> None:
    """Say under which keys a rank's blocks of a domain go to the store, and what their trailers say of their origin.

    `identity` is that of the domain's weights.
    """
    for block_type, cache in domain.caches.items():
        cache.prefix = key_prefix(
            config.name_space,
            domain.key_component,
            block_type,
            cache.layout.schema_hash,
            tp_size=config.tp_size,
            tp_rank=rank,
            mla=cache.layout.replicated,
        )
        cache.origin = origin(cache.prefix, identity)


class KVCacheStore:
    """The store as one worker sees it; `prefetch` and `put` may run on two threads at once.

    `numerics_id` names what the bits of this instance depend on (see ModelRunner.details): instances with different
    ones may share a name space, but then hits are equal only up to rounding, and all of them say so
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
        self._config = config
        self._rank = rank
        self._stats = stats
        self.refused = ""
        self._client = MooncakeClient(config, rank)
        self._marks = StoreMarks(self._client, config.name_space, stats, numerics_id, identities or {})
        self._quarantine = KeyQuarantine()
        self._entries: dict[BlockType, list[_Entry]] = {}
        self._host_usable = False  # the host blocks themselves can be read into; else by way of staging
        self._lends_memory = False
        self._vain_looks = 0
        self._staging: dict[str, int] = {}
        self._on_open = on_open
        self.circuit = StoreCircuit(config.store_call_limit_ms / 1000, self._opened)
        self.circuit.wanted()
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name="store-monitor", daemon=True)

    # ---------------------------------------------------------------------------------------------- set-up

    def connect(self, host_bytes: int) -> int | None:
        """Try to reach the store now; returns the address of `host_bytes` of its pool when it offers shared memory,
        else None: the host tier brings its own memory, as with a store that is not there."""
        try:
            self._client.connect(host_bytes + 2 * self._staging_bytes(host_bytes) + _SPARE_BYTES)
            if not self._client.through_node:
                return None
            address = self._client.allocate(host_bytes)
            self._host_usable = self._lends_memory = True
            return address
        except StoreError as error:
            log.warning("the store is not available, going on without it: %s", error)
            return None

    def keep_apart(self) -> None:
        """The host blocks do not lie where `connect` said: reach them by way of staging memory. Before `start`."""
        self._host_usable = self._lends_memory = False

    @staticmethod
    def _staging_bytes(host_bytes: int) -> int:
        return min(host_bytes, 64 << 20)

    def start(self, domains: Sequence[CacheDomain], address: int, host_bytes: int) -> None:
        """Index the host blocks that are this rank's to read and write, and begin to serve.

        They lie in `host_bytes` at `address`. Blocks that every rank holds alike are rank 0's.
        """
        for domain in domains:
            for block_type, cache in domain.caches.items():
                if not cache.layout.kept_by(self._rank):
                    continue
                entries = self._entries.setdefault(block_type, [])
                if any(entry.prefix == cache.prefix for entry in entries):
                    raise StoreError(f"two cache domains are both {domain.key_component} for {block_type.value}")
                entries.append(_Entry(cache, cache.prefix))
        self._memory = (address, host_bytes)
        if self._client.connected:
            try:
                self._attach(at_start=True)
            except StoreError as error:
                log.warning("the store does not work, going on without it: %s", error)
        self._monitor.start()

    @property
    def state(self) -> str:
        return self.circuit.state

    @property
    def lends_memory(self) -> bool:
        """The host blocks lie in the pool of this store's client, which must stay as long as they do."""
        return self._lends_memory

    def look(self) -> None:
        """Find out now whether the store is there, instead of within a second.

        Raises:
            StoreError: it is not there, or must not be used.
        """
        with self._looking:  # the monitor may look while somebody attaches
            if self.circuit.closed:
                return
            if not self._client.reachable():
                raise StoreError("nobody listens there")
            if not self._client.connected:
                if not self._client.answers():
                    raise StoreError(f"somebody listens there and does not answer{self._client.hint}")
                self._set_up()
            try:
                self._attach()
            except IdentityUnknownError:
                self._vain_looks += 1
                if not self._is_stale():
                    raise
                log.warning("the store's client moves no bytes where a new one could: it is set up anew")
                self._set_up()
                self._attach()
            self._vain_looks = 0
            if self.refused:
                raise StoreError(self.refused)

    def _set_up(self) -> None:
        """A new client, for what goes through staging; one that lends memory for the host blocks goes on to do so."""
        self._client.connect(2 * self._staging_bytes(self._memory[1]) + _SPARE_BYTES)
        self._host_usable = False
        self._staging.clear()
        self._marks.forget_client()

    def _is_stale(self) -> bool:
        """The library has missed that the node's client is another process now, which knows no memory of ours: calls
        that move bytes then fail for good (seen: shm_not_mapped), while others work. Once in an outage."""
        return self._vain_looks == VAIN_LOOKS and self._client.through_node and self._client.answers()

    def _attach(self, *, at_start: bool = False) -> None:
        """The client is connected: make memory usable and probe once."""
        if not self._client.through_node and not self._host_usable:
            self._client.register(*self._memory)
            self._host_usable = True
        self._client.exist([self._probe_key()])
        self._refuse(self._marks.objection())
        if self.refused:
            return
        self._marks.compare_numerics(self._readers)
        self.circuit.works(at_start=at_start)
        log.info("the store is attached")

    def _probe_key(self) -> str:
        return next(iter(self._entries.values()))[0].prefix + "probe"

    @property
    def _readers(self) -> str:
        """Those who read the same objects of the target: blocks of a rank are its number of ranks' alone. No answer
        depends on a draft's bits."""
        shared = next(iter(self._entries.values()))[0].cache.layout.replicated
        return "mla" if shared else f"tp{self._config.tp_size}"

    @property
    def mixed_numerics(self) -> bool:
        return self._marks.mixed_numerics

    def _look_at_marks(self) -> None:
        """They may have been evicted or removed since, and be another's now."""
        try:
            self._refuse(self._marks.objection())
        except IdentityUnknownError as error:  # the verdict stays: who holds the object may be away for a moment
            log.warning("the identity of the model was not compared: %s", error)
        if not self.refused:
            self._marks.compare_numerics(self._readers)

    def _refuse(self, objection: str) -> None:
        """Use a store no more that holds another model's blocks under our name, until somebody attaches it again."""
        self.refused = objection
        if objection:
            self.circuit.detach()
            log.error(
                "%s. This instance goes on without the store. Give it a --model_id of its own; or, when nobody serves "
                "the other model any more, empty the store for this id (POST /cache/clear) and attach it again "
                "(PUT /cache/store)",
                objection,
            )

    def stop_watching(self) -> None:
        """Look for the store no more; its client goes on to lend its memory."""
        self._stop.set()

    def close(self) -> bool:
        """Stop; False when a call is stuck in the library (see MooncakeClient.close)."""
        self._stop.set()
        if self._monitor.is_alive():
            self._monitor.join(10.0)
        return self._client.close()

    # ----------------------------------------------------------------------------------------- degraded mode

    def _failed(self, kind: str, error: object) -> None:
        self._stats.fail(kind, "store_error")
        self.circuit.fail(str(error))

    def _opened(self, why: str) -> None:
        self._stats.count("times_opened")
        log.warning("the store does not work, going on without it: %s", why)
        self._on_open()

    def _watch(self) -> None:
        """Look for a store that was lost, once a second, on a thread of its own: nobody waits for it."""
        compared_at = look_at = time.monotonic()
        pause = PROBE_S / 2
        while not self._stop.wait(PROBE_S):
            state, due = self.state, time.monotonic() - compared_at > MARKS_PROBE_S
            if state == DETACHED or (state == ATTACHED and not due):
                continue
            compared_at = time.monotonic()
            try:
                if state == ATTACHED:
                    self._look_at_marks()
                elif state == OPEN:
                    if self.circuit.busy or time.monotonic() < look_at:
                        continue  # a call is stuck, or the last look was in vain
                    pause = min(2 * pause, self._longest_pause_s)
                    look_at = time.monotonic() + pause
                    self.look()
                    if not self.circuit.hung:
                        pause = PROBE_S / 2
                else:
                    self._client.exist([self._probe_key()])
                    self.circuit.judge(good=True)
            except StoreError as error:
                log.debug("the store is still away: %s", error)
                self.circuit.fail(str(error))
            except Exception as error:  # whatever it was, the next look must come
                log.exception("looking at the store failed")
                self.circuit.fail(str(error))

    @property
    def _longest_pause_s(self) -> float:
        """A store that hung is given time: a look may find it well, and the next request hangs again."""
        if self.circuit.hung or not self._client.connected:
            return LONGEST_PAUSE_S
        return LONGEST_CONNECTED_PAUSE_S

    # --------------------------------------------------------------------------------------------- transfers

    def _expand(self, block_type: BlockType, blocks: Sequence[int], hashes: Sequence[bytes]) -> list[_Object]:
        entries = self._entries.get(block_type, [])
        return [
            _Object(row, block, block_hash, entry)
            for row, (block, block_hash) in enumerate(zip(blocks, hashes, strict=True))
            for entry in entries
        ]

    def probe(self, block_type: BlockType, hashes: Sequence[bytes]) -> bytes:
        """HIT for each logical block of which every object is there and may be asked for, else MISS."""
        objects = self._expand(block_type, range(len(hashes)), hashes)
        if not self.circuit.closed or not objects:
            return bytes([MISS]) * len(hashes)
        held = self._quarantine.held(item.key for item in objects)
        try:
            with self.circuit.call():
                exist = self._client.exist([item.key for item in objects])
        except StoreError as error:
            self._failed("g2h", error)
            return bytes([MISS]) * len(hashes)
        lacking = {item.row for item, there in zip(objects, exist, strict=True) if not there or item.key in held}
        return bytes(MISS if row in lacking else HIT for row in range(len(hashes)))

    def prefetch(self, block_type: BlockType, blocks: Sequence[int], hashes: Sequence[bytes]) -> bytes:
        """Read logical blocks into host `blocks`; one byte each, see PrefetchAnswer."""
        objects = self._expand(block_type, blocks, hashes)
        if not self.circuit.closed or not objects or len({item.key for item in objects}) != len(objects):
            return bytes([MISS]) * len(blocks)
        held = self._quarantine.held(item.key for item in objects)
        alone = {item.row for item in objects if item.key in held}
        self._stats.count("quarantined_reads", len(alone))
        asked = [item for item in objects if item.row not in alone]
        if not asked:
            return bytes([MISS]) * len(blocks)
        return self._prefetch(asked, len(blocks))

    def _prefetch(self, objects: list[_Object], num_blocks: int) -> bytes:
        """`objects` are of those blocks that may be asked for; the others are misses."""
        hits = bytearray(num_blocks)
        unknown: set[int] = set()
        try:
            with self.circuit.call():
                exist = self._client.exist([item.key for item in objects])
            absent = set(range(num_blocks)) - {item.row for item in objects}
            absent |= {item.row for item, there in zip(objects, exist, strict=True) if not there}
            wanted = [item for item in objects if item.row not in absent]
            unknown = {item.row for item in wanted} if self._host_usable else set()  # until the read has ended
            lost, unknown = self._read(wanted) if wanted else (set(), set())
        except StoreError as error:
            self._failed("g2h", error)
            return bytes(UNKNOWN if row in unknown else MISS for row in range(num_blocks))
        for row in range(num_blocks):
            hits[row] = MISS if row in absent else UNKNOWN if row in unknown else MISS if row in lost else HIT
        self._stats.count("hit_blocks", hits.count(HIT))
        self._stats.count("missed_blocks", len(hits) - hits.count(HIT))
        return bytes(hits)

    def _read(self, objects: Sequence[_Object]) -> tuple[set[int], set[int]]:
        """Get and verify; returns the rows of which some object could not be had, and those among them whose host
        block may still be written to."""
        lost: set[int] = set()
        unknown: set[int] = set()
        start = time.perf_counter()
        codes = self._transfer("get", objects)
        nbytes = sum(item.nbytes for item, code in zip(objects, codes, strict=True) if code == item.nbytes)
        self._stats.add("g2h", nbytes, time.perf_counter() - start)
        unreadable = [code for code, item in zip(codes, objects, strict=True) if code != item.nbytes]
        self.circuit.judge(good=len(unreadable) < len(objects))
        for code, item in zip(codes, objects, strict=True):
            if code != item.nbytes:
                lost.add(item.row)
                self._stats.fail("g2h", "unreadable" if code < 0 else "short_read")
                if code < 0 and code not in ENDED_READS and self._host_usable:
                    unknown.add(item.row)
                if code >= 0:
                    self._reject(item)
                continue
            problem = trailer_mismatch(item.entry.cache, item.block, item.block_hash)
            if problem is not None:
                lost.add(item.row)
                self._stats.fail("g2h", problem)
                log.error("a store object is not what its key says (%s): %s", problem, item.key)
                self._reject(item)
        return lost, unknown

    def _reject(self, item: _Object) -> None:
        """Take a bad object out of the store, where it would never be replaced, and leave its key alone for a while.

        Else a segment that damages what it holds would get the same block again and again.
        """
        self._quarantine.add(item.key)
        self._stats.count("quarantined_keys")
        try:
            self._client.remove(item.key)
            self._stats.count("removed_objects")
        except StoreError as error:
            log.warning("could not remove %s: %s", item.key, error)

    def put(self, block_type: BlockType, blocks: Sequence[int], hashes: Sequence[bytes]) -> int:
        """Write host blocks whose objects the store lacks; returns the logical blocks there is nothing left to do for:
        every object is there, or left alone as its key is in quarantine."""
        objects = self._expand(block_type, blocks, hashes)
        if not self.circuit.closed:
            self._stats.fail("h2g", self.state, len(objects))
            return 0
        by_key = {item.key: item for item in objects}
        held = self._quarantine.held(by_key)
        self._stats.count("quarantined_writes", len(held))
        unique = [item for key, item in by_key.items() if key not in held]
        if not unique:
            return len(blocks)
        try:
            with self.circuit.call():
                exist = self._client.exist([item.key for item in unique])
            missing = [item for item, there in zip(unique, exist, strict=True) if not there]
            start = time.perf_counter()
            codes = self._transfer("put", missing) if missing else []
        except StoreError as error:
            self._failed("h2g", error)
            return 0
        self.circuit.judge(good=not codes or any(code in (0, _NO_SPACE) for code in codes))
        failed = {item.key for item, code in zip(missing, codes, strict=True) if code != 0}
        nbytes = sum(item.nbytes for item in missing if item.key not in failed)
        self._stats.add("h2g", nbytes, time.perf_counter() - start)
        self._stats.fail("h2g", "no_space", sum(code == _NO_SPACE for code in codes))
        self._stats.fail("h2g", "put", sum(code not in (0, _NO_SPACE) for code in codes))
        self._stats.count("put_objects", len(missing) - len(failed))
        self._stats.count("existing_objects", len(unique) - len(missing))
        return len(blocks) - len({item.row for item in objects if item.key in failed})

    def _transfer(self, direction: str, objects: Sequence[_Object]) -> list[int]:
        """`get` or `put` of host blocks, through staging memory where the store cannot reach the host blocks."""
        addresses = [item.entry.address(item.block) for item in objects]
        if self._host_usable:
            return self._send(direction, objects, addresses)
        codes: list[int] = []
        staging, slot = self._staging_area(direction)
        step = max(1, min(STAGING_BLOCKS, self._staging_bytes(self._memory[1]) // slot))
        for start in range(0, len(objects), step):
            part, real = objects[start : start + step], addresses[start : start + step]
            staged = [staging + number * slot for number in range(len(part))]
            if direction == "put":
                for item, source, target in zip(part, real, staged, strict=True):
                    ctypes.memmove(target, source, item.nbytes)
            answer = self._send(direction, part, staged)
            if direction == "get":
                for item, source, target, code in zip(part, staged, real, answer, strict=True):
                    if code == item.nbytes:
                        ctypes.memmove(target, source, item.nbytes)
            codes.extend(answer)
        return codes

    def _send(self, direction: str, objects: Sequence[_Object], addresses: Sequence[int]) -> list[int]:
        """In pieces of so many bytes that the limit of a call tells a store that hangs from one that has much to do."""
        keys, sizes = [item.key for item in objects], [item.nbytes for item in objects]
        name_space, codes = self._config.name_space, []
        groups = [group_id(name_space, item.entry.cache.layout.block_type, item.block_hash) for item in objects]
        step = max(1, _CALL_BYTES // max(sizes))
        for start in range(0, len(objects), step):
            part = slice(start, start + step)
            if not self.circuit.closed:  # opened by a piece before this one: the others need not hang too
                codes += [_NOT_SENT] * len(keys[part])
                continue
            with self.circuit.call():
                if direction == "get":
                    codes += self._client.get(keys[part], addresses[part], sizes[part])
                else:
                    codes += self._client.put(keys[part], addresses[part], sizes[part], groups[part])
        return codes

    def _staging_area(self, direction: str) -> tuple[int, int]:
        """Address and slot size of the staging memory of one direction; each is used by one thread."""
        slot = max(entry.cache.layout.object_bytes for entries in self._entries.values() for entry in entries)
        if direction not in self._staging:
            nbytes = max(slot, self._staging_bytes(self._memory[1]))
            self._staging[direction] = self._client.allocate(nbytes)
        return self._staging[direction], slot

    def clear(self) -> int:
        """Remove every object of this model's name space, whoever wrote it; returns how many.

        Who uses the store leaves his marks anew at once, so that no other model comes in between. A refused instance
        may clear it, too: that is how it gets in.

        Raises:
            StoreError: the store does not work.
        """
        if not self.circuit.closed and not self.refused:
            raise StoreError(f"the store is {self.state}: nothing was removed")
        count = self._client.remove_matching(name_space_regex(self._config.name_space))
        if not self.refused:
            self._look_at_marks()
        return count
