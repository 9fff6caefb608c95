"""Seeded random walks of the whole deciding side: a hit, a fault or a preemption never changes an answer."""

from __future__ import annotations

import random

import pytest
from simulated_workers import Faults, Simulation, reference


def shared_prompts(dice: random.Random) -> list[list[int]]:
    """Prompts of 1 to 26 tokens that share prefixes at block borders and elsewhere."""
    trunk = [dice.randrange(50) for _ in range(26)]
    prompts = []
    for _ in range(12):
        cut = dice.randrange(0, 24)
        prompts.append(trunk[:cut] + [dice.randrange(50) for _ in range(dice.randrange(1, 4))])
    return prompts


WALKS = [
    pytest.param(dict(store=False, num_host=0), id="device only"),
    pytest.param(dict(store=False), id="device and host"),
    pytest.param(dict(), id="three tiers"),
    pytest.param(dict(num_workers=2, share=0.4), id="two ranks, slow answers"),
    pytest.param(dict(decode_kv_reuse="off", share=0.5), id="decoded blocks are not reused"),
    pytest.param(dict(num_host=6, share=0.3), id="a small host pool and slow transfers"),
    pytest.param(dict(faults=Faults(load=0.3, offload=0.3, put=0.3, unreadable=0.3), share=0.6), id="transfers fail"),
    pytest.param(
        dict(num_workers=2, num_host=5, faults=Faults(load=0.2, offload=0.2, put=0.2, unreadable=0.3), share=0.3),
        id="two ranks, little host memory, transfers fail",
    ),
]


@pytest.mark.parametrize("settings", WALKS)
def test_random_walks_answer_as_without_any_cache_and_return_every_block(settings: dict) -> None:
    for seed in range(25):
        dice = random.Random(seed)
        simulation = Simulation(seed=seed, **settings)
        expected: dict[str, tuple[list[int], list[int]]] = {}
        aborted = set()
        for prompt in shared_prompts(dice):
            request_id = simulation.add(prompt, max_tokens := dice.randrange(1, 8), priority=dice.randrange(2))
            expected[request_id] = prompt, reference(prompt, max_tokens)
            for _ in range(dice.randrange(0, 6)):
                simulation.step()
            if dice.random() < 0.2:
                victim = dice.choice(list(expected))
                simulation.scheduler.abort(victim)
                aborted.add(victim)
            if dice.random() < 0.1:
                simulation.manager.clear(dice.choice(["device", "host"]))
        simulation.run()
        for request_id, (prompt, answer) in expected.items():
            got = simulation.answered[request_id]
            assert got == answer or (request_id in aborted and got == answer[: len(got)]), (seed, request_id)
            if got:
                assert sum(simulation.usage(request_id)) == len(prompt)
        for pool in (simulation.manager.device, simulation.manager.host):
            assert pool.num_pinned == 0
            pool.clear()
            assert pool.num_free == pool.num_blocks


def test_walks_meet_what_they_are_meant_to_meet() -> None:
    met = dict.fromkeys(("preemptions", "loads", "offloads", "device", "host", "store", "computed"), 0)
    for seed in range(25):
        dice = random.Random(seed)
        simulation = Simulation(seed=seed, share=0.6, num_host=7, faults=Faults(load=0.2, offload=0.2))
        for _ in range(2):
            for prompt in shared_prompts(dice):
                simulation.add(prompt, 5)
                simulation.step()
            simulation.run()
            dice.seed(seed)  # the same prompts again
            simulation.manager.clear("device")
            simulation.manager.clear("host")
        met["preemptions"] += simulation.scheduler.num_preemptions
        met["loads"] += simulation.manager.num_failed_loads
        met["offloads"] += simulation.manager.num_failed_offloads
        for tier, tokens in simulation.manager.prefix_tokens.items():
            met[tier] += tokens
    assert all(met.values()), met


def test_a_failed_forward_ends_its_requests_only_and_frees_their_blocks() -> None:
    simulation = Simulation(faults=Faults(forward=1.0))
    request_id = simulation.add([1, 2, 3, 4, 5])
    simulation.run()
    (end,) = simulation.outputs[request_id]
    assert end.finish_reason == "error" and "simulated" in (end.error or "")
    simulation.workers.faults.forward = 0.0
    assert simulation.ask([1, 2, 3, 4, 5]) == reference([1, 2, 3, 4, 5], 3)
