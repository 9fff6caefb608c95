"""Keys that are left alone for a while because the store gave other bytes for them than they name."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

KEY_QUARANTINE_S = 300.0
MAX_KEYS = 4096  # some hundred KiB; with more the oldest is asked for again


class KeyQuarantine:
    """At most MAX_KEYS keys, each for KEY_QUARANTINE_S from the last time it was bad; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: OrderedDict[str, float] = OrderedDict()  # the oldest first

    def add(self, key: str) -> None:
        """Leave `key` alone from now on."""
        with self._lock:
            self._since.pop(key, None)
            self._since[key] = time.monotonic()
            if len(self._since) > MAX_KEYS:
                self._since.popitem(last=False)

    def held(self, keys: Iterable[str]) -> set[str]:
        """The keys that must be neither read nor written now."""
        with self._lock:
            end = time.monotonic() - KEY_QUARANTINE_S
            while self._since and next(iter(self._since.values())) <= end:
                self._since.popitem(last=False)
            return {key for key in keys if key in self._since} if self._since else set()

    def __len__(self) -> int:
        return len(self._since)
