"""Where the service sends requests: what each policy takes into account, and that none has faults seen elsewhere."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from typing import Any

import pytest

from xllm_hier.block import BlockType, RestoreRule
from xllm_hier.errors import ConfigError
from xllm_hier.kv_events import Stored
from xllm_hier.service.policies import POLICIES, Candidate, InstanceLoad, Prompt, Route, Router
from xllm_hier.service.prefix_index import IndexState, PrefixIndex

KV, SIZE = BlockType.KV, 10
MS = 1e-3
RATES = {"compute_s": 1 * MS, "load_s": 1 * MS, "read_s": 2 * MS, "step_s": 20 * MS}  # 10 ms to compute a block


class Fleet:
    """Instances by name, an index that knows what they have, and a router."""

    def __init__(self, *names: str, policy: str = "CAR", role: str = "DEFAULT", store: str = "s", **more: Any) -> None:
        self.index = PrefixIndex()
        self.router = Router(policy, self.index, **more)
        self.candidates: dict[str, Candidate] = {}
        for name in names:
            self.join(name, role, store=store)

    def join(self, name: str, role: str = "DEFAULT", incarnation: str = "one", store: str = "s") -> None:
        self.candidates[name] = Candidate(name, role, incarnation, SIZE, InstanceLoad(**RATES))
        self.index.join(name, incarnation, [RestoreRule(KV, SIZE)], store)
        self.index.set_state(name, IndexState.EXACT)

    def has(self, name: str, tier: str, prompt: Prompt, tokens: int) -> None:
        hashes = prompt.hashes(SIZE)[: tokens // SIZE]
        assert self.index.apply(name, self.candidates[name].incarnation, [Stored(tier, KV, hashes)])

    def tells(self, name: str, **load: Any) -> None:
        one = self.candidates[name]
        self.candidates[name] = dataclasses.replace(one, load=dataclasses.replace(one.load, **load))

    def choose(self, prompt: Prompt, **more: Any) -> Route:
        route = self.router.choose(prompt, list(self.candidates.values()), **more)
        assert route is not None
        return route

    def send(self, prompt: Prompt) -> Route:
        route = self.choose(prompt)
        self.router.begin(route)
        return route


def prompt_of(first: int, tokens: int = 100, salt: str = "") -> Prompt:
    return Prompt(range(first, first + tokens), salt)


ASKED = prompt_of(0)


# --------------------------------------------------------------------------------- faults seen in other services


def test_fault_1_half_a_prefix_is_worth_half_as_much_as_the_whole() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.has("b", "device", ASKED, 50)
    fleet.has("c", "device", ASKED, 40)
    route = fleet.choose(ASKED)
    assert (route.prefill, route.match.device) == ("b", 50)
    assert route.prefill_s == pytest.approx(50 * MS)


def test_fault_2_a_hot_instance_spills_to_one_that_has_nothing_and_gets_its_requests_back() -> None:
    fleet = Fleet("a", "b")
    fleet.has("a", "device", ASKED, 50)
    assert fleet.choose(ASKED).prefill == "a"
    fleet.tells("a", backlog_tokens=180)  # 180 ms of waiting to save 50 of computing
    assert fleet.choose(ASKED).prefill == "b"
    fleet.tells("a", backlog_tokens=120)
    assert fleet.choose(ASKED).prefill == "a"


def test_fault_3_what_host_and_store_have_counts_less_than_the_device_and_more_than_nothing() -> None:
    fleet = Fleet("a", "b", "c", "d")
    fleet.join("d", store="of its own")
    seconds = {}
    fleet.has("a", "device", ASKED, 90)
    seconds["device"] = fleet.choose(ASKED).estimate_s
    assert fleet.choose(ASKED).prefill == "a"
    fleet.index.leave("a")
    del fleet.candidates["a"]
    fleet.has("b", "host", ASKED, 90)
    fleet.has("d", "store", ASKED, 90)
    assert fleet.choose(ASKED).prefill == "b"
    seconds["host"] = fleet.choose(ASKED).estimate_s
    assert fleet.choose(ASKED, avoid={"b"}).prefill == "d"
    seconds["store"] = fleet.choose(ASKED, avoid={"b"}).estimate_s
    seconds["nothing"] = fleet.choose(ASKED, avoid={"b", "d"}).estimate_s
    # 90 tokens are nine blocks: loaded in 1 ms each, read in 2 ms more, or computed in 10.
    expected = {"device": 10, "host": 10 + 9, "store": 10 + 9 * 3, "nothing": 100}
    assert seconds == pytest.approx({tier: of * MS for tier, of in expected.items()})


def test_fault_4_a_restarted_instance_has_nothing_of_what_it_had() -> None:
    fleet = Fleet("a", "b")
    fleet.has("a", "device", ASKED, 90)
    fleet.tells("b", num_open=1)
    fleet.send(ASKED)
    fleet.index.leave("a")
    fleet.join("a", incarnation="two")
    route = fleet.choose(ASKED)
    assert route.match.cached == 0  # neither what it had nor what was under way there
    assert (route.prefill, route.incarnation) == ("a", "two")


def test_fault_5_the_time_to_the_first_token_is_that_of_what_is_not_cached() -> None:
    fleet = Fleet("a", "b", policy="SLO_AWARE", target_ttft_s=0.08)
    fleet.has("a", "device", ASKED, 90)
    fleet.tells("a", backlog_tokens=50)  # 50 + 10 ms, where b needs 100
    route = fleet.choose(ASKED)
    assert (route.prefill, route.predicted_ttft_s) == ("a", pytest.approx(60 * MS))


def test_fault_6_what_one_instance_has_stored_is_a_hit_for_all() -> None:
    fleet = Fleet("a", "b")
    fleet.has("a", "store", ASKED, 90)
    route = fleet.choose(ASKED, avoid={"a"})
    assert (route.prefill, route.match.store) == ("b", 90)
    fleet.tells("b", store_state="detached")  # it cannot read it now
    assert fleet.choose(ASKED, avoid={"a"}).prefill_s == pytest.approx(100 * MS)


# -------------------------------------------------------------------------------------------- costs and queues


def test_what_nobody_has_measured_keeps_the_order_of_the_tiers() -> None:
    fleet = Fleet("a")
    fleet.candidates = {"a": Candidate("a", "MIX", "one", SIZE)}
    costs = [fleet.choose(ASKED).cost_s]
    for tier in ("store", "host", "device"):
        fleet.has("a", tier, ASKED, 90)
        costs.append(fleet.choose(ASKED).cost_s)
    assert costs == sorted(costs, reverse=True) and len(set(costs)) == 4


def test_what_an_instance_has_not_measured_is_as_with_the_others() -> None:
    fleet = Fleet("a", "b", "c", "d")
    fleet.candidates["d"] = Candidate("d", "DEFAULT", "one", SIZE)
    fleet.tells("a", compute_s=50 * MS)
    fleet.has("d", "host", ASKED, 90)
    assert fleet.choose(ASKED, avoid={"a", "b", "c"}).prefill_s == pytest.approx((10 + 9) * MS)


def test_a_tier_slower_than_computing_costs_what_computing_costs() -> None:
    fleet = Fleet("a")
    fleet.has("a", "host", ASKED, 50)
    fleet.has("a", "store", ASKED, 90)
    fleet.tells("a", load_s=1.0)
    assert fleet.choose(ASKED).prefill_s == pytest.approx(100 * MS)


def test_a_prompt_waits_for_a_step_of_those_who_are_answered_there() -> None:
    fleet = Fleet("a", "b")
    fleet.has("a", "device", ASKED, 90)
    fleet.tells("a", num_running=8, step_s=300 * MS)
    assert fleet.choose(ASKED).prefill == "b"
    fleet.tells("a", num_running=8, step_s=100 * MS)
    assert fleet.choose(ASKED).prefill == "a"


def test_what_was_just_sent_counts_before_any_heartbeat_tells_of_it() -> None:
    fleet = Fleet("a", "b")
    routes = [fleet.send(prompt_of(1000 * number)) for number in range(10)]
    assert Counter(route.prefill for route in routes) == {"a": 5, "b": 5}
    for route in routes:
        if route.prefill == "a":
            fleet.router.first_token(route, None)
    assert fleet.choose(ASKED).prefill == "a"


def test_a_burst_of_equal_prompts_is_computed_once() -> None:
    fleet = Fleet("a", "b", "c")
    routes = [fleet.send(ASKED) for _ in range(4)]
    assert len({route.prefill for route in routes}) == 1
    assert [route.match.device for route in routes] == [0, 99, 99, 99]
    others = [fleet.send(prompt_of(1000 * number)) for number in (1, 2)]
    assert len({route.prefill for route in [*others, routes[0]]}) == 3


def test_a_burst_that_would_wait_longer_than_computing_takes_spreads() -> None:
    fleet = Fleet("a", "b")
    shared = [Prompt([*range(50), *range(1000 * number, 1000 * number + 50)]) for number in range(1, 9)]
    routes = [fleet.send(prompt) for prompt in shared]
    assert Counter(route.prefill for route in routes) == {"a": 4, "b": 4}
    assert Counter(route.match.device for route in routes) == {0: 2, 50: 6}  # each computes what they share once


def test_a_prefix_that_others_use_too_is_copied_sooner_than_one_of_a_single_conversation() -> None:
    fleet = Fleet("a", "b")
    fleet.has("a", "device", ASKED, 50)
    fleet.tells("a", backlog_tokens=80)
    assert fleet.choose(ASKED).prefill == "a"
    other = fleet.choose(Prompt([*range(50), *range(7000, 7050)]))  # begins like it
    fleet.router.begin(other)
    fleet.router.first_token(other, None)
    assert (other.prefill, fleet.choose(ASKED).prefill) == ("a", "b")
    fleet.router.end(other)
    assert fleet.choose(ASKED).prefill == "a"


def test_of_a_recurrent_models_prompts_under_way_others_can_go_on_where_one_ends() -> None:
    fleet = Fleet("a")
    fleet.index.join("a", "one", [RestoreRule(KV, SIZE), RestoreRule(BlockType.LINEAR, SIZE, 1)])
    fleet.send(ASKED)
    for same, found in ((100, 100), (95, 90), (65, 0)):
        assert fleet.choose(Prompt([*range(same), *range(5000, 5050)])).match.device == found
    assert fleet.choose(ASKED).match.device == 90


def test_an_end_told_twice_ends_nothing_else() -> None:
    fleet = Fleet("a")
    first, second = fleet.send(ASKED), fleet.send(ASKED)
    for _ in range(2):
        fleet.router.end(first)
    assert fleet.router.describe()["open"] == {"a": 1}
    assert fleet.choose(ASKED).match.device == 99
    fleet.router.end(second)
    assert fleet.choose(ASKED).match.device == 0


def test_what_was_under_way_counts_until_its_end_and_is_counted_once() -> None:
    fleet = Fleet("a", "b", store="")
    route = fleet.choose(ASKED)
    for _ in range(2):
        fleet.router.begin(route)
    other = ({"a", "b"} - {route.prefill}).pop()
    assert fleet.router.describe()["open"] == {route.prefill: 1}
    assert fleet.choose(ASKED, avoid={other}).estimate_s == pytest.approx((100 + 1) * MS)
    for _ in range(2):
        fleet.router.first_token(route, 0.1)
    assert fleet.choose(ASKED, avoid={other}).estimate_s == pytest.approx((1 + 20) * MS)
    for _ in range(2):
        fleet.router.end(route)
    assert fleet.choose(ASKED, avoid={other}).estimate_s == pytest.approx(100 * MS)
    assert fleet.router.describe()["open"] == {} and not fleet.router._books


def test_a_conversation_stays_where_it_began() -> None:
    fleet = Fleet("a", "b", "c", "d")
    where: dict[int, set[str]] = {}
    said = {number: list(range(1000 * number, 1000 * number + 100)) for number in range(1, 9)}
    for turn in range(5):
        for number, tokens in said.items():
            tokens += range(100_000 * turn, 100_000 * turn + 20)
            route = fleet.send(Prompt(tokens))
            where.setdefault(number, set()).add(route.prefill)
            fleet.router.first_token(route, route.estimate_s)
            fleet.has(route.prefill, "device", Prompt(tokens), len(tokens))
            fleet.router.end(route)
    assert all(len(names) == 1 for names in where.values())
    assert len(set.union(*where.values())) > 1


def test_a_salt_is_another_name_space() -> None:
    fleet = Fleet("a", "b")
    fleet.has("a", "device", prompt_of(0, salt="mine"), 90)
    assert fleet.choose(prompt_of(0, salt="mine")).match.cached == 90
    assert fleet.choose(ASKED).match.cached == 0


# ------------------------------------------------------------------------------------------------------- ties


def test_equal_instances_get_equal_shares_of_new_prompts_and_not_in_the_same_order() -> None:
    orders = set()
    for seed in range(4):
        fleet = Fleet(*"abcd", seed=seed)
        routes = [fleet.send(prompt_of(1000 * number)) for number in range(40)]
        assert set(Counter(route.prefill for route in routes).values()) == {10}
        orders.add(tuple(route.prefill for route in routes[:4]))
    assert len(orders) > 1


def test_of_idle_equals_not_always_the_first_is_chosen() -> None:
    fleet = Fleet(*"abcd")
    counts = Counter(fleet.choose(prompt_of(1000 * number)).prefill for number in range(200))
    assert len(counts) == 4 and min(counts.values()) > 25


def test_of_those_that_cost_the_same_the_one_with_the_blocks_on_its_device_comes_first() -> None:
    fleet = Fleet(*"abcd")
    short = prompt_of(0, 21)
    fleet.has("a", "store", short, 20)
    fleet.has("c", "device", short, 20)
    for name in fleet.candidates:
        fleet.tells(name, load_s=0.1 * MS, read_s=0.1 * MS)
    assert {fleet.choose(short).prefill for _ in range(20)} == {"c"}


def test_a_difference_as_small_as_an_estimates_error_is_none() -> None:
    fleet = Fleet("a", "b")
    fleet.tells("a", compute_s=1.02 * MS)
    assert {fleet.choose(prompt_of(1000 * number)).prefill for number in range(50)} == {"a", "b"}
    fleet.tells("a", num_open=1, step_s=None)
    fleet.tells("b", step_s=None)
    assert {fleet.choose(prompt_of(1000 * number)).prefill for number in range(50)} == {"b"}


# ---------------------------------------------------------------------------------------------- who can take it


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_takes_what_all_have_failed_at(policy: str) -> None:
    fleet = Fleet("a", "b", policy=policy)
    fleet.has("a", "device", ASKED, 90)
    assert fleet.choose(ASKED, avoid={"a"}).prefill == "b"
    assert fleet.router.choose(ASKED, list(fleet.candidates.values()), avoid={"a", "b"}) is None
    assert fleet.router.choose(ASKED, []) is None
    fleet = Fleet("p", policy=policy, role="PREFILL")
    assert fleet.router.choose(ASKED, list(fleet.candidates.values())) is None
    fleet.join("d", "DECODE")
    assert fleet.choose(ASKED).decode == "d"
    assert fleet.router.choose(ASKED, list(fleet.candidates.values()), avoid={"d"}) is None


def test_an_instance_of_which_nothing_is_known_gets_requests_too() -> None:
    fleet = Fleet("a")
    fleet.candidates["b"] = Candidate("b", "DEFAULT", "one", SIZE)
    fleet.index.join("c", "one", [RestoreRule(KV, SIZE)])
    fleet.candidates["c"] = Candidate("c", "DEFAULT", "one", SIZE)
    fleet.index.apply("c", "one", [Stored("device", KV, ASKED.hashes(SIZE))])
    route = fleet.choose(ASKED, avoid={"a"})
    assert (route.match.cached, route.match.state) == (0, IndexState.UNKNOWN)
    assert {fleet.send(prompt_of(1000 * number)).prefill for number in range(3)} == {"a", "b", "c"}
    fleet.index.set_state("c", IndexState.STALE)
    assert fleet.choose(ASKED).prefill == "c"


def test_in_turn_goes_on_behind_the_last_one_whoever_comes_and_goes() -> None:
    fleet = Fleet("a", "b", "d", policy="RR")
    fleet.has("a", "device", ASKED, 90)
    assert [fleet.send(ASKED).prefill for _ in range(5)] == ["a", "b", "d", "a", "b"]
    fleet.join("c")
    assert [fleet.send(ASKED).prefill for _ in range(2)] == ["c", "d"]
    del fleet.candidates["a"]
    assert fleet.send(ASKED).prefill == "b"


# ------------------------------------------------------------------------------------------------------- pairs


def pairs(policy: str = "CAR", **more: Any) -> Fleet:
    fleet = Fleet("p", "q", policy=policy, role="PREFILL", **more)
    for name in ("d", "e"):
        fleet.join(name, "DECODE")
    return fleet


def test_a_pair_is_the_prefill_instance_with_the_prefix_and_the_decode_instance_with_least_to_do() -> None:
    fleet = pairs()
    fleet.has("q", "device", ASKED, 90)
    fleet.tells("d", num_open=2)
    route = fleet.choose(ASKED)
    assert (route.prefill, route.decode, route.incarnation, route.decode_incarnation) == ("q", "e", "one", "one")
    fleet.tells("e", num_open=2, step_s=40 * MS)
    assert {fleet.choose(ASKED).decode for _ in range(20)} == {"d"}


def test_a_decode_instance_that_has_the_prompt_already_is_preferred_a_little() -> None:
    fleet = pairs()
    fleet.has("e", "device", ASKED, 100)
    fleet.tells("d", num_open=4)
    fleet.tells("e", num_open=4)
    assert {fleet.choose(ASKED).decode for _ in range(20)} == {"e"}
    fleet.tells("e", num_open=6)
    assert fleet.choose(ASKED).decode == "d"


def test_pairs_in_turn_use_all_of_both_kinds() -> None:
    fleet = pairs("RR")
    fleet.join("c", "DECODE")
    routes = [fleet.send(ASKED) for _ in range(6)]
    assert [route.prefill for route in routes] == ["p", "q"] * 3
    assert [route.decode for route in routes] == ["c", "d", "e"] * 2


def test_a_decode_instance_is_busy_until_the_end_and_a_prefill_instance_until_the_first_token() -> None:
    fleet = pairs()
    first = fleet.send(ASKED)
    fleet.router.first_token(first, 0.1)
    second = fleet.send(prompt_of(1000))
    assert {first.decode, second.decode} == {"d", "e"}
    fleet.router.end(first)
    assert fleet.choose(prompt_of(2000)).decode == first.decode
    assert fleet.choose(prompt_of(2000)).prefill == ({"p", "q"} - {second.prefill}).pop()
    fleet.router.first_token(second, 0.1)
    assert {fleet.choose(prompt_of(2000 + number)).prefill for number in range(20)} == {"p", "q"}
    fleet.router.end(second)
    assert not fleet.router._books


def test_a_mixed_instance_answers_what_it_computes_and_competes_with_pairs() -> None:
    fleet = pairs()
    fleet.join("m", "MIX")
    fleet.has("m", "device", ASKED, 90)
    route = fleet.choose(ASKED)
    assert (route.prefill, route.decode) == ("m", None)
    fleet.tells("m", backlog_tokens=500)
    assert fleet.choose(ASKED).decode in ("d", "e")


# ---------------------------------------------------------------------------------------------- with targets


def test_whoever_meets_both_targets_comes_before_whoever_is_cheaper_and_does_not() -> None:
    fleet = Fleet("a", "b", policy="SLO_AWARE", target_ttft_s=0.2, target_tpot_s=0.05)
    fleet.has("a", "device", ASKED, 90)
    assert fleet.choose(ASKED).prefill == "a"
    fleet.tells("a", num_open=4, num_running=4, step_s=48 * MS)  # a fifth sequence makes it 54
    assert Fleet.choose(fleet, ASKED).predicted_tpot_s <= 0.05
    assert fleet.choose(ASKED).prefill == "b"


def test_when_nobody_meets_the_targets_the_least_bad_is_chosen() -> None:
    fleet = Fleet("a", "b", policy="SLO_AWARE", target_ttft_s=0.05, target_tpot_s=0.05)
    fleet.tells("a", backlog_tokens=300)  # 8 times the target
    fleet.tells("b", num_open=3, num_running=3, step_s=90 * MS)  # 3.8 and 2.1 times
    assert fleet.choose(ASKED).prefill == "b"
    fleet.tells("b", num_open=3, num_running=3, step_s=900 * MS)
    assert fleet.choose(ASKED).prefill == "a"


def test_an_instance_that_is_late_again_and_again_is_expected_to_be_late() -> None:
    fleet = Fleet("a", "b", policy="SLO_AWARE", target_ttft_s=0.2)
    fleet.has("a", "device", ASKED, 20)
    for _ in range(20):
        route = fleet.choose(ASKED, avoid={"b"})
        fleet.router.begin(route)
        fleet.router.first_token(route, 3 * route.estimate_s)
        fleet.router.end(route)
    assert fleet.router.describe()["corrections"]["a"] == pytest.approx(3, rel=0.02)
    assert fleet.choose(ASKED).prefill == "b"
    route = fleet.choose(ASKED, avoid={"b"})
    fleet.router.begin(route)
    fleet.router.first_token(route, 1000.0)
    assert fleet.choose(ASKED, avoid={"b"}).predicted_ttft_s <= 4 * 0.18
    fleet.router.leave("a")
    assert fleet.router.describe()["corrections"] == {}


# -------------------------------------------------------------------------------------------------------- the rest


def test_a_load_takes_what_it_can_use_of_whatever_is_told() -> None:
    told = {"num_open": 3, "num_running": -1, "backlog_tokens": True, "compute_s": 0.5, "load_s": float("nan")}
    told |= {"read_s": "fast", "step_s": 0, "ttft_s": 1, "num_waiting": 1.5, "store_state": 7, "unheard of": [1]}
    assert InstanceLoad.from_dict(told) == InstanceLoad(num_open=3, compute_s=0.5, ttft_s=1)
    assert InstanceLoad.from_dict(None) == InstanceLoad.from_dict([]) == InstanceLoad()
    assert (
        InstanceLoad.from_dict(dataclasses.asdict(InstanceLoad(1, 2, 3, 4, 5.0, store_state="attached"))).store_state
        == "attached"
    )


def test_decisions_and_tokens_are_counted() -> None:
    fleet = Fleet("a", "b")
    fleet.send(ASKED)
    fleet.has("a", "host", prompt_of(1000), 50)
    fleet.tells("a", backlog_tokens=0)
    assert fleet.choose(prompt_of(1000)).match.host in (0, 50)
    told = fleet.router.describe()
    assert told["policy"] == "CAR" and sum(told["decisions"].values()) == 2
    assert told["tokens"] == {"device": 0, "host": 0, "store": 0, "computed": 100}
    fleet.router.choose(ASKED, [])
    assert fleet.router.describe()["decisions"]["nobody"] == 1


def test_there_are_no_other_policies() -> None:
    with pytest.raises(ConfigError, match="load_balance_policy"):
        Router("RANDOM", PrefixIndex())


def test_a_prompt_is_placed_among_32_instances_in_a_moment() -> None:
    fleet = Fleet(*(f"i{number}" for number in range(32)))
    prompt = prompt_of(0, SIZE * 512)
    for name in fleet.candidates:
        fleet.has(name, "device", prompt, SIZE * 400)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        fleet.send(prompt)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.008  # a quarter of that where nothing else runs


def test_answers_that_come_as_a_whole_are_no_queue_once_the_instance_has_nothing_to_compute() -> None:
    """Their first token is seen by nobody; two heartbeats without a backlog say that their prompts are computed."""
    index = PrefixIndex()
    router, busy = Router("CAR", index), InstanceLoad(num_open=1, num_waiting=1, compute_s=1e-3)
    idle = InstanceLoad(num_open=1, num_running=1, compute_s=1e-3)
    route = router.choose(Prompt(list(range(1000))), [Candidate("a", "DEFAULT", "x", 16, idle)])
    assert route is not None
    router.begin(route)
    one = Candidate("a", "DEFAULT", "x", 16, idle)
    assert router._queued_s(one) > 0.5
    router.heard("a", "x", idle)  # perhaps told before the request was there
    router.heard("a", "x", busy)
    router.heard("a", "x", idle)
    router.heard("a", "another", idle)
    assert router._queued_s(one) > 0.5
    router.heard("a", "x", idle)
    assert router._queued_s(one) == 0 and router.describe()["open"] == {"a": 1}
    router.end(route)
    router.heard("a", "x", idle)
