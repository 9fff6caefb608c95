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


def assert_at_rest(simulation: Simulation) -> None:
    """No block is held but by quarantine, and no table of the books has an entry left."""
    manager = simulation.manager
    reads = manager.store_reads
    assert manager.device.num_pinned == 0 and manager.host.num_pinned == reads.num_left_alone == len(reads.quarantine)
    tables = [reads._prefetches, reads._prefetch_of, reads._fetching, reads._awaited, reads._orphans, manager._filling]
    tables += [
        manager._planned_loads,
        manager._batches,
        manager.write_back._pairs,
        manager.write_back._offloading,
        manager.write_back._offloads,
    ]
    assert not any(tables) and reads._num_targets == reads._num_mounted == 0
    for pool, left in ((manager.device, 0), (manager.host, len(manager.store_reads.quarantine))):
        pool.clear()
        assert pool.num_free == pool.num_blocks - left
        assert not pool._num_children and not pool._num_pinned_children


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
        assert_at_rest(simulation)


def harsh_settings(dice: random.Random) -> dict:
    """Tiny pools, chunks of one token, up to three ranks, faults up to four in five."""
    num_device, fault = dice.choice([2, 3, 4, 6, 8, 12, 20]), dice.choice([0.0, 0.0, 0.1, 0.4, 0.8])
    return dict(
        num_device=num_device,
        num_host=dice.choice([0, 1, 2, num_device, 2 * num_device]),
        block_size=dice.choice([1, 2, 4]),
        num_workers=dice.choice([1, 1, 2, 3]),
        store=dice.random() < 0.7,
        decode_kv_reuse=dice.choice(["canonical", "off"]),
        max_tokens=dice.choice([1, 2, 3, 8, 64]),
        max_seqs=dice.choice([1, 2, 4, 16]),
        chunk_tokens=dice.choice([1, 2, 8, 64]),
        prefetch_batch_size=dice.choice([1, 2, 8]),
        enable_prefix_cache=dice.random() < 0.9,
        share=dice.choice([1.0, 0.7, 0.3]),
        faults=Faults(*(fault * dice.random() for _ in range(4))),
    )


def test_harsh_walks_end_answer_right_and_leave_nothing() -> None:
    """Prompts that fill the pool, repeat, continue answers, ask for prompt logprobs, have salts and priorities."""
    for seed in range(400):
        dice = random.Random(seed)
        simulation = Simulation(seed=seed, **harsh_settings(dice))
        limit = simulation.num_device * simulation.block_size
        trunk = [dice.randrange(50) for _ in range(limit)]
        asked: dict[str, tuple[list[int], list[int]]] = {}
        for _ in range(dice.choice([5, 15, 30])):
            if asked and dice.random() < 0.4:
                before, answer = dice.choice(list(asked.values()))
                prompt = [*before, *answer, dice.randrange(50)] if dice.random() < 0.4 else list(before)
            else:
                prompt = trunk[: dice.randrange(limit)] + [dice.randrange(50) for _ in range(dice.randrange(3))]
            prompt = prompt[: limit - 1] or [1]
            max_tokens = dice.randrange(1, limit - len(prompt) + 1)
            fields: dict = {"priority": dice.randrange(3), "cache_salt": dice.choice(["", "", "a"])}
            if dice.random() < 0.15:
                fields["prompt_logprobs"] = 1
            request_id = simulation.add(prompt, max_tokens, **fields)
            asked[request_id] = prompt, reference(prompt, max_tokens)
            for _ in range(dice.choice([0, 0, 1, 2, 10])):
                simulation.step()
        simulation.run(20_000)
        for request_id, (prompt, answer) in asked.items():
            assert simulation.answered[request_id] == answer, (seed, request_id)
            assert sum(simulation.usage(request_id)) == len(prompt)
            logprobs = simulation.outputs[request_id][0].prompt_logprobs
            if logprobs is not None:
                assert [entry and entry.token_id for entry in logprobs] == [None, *prompt[1:]]
        assert_at_rest(simulation)


def test_a_request_alone_that_fits_always_ends_even_when_it_may_reuse_nothing() -> None:
    """One with prompt logprobs used to hold its prefix twice, preempt itself, and start again for ever."""
    for seed in range(150):
        dice = random.Random(seed)
        num_device = dice.choice([3, 8, 20])
        simulation = Simulation(num_device=num_device, num_host=0, store=False, chunk_tokens=dice.choice([2, 8, 64]))
        trunk = [number % 50 for number in range(4 * num_device)]
        simulation.ask(trunk[: 4 * dice.randrange(1, num_device) - dice.choice([1, 2])], 1)
        request_id = simulation.add(trunk[: 4 * num_device - 1], 1, prompt_logprobs=0)
        simulation.run(500)
        assert simulation.usage(request_id)[3] == 4 * num_device - 1 and simulation.scheduler.num_preemptions <= 1


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
        met["offloads"] += simulation.manager.write_back.num_failed
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
