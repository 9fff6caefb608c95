"""The routing bench's simulation, on few requests of each of its kinds: it must not drift away from the engine."""

from __future__ import annotations

import random

import pytest

from bench.routing import REFERENCE, SLICES, TRACES, Case, demands, row
from bench.routing_simulated import Replay, Request, Run, Sizes, oracle, read_trace, shared_prefix

SMALL = Sizes(device=160, host=320)


def replay(requests: list[Request], count: int, policy: str, *, store: bool = False, time_scale: float = 8.0) -> Run:
    return Replay(requests, count, policy, store=store, sizes=SMALL, time_scale=time_scale).run()


@pytest.fixture(scope="module")
def conversations() -> list[Request]:
    return read_trace(TRACES / SLICES["conversation"], SMALL.block_size, limit=120)


def test_a_prompt_has_as_many_tokens_as_its_trace_says_and_equal_ids_equal_tokens(conversations: list[Request]) -> None:
    first, second = conversations[:2]
    assert len(first.tokens) == 22 * 16 + (11339 - 22 * 512) * 16 // 512 and first.max_tokens == 27  # 848 tokens of 512
    assert first.ids[0] == second.ids[0] and first.tokens[:16] == second.tokens[:16]
    assert first.tokens[16:32] != second.tokens[16:32]


@pytest.mark.parametrize("policy", ["RR", "CAR"])
def test_the_engine_hits_what_plain_caches_would(conversations: list[Request], policy: str) -> None:
    for store, tier in ((False, "host"), (True, "store")):
        run = replay(conversations, 2, policy, store=store)
        assert run.ratio() == pytest.approx(oracle(conversations, run.placed, SMALL)[tier], abs=0.03)
        assert sum(run.computed) < sum(len(one.tokens) for one in conversations)
        assert len(run.ttft_s) == len(run.placed) == len(conversations)


def test_who_looks_where_the_prefix_is_finds_more_than_who_goes_in_turn() -> None:
    dice, requests, said = random.Random(0), [], dict.fromkeys(range(12), 10)
    for number in range(100):  # twelve conversations that grow; their turns come in any order
        talk = dice.choice(list(said))
        ids = [1000 * talk + block for block in range(said[talk])]
        tokens = [token for one in ids for token in range(16 * one + 100, 16 * one + 116)]
        requests.append(Request(float(number), ids, tokens, 4))
        said[talk] += 2
    in_turn, aware = (replay(requests, 4, policy, time_scale=4.0) for policy in ("RR", "CAR"))
    assert aware.ratio() > 1.5 * in_turn.ratio()
    assert max(aware.spread) < 2
    assert sum(aware.ttft_s) < sum(in_turn.ttft_s)


def test_a_prefix_of_all_is_not_left_to_one_instance() -> None:
    requests = shared_prefix(150, 10.0, shared_blocks=64, own_blocks=8, block_size=16)
    in_turn, aware = (replay(requests, 4, policy, time_scale=1.0) for policy in ("RR", "CAR"))
    assert max(aware.spread) < 1.3
    assert sum(aware.ttft_s) < 1.3 * sum(in_turn.ttft_s)


def test_a_replay_is_the_same_each_time(conversations: list[Request]) -> None:
    assert replay(conversations[:40], 2, "CAR") == replay(conversations[:40], 2, "CAR")


def test_each_demand_can_fail(conversations: list[Request]) -> None:
    runs = {hits: Run(100, {"device": hits, "host": 0, "store": 0}, 0, [0], [1], [1.0, 2.0]) for hits in (20, 29, 31)}

    def case(policy: str, hits: int, expected: float = 0.0, apart: float = 0.2) -> Case:
        light = tuple(ratio + apart for ratio in REFERENCE["synthetic", 4, policy])
        return Case("synthetic", 4, policy, (runs[hits],) * 3, (expected or hits / 100,) * 3, light)

    assert len(row(case("RR", 20))) == 9
    fine = [case("RR", 20, apart=0.02), case("CAR", 31, apart=-0.02)]
    assert [passed for _, _, passed in demands(fine)] == [True, True, True]
    assert [passed for _, _, passed in demands([case("RR", 20), case("CAR", 31)])] == [True, False, True]
    assert [passed for _, _, passed in demands([case("RR", 20), case("CAR", 29)])] == [True, False, False]
    assert not next(passed for _, _, passed in demands([case("RR", 20, 0.24), case("CAR", 31)]))
