"""The way from one instance to the address of another, over TCP."""

from __future__ import annotations

from typing import Any

import zmq

from ...machine import split_address

_KEEPALIVE_S = 5


class Line:
    """The way to one address: a socket that connects by itself again and again, and its connections made and lost.

    Raises:
        ValueError: it is no address.
    """

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.address = address
        split_address(address)  # a peer says its own address, which may be anything
        self._socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        keep_alive(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self.connected = False
        try:
            self._socket.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"{address!r} is no address: {error}") from error

    def news(self) -> list[bool]:
        """Connections made (True) and lost (False) since the last call."""
        found = []
        while self._monitor.poll(0):
            number = int.from_bytes(self._monitor.recv_multipart()[0][:2], "little")
            self.connected = number == zmq.EVENT_CONNECTED
            found.append(self.connected)
        return found

    def send(self, frames: list[bytes]) -> None:
        if self.connected:  # else they would wait for the next process at this address
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()


def keep_alive(socket: zmq.Socket[Any]) -> None:
    """Let the kernel notice a machine that is gone, which closes no connection."""
    for option, value in (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S),
        (zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_S),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        socket.setsockopt(option, value)
