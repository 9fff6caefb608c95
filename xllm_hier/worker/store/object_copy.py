"""Objects between host blocks and store: in calls of bounded size, and through staging memory where they must.

A call moves at most 64 MiB. So the time limit of a call tells a store that hangs from one that has a large batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from .connection import StoreConnection
from .objects import StoreObject

NOT_SENT = -703  # among ENDED_READS: the object was not touched
STAGING_BLOCKS = 32
_CALL_BYTES = 64 << 20


class ObjectCopy:
    """Gets and puts objects over a connection; `get` and `put` may run on two threads at once."""

    def __init__(self, connection: StoreConnection, name_space: str) -> None:
        self._connection = connection
        self._name_space = name_space

    def get(self, objects: Sequence[StoreObject]) -> list[int]:
        """Read each object into its host block; for each its bytes, or the store's error code."""
        return self._transfer("get", objects)

    def put(self, objects: Sequence[StoreObject]) -> list[int]:
        """Write each host block as its object; for each 0, or the store's error code."""
        return self._transfer("put", objects)

    def _transfer(self, direction: str, objects: Sequence[StoreObject]) -> list[int]:
        addresses = [item.address for item in objects]
        if self._connection.host_usable:
            return self._send(direction, objects, addresses)
        codes: list[int] = []
        staging, slot, num_slots = self._connection.staging(direction)
        step = min(STAGING_BLOCKS, num_slots)
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

    def _send(self, direction: str, objects: Sequence[StoreObject], addresses: Sequence[int]) -> list[int]:
        client, circuit, codes = self._connection.client, self._connection.circuit, list[int]()
        keys, sizes = [item.key for item in objects], [item.nbytes for item in objects]
        groups = [item.group(self._name_space) for item in objects]
        step = max(1, _CALL_BYTES // max(sizes))
        for start in range(0, len(objects), step):
            part = slice(start, start + step)
            if not circuit.closed:  # a call before this one opened it: the others need not hang too
                codes += [NOT_SENT] * len(keys[part])
                continue
            with circuit.call():
                if direction == "get":
                    codes += client.get(keys[part], addresses[part], sizes[part])
                else:
                    codes += client.put(keys[part], addresses[part], sizes[part], groups[part])
        return codes
