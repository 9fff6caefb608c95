"""The service's index of blocks: what it says of a prompt is what the instance would find, in every tier and type."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from simulation import scripts
from simulation.world import World

from xllm_hier.block import BlockType, RestoreRule
from xllm_hier.engine.core import EngineCore
from xllm_hier.figures import WorkerReady
from xllm_hier.hashing import prompt_hashes, root_hash
from xllm_hier.kv_events import Cleared, Event, Removed, Stored
from xllm_hier.service.prefix_index import IndexState, Match, PrefixIndex, StoreIndex, UnderWay

EXACT, STALE, UNKNOWN = IndexState
KV, SWA, LINEAR = BlockType
SIZE = 4
WHOLE = [RestoreRule(KV, SIZE)]
MODELS = {
    "KV": WHOLE,
    "KV SWA": [RestoreRule(KV, SIZE), RestoreRule(SWA, SIZE, 6)],
    "KV LINEAR": [RestoreRule(KV, SIZE), RestoreRule(LINEAR, SIZE, 1)],
    "SWA": [RestoreRule(SWA, SIZE, 10)],
    "SWA LINEAR": [RestoreRule(SWA, SIZE, 10), RestoreRule(LINEAR, SIZE, 1)],
}
PROMPT = list(range(1, 18))  # four blocks and a token
HASHES = prompt_hashes(PROMPT, SIZE, root_hash())


def index_of(*names: str, rules: list[RestoreRule] = WHOLE, store: str = "s") -> PrefixIndex:
    index = PrefixIndex()
    for name in names:
        index.join(name, "one", rules, store)
        index.set_state(name, EXACT)
    return index


def tiers(match: Match) -> tuple[int, int, int]:
    return match.device, match.host, match.store


# ------------------------------------------------------------------------------------------ what a match says


def test_a_block_counts_for_the_fastest_tier_that_has_it_and_the_first_missing_one_ends_the_prefix() -> None:
    index = index_of("a")
    index.apply("a", "one", [Stored("device", KV, HASHES[:1]), Stored("host", KV, HASHES[:2])])
    index.apply("a", "one", [Stored("store", KV, [HASHES[0], HASHES[1], HASHES[3]])])
    assert tiers(index.match("a", HASHES, 17)) == (4, 4, 0)
    index.apply("a", "one", [Stored("store", KV, HASHES[2:3])])
    assert tiers(index.match("a", HASHES, 17)) == (4, 4, 8)
    index.apply("a", "one", [Removed("device", KV, HASHES[:1])])
    assert tiers(index.match("a", HASHES, 17)) == (0, 8, 8)


def test_the_last_token_is_always_computed() -> None:
    index = index_of("a")
    index.apply("a", "one", [Stored("device", KV, HASHES[:3]), Stored("host", KV, HASHES[3:])])
    assert tiers(index.match("a", HASHES, 16)) == (12, 3, 0)
    assert tiers(index.match("a", HASHES, 17)) == (12, 4, 0)
    assert tiers(index.match("a", HASHES[:3], 12)) == (11, 0, 0)
    assert tiers(index.match("a", [], 3)) == (0, 0, 0)


def test_a_recurrent_model_cannot_take_a_block_whose_last_token_it_must_compute() -> None:
    index = index_of("a", rules=MODELS["KV LINEAR"])
    index.apply("a", "one", [Stored("device", kind, HASHES) for kind in (KV, LINEAR)])
    assert index.match("a", HASHES, 16).cached == 12
    assert index.match("a", HASHES, 17).cached == 16


def test_blocks_of_requests_under_way_count_as_the_devices_up_to_where_all_types_have_something() -> None:
    index = index_of("a")
    index.apply("a", "one", [Stored("host", KV, HASHES)])
    assert tiers(index.match("a", HASHES, 17, UnderWay(3, 2))) == (12, 4, 0)
    assert tiers(index.match("a", HASHES, 16, UnderWay(9, 9))) == (15, 0, 0)
    index = index_of("a", rules=MODELS["KV LINEAR"])
    assert tiers(index.match("a", HASHES, 17, UnderWay(3, 2))) == (8, 0, 0)


def brute_force(has: dict[BlockType, list[int]], rules: list[RestoreRule], num_tokens: int) -> tuple[int, int, int]:
    """Token by token; `has[t][i]` is the fastest tier of block i of type t, 3 for none."""

    def needed(kind: BlockType, boundary: int) -> set[int]:
        span = {rule.block_type: rule.span for rule in rules}[kind] or boundary
        return {token // SIZE for token in range(max(0, boundary - span), boundary)}

    best = 0
    for boundary in range(SIZE, num_tokens // SIZE * SIZE + 1, SIZE):
        if boundary == num_tokens and LINEAR in has:
            continue
        if all(has[kind][index] < 3 for kind in has for index in needed(kind, boundary)):
            best = boundary
    paid = [0, 0, 0]
    for token in range(min(best, num_tokens - 1)):
        for index in range(token // SIZE, best // SIZE):
            wanted = [has[kind][index] for kind in has if index in needed(kind, best)]
            if wanted:
                paid[max(wanted)] += 1
                break
    return paid[0], paid[1], paid[2]


@pytest.mark.parametrize("model", MODELS)
def test_whatever_is_told_in_whatever_order_a_match_is_what_counting_token_by_token_gives(model: str) -> None:
    dice, rules, met = random.Random(model), MODELS[model], Counter[tuple[bool, ...]]()
    kinds = [rule.block_type for rule in rules]
    prompts = [[dice.randrange(2) for _ in range(dice.randrange(1, 40))] for _ in range(12)]
    chains = [prompt_hashes(prompt, SIZE, root_hash()) for prompt in prompts]
    names, index = ["a", "b", "c"], index_of("a", "b", "c", rules=rules)
    stores = {"a": "s", "b": "s", "c": "t"}
    index.join("c", "one", rules, "t")
    index.set_state("c", STALE)
    truth: dict[tuple[str, str, BlockType], set[bytes]] = {}
    for _ in range(400):
        name, tier, kind = dice.choice(names), dice.choice(["device", "host", "store"]), dice.choice(kinds)
        chain = dice.choice(chains)
        hashes = chain[: dice.randrange(len(chain) + 1)] if dice.random() < 0.7 else dice.sample(chain, len(chain) // 2)
        known = truth.setdefault((stores[name] if tier == "store" else name, tier, kind), set())
        if dice.random() < 0.02:
            index.apply(name, "one", [Cleared()])
            for kind, tier in ((kind, tier) for kind in kinds for tier in ("device", "host")):
                truth.pop((name, tier, kind), None)
        elif dice.random() < 0.65:
            index.apply(name, "one", [Stored(tier, kind, hashes)])
            known |= set(hashes)
        else:
            index.apply(name, "one", [Removed(tier, kind, hashes)])
            known -= set(hashes)
        for name in names:
            where = {"device": name, "host": name, "store": stores[name]}
            for prompt, chain in zip(prompts, chains, strict=True):
                has = {
                    kind: [
                        next((n for n, t in enumerate(where) if one in truth.get((where[t], t, kind), ())), 3)
                        for one in chain
                    ]
                    for kind in kinds
                }
                found = tiers(index.match(name, chain, len(prompt)))
                assert found == brute_force(has, rules, len(prompt))
                met[tuple(map(bool, found))] += 1
    assert len(met) == 8  # any mix of tiers, and none


# ------------------------------------------------------------------------------- who joins, leaves and is believed


def test_an_instance_that_leaves_leaves_nothing() -> None:
    index = index_of("a", "b")
    index.apply("a", "one", [Stored("device", KV, HASHES), Stored("host", KV, HASHES)])
    index.leave("a")
    index.leave("never seen")
    assert index.match("a", HASHES, 17) == Match() and index.state("a") is UNKNOWN
    assert list(index.describe()["instances"]) == ["b"]
    assert not index.apply("a", "one", [Stored("device", KV, HASHES)])
    index.join("a", "one", WHOLE, "s")
    index.set_state("a", EXACT)
    assert index.match("a", HASHES, 17).cached == 0


def test_what_another_incarnation_tells_is_refused() -> None:
    index = index_of("a")
    index.apply("a", "one", [Stored("device", KV, HASHES)])
    index.join("a", "two", WHOLE, "s")
    assert index.state("a") is UNKNOWN
    assert not index.apply("a", "one", [Stored("device", KV, HASHES), Stored("store", KV, HASHES)])
    assert index.apply("a", "two", [Stored("host", KV, HASHES[:2])])
    index.set_state("a", EXACT)
    assert tiers(index.match("a", HASHES, 17)) == (0, 8, 0)


def test_cleared_empties_device_and_host_of_that_instance_only() -> None:
    index = index_of("a", "b")
    for name in ("a", "b"):
        index.apply(name, "one", [Stored(tier, KV, HASHES) for tier in ("device", "host")])
    index.apply("a", "one", [Stored("store", KV, HASHES[:1]), Cleared()])
    assert tiers(index.match("a", HASHES, 17)) == (0, 0, 4)
    assert tiers(index.match("b", HASHES, 17)) == (16, 0, 0)


def test_of_an_unknown_instance_only_what_the_store_has_counts_until_its_state_is_told() -> None:
    index = index_of("a", "b")
    index.apply("a", "one", [Stored("store", KV, HASHES[:3])])
    index.join("b", "two", WHOLE, "s")
    index.apply("b", "two", [Stored("device", KV, HASHES)])
    assert index.match("b", HASHES, 17) == Match(store=12, state=UNKNOWN)
    index.set_state("b", STALE)
    assert index.match("b", HASHES, 17) == Match(device=16, state=STALE)


def test_the_store_is_of_all_who_read_it_and_outlives_them() -> None:
    index = index_of("a", "b")
    index.join("c", "one", WHOLE)
    index.join("d", "one", WHOLE, "another")
    index.apply("a", "one", [Stored("store", KV, HASHES)])
    index.apply("c", "one", [Stored("store", KV, HASHES)])
    assert [index.match(name, HASHES, 17).store for name in "abcd"] == [16, 16, 0, 0]
    assert set(index.describe()["stores"]) == {"s", "another"}
    index.leave("a")
    index.leave("b")
    index.join("e", "one", WHOLE, "s")
    assert index.match("e", HASHES, 17).store == 16


def test_a_store_is_exact_from_a_listing_until_it_may_have_evicted_something() -> None:
    index, store = index_of("a"), StoreIndex()
    store.invalidate()
    assert store.state is UNKNOWN
    store.add(KV, HASHES[:1])
    assert store.state is STALE
    store = index.store("s")
    assert index.match("a", HASHES, 17).state is STALE
    store.replace({KV: set(HASHES[:2])})
    assert index.match("a", HASHES, 17) == Match(store=8, state=EXACT)
    store.add(KV, HASHES[2:])
    assert store.state is EXACT and index.match("a", HASHES, 17).store == 16
    store.invalidate()
    assert store.state is STALE and index.match("a", HASHES, 17).store == 16
    store.discard(KV, HASHES[1:2])
    assert index.match("a", HASHES, 17) == Match(store=4, state=STALE)
    assert index.describe()["stores"] == {"s": {"state": "stale", "KV": 3}}


def test_a_prompt_is_looked_up_at_32_instances_in_a_moment() -> None:
    hashes, names = [os.urandom(16) for _ in range(512)], [f"i{number}" for number in range(32)]
    index = index_of(*names)
    for name in names:  # bytes of their own, as from the wire
        copies = [bytes(bytearray(one)) for one in hashes]
        events: list[Event] = [Stored("device", KV, copies[:200]), Stored("host", KV, copies[:400])]
        index.apply(name, "one", [*events, Stored("store", KV, copies)])
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        assert all(index.match(name, hashes, 2048).cached == 2047 for name in names)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.004  # 1 ms where nothing else runs


# ------------------------------------------------------------------------------------------ with the engine itself


class ListeningWorld(World):
    """An engine whose events an index takes after each turn."""

    index: PrefixIndex
    compared: ClassVar[Counter[str]] = Counter()

    def _new_core(self, ready: list[WorkerReady]) -> EngineCore:
        config = dataclasses.replace(self.settings.config(), enable_kv_events=True)
        core = EngineCore(config, self.api, self.workers, ready)  # type: ignore[arg-type]
        self.index = PrefixIndex()
        self.index.join("i", "one", [pools.rule for pools in core.manager.pools.values()], "s")
        self.index.set_state("i", EXACT)
        return core

    def _turn(self) -> None:
        super()._turn()
        assert self.core.journal is not None
        self.index.apply("i", "one", self.core.journal.take())
        for kind, pools in self.manager.pools.items():
            for tier, pool in pools.tiers.items():
                known = self.index._instances["i"].blocks[tier].get(kind, set())
                assert known == pool.hashes()
                self.compared[f"{kind.value} {tier}"] += bool(known)

    def run(self, until: Callable[[], bool] | None = None) -> None:
        super().run(until)
        assert self.core.journal is not None
        self.core.journal.take()  # the check at the end empties copies of the pools, which tell of it too

    def match(self, prompt: list[int]) -> tuple[int, int, int]:
        return tiers(self.index.match("i", prompt_hashes(prompt, SIZE, root_hash()), len(prompt)))


def test_the_index_is_what_the_engines_pools_hold_after_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "World", ListeningWorld)
    ListeningWorld.compared.clear()
    for family in scripts.FAMILIES:
        for seed in range(8):
            scripts.replay(scripts.draw(family, seed))
    wanted = {f"{kind.value} {tier}" for kind in BlockType for tier in ("device", "host")}
    assert all(ListeningWorld.compared[what] > 100 for what in wanted)


def listening(types: str, **more: Any) -> ListeningWorld:
    sizes: dict[str, Any] = dict(num_device=20, num_host=40, num_swa=(20, 40), num_linear=(20, 40), window=6)
    return ListeningWorld(types=types, max_tokens=64, chunk_tokens=64, **(sizes | more))


@pytest.mark.parametrize("types", MODELS)
def test_a_match_is_what_the_engine_then_finds(types: str) -> None:
    world, dice = listening(types, longest=80), random.Random(types)
    said = [dice.randrange(50) for _ in range(19)]
    for forget in ((), ("device",), ("device", "host"), (), ("device",), ("device", "host"), ("host",)):
        world.forget(*forget)
        world.turn()
        for prompt in (said, said[: len(said) // 2], [*said, *(dice.randrange(50) for _ in range(7))], said):
            expected = world.match(prompt)
            usage = world.ask(prompt).usage
            assert usage is not None and (usage.device, usage.host, usage.store) == expected
        said = prompt
    found = world.manager.ledger.account.tokens
    assert min(found.values()) > 0  # each tier gave something


def test_the_stores_index_is_what_the_store_holds_once_all_is_at_rest() -> None:
    world = listening("KV LINEAR")
    for number in range(4):
        world.ask([number, *PROMPT])
    (rank,) = world.ranks.ranks
    for domain in rank.domains.values():
        assert world.index.store("s").of(domain.part.type) == set(domain.store) != set()


def test_a_store_that_nobody_lists_is_known_up_to_a_limit_and_then_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xllm_hier.service.prefix_index.MOST_BLOCKS", 3)
    store = PrefixIndex().store("s")
    for number in range(5):
        store.add(BlockType.KV, [number.to_bytes(16, "big")])
    assert len(store.of(BlockType.KV)) == 2 and store.state is IndexState.STALE


def test_a_block_that_is_not_where_it_was_thought_to_be_makes_the_store_s_index_stale() -> None:
    """A store that was away answers nothing: what was asked for in vain may be there still."""
    store = PrefixIndex().store("s")
    here, elsewhere = (number.to_bytes(16, "big") for number in (1, 2))
    store.replace({BlockType.KV: {here}})
    store.discard(BlockType.KV, [elsewhere])
    assert store.state is IndexState.EXACT
    store.discard(BlockType.KV, [here])
    assert store.state is IndexState.STALE and not store.of(BlockType.KV)
