"""The layered wait: a forward begins before its loads have ended, and waits for each layer's blocks just before it.

::

    engine        TransferBlocks (load 7)   TransferBlocks (load 8)   Forward
    worker             |                         |                      |
    load_from_host     copies + proof start      copies + proof start   |
                       LayerSynchronizer         LayerSynchronizer      |
                            \\_________ PendingLoads __________/          |
                                            attach  <-------------------+
    forward                             LoadWaiter: layer 0  wait  compute
                                                    layer 1  wait  compute ...
                                                    finish   all copies, all proofs  -> failed batches

1. A load copies its blocks in layer groups (`layer_groups`), the first layers first. Its `LayerSynchronizer` has one
   event a group, which the copier sets; the copies of target and draft advance it together.
2. A `HostLoad` is the synchroniser and, beside it, the proof of the host blocks (`proof.py`) on another thread.
3. The next forward attaches all pending loads, also those that belong to no sequence of its own: a loaded block is
   in the engine's prefix index before its bytes are there, so that any forward after it may read it.
4. The model calls `LoadWaiter(layer)` before that layer touches the cache. `finish` waits for the rest and for the
   proofs, and names the failed loads; the engine voids the results that depend on their blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from ...errors import InvariantError, TransferError


def layer_groups(num_layers: int, num_groups: int) -> list[range]:
    """Layers copied under one event: max(1, layers // n) each, so 30 layers and n = 4 give 7, 7, 7, 7, 2; 0 = one."""
    size = num_layers if num_groups == 0 else max(1, num_layers // num_groups)
    return [range(start, min(start + size, num_layers)) for start in range(0, num_layers, size)]


class LayerSynchronizer:
    """Progress of one load's copies: `wait(layer)` returns when the forward may use that layer's blocks.

    One thread completes the groups in order, any thread may wait.
    """

    def __init__(self, batch_id: int, groups: Sequence[range]) -> None:
        self.batch_id = batch_id
        self.num_groups = len(groups)
        self._group_of = {layer: number for number, group in enumerate(groups) for layer in group}
        self._events = [threading.Event() for _ in groups]
        self._error: str | None = None

    @property
    def error(self) -> str | None:
        """The reason why the load failed; None while it runs and when it succeeded."""
        return self._error

    def complete(self, group: int) -> None:
        self._events[group].set()

    def abort(self, error: str) -> None:
        """The load failed; copies already submitted have ended before this is called. All waiters go on."""
        self._error = error
        for event in self._events:
            event.set()

    def wait(self, layer: int, timeout_s: float) -> None:
        """Block until the group of `layer` is there or the load has failed (see `error`).

        Raises:
            TransferError: neither happened within `timeout_s`.
        """
        self._wait_group(self._group_of[layer], timeout_s)

    def wait_all(self, timeout_s: float) -> None:
        """Block until every copy has ended, well or not. Raises TransferError after `timeout_s`."""
        for group in range(self.num_groups):
            self._wait_group(group, timeout_s)

    def _wait_group(self, group: int, timeout_s: float) -> None:
        if not self._events[group].wait(timeout_s):
            raise TransferError(f"load {self.batch_id} did not bring layer group {group} within {timeout_s:g} s")


class HostLoad:
    """A load under way: its copies, and perhaps a proof whose result names the first problem, None without one."""

    def __init__(self, copies: LayerSynchronizer, proof: Future[str | None] | None = None) -> None:
        self.batch_id = copies.batch_id
        self._copies = copies
        self._proof = proof

    @property
    def error(self) -> str | None:
        """The reason why the load failed; None while that is not known, and when it succeeded (see `wait_all`)."""
        if self._copies.error is not None or self._proof is None or not self._proof.done():
            return self._copies.error
        return self._proof.result()

    def wait(self, layer: int, timeout_s: float) -> None:
        """Block until the group of `layer` is there or a copy has failed. Raises TransferError after `timeout_s`."""
        self._copies.wait(layer, timeout_s)

    def wait_all(self, timeout_s: float) -> None:
        """Block until every copy has ended and the proof is known. Raises TransferError after `timeout_s` of each."""
        self._copies.wait_all(timeout_s)
        if self._proof is not None:
            try:
                self._proof.result(timeout_s)
            except TimeoutError:
                raise TransferError(
                    f"the host blocks of load {self.batch_id} were not verified within {timeout_s:g} s"
                ) from None


class PendingLoads:
    """The loads that no forward has attached yet, by batch id; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: dict[int, HostLoad] = {}

    def check_new(self, batch_id: int) -> None:
        """Raises InvariantError when a load of this id is pending: live ids are never reused."""
        with self._lock:
            if batch_id in self._loads:
                raise InvariantError(f"batch id {batch_id} is in use")

    def add(self, load: HostLoad) -> None:
        with self._lock:
            self._loads[load.batch_id] = load

    def attach(self) -> list[HostLoad]:
        """Take all pending loads; the caller's forward must wait for each of them."""
        with self._lock:
            attached, self._loads = list(self._loads.values()), {}
            return attached


class LoadWaiter:
    """The hook that a forward calls before each layer: it waits until all attached loads have brought that layer."""

    def __init__(self, loads: list[HostLoad], timeout_s: float) -> None:
        self._loads = loads
        self._timeout_s = timeout_s
        self.waited_s = 0.0

    def __call__(self, layer: int) -> None:
        if not self._loads:
            return
        start = time.perf_counter()
        for load in self._loads:
            load.wait(layer, self._timeout_s)
        self.waited_s += time.perf_counter() - start

    def finish(self) -> list[int]:
        """Wait for all copies, used or not, and for all proofs; returns the batch ids of the loads that failed."""
        start = time.perf_counter()
        for load in self._loads:
            load.wait_all(self._timeout_s)
        self.waited_s += time.perf_counter() - start
        return [load.batch_id for load in self._loads if load.error is not None]
