"""Draft tokens by prompt lookup: what followed the last few tokens where they stood before, as n-gram speculation does.

No model and no KV: repetitive texts (code being edited, documents being quoted, lists) are guessed for nothing, and a
wrong guess costs a row of one step (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

import numpy as np

LONGEST, SHORTEST = 4, 2  # tokens that must be equal; fewer are found by chance too often
_LOOK_BACK = 32768


def lookup(tokens: Tokens[int], num_drafts: int) -> list[int]:
    """Up to `num_drafts` tokens that followed the latest earlier place of the longest tail that has one."""
    if num_drafts <= 0 or len(tokens) <= SHORTEST:
        return []
    text = np.asarray(tokens[-_LOOK_BACK:], dtype=np.int64)
    for length in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
        places = len(text) - length  # of an n-gram that ends before the tail does
        equal = np.ones(places, dtype=bool)
        for offset in range(length):
            equal &= text[offset : offset + places] == text[len(text) - length + offset]
        found = np.flatnonzero(equal)
        if len(found):
            start = int(found[-1]) + length
            return [int(token) for token in text[start : start + num_drafts]]
    return []


@dataclass
class DraftCounts:
    """Drafted and accepted tokens by where a request's prompt came from: cold, or the tier that paid for most of it."""

    drafted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("cold", "device", "host", "store"), 0))
    accepted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("cold", "device", "host", "store"), 0))

    def add(self, origin: str, drafted: int, accepted: int) -> None:
        self.drafted[origin] += drafted
        self.accepted[origin] += accepted
