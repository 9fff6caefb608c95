"""Load or recompute: whether bringing blocks back takes less time than computing them, by rates measured here.

    restore    blocks x (seconds to read one from the store + seconds to load one to the device)
    recompute  blocks x tokens of a block x seconds to compute a prompt token

These are unknown in advance: a link may be shared, a store far away, a model small. A rate that was not measured, or
not lately, is taken to be fast, so that a slow tier is tried again now and then.
"""

from __future__ import annotations

import time

STALE_S = 30.0  # after that a tier gets another try
SLACK_S = 0.01  # predicted losses below this are not worth a decision, nor below a fifth of the time
_SLACK_SHARE = 0.2
_KEEP = 0.8  # weight of all that was measured before one more measurement
MIN_PROMPT_TOKENS = 64  # smaller steps pay for padding, and say little about a prompt


class Rate:
    """Seconds per unit over the recent past; `value` is None while there is none, or when it is `stale_s` old."""

    def __init__(self, stale_s: float = float("inf")) -> None:
        self._stale_s = stale_s
        self._units = self._seconds = 0.0
        self._at = 0.0

    def add(self, units: float, seconds: float) -> None:
        if units > 0:
            keep = _KEEP if self.value is not None else 0.0
            self._units = self._units * keep + units
            self._seconds = self._seconds * keep + seconds
            self._at = time.monotonic()

    @property
    def value(self) -> float | None:
        if not self._units or time.monotonic() - self._at > self._stale_s:
            return None
        return self._seconds / self._units


class RestorePolicy:
    """Decides for one instance and counts its decisions; `measured` False restores all that can be restored.

    `decisions` counts requests: by tier, how many had all of their hit there restored, only a part, or nothing
    because computing it was faster.
    """

    def __init__(self, block_size: int, *, measured: bool = True) -> None:
        self._block_size = block_size
        self._measured = measured
        self.trusted = True  # False: restored blocks were found to be wrong
        self.compute = Rate()
        self.load = Rate(STALE_S)
        self.read = Rate(STALE_S)
        self._loaded: dict[int, tuple[float, float]] = {}
        self._settled: bool | None = None
        self.decisions = {tier: {"restored": 0, "partly": 0, "recomputed": 0} for tier in ("host", "store")}

    def computed(self, prompt_tokens: int, generated_tokens: int, seconds: float) -> None:
        """A step has ended; only steps that are nearly all prompt tell the cost of a prompt."""
        if prompt_tokens >= max(MIN_PROMPT_TOKENS, 4 * generated_tokens):
            self.compute.add(prompt_tokens, seconds)

    def loaded(self, rank: int, blocks: float, seconds: float) -> None:
        """Blocks that a rank has loaded since its start, and the seconds that took; slow ranks count as much as
        others."""
        old_blocks, old_seconds = self._loaded.get(rank, (0.0, 0.0))
        self._loaded[rank] = (blocks, seconds)
        self.load.add(blocks - old_blocks, seconds - old_seconds)

    def settle(self) -> None:
        """Decide about loads until the next call: a measurement that goes stale between two looks at one request would
        let its match and its allocation disagree."""
        self._settled = self._pays(1, self.load.value, slack_s=0.0)

    def loading_pays(self) -> bool:
        """Loading a block from the host is not slower than computing it."""
        return self._pays(1, self.load.value, slack_s=0.0) if self._settled is None else self._settled

    def reading_pays(self, num_blocks: int, seconds_per_block: float | None = None) -> bool:
        """Reading `num_blocks` more from the store, and loading them, is not slower than computing them.

        `seconds_per_block` is the pace of the request's own reads; it counts if it is worse than that of others.
        """
        known = [rate for rate in (self.read.value, seconds_per_block) if rate is not None]
        return self._pays(num_blocks, max(known) + (self.load.value or 0.0) if known else None, slack_s=SLACK_S)

    def count(self, tier: str, decision: str) -> None:
        self.decisions[tier][decision] += 1

    def _pays(self, num_blocks: int, seconds_per_block: float | None, *, slack_s: float) -> bool:
        if not self.trusted:
            return False
        compute = self.compute.value
        if not self._measured or compute is None or seconds_per_block is None:
            return True
        recompute = num_blocks * self._block_size * compute
        loss = num_blocks * seconds_per_block - recompute
        return loss <= max(slack_s, _SLACK_SHARE * recompute)
