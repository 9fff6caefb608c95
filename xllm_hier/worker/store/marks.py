"""The marks that instances leave in a name space beside their blocks: the model's identity, and their numerics.

Identity, one object per cache domain: the first instance leaves its model's, later ones compare theirs with it::

    | identity in plain text, filled up with zeros (248 bytes) | XXH3-64 of it (8) |

A put of the store is "stored, or was there": so whoever writes reads back, and of two that come at once one prevails
for both. Numerics marks say all by being there.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash

from ...errors import StoreError
from ...models.identity import ModelIdentity
from ...store_key import MAIN, identity_key, numerics_key
from ..transfer_stats import TransferStats
from .mooncake_client import MooncakeClient

log = logging.getLogger("xllm.store")

NOTE_BYTES = 256
_TEXT_BYTES = NOTE_BYTES - 8
_TRIES, _PAUSE_S = 20, 0.05  # another instance's, or another rank's, write may be under way


class IdentityUnknownError(StoreError):
    """The store answers, and neither gives nor takes an identity: it is full, or who holds the object is away."""


class StoreMarks:
    """The marks of one name space as one worker sees them; any thread may call.

    `identities` are those of the models by key component. `mixed_numerics`: instances with other numerics than
    `numerics_id` were seen here (see ModelRunner.details).
    """

    def __init__(
        self,
        client: MooncakeClient,
        name_space: str,
        stats: TransferStats,
        numerics_id: str,
        identities: Mapping[str, ModelIdentity],
    ) -> None:
        self._client = client
        self._name_space = name_space
        self._stats = stats
        self._numerics_id = numerics_id
        self._identities = dict(identities)
        self._lock = threading.Lock()
        self._own_note: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._note_address = 0
        self.mixed_numerics = False

    def _note(self) -> int:
        """Address of NOTE_BYTES that the client can read into, apart from all blocks and staging areas."""
        if not self._note_address:
            if self._client.through_node:
                self._note_address = self._client.allocate(NOTE_BYTES)
            else:
                self._own_note = np.zeros(NOTE_BYTES, dtype=np.uint8)
                self._client.register(self._own_note.ctypes.data, NOTE_BYTES)
                self._note_address = self._own_note.ctypes.data
        return self._note_address

    def forget_client(self) -> None:
        """The client was set up anew: memory that it lent before is not its own any more."""
        self._note_address = 0

    # ------------------------------------------------------------------------------------------- identity

    def objection(self) -> str:
        """Why this instance must not use the name space; empty when it may, and its identities are there.

        All ranks compare the same text with the same object, and so come to the same end.

        Raises:
            IdentityUnknownError: it could not be found out.
            StoreError: the store does not answer.
        """
        for component, ours in self._identities.items():
            with self._lock:
                theirs = self._settled(identity_key(self._name_space, component), ours)
            difference = ours.difference(theirs)
            if difference:
                what = "model" if component == MAIN else f"draft model for {component}"
                return (
                    f"the store holds KV of another {what} under model id {self._name_space!r}: "
                    f"other {difference} (here {ours.text}; there {theirs})"
                )
        return ""

    def _settled(self, key: str, ours: ModelIdentity) -> str:
        """The identity that is in the store, `ours` if there was none."""
        note = self._note()
        for attempt in range(_TRIES):
            if attempt > 1:  # the first look after our own put needs no pause
                time.sleep(_PAUSE_S)
            if self._client.exist([key]) == [False]:
                text = ours.text.encode().ljust(_TEXT_BYTES, b"\0")
                ctypes.memmove(note, text + xxhash.xxh3_64_digest(text), NOTE_BYTES)
                self._client.put([key], [note], [NOTE_BYTES], [key])
            elif self._client.get([key], [note], [NOTE_BYTES]) == [NOTE_BYTES]:
                found = _proven(ctypes.string_at(note, NOTE_BYTES))
                if found is not None:
                    return found
                self._client.remove(key)
        raise IdentityUnknownError(f"{key} can neither be read nor written")

    # ------------------------------------------------------------------------------------------- numerics

    def compare_numerics(self, readers: str) -> None:
        """Leave our numerics id among those of `readers`, who read the same objects; say so when another is there."""
        if not self._numerics_id:
            return
        marks = [numerics_key(self._name_space, readers, what) for what in (self._numerics_id, "mixed", "any")]
        ours, mixed, first = marks
        any_there, ours_there, is_mixed = self._client.exist([first, ours, mixed])
        if not any_there:
            self._put([first, ours])
        elif not ours_there:
            self._put([ours, mixed])
            is_mixed = True
        if is_mixed and not self.mixed_numerics:
            self.mixed_numerics = True
            self._stats.count("mixed_numerics")
            log.warning(
                "instances with other numerics than %s (other CPU, threads, ranks, dtype, tiles) share name space %s: "
                "store hits are equal up to rounding only; use another --model_id for equal bits",
                self._numerics_id,
                self._name_space,
            )

    def _put(self, keys: list[str]) -> None:
        """Objects whose content means nothing. Mooncake takes none of size 0."""
        with self._lock:
            self._client.put(keys, [self._note()] * len(keys), [64] * len(keys), keys)


def _proven(raw: bytes) -> str | None:
    """The text of an identity object; None when it is damaged."""
    text, checksum = raw[:_TEXT_BYTES], raw[_TEXT_BYTES:]
    return text.rstrip(b"\0").decode() if xxhash.xxh3_64_digest(text) == checksum else None
