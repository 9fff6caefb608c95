"""The tier that paid for each prompt token: device, host, store, or computing."""

from __future__ import annotations

from collections.abc import Iterable

from ...request_messages import PromptUsage
from .sequence import Sequence
from .types import Found

_TIERS = ("device", "host", "store")  # the slowest last


class PrefixAccount:
    """Accounts of all requests; `tokens` are their sums by tier."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.tokens = {"device": 0, "host": 0, "store": 0, "computed": 0}

    def open(self, sequence: Sequence, found: Iterable[Found], num_hit_tokens: int) -> None:
        """Of a block's types the slowest pays, for a block of which nothing was needed that of the block behind it.
        Once per request: a resumed one keeps its first account."""
        if sequence.usage is not None:
            return
        slowest: dict[int, int] = {}
        for item in found:
            from_store = item.index in sequence.held[item.pools.type].from_store
            tier = 0 if item.device is not None else 2 if from_store else 1
            slowest[item.index] = max(tier, slowest.get(item.index, 0))
        paid = dict.fromkeys(_TIERS, 0)
        tier = 0
        for index in reversed(range(max(slowest, default=-1) + 1)):
            tier = slowest.get(index, tier)
            paid[_TIERS[tier]] += max(0, min(self._block_size, num_hit_tokens - index * self._block_size))
        sequence.usage = PromptUsage(**paid, computed=sequence.prompt_length - num_hit_tokens)
        self._count(sequence.usage, +1)

    def forget(self, sequence: Sequence) -> None:
        """The blocks of a failed load were not there after all; the next admission accounts anew."""
        if sequence.usage is not None and not sequence.usage_sent:
            self._count(sequence.usage, -1)
            sequence.usage = None
            for held in sequence.held.values():
                held.from_store.clear()

    def _count(self, usage: PromptUsage, sign: int) -> None:
        for tier in self.tokens:
            self.tokens[tier] += sign * int(getattr(usage, tier))
