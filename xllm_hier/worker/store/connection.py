"""The connection to the store: set up, attached, watched, and looked for again after it was lost.

A thread looks once a second (`StoreCircuit` says what each state allows). A store that holds another model's blocks
under our name is refused (see StoreMarks) until somebody attaches it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ...config import EngineConfig
from ...errors import StoreError
from ..transfer_stats import TransferStats
from .circuit import ATTACHED, DETACHED, OPEN, StoreCircuit
from .marks import IdentityUnknownError, StoreMarks
from .mooncake_client import MooncakeClient
from .objects import ObjectIndex

log = logging.getLogger("xllm.store")

PROBE_S = 1.0
LONGEST_PAUSE_S = 8.0  # between looks for a store that was away the last times
LONGEST_CONNECTED_PAUSE_S = 2.0  # while the client finds its way back by itself: a look is one call, no process
MARKS_PROBE_S = 30.0
VAIN_LOOKS = 2  # at a store that answers and moves no bytes, before its client is set up anew
_SPARE_BYTES = 64 << 10  # of the pool, for the note
_MOST_STAGING_BYTES = 64 << 20


class StoreConnection:
    """The client of one worker and the state of its store.

    `host_usable`: the store reads and writes the host blocks themselves, else staging memory. `lends_memory`: the host
    blocks lie in the pool of this client, which must stay as long as they do. `refused`: the reason why the store must
    not be used, empty when it may. `on_open` is called each time the store is left alone from now on.
    """

    def __init__(
        self,
        config: EngineConfig,
        index: ObjectIndex,
        client: MooncakeClient,
        marks: StoreMarks,
        *,
        stats: TransferStats,
        on_open: Callable[[], None],
    ) -> None:
        self._config, self._index, self._stats, self._on_open = config, index, stats, on_open
        self.client, self.marks = client, marks
        self.refused = ""
        self.host_usable = self.lends_memory = False
        self._memory = (0, 0)  # address and bytes of the host blocks
        self._staging: dict[str, int] = {}
        self._vain_looks = 0
        self.circuit = StoreCircuit(config.store_call_limit_ms / 1000, self._opened)
        self.circuit.wanted()
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._monitor = threading.Thread(target=self._watch, name="store-monitor", daemon=True)

    # ------------------------------------------------------------------------------------------- connect

    def connect(self, host_bytes: int) -> int | None:
        """Try to reach the store now; returns the address of `host_bytes` of its pool when it offers shared memory,
        else None: the host tier brings its own memory, as with a store that is not there."""
        try:
            self.client.connect(host_bytes + 2 * _staging_bytes(host_bytes) + _SPARE_BYTES)
            if not self.client.through_node:
                return None
            address = self.client.allocate(host_bytes)
            self.host_usable = self.lends_memory = True
            return address
        except StoreError as error:
            log.warning("the store is not available, going on without it: %s", error)
            return None

    def keep_apart(self) -> None:
        """The host blocks do not lie in the client's pool: reach them through staging memory. Before `start`."""
        self.host_usable = self.lends_memory = False

    def start(self, address: int, host_bytes: int) -> None:
        """Attach the store for host blocks in `host_bytes` at `address`, and watch it from now on."""
        self._memory = (address, host_bytes)
        if self.client.connected:
            try:
                self._attach(at_start=True)
            except StoreError as error:
                log.warning("the store does not work, going on without it: %s", error)
        self._monitor.start()

    def staging(self, direction: str) -> tuple[int, int, int]:
        """Staging memory of one direction, which one thread uses: address, bytes of a slot, number of slots."""
        slot, nbytes = self._index.largest_bytes, _staging_bytes(self._memory[1])
        if direction not in self._staging:
            self._staging[direction] = self.client.allocate(max(slot, nbytes))
        return self._staging[direction], slot, max(1, nbytes // slot)

    def close(self) -> bool:
        """Stop; False when a call is stuck in the library (see MooncakeClient.close)."""
        self._stop.set()
        if self._monitor.is_alive():
            self._monitor.join(10.0)
        return self.client.close()

    def stop_watching(self) -> None:
        """Look for the store no more; its client goes on to lend its memory."""
        self._stop.set()

    # -------------------------------------------------------------------------------------------- attach

    def look(self) -> None:
        """Find out now whether the store is there, instead of within a second.

        Raises:
            StoreError: it is not there, or must not be used.
        """
        with self._looking:  # the monitor may look while somebody attaches
            if self.circuit.closed:
                return
            if not self.client.reachable():
                raise StoreError("nobody listens there")
            if not self.client.connected:
                if not self.client.answers():
                    raise StoreError(f"somebody listens there and does not answer{self.client.hint}")
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
        """Make a new client, which moves bytes through staging; one that lends memory goes on to do so."""
        self.client.connect(2 * _staging_bytes(self._memory[1]) + _SPARE_BYTES)
        self.host_usable = False
        self._staging.clear()
        self.marks.forget_client()

    def _is_stale(self) -> bool:
        """The library has missed that the node's client is another process now, which knows no memory of ours: calls
        that move bytes then fail for good (seen: shm_not_mapped), while others work. True once in an outage."""
        return self._vain_looks == VAIN_LOOKS and self.client.through_node and self.client.answers()

    def _attach(self, *, at_start: bool = False) -> None:
        """Make memory usable for a connected client, and probe the store once."""
        if not self.client.through_node and not self.host_usable:
            self.client.register(*self._memory)
            self.host_usable = True
        self.client.exist([self._probe_key()])
        self._refuse(self.marks.objection())
        if self.refused:
            return
        self.marks.compare_numerics(self.readers)
        self.circuit.works(at_start=at_start)
        log.info("the store is attached")

    def _probe_key(self) -> str:
        return self._index.first.prefix + "probe"

    @property
    def readers(self) -> str:
        """The instances that read the same objects of the target: those of as many ranks, or all for blocks that ranks
        hold alike. No answer depends on a draft's bits."""
        return "mla" if self._index.first.layout.replicated else f"tp{self._config.tp_size}"

    def look_at_marks(self) -> None:
        """Compare the marks again: they may have been evicted or removed since, and be another's now."""
        try:
            self._refuse(self.marks.objection())
        except IdentityUnknownError as error:  # the verdict stays: the object's holder may be away for a moment
            log.warning("the identity of the model was not compared: %s", error)
        if not self.refused:
            self.marks.compare_numerics(self.readers)

    def _refuse(self, objection: str) -> None:
        """Stop using a store that holds another model's blocks under our name, until somebody attaches it again."""
        self.refused = objection
        if objection:
            self.circuit.detach()
            log.error(
                "%s. This instance goes on without the store. Give it a --model_id of its own; or, when nobody serves "
                "the other model any more, empty the store for this id (POST /cache/clear) and attach it again "
                "(PUT /cache/store)",
                objection,
            )

    # --------------------------------------------------------------------------------------------- watch

    def failed(self, kind: str, error: object) -> None:
        """A call of transfers of `kind` failed as a whole."""
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
            state, due = self.circuit.state, time.monotonic() - compared_at > MARKS_PROBE_S
            if state == DETACHED or (state == ATTACHED and not due):
                continue
            compared_at = time.monotonic()
            try:
                if state == ATTACHED:
                    self.look_at_marks()
                elif state == OPEN:
                    if self.circuit.busy or time.monotonic() < look_at:
                        continue  # a call is stuck, or the last look was in vain
                    pause = min(2 * pause, self._longest_pause_s)
                    look_at = time.monotonic() + pause
                    self.look()
                    if not self.circuit.hung:
                        pause = PROBE_S / 2
                else:
                    self.client.exist([self._probe_key()])
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
        if self.circuit.hung or not self.client.connected:
            return LONGEST_PAUSE_S
        return LONGEST_CONNECTED_PAUSE_S


def _staging_bytes(host_bytes: int) -> int:
    return min(host_bytes, _MOST_STAGING_BYTES)
