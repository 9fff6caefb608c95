"""Which instance a request goes to: in turn (RR), where it costs least (CAR), where it meets its targets (SLO_AWARE).

    time    = queue + prefill + a step of the answers that run there
    prefill = uncached tokens x compute + host's tokens x load + store's tokens x (read + load)
    queue   = prefill of the requests before it, as the router has sent them or the instance tells, whichever is more
    cost    = time + WORK_WEIGHT x prefill, as far as it is of no use to others: those who come next wait for it

All rates are those that the instances measure. Every instance is scored, whatever it has cached, so that one which has
everything but is busy loses to an idle one: soon where many want the same prefix, since a second copy of it serves them
too, later where nobody else does, since computing it once more only keeps others waiting. Requests that the router has
sent somewhere counts at once, before any heartbeat tells of it: its time as queue, its blocks as the device's.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..hashing import prompt_hashes, root_hash
from ..kv_events import InstanceLoad
from .prefix_index import Match, PrefixIndex, UnderWay
from .rates import Candidate, Rates, rates_of, with_one_more

__all__ = ["POLICIES", "Candidate", "InstanceLoad", "Prompt", "Route", "Router"]

POLICIES = ("RR", "CAR", "SLO_AWARE")
WORK_WEIGHT = 2.0  # more keeps prefixes together, less spills sooner; measured with bench/routing.py
SLACK_S, SLACK_SHARE = 0.002, 0.05  # costs nearer to each other than that are the same: they are estimates
DEVICE_PREFIX_SHARE = 0.2  # gain of a decode instance that has a whole prompt already
_KEEP = 0.8  # weight of all earlier observations beside one more
_LEAST_S, _MOST_CORRECTION = 0.005, 4.0  # shorter times say nothing about a prediction


class Prompt:
    """The tokens of a request; equal tokens have other hashes in another `cache_salt`. Not `known`: only how many there
    are counts."""

    def __init__(self, token_ids: np.ndarray | Sequence[int], cache_salt: str = "", *, known: bool = True) -> None:
        self._known = known
        self._token_ids = np.asarray(token_ids, dtype="<i4")
        self._root = root_hash(cache_salt)
        self._hashes: dict[int, list[bytes]] = {}

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def hashes(self, block_size: int) -> list[bytes]:
        """Of all full blocks, as an engine with this block size has them; computed once."""
        if not self._known:
            return []
        if block_size not in self._hashes:
            self._hashes[block_size] = prompt_hashes(self._token_ids, block_size, self._root)
        return self._hashes[block_size]


@dataclass(frozen=True)
class Route:
    """Where one request goes: to `prefill` for its prompt and to `decode` for its answer (None: the same instance).

    `match` is what `prefill` is expected to have of the prompt, `prefill_s` what the rest takes it, `estimate_s` that
    with the queue, `predicted_ttft_s` as the instance is known to keep to estimates, `cost_s` what was compared with
    others. `number` tells equal routes apart.
    """

    number: int
    prefill: str
    incarnation: str
    decode: str | None
    decode_incarnation: str | None
    match: Match
    prefill_s: float
    estimate_s: float
    cost_s: float
    predicted_ttft_s: float
    predicted_tpot_s: float
    prompt_tokens: int
    hashes: Sequence[bytes] = field(repr=False, compare=False)
    ends: Sequence[bytes] = field(repr=False, compare=False)


@dataclass(eq=False)
class _Book:
    """The router's open requests at one incarnation: prefill seconds and requests by route, and their blocks.

    `idle_since`: routes that were there when the instance last had nothing to compute. `blocks` counts all full blocks
    of their prompts, `ends` those behind which a prompt ends.
    """

    prefill_s: dict[int, float] = field(default_factory=dict)
    idle_since: set[int] = field(default_factory=set)
    open: set[int] = field(default_factory=set)
    blocks: Counter[bytes] = field(default_factory=Counter)
    ends: Counter[bytes] = field(default_factory=Counter)

    def count(self, route: Route, change: int) -> None:
        for counts, hashes in ((self.blocks, route.hashes), (self.ends, route.ends)):
            for block in hashes:
                counts[block] += change
                if not counts[block]:
                    del counts[block]

    def under_way(self, hashes: Sequence[bytes]) -> UnderWay:
        whole = len(list(takewhile(self.blocks.__contains__, hashes))) if self.blocks else 0
        return UnderWay(whole, next((end for end in range(whole, 0, -1) if hashes[end - 1] in self.ends), 0))


@dataclass(frozen=True)
class _Choice:
    """One instance, or pair, that could take the request, and what that would cost."""

    prefill: Candidate
    decode: Candidate | None
    match: Match
    num_open: int
    prefill_s: float
    estimate_s: float
    ttft_s: float
    tpot_s: float
    uncached: int
    cost_s: float

    @property
    def rank(self) -> tuple[int, int, int]:
        """The order of choices that cost the same: least computing first, then least loading, then least work.

        The first keeps equal prefixes together while the first of them is still being computed.
        """
        return self.uncached, -self.match.device, self.num_open


class Router:
    """Chooses by one of `POLICIES` and keeps books on its open requests; used by one thread.

    Raises:
        ConfigError: there is no such policy.
    """

    def __init__(
        self,
        policy: str,
        index: PrefixIndex,
        *,
        target_ttft_s: float = 1.0,
        target_tpot_s: float = 0.05,
        seed: int = 0,
    ) -> None:
        if policy not in POLICIES:
            raise ConfigError("load_balance_policy", policy, "one of " + ", ".join(POLICIES))
        self.policy = policy
        self._index = index
        self._target_ttft_s, self._target_tpot_s = target_ttft_s, target_tpot_s
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._books: dict[tuple[str, str], _Book] = {}
        self._corrections: dict[tuple[str, str], float] = {}
        self._last = {"prefill": "", "decode": ""}
        self._decisions: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    # ---------------------------------------------------------------------------------------------- choosing

    def choose(self, prompt: Prompt, candidates: Sequence[Candidate], avoid: Collection[str] = ()) -> Route | None:
        """Where the request goes; None when none of `candidates` outside of `avoid` can take it."""
        usable = [one for one in candidates if one.name not in avoid]
        decodes = [one for one in usable if one.role == "DECODE"]
        firsts = [one for one in usable if one.role in ("DEFAULT", "MIX") or (one.role == "PREFILL" and decodes)]
        if not firsts:
            self._decisions["nobody"] += 1
            return None
        rates = rates_of(candidates)
        if self.policy == "RR":
            chosen = self._in_turn(prompt, firsts, decodes, rates)
            self._decisions["in turn"] += 1
        else:
            decode = self._best_decode(prompt, decodes, rates) if decodes else None
            shared = max(self._under_way(prompt, one).whole * one.block_size for one in candidates)
            choices = [
                self._choice(prompt, one, decode if one.role == "PREFILL" else None, rates, shared) for one in firsts
            ]
            chosen = self._best(choices)
            most = max(choice.match.cached for choice in choices)
            self._decisions["cold" if not most else "spilled" if chosen.match.cached < most else "to its prefix"] += 1
        return self._route(prompt, chosen)

    def _in_turn(
        self, prompt: Prompt, firsts: list[Candidate], decodes: list[Candidate], rates: dict[str, Rates]
    ) -> _Choice:
        first = self._next("prefill", firsts)
        return self._choice(prompt, first, self._next("decode", decodes) if first.role == "PREFILL" else None, rates)

    def _next(self, what: str, those: list[Candidate]) -> Candidate:
        """The instance behind the last one by name, also when others came and went since."""
        ordered = sorted(those, key=lambda one: one.name)
        found = next((one for one in ordered if one.name > self._last[what]), ordered[0])
        self._last[what] = found.name
        return found

    def _best(self, choices: list[_Choice]) -> _Choice:
        if self.policy == "SLO_AWARE":
            good = [choice for choice in choices if self._overshoot(choice) <= 1]
            if not good:
                return self._least(choices, self._overshoot, slack=0.0)
            choices = good
        return self._least(choices, lambda choice: choice.cost_s, slack=SLACK_S)

    def _overshoot(self, choice: _Choice) -> float:
        return max(choice.ttft_s / self._target_ttft_s, choice.tpot_s / self._target_tpot_s)

    def _least(self, choices: list[_Choice], value: Callable[[_Choice], float], *, slack: float) -> _Choice:
        """The choice of least value; of those about equal the first in rank, of those alike any."""
        limit = min(map(value, choices))
        limit += max(slack, SLACK_SHARE * limit)
        near = [choice for choice in choices if value(choice) <= limit]
        first = min(choice.rank for choice in near)
        return self._random.choice([choice for choice in near if choice.rank == first])

    def _best_decode(self, prompt: Prompt, decodes: list[Candidate], rates: dict[str, Rates]) -> Candidate:
        """The decode instance with the least to do, which it tells by its requests and the length of its steps."""

        def score(one: Candidate) -> float:
            share = self._match(prompt, one).device / max(1, prompt.num_tokens)
            return (self._num_open(one) + 1) * (rates[one.name].step or 1.0) * (1 - DEVICE_PREFIX_SHARE * share)

        scores = {one.name: score(one) for one in decodes}
        limit = min(scores.values()) * (1 + SLACK_SHARE)
        return self._random.choice([one for one in decodes if scores[one.name] <= limit])

    # ---------------------------------------------------------------------------------------------- estimates

    def _choice(
        self, prompt: Prompt, one: Candidate, decode: Candidate | None, rates: dict[str, Rates], shared: int = 0
    ) -> _Choice:
        """`shared`: leading tokens that requests under way have in common with this one."""
        match, rate = self._match(prompt, one), rates[one.name]
        uncached, num_open = prompt.num_tokens - match.cached, self._num_open(one)
        prefill_s = uncached * rate.compute + match.host * rate.host + match.store * rate.store
        queue_s = max(self._queued_s(one), one.load.backlog_tokens * rate.compute)
        step_s = rate.step if decode is None and self._num_answered(one) else 0.0
        estimate_s = queue_s + prefill_s + step_s
        answering = decode or one
        tpot_s = with_one_more(rates[answering.name].step, answering.load.num_running, self._num_open(answering))
        ttft_s = estimate_s * self._corrections.get(one.book, 1.0)
        own_s = prefill_s - max(0, shared - match.cached) * rate.compute
        cost_s = estimate_s + WORK_WEIGHT * own_s
        return _Choice(one, decode, match, num_open, prefill_s, estimate_s, ttft_s, tpot_s, uncached, cost_s)

    def _match(self, prompt: Prompt, one: Candidate) -> Match:
        under_way = self._under_way(prompt, one)
        return self._index.match(one.name, prompt.hashes(one.block_size), prompt.num_tokens, under_way)

    def _under_way(self, prompt: Prompt, one: Candidate) -> UnderWay:
        book = self._books.get(one.book)
        return book.under_way(prompt.hashes(one.block_size)) if book is not None else UnderWay()

    def _num_open(self, one: Candidate) -> int:
        book = self._books.get(one.book)
        if book is None:
            return one.load.num_open
        # A prompt leaves a prefill instance when it has been computed.
        return max(one.load.num_open, len(book.prefill_s if one.role == "PREFILL" else book.open))

    def _num_answered(self, one: Candidate) -> int:
        """Requests that get tokens there; a prompt under computation counts in the queue."""
        book = self._books.get(one.book)
        return max(one.load.num_running, len(book.open) - len(book.prefill_s) if book is not None else 0)

    def _queued_s(self, one: Candidate) -> float:
        book = self._books.get(one.book)
        return sum(book.prefill_s.values()) if book is not None else 0.0

    def _route(self, prompt: Prompt, chosen: _Choice) -> Route:
        one, decode, hashes = chosen.prefill, chosen.decode, prompt.hashes(chosen.prefill.block_size)
        last = {end for known in (0, 1) if (end := (prompt.num_tokens - known) // one.block_size) > 0}
        return Route(
            next(self._numbers),
            one.name,
            one.incarnation,
            decode.name if decode is not None else None,
            decode.incarnation if decode is not None else None,
            chosen.match,
            chosen.prefill_s,
            chosen.estimate_s,
            chosen.cost_s,
            chosen.ttft_s,
            chosen.tpot_s,
            prompt.num_tokens,
            hashes,
            [hashes[end - 1] for end in last if end <= len(hashes)],
        )

    # ---------------------------------------------------------------------------------------------- the books

    def begin(self, route: Route) -> None:
        """The request is on its way there."""
        first, *others = self._keys(route)
        if first in self._books and route.number in self._books[first].open:
            return
        for key in (first, *others):
            book = self._books.setdefault(key, _Book())
            book.open.add(route.number)
            book.count(route, +1)
        self._books[first].prefill_s[route.number] = route.prefill_s
        for tier in ("device", "host", "store"):
            self._tokens[tier] += getattr(route.match, tier)
        self._tokens["computed"] += route.prompt_tokens - route.match.cached

    def first_token(self, route: Route, seconds: float | None) -> None:
        """Its prompt has been computed, `seconds` after `begin`; None: nobody knows when."""
        key = self._keys(route)[0]
        book = self._books.get(key)
        if book is None or book.prefill_s.pop(route.number, None) is None or seconds is None:
            return
        ratio = max(seconds, _LEAST_S) / max(route.estimate_s, _LEAST_S)
        ratio = min(max(ratio, 1 / _MOST_CORRECTION), _MOST_CORRECTION)
        self._corrections[key] = _KEEP * self._corrections.get(key, 1.0) + (1 - _KEEP) * ratio

    def heard(self, name: str, incarnation: str, load: InstanceLoad) -> None:
        """An instance tells its load. When it has no prompt left to compute, what was sent before the last time it said
        so has been computed, also where no first token shows it, as in answers that come as a whole."""
        book = self._books.get((name, incarnation))
        if book is None:
            return
        if load.num_waiting or load.backlog_tokens:
            book.idle_since.clear()
            return
        for number in book.idle_since & book.prefill_s.keys():
            del book.prefill_s[number]
        book.idle_since = set(book.prefill_s)

    def end(self, route: Route) -> None:
        """The request is over, or has left for another place."""
        for key in self._keys(route):
            book = self._books.get(key)
            if book is None or route.number not in book.open:
                continue
            book.open.discard(route.number)
            book.prefill_s.pop(route.number, None)
            book.count(route, -1)
            if not book.open:
                del self._books[key]

    def leave(self, name: str) -> None:
        """An instance is gone: nothing learnt about it is of use; its open requests end by `end`."""
        for key in [key for key in self._corrections if key[0] == name]:
            del self._corrections[key]

    @staticmethod
    def _keys(route: Route) -> list[tuple[str, str]]:
        keys = [(route.prefill, route.incarnation)]
        if route.decode is not None:
            keys.append((route.decode, route.decode_incarnation or ""))
        return keys

    def describe(self) -> dict[str, Any]:
        """For people and metrics: decisions by kind, prompt tokens by the tier they were expected in; by instance the
        requests under way and the learnt factor between observed and predicted times."""
        return {
            "policy": self.policy,
            "decisions": dict(self._decisions),
            "tokens": dict(self._tokens),
            "open": {name: len(book.open) for (name, _), book in self._books.items()},
            "corrections": {name: factor for (name, _), factor in self._corrections.items()},
        }
