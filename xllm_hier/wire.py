"""How messages travel: msgpack with tagged arrays for dataclasses, ZeroMQ sockets over ipc, and a limit on every wait.

A message is `[tag, field, field, ...]`, tag = class name, fields in the order of the dataclass. Nested dataclasses and
int32 arrays are msgpack extension types, so that a list of ints never has to become a list of objects.
"""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgpack
import numpy as np
import zmq

from . import calls, figures, peer_plans, plans, request_messages
from .errors import WireError

_INTS, _MESSAGE = 1, 2
_CONNECT_MS = 5000
_CLASSES: dict[str, tuple[type, int]] = {
    name: (thing, len(dataclasses.fields(thing)))
    for module in (request_messages, plans, figures, calls, peer_plans)
    for name, thing in vars(module).items()
    if isinstance(thing, type) and dataclasses.is_dataclass(thing)
}


def _fields_getter(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    names = [item.name for item in dataclasses.fields(kind)]
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)


_FIELDS_OF = {kind: _fields_getter(kind) for kind, _ in _CLASSES.values()}  # made once: a step packs hundreds


def _extension(value: Any) -> msgpack.ExtType:
    if isinstance(value, np.ndarray) and value.dtype == np.int32 and value.ndim == 1:
        return msgpack.ExtType(_INTS, value.tobytes())
    if type(value) in _FIELDS_OF:
        return msgpack.ExtType(_MESSAGE, pack(value))
    if isinstance(value, (np.integer, np.floating)):
        return value.item()
    raise WireError(f"a {type(value).__name__} cannot travel between processes")


def pack(message: Any) -> bytes:
    """Bytes of a dataclass of one of the four modules of messages. Raises WireError for anything else in it."""
    name, fields_of = type(message).__name__, _FIELDS_OF.get(type(message))
    if fields_of is None:
        raise WireError(f"{name} is not a message")
    packed: bytes = msgpack.packb([name, *fields_of(message)], default=_extension)
    return packed


def _from_extension(code: int, data: bytes) -> Any:
    if code == _INTS:
        if len(data) % 4:
            raise WireError(f"an int32 array of {len(data)} bytes")
        return np.frombuffer(data, dtype=np.int32).copy()  # writable, as torch wants it
    if code == _MESSAGE:
        return unpack(data)
    raise WireError(f"unknown extension type {code}")


def unpack(data: bytes) -> Any:
    """The message in `data`.

    Raises:
        WireError: broken msgpack, an unknown tag, or a wrong number of fields.
    """
    try:
        raw = msgpack.unpackb(data, ext_hook=_from_extension, strict_map_key=False)
    except WireError:
        raise
    except Exception as error:  # msgpack raises ValueError, TypeError and its own kinds for broken bytes
        raise WireError(f"broken msgpack: {error}") from error
    if not isinstance(raw, list) or not raw or not isinstance(raw[0], str):
        raise WireError("a message is a list that begins with its tag")
    tag, *fields = raw
    if tag not in _CLASSES:
        raise WireError(f"unknown message {tag!r}")
    kind, count = _CLASSES[tag]
    if len(fields) != count:
        raise WireError(f"{tag} has {count} fields, {len(fields)} came")
    return kind(*fields)


def open_socket(context: zmq.Context[Any], address: str, *, bind: bool) -> zmq.Socket[Any]:
    """A PAIR socket without bounds on its queue and without lingering; one side binds, the other connects."""
    socket: zmq.Socket[Any] = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 500)
    if bind:
        socket.bind(address)
    else:
        socket.connect(address)
    return socket


class Channel:
    """One ordered, two-way connection to one peer process, used by one thread.

    `send` queues without bound (the protocol bounds it: every plan has one answer); `receive` has a limit;
    `peer_gone` tells within milliseconds that the other process ended.
    """

    def __init__(self, context: zmq.Context[Any], address: str, *, bind: bool) -> None:
        self.socket = open_socket(context, address, bind=bind)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._gone = False

    def send(self, message: Any) -> bool:
        """Queue a message; waits for a peer that has not connected yet. False when the peer is gone or never comes:
        nobody will read it, and a caller that needs an answer has a limit of its own."""
        data = pack(message)
        while True:
            try:
                self.socket.send(data, zmq.NOBLOCK)
                return True
            except zmq.Again:
                if self.peer_gone() or not self.socket.poll(_CONNECT_MS, zmq.POLLOUT):
                    return False

    def receive(self, timeout_s: float) -> Any | None:
        """The next message, or None when none came within `timeout_s`. Raises WireError when it does not decode."""
        if not self.socket.poll(max(0, int(timeout_s * 1000))):
            return None
        return unpack(self.socket.recv())

    def peer_gone(self) -> bool:
        """The peer had connected and its end of the socket is closed."""
        if not self._gone and self._monitor.poll(0):
            self._gone = True
        return self._gone

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()


class HasSocket(Protocol):
    """Something that can be waited for."""

    socket: zmq.Socket[Any]


def wait_readable(channels: Sequence[HasSocket], timeout_s: float) -> list[HasSocket]:
    """The channels with a message waiting; none after `timeout_s`."""
    poller = zmq.Poller()
    for channel in channels:
        poller.register(channel.socket, zmq.POLLIN)
    ready = {socket for socket, _ in poller.poll(max(0, int(timeout_s * 1000)))}
    return [channel for channel in channels if channel.socket in ready]


class Deadline:
    """A point in time that a chain of waits shares."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return self.remaining() == 0.0
