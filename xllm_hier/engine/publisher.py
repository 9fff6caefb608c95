"""Publishes the journal of an engine's caches, numbered, and sends missed batches once more (`kv_events`)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from ..block import BlockType
from ..clock import now
from ..config import EngineConfig
from ..errors import StartupError
from ..kv_events import END, SNAPSHOT, TOPIC, Cleared, EventBatch, InstanceLoad, pack_batch
from .blocks.journal import CacheJournal

log = logging.getLogger("xllm.events")

KEPT_BATCHES = 10_000  # for consumers that missed some; one that missed more asks for a snapshot
_QUEUED_BATCHES = 100_000  # for one subscriber that does not read, before it misses some
_PART_BLOCKS = 2_000  # of a snapshot, in one message: some 10 ms, between which the engine goes on
_MOST_SNAPSHOTS = 64  # under way; a subscriber beyond them has to ask again


class KvPublisher:
    """Two sockets of one engine, used by its thread: one publishes, the other answers; call `tick` often.

    The first batch says that nothing is left of the cache of an earlier process on this address, and tells the `load`.

    Raises:
        StartupError: a port is taken.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        config: EngineConfig,
        journal: CacheJournal,
        groups: Sequence[BlockType],
        incarnation: str,
        *,
        load: InstanceLoad,
    ) -> None:
        self._journal, self._groups = journal, groups
        self._incarnation = incarnation
        self._interval_s = config.heart_beat_interval
        self._next_heartbeat = 0.0
        self._number = 0
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._snapshots: deque[tuple[bytes, bytes, Iterator[list[Any]]]] = deque()
        self._sockets: list[zmq.Socket[Any]] = []
        try:
            self._publish, port = self._listen(context, zmq.PUB, config.host, "kv_events_port", config.kv_events_port)
            self.socket, replay = self._listen(
                context, zmq.ROUTER, config.host, "kv_events_replay_port", config.kv_events_replay_port
            )
        except StartupError:
            self.close()
            raise
        self.events_address = f"{config.reachable_host}:{port}"
        self.replay_address = f"{config.reachable_host}:{replay}"
        self._send([Cleared()], load)

    def _listen(
        self, context: zmq.Context[Any], kind: int, host: str, setting: str, port: int
    ) -> tuple[zmq.Socket[Any], int]:
        socket: zmq.Socket[Any] = context.socket(kind)
        self._sockets.append(socket)
        socket.setsockopt(zmq.SNDHWM, _QUEUED_BATCHES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, ":" in host)
        where = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        try:
            if not port:
                return socket, socket.bind_to_random_port(where)
            socket.bind(f"{where}:{port}")
        except zmq.ZMQError as error:
            raise StartupError(f"{setting} {port} on {host} cannot be taken: {error}") from error
        return socket, port

    @property
    def heartbeat_due(self) -> bool:
        """It is time for a `tick` with a load."""
        return now() >= self._next_heartbeat

    def tick(self, load: InstanceLoad | None = None) -> None:
        """Publish the events since the last call; with a `load` also that, whether or not there are events. Answer
        questions."""
        events = self._journal.take()
        if events or load is not None:
            self._send(events, load)
        while self.socket.poll(0):
            frames = self.socket.recv_multipart()
            if len(frames) != 3 or (len(frames[2]) != 8 and frames[2] != SNAPSHOT):
                log.warning("a message at the replay port is no question: %d frames", len(frames))
                continue
            self._answer(frames[0], frames[2])
        if self._snapshots:
            self._send_part(*self._snapshots.popleft())

    @property
    def busy(self) -> bool:
        """The next `tick` has something to do."""
        return bool(self._snapshots)

    def _send(self, events: list[Any], load: InstanceLoad | None) -> None:
        if load is not None:
            self._next_heartbeat = now() + self._interval_s
        payload = self._pack(events, load)
        self._publish.send_multipart([TOPIC.encode(), self._number.to_bytes(8, "big"), payload])
        self.kept.append((self._number, payload))
        self._number += 1

    def _pack(self, events: list[Any], load: InstanceLoad | None = None) -> bytes:
        return pack_batch(EventBatch(time.time(), events, self._incarnation, load), self._groups)

    def _answer(self, sender: bytes, question: bytes) -> None:
        """Repeat batches that were published, or begin a snapshot, of which the first part tells of everything that
        was published before the number it bears."""
        if question == SNAPSHOT:
            if len(self._snapshots) < _MOST_SNAPSHOTS:
                parts = self._journal.snapshot(_PART_BLOCKS)
                self._snapshots.append((sender, self._number.to_bytes(8, "big"), parts))
            return
        first = int.from_bytes(question, "big")
        for number, payload in self.kept:
            if number >= first:
                self.socket.send_multipart([sender, b"", number.to_bytes(8, "big"), payload])
        self.socket.send_multipart([sender, b"", END, b""])

    def _send_part(self, sender: bytes, number: bytes, parts: Iterator[list[Any]]) -> None:
        events = next(parts, None)
        if events is not None:
            self.socket.send_multipart([sender, b"", number, self._pack(events)])
            self._snapshots.append((sender, number, parts))
        else:  # one that is empty says at least whose it is, and what comes next
            self.socket.send_multipart([sender, b"", number, self._pack([])])
            self.socket.send_multipart([sender, b"", END, b""])

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
