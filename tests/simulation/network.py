"""What stands in for ZeroMQ between instances: ordered lines that take a moment, stall, break, and connect again.

A line that breaks loses some of what is on it; the rest waits, as in ZeroMQ, for whoever is at the address next.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import zmq

from .processes import Process
from .timeline import Timeline

AGAIN_S = 0.1  # between two attempts to connect
TRAVEL_S = 0.001


class Network:
    """All addresses and lines; a pair of processes may be cut off from each other, or their line stall, for a while."""

    def __init__(self, timeline: Timeline, seed: int) -> None:
        self.timeline = timeline
        self.dice = random.Random(f"network {seed}")
        self.listening: dict[str, Socket] = {}
        self.lines: list[Socket] = []
        self.cut: set[tuple[str, str]] = set()  # names of processes, from and to
        self.stalled: set[tuple[str, str]] = set()
        self.num_breaks = 0

    def context(self, process: Process) -> Context:
        return Context(self, process)

    def break_lines(self, one: str, other: str, seconds: float) -> None:
        """Lines from `one` to `other` break, and are not made again for so long."""
        self.cut.add((one, other))
        for line in list(self.lines):
            if line.ends == (one, other):
                line.lose()
                self.num_breaks += 1
        self.timeline.after(seconds, lambda: self.cut.discard((one, other)))

    def stall_lines(self, one: str, other: str, seconds: float) -> None:
        """What `one` says to `other` arrives only afterwards, all of it."""
        self.stalled.add((one, other))

        def go_on() -> None:
            self.stalled.discard((one, other))
            for line in self.lines:
                line.push_on()

        self.timeline.after(seconds, go_on)

    def went_on(self) -> None:
        """Some process that was stopped is not any more."""
        for line in self.lines:
            line.push_on()

    def ended(self, process: Process) -> None:
        """All sockets of a process are gone with it."""
        for address, socket in list(self.listening.items()):
            if socket.process is process:
                del self.listening[address]
        for line in list(self.lines):
            if line.process is process:
                line.close()
            elif line.peer is not None and line.peer.process is process:
                line.lose()


class Context:
    """`zmq.Context` of one process."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process

    def socket(self, kind: int) -> Socket:
        assert kind in (zmq.DEALER, zmq.ROUTER)
        return Socket(self._network, self._process)


class Monitor:
    """Tells of connections made and lost."""

    def __init__(self) -> None:
        self.events: deque[list[bytes]] = deque()

    def tell(self, event: int) -> None:
        self.events.append([int(event).to_bytes(2, "little") + bytes(4)])

    def poll(self, _timeout: int) -> bool:
        return bool(self.events)

    def recv_multipart(self) -> list[bytes]:
        return self.events.popleft()

    def close(self, _linger: int) -> None:
        self.events.clear()


class Socket:
    """One that listens (`inbox`), or the near end of a line to one."""

    def __init__(self, network: Network, process: Process) -> None:
        self.process = process
        self.inbox: deque[list[bytes]] = deque()
        self.closed = False
        self.peer: Socket | None = None
        self._network = network
        self._address = ""
        self._monitor = Monitor()
        self._on_the_way: deque[list[bytes]] = deque()

    def setsockopt(self, _option: int, _value: int) -> None:
        pass

    # ------------------------------------------------------------------------------------------ one that listens

    def bind(self, address: str) -> None:
        assert address not in self._network.listening, f"{address} is taken"
        self._network.listening[address] = self

    def poll(self, _timeout: int) -> bool:
        return bool(self.inbox)

    def recv_multipart(self) -> list[bytes]:
        return self.inbox.popleft()

    # --------------------------------------------------------------------------------------------------- a line

    @property
    def ends(self) -> tuple[str, str]:
        return self.process.name, self.peer.process.name if self.peer is not None else ""

    def get_monitor_socket(self, _events: int) -> Monitor:
        return self._monitor

    def disable_monitor(self) -> None:
        pass

    def connect(self, address: str) -> None:
        self._address = address
        self._network.lines.append(self)
        self._later(TRAVEL_S, self._connect)

    def _later(self, mean_s: float, work: Any) -> None:
        self._network.timeline.after(self._network.dice.random() * 2 * mean_s, work)

    def _connect(self) -> None:
        peer = self._network.listening.get(self._address)
        if self.closed or self.peer is not None:
            return
        if peer is None or self.process.stopped or (self.process.name, peer.process.name) in self._network.cut:
            self._later(AGAIN_S, self._connect)
            return
        self.peer = peer
        self._monitor.tell(zmq.EVENT_CONNECTED)
        for _ in self._on_the_way:
            self._later(TRAVEL_S, self._arrive)

    def send_multipart(self, frames: list[bytes], _flags: int) -> None:
        assert not self.closed
        self._on_the_way.append(list(frames))
        self._later(TRAVEL_S, self._arrive)

    def _arrive(self) -> None:
        """The next message has come, if nothing is in the way: none overtakes another."""
        peer = self.peer
        if not self._on_the_way or peer is None or self.process.stopped or self.ends in self._network.stalled:
            return
        peer.inbox.append([b"line", *self._on_the_way.popleft()])

    def push_on(self) -> None:
        for _ in self._on_the_way:
            self._later(TRAVEL_S, self._arrive)

    def lose(self) -> None:
        """The line breaks: the first messages on the way are lost, any number of them."""
        if self.peer is None:
            return
        self.peer = None
        for _ in range(self._network.dice.randint(0, len(self._on_the_way))):
            self._on_the_way.popleft()
        self._monitor.tell(zmq.EVENT_DISCONNECTED)
        self._later(AGAIN_S, self._connect)

    def close(self) -> None:
        """What was said last still arrives."""
        self.closed = True
        peer, self.peer = self.peer, None
        lines = self._network.lines
        if self in lines:
            lines.remove(self)
        if peer is not None and not self.process.killed:
            last = [[b"line", *frames] for frames in self._on_the_way]
            self._later(TRAVEL_S, lambda: peer.inbox.extend(last))
        for address, socket in list(self._network.listening.items()):
            if socket is self:
                del self._network.listening[address]
                for line in [line for line in lines if line.peer is self]:
                    line.lose()
