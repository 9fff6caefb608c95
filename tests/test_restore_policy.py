"""What would take longer to restore than to compute is computed, and a tier that was slow gets another try."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulated_workers import Simulation, reference

from xllm_hier.engine.blocks.policy import STALE_S, RestorePolicy
from xllm_hier.plans import PrefetchFromStorage, TransferBlocks

BLOCK = 4
PROMPT = list(range(1, 30))  # 7 full blocks
Clock = Callable[[float], None]


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time that only passes when the test says so."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def policy(*, compute_s: float = 0.0, read_s: float = 0.0, load_s: float = 0.0) -> RestorePolicy:
    """Rates in seconds per block, 0 = not measured."""
    made = RestorePolicy(BLOCK)
    if compute_s:
        made.computed(100, 0, 100 * compute_s / BLOCK)
    made.read.add(10 if read_s else 0, 10 * read_s)
    made.loaded(0, 10 if load_s else 0, 10 * load_s)
    return made


def test_what_was_not_measured_is_restored(wait: Clock) -> None:
    for unknown in (policy(), policy(compute_s=0.001), policy(read_s=9.0, load_s=9.0)):
        assert unknown.reading_pays(1000) and unknown.loading_pays()


def test_reads_and_loads_add_up_against_computing(wait: Clock) -> None:
    assert policy(compute_s=0.1, read_s=0.07, load_s=0.02).reading_pays(100)
    assert not policy(compute_s=0.1, read_s=0.09, load_s=0.05).reading_pays(100)
    assert policy(compute_s=0.1, load_s=0.09).loading_pays()
    assert not policy(compute_s=0.1, load_s=0.15).loading_pays()


def test_small_losses_are_not_worth_a_decision(wait: Clock) -> None:
    slow = policy(compute_s=0.001, read_s=0.003)
    assert slow.reading_pays(5), "10 ms lost at most"
    assert not slow.reading_pays(6)


def test_only_steps_that_are_nearly_all_prompt_tell_what_a_prompt_costs(wait: Clock) -> None:
    made = RestorePolicy(BLOCK)
    made.computed(63, 0, 1.0)
    made.computed(100, 26, 1.0)
    assert made.compute.value is None
    made.computed(100, 25, 1.0)
    assert made.compute.value == 0.01


def test_rates_follow_what_is_measured_and_a_slow_tier_gets_another_try(wait: Clock) -> None:
    made = policy(compute_s=0.001, read_s=1.0)
    for _ in range(30):
        made.read.add(10, 0.001)
    assert made.reading_pays(100), "it has become fast"
    made = policy(compute_s=0.001, read_s=1.0)
    wait(STALE_S)
    assert not made.reading_pays(100)
    wait(1)
    assert made.reading_pays(100)


def warmed(made: RestorePolicy) -> Simulation:
    simulation = Simulation(policy=made, prefetch_batch_size=2, num_device=16, num_host=32)
    simulation.ask(PROMPT)
    simulation.manager.clear("device")
    simulation.workers.sent.clear()
    return simulation


def test_a_store_slower_than_computing_is_not_asked_and_the_decision_is_counted(wait: Clock) -> None:
    made = RestorePolicy(BLOCK)
    simulation = warmed(made)
    simulation.manager.clear("host")
    made.computed(100, 0, 0.001)
    made.read.add(10, 100.0)
    request_id = simulation.add(PROMPT)
    simulation.run()
    assert simulation.usage(request_id) == (0, 0, 0, len(PROMPT))
    assert not any(isinstance(message, PrefetchFromStorage) for message in simulation.workers.sent)
    assert made.decisions["store"] == {"restored": 0, "partly": 0, "recomputed": 1}


def test_a_host_slower_than_computing_is_left_alone_and_the_decision_is_counted(wait: Clock) -> None:
    made = RestorePolicy(BLOCK)
    simulation = warmed(made)
    made.computed(100, 0, 0.001)
    made.loaded(0, 10, 100.0)
    request_id = simulation.add(PROMPT)
    simulation.run()
    assert simulation.usage(request_id) == (0, 0, 0, len(PROMPT))
    assert simulation.answered[request_id] == reference(PROMPT, 3)
    assert not any(isinstance(message, TransferBlocks) for message in simulation.workers.sent)
    assert made.decisions["host"] == {"restored": 0, "partly": 0, "recomputed": 1}


def test_a_store_that_becomes_slow_in_the_middle_is_asked_no_further(wait: Clock) -> None:
    """Two batches of two are in flight; when the first has taken too long, the last three blocks are computed."""
    made = RestorePolicy(BLOCK)
    simulation = warmed(made)
    simulation.manager.clear("host")
    made.computed(100, 0, 0.1)  # 4 ms a block
    request_id = simulation.add(PROMPT)
    wait(0.5)
    simulation.run()
    assert simulation.usage(request_id) == (0, 0, 16, len(PROMPT) - 16)
    assert simulation.answered[request_id] == reference(PROMPT, 3)
    assert made.decisions["store"] == {"restored": 0, "partly": 1, "recomputed": 0}


def test_always_restores_whatever_can_be(wait: Clock) -> None:
    made = RestorePolicy(BLOCK, measured=False)
    simulation = warmed(made)
    simulation.manager.clear("host")
    made.computed(100, 0, 0.001)
    made.read.add(10, 100.0)
    request_id = simulation.add(PROMPT)
    wait(5)
    simulation.run()
    assert simulation.usage(request_id) == (0, 0, 28, 1)
    assert made.decisions["store"]["restored"] == 1


def test_requests_that_read_at_once_do_not_take_each_others_time_for_the_stores(wait: Clock) -> None:
    made = RestorePolicy(BLOCK)
    simulation = warmed(made)
    prompts = [[30 + n, *PROMPT] for n in range(4)]
    for prompt in prompts:
        simulation.ask(prompt)
    for tier in ("device", "host"):
        simulation.manager.clear(tier)
    made.computed(100, 0, 0.2)  # 8 ms a block
    made.read = type(made.read)(STALE_S)
    ids = [simulation.add(prompt) for prompt in prompts]
    wait(0.1)  # 4 x 4 blocks are under way: 6 ms each
    simulation.run()
    assert made.decisions["store"]["recomputed"] == 0
    assert all(simulation.usage(name)[2] > 0 for name in ids)
    assert made.read.value is not None and made.read.value < 0.02


def test_a_store_that_is_slow_to_say_no_is_slow(wait: Clock) -> None:
    made = RestorePolicy(BLOCK)
    simulation = Simulation(policy=made, prefetch_batch_size=2, num_device=16, num_host=32)
    made.computed(100, 0, 0.001)
    simulation.add(PROMPT)
    wait(3)
    simulation.run()
    assert made.read.value is not None and not made.reading_pays(7)
