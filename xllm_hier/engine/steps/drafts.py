"""Drafts in the engine: their makers, prompt lookup, and how many were right.

Prompt lookup drafts the tokens that followed the last few where these stood before. No model and no KV: repetitive
texts (code being edited, documents being quoted, lists) are guessed for nothing, and a wrong guess costs a row of one
step (https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..blocks.books import HierarchyBlockManagerPool
from ..blocks.sequence import Sequence

ORIGINS = ("cold", "device", "host", "store")
# Fewer drafts than these say nothing; a gap must be both large and beyond chance.
_ENOUGH, _GAP, _DEVIATIONS = 300, 0.2, 4.0
LONGEST, SHORTEST = 4, 2  # tokens that must be equal; fewer are found by chance too often
_LOOK_BACK = 32768


def lookup(tokens: list[int], num_drafts: int) -> list[int]:
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


class Drafter:
    """Decides for each sequence how many drafts a step verifies and how many the worker's draft model makes.

    `propose(sequence, most)` returns up to `most` drafts behind the sequence's last token.
    """

    def __init__(self, manager: HierarchyBlockManagerPool) -> None:
        self._manager = manager
        self._settings = manager.settings.drafting
        self.counts = DraftCounts()
        self.propose: Callable[[Sequence, int], list[int]] = self._proposed

    def _proposed(self, sequence: Sequence, most: int) -> list[int]:
        return sequence.drafts[: max(0, most)] if self._settings.by_model else lookup(sequence.tokens, most)

    def drafts(self, sequence: Sequence, count: int, budget: int) -> list[int]:
        """Tokens to verify behind the next `count` of the sequence: none that it could not use, that would exceed the
        step's `budget`, or that would cost another sequence its blocks."""
        start, request = sequence.num_computed, sequence.request
        if sequence.in_prefill or start + count < len(sequence.tokens):
            return []
        limit = min(self._settings.num_tokens, budget, request.max_tokens - sequence.num_generated - 1)
        if limit <= 0:
            return []
        drafts = self.propose(sequence, limit)
        if drafts and not self._manager.allocate(sequence, start + count + len(drafts) + self._settings.ahead):
            return []
        return drafts

    def num_proposals(self, sequence: Sequence, end: int, share: int) -> int:
        """Drafts to ask the draft model for behind a step over tokens up to `end`, drafts included: as many as the next
        step can verify (`share`). Blocks for them are allocated where there are any; without them it makes fewer."""
        if not self._settings.by_model:
            return 0
        request = sequence.request
        most = min(self._settings.num_tokens, request.max_tokens - sequence.num_generated - 2, share)
        if most <= 0:
            return 0
        last = sequence.prompt_length + request.max_tokens
        self._manager.allocate(sequence, min(end + self._settings.ahead + most - 1, last))
        return most

    def note(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """A step has verified `drafted` drafts of the sequence."""
        if drafted:
            self.counts.add(_origin(sequence), drafted, accepted)


def _origin(sequence: Sequence) -> str:
    """The tier that paid for most of the restored part of the prompt; cold when nothing was restored."""
    usage = sequence.usage
    if usage is None or not (usage.device or usage.host or usage.store):
        return "cold"
    return max(ORIGINS[1:], key=lambda tier: int(getattr(usage, tier)))


def _zeros() -> dict[str, int]:
    return dict.fromkeys(ORIGINS, 0)


@dataclass
class DraftCounts:
    """Drafted and accepted tokens, and the steps with drafts, by where a request's prompt came from: cold, or the tier
    that paid for most of it."""

    drafted: dict[str, int] = field(default_factory=_zeros)
    accepted: dict[str, int] = field(default_factory=_zeros)
    steps: dict[str, int] = field(default_factory=_zeros)
    _drafted_before: dict[str, int] = field(default_factory=_zeros)
    _accepted_before: dict[str, int] = field(default_factory=_zeros)

    def add(self, origin: str, drafted: int, accepted: int) -> None:
        self.steps[origin] += 1
        self.drafted[origin] += drafted
        self.accepted[origin] += accepted

    @property
    def accept_length(self) -> dict[str, float]:
        """Tokens per step with drafts, by origin; origins without such steps are left out."""
        return {origin: 1.0 + self.accepted[origin] / steps for origin, steps in self.steps.items() if steps}

    @property
    def alarm(self) -> bool:
        """Drafts behind a restored prompt are right less often than behind a computed one, beyond chance:
        the draft model's restored blocks may not be those that were stored."""
        drafted = {origin: count - self._drafted_before[origin] for origin, count in self.drafted.items()}
        accepted = {origin: count - self._accepted_before[origin] for origin, count in self.accepted.items()}
        return any(_falls_behind(drafted, accepted, origin) for origin in ORIGINS[1:])

    def forget(self) -> None:
        """The alarm looks at drafts from now on; the counts stay."""
        self._drafted_before, self._accepted_before = dict(self.drafted), dict(self.accepted)


def _falls_behind(drafted: dict[str, int], accepted: dict[str, int], origin: str) -> bool:
    """Two shares compared: is that of `origin` below the cold one by more than a fifth of it, and than chance?"""
    if min(drafted["cold"], drafted[origin]) < _ENOUGH:
        return False
    cold, warm = accepted["cold"] / drafted["cold"], accepted[origin] / drafted[origin]
    both = (accepted["cold"] + accepted[origin]) / (drafted["cold"] + drafted[origin])
    deviation = math.sqrt(both * (1.0 - both) * (1.0 / drafted["cold"] + 1.0 / drafted[origin]))
    return cold - warm > max(_GAP * cold, _DEVIATIONS * deviation)
