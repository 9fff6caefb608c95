"""Follows the cache events of one instance into the index, without missing any.

A stream begins with a snapshot. A batch whose number is not the next one shows that some were missed: they are asked
for, and where the instance does not have them any more, there is a snapshot once more. Until that has ended the index
says that it is stale.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio

from ..block import BlockType, RestoreRule
from ..errors import WireError
from ..kv_events import END, SNAPSHOT, EventBatch, unpack_batch
from ..registry import InstanceInfo
from .prefix_index import IndexState, PrefixIndex

log = logging.getLogger("xllm.service")

_ANSWER_S = 10.0  # between two messages of an answer
_AGAIN_S = 0.5
_QUEUED = 100_000  # batches, before some are missed


def rules_of(info: InstanceInfo) -> list[RestoreRule]:
    """The restore rule of each block type of an instance. Raises ValueError for an unknown type."""
    return [RestoreRule(BlockType(name), info.block_size, int(span)) for name, span in info.types]


class KvEventStream:
    """One incarnation's events; `run` follows them until it is cancelled.

    `on_batch` hears of every batch that is this incarnation's, for its load and as a sign of life. When none comes for
    `silence_s` the index counts as stale.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        info: InstanceInfo,
        index: PrefixIndex,
        on_batch: Callable[[EventBatch], None],
        silence_s: float,
    ) -> None:
        self._context, self._info, self._index = context, info, index
        self._on_batch, self._silence_s = on_batch, silence_s
        self._next = 0  # number of the batch that is to come
        self.num_gaps = 0

    async def run(self) -> None:
        """Never returns; failures are logged, and it begins anew."""
        while True:
            try:
                await self._follow()
            except (WireError, TimeoutError, zmq.ZMQError) as error:
                log.warning("the events of %s: %s", self._info.name, error)
            self._set(IndexState.STALE)
            await asyncio.sleep(_AGAIN_S)

    def _set(self, state: IndexState) -> None:
        if self._index.state(self._info.name) is not IndexState.UNKNOWN or state is IndexState.EXACT:
            self._index.set_state(self._info.name, state)

    async def _follow(self) -> None:
        events = self._open(zmq.SUB, self._info.events)
        events.subscribe(b"")
        try:
            await self._snapshot()
            while True:
                if not await events.poll(int(self._silence_s * 1000)):
                    self._set(IndexState.STALE)
                    continue
                frames = await events.recv_multipart()
                if len(frames) != 3 or len(frames[1]) != 8:
                    raise WireError(f"{len(frames)} frames")
                await self._take(int.from_bytes(frames[1], "big"), unpack_batch(frames[2]))
        finally:
            events.close(0)

    def _open(self, kind: int, address: str) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, _QUEUED)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, "[" in address)
        socket.connect(f"tcp://{address}")
        return socket

    async def _take(self, number: int, batch: EventBatch) -> None:
        if batch.incarnation != self._info.incarnation_id:  # another process on this address: the registry will tell
            self._join()
            return
        if number > self._next:
            self.num_gaps += 1
            self._set(IndexState.STALE)
            await self._replay()
        if number > self._next:
            raise WireError(f"batch {self._next} is not to be had")
        if number == self._next:
            self._apply(batch)
            self._next = number + 1
        self._set(IndexState.EXACT)
        self._on_batch(batch)

    def _apply(self, batch: EventBatch) -> None:
        self._index.apply(self._info.name, batch.incarnation, batch.events)

    async def _replay(self) -> None:
        """Take the batches from the next one on, or a snapshot when the first of them is not kept any more."""
        for number, batch in await self._ask(self._next.to_bytes(8, "big")):
            if number > self._next:
                log.info("%s keeps no batch %d: taking a snapshot", self._info.name, self._next)
                await self._snapshot()
                return
            if number == self._next:
                self._apply(batch)
                self._next = number + 1

    async def _snapshot(self) -> None:
        parts = await self._ask(SNAPSHOT)
        self._join()
        for number, part in parts:
            self._apply(part)
            self._next = number
        self._set(IndexState.EXACT)

    def _join(self) -> None:
        """Nothing is known of it."""
        self._index.join(self._info.name, self._info.incarnation_id, rules_of(self._info), self._info.store_blocks)

    async def _ask(self, question: bytes) -> list[tuple[int, EventBatch]]:
        """The numbered batches of the answer. Raises TimeoutError, WireError."""
        socket = self._open(zmq.DEALER, self._info.replay)
        answer: list[tuple[int, EventBatch]] = []
        try:
            await socket.send_multipart([b"", question])
            while True:
                if not await socket.poll(int(_ANSWER_S * 1000)):
                    raise TimeoutError(f"no answer from {self._info.replay}")
                frames = await socket.recv_multipart()
                if len(frames) != 3:
                    raise WireError(f"{len(frames)} frames")
                if frames[1] == END:
                    return answer
                batch = unpack_batch(frames[2])
                if batch.incarnation != self._info.incarnation_id:
                    raise WireError("another process answers")
                answer.append((int.from_bytes(frames[1], "big"), batch))
        finally:
            socket.close(0)
