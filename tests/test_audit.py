"""What was restored is computed again now and then; a difference is an alarm, and nothing is restored any more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from serving import Server, running_store, store_flags, wait_for
from simulated_workers import Simulation, reference
from tiny_models import make, random_prompt

from xllm_hier.block import BlockLayout, BlockType, TensorSpec
from xllm_hier.engine.steps.audit import Auditor
from xllm_hier.plans import DIFFERENT, EQUAL, ROUNDING, BlocksCompared, CompareBlocks
from xllm_hier.worker.compute.block_compare import compare_blocks
from xllm_hier.worker.tiers.cache_domain import BlockCache, allocate_device_cache, as_bytes

PROMPT = list(range(1, 30))  # 7 full blocks of 4
OTHER = [40, *PROMPT]


def audited(rate: int = 1, **changes: object) -> Simulation:
    simulation = Simulation(num_device=32, num_host=64, audit_rate=rate, **changes)  # type: ignore[arg-type]
    simulation.ask(PROMPT)
    simulation.manager.clear("device")
    return simulation


def results(simulation: Simulation) -> dict[str, int]:
    return {name: count for name, count in simulation.scheduler.auditor.results.items() if count}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_restored_prefix_that_is_right_is_found_equal_and_its_blocks_return(num_workers: int) -> None:
    simulation = audited(num_workers=num_workers)
    assert simulation.ask(PROMPT) == reference(PROMPT, 3)
    assert results(simulation) == {"equal": 1}
    assert simulation.manager.pools.first.device.num_pinned == 0
    assert simulation.ask(PROMPT) == reference(PROMPT, 3)
    assert results(simulation) == {"equal": 1}, "a prefix from the device is not audited"


def test_one_in_n_is_audited_and_none_without_the_setting() -> None:
    simulation = audited(rate=3)
    for _ in range(7):
        simulation.manager.clear("device")
        simulation.ask(PROMPT)
    assert results(simulation) == {"equal": 2}
    simulation = audited(rate=0)
    simulation.ask(PROMPT)
    assert results(simulation) == {}


@pytest.mark.parametrize("tier", ["host", "store"])
def test_a_wrong_block_ends_all_restoring_until_everything_is_emptied(tier: str) -> None:
    """Its checksum is right: somebody wrote what another model computed."""
    simulation = audited()
    block_hash = next(iter(simulation.workers.store))
    if tier == "store":
        simulation.manager.clear("host")
        simulation.workers.store[block_hash][1] = b"of other"
    else:
        simulation.workers.host[simulation.manager.pools.first.host.find(block_hash) or 0][1] = b"of other"
    simulation.ask(PROMPT)
    auditor, manager = simulation.scheduler.auditor, simulation.manager
    assert results(simulation) == {"different": 1} and auditor.alarm
    before = dict(manager.ledger.account.tokens)
    for _ in range(2):
        assert simulation.ask(PROMPT) == reference(PROMPT, 3)
        manager.clear("device")
    after = manager.ledger.account.tokens
    assert (after["host"], after["store"]) == (before["host"], before["store"])
    manager.clear("host")
    simulation.workers.store.clear()
    auditor.reset()
    simulation.ask(PROMPT)
    manager.clear("device")
    assert simulation.ask(PROMPT) == reference(PROMPT, 3)
    assert manager.ledger.account.tokens["host"] > before["host"] and results(simulation)["equal"] == 1


def spoil(simulation: Simulation) -> None:
    """One position of a host block holds what another model computed; its checksum is right."""
    block_hash = next(iter(simulation.workers.store))
    simulation.workers.host[simulation.manager.pools.first.host.find(block_hash) or 0][1] = b"of other"


def test_who_runs_on_wrong_blocks_when_the_alarm_comes_neither_goes_on_nor_leaves_blocks_behind() -> None:
    """One has answered tokens already and fails; one has none yet and begins anew; one waits; a clean one goes on."""
    simulation = audited(max_tokens=64, chunk_tokens=8, max_seqs=8, num_workers=1)
    spoil(simulation)
    simulation.add(PROMPT, 1)
    while not simulation.scheduler.auditor.comparing:
        simulation.step()
    simulation.share = 0.0
    clean = simulation.add([45, 46, 47], 40)
    late = simulation.add(PROMPT, 30)
    for _ in range(3):
        simulation.step()
    begun = simulation.add([*PROMPT, *range(30, 49)], 2)
    simulation.step()
    simulation.share = 1.0
    simulation.run()
    assert simulation.scheduler.auditor.alarm
    ends = {name: simulation.outputs[name][-1] for name in (late, begun, clean)}
    assert ends[late].finish_reason == "error" and "audit" in (ends[late].error or "")
    assert simulation.answered[clean] == reference([45, 46, 47], 40)
    if ends[begun].finish_reason != "error":
        assert simulation.answered[begun] == reference([*PROMPT, *range(30, 49)], 2)
    for prompt in (PROMPT, [*PROMPT, 7, 8, 9, 10, 11]):
        assert simulation.ask(prompt, 2) == reference(prompt, 2)
    for tier in ("device", "host"):
        simulation.manager.clear(tier)
    simulation.workers.store.clear()
    simulation.scheduler.auditor.reset()
    for _ in range(3):
        for prompt in (PROMPT, [*PROMPT, 7, 8, 9, 10, 11]):
            assert simulation.ask(prompt, 2) == reference(prompt, 2)
        simulation.manager.clear("device")


def test_an_alarm_in_the_middle_of_a_step_leaves_nothing_that_the_step_has_published_and_nothing_is_stored() -> None:
    """A long prompt goes on from the wrong blocks when the ranks' verdict comes, while its step is being computed."""
    simulation = audited(max_tokens=64, chunk_tokens=8)
    for block_hash in list(simulation.workers.store):  # the last position, from which the next block is computed
        simulation.workers.host[simulation.manager.pools.first.host.find(block_hash) or 0][3] = b"of other"
    simulation.add(PROMPT, 1)
    auditor = simulation.scheduler.auditor
    while not auditor.comparing:
        simulation.step()
    verdicts, simulation.workers.pending = simulation.workers.pending, []
    longer = [*PROMPT, *range(1, 20)]
    simulation.add(longer, 1)
    while (step := simulation.scheduler.schedule()) is None:
        simulation.workers.deliver(simulation.manager)
        simulation.scheduler.poll_prefetches()
    assert step.prefill[0][0].write_from == 28
    output = simulation.workers.forward(step.plan)
    for answer in verdicts:
        answer(simulation.manager)
    assert auditor.alarm
    before = dict(simulation.workers.store)
    simulation.scheduler.finish(step, output)
    simulation.run()
    for prompt in (longer, PROMPT, longer):
        assert simulation.ask(prompt, 2) == reference(prompt, 2)
    assert simulation.workers.store == before


def test_what_failed_is_not_audited() -> None:
    simulation = audited()
    simulation.workers.faults.forward = 1.0
    simulation.add(PROMPT, 1)
    simulation.run()
    assert results(simulation) == {}


def test_experts_that_rounding_chose_otherwise_are_no_alarm_where_bits_need_not_be_equal() -> None:
    for exact in (True, False):
        simulation = audited()
        auditor = simulation.scheduler.auditor
        auditor.exact, auditor._experts = exact, True
        simulation.workers.verdict = DIFFERENT
        simulation.ask(PROMPT)
        assert results(simulation) == {"different": 1} and auditor.alarm is exact


def test_rounding_is_an_alarm_only_where_bits_must_be_equal() -> None:
    for exact in (True, False):
        simulation = audited()
        auditor = simulation.scheduler.auditor
        auditor.exact = exact
        simulation.workers.verdict = ROUNDING
        simulation.ask(PROMPT)
        assert results(simulation) == {"rounding": 1} and auditor.alarm is exact


def test_requests_come_first_and_an_audit_lets_go_of_its_blocks_for_them() -> None:
    simulation = audited(num_workers=1)
    simulation.manager.pools.first.device.check()
    simulation.ask(PROMPT, 1)
    simulation.manager.clear("device")
    auditor = simulation.scheduler.auditor
    simulation.add(PROMPT, 1)
    while not auditor.has_work:
        simulation.step()
    taken = simulation.manager.pools.first.device.allocate(simulation.manager.pools.first.device.num_available - 1)
    assert taken is not None
    simulation.add(OTHER, 2)
    simulation.run()
    assert results(simulation)["given_up"] == 1
    simulation.manager.pools.first.device.unpin(taken)
    assert simulation.manager.pools.first.device.num_pinned == 0


def test_a_comparison_nobody_asked_for_and_a_second_verdict_are_ignored() -> None:
    simulation = audited(num_workers=2)
    auditor = simulation.scheduler.auditor
    auditor.on_compared(BlocksCompared(99, 0, bytes([DIFFERENT])))
    simulation.share = 0.0
    simulation.add(PROMPT, 1)
    simulation.share = 1.0
    while not any(isinstance(message, CompareBlocks) for message in simulation.workers.sent):
        simulation.step()
    (plan,) = [message for message in simulation.workers.sent if isinstance(message, CompareBlocks)]
    auditor.on_compared(BlocksCompared(plan.compare_id, 0, bytes([EQUAL])))
    auditor.on_compared(BlocksCompared(plan.compare_id, 0, bytes([EQUAL])))
    assert results(simulation) == {}, "the other rank has not answered"
    simulation.run()
    assert results(simulation) == {"equal": 1}


def test_blocks_are_equal_near_or_different_over_all_layers() -> None:
    layout = BlockLayout(BlockType.KV, 4, (0, 1), (TensorSpec("latent", "bfloat16", (4, 8)),))
    caches = allocate_device_cache(layout, 6, torch.device("cpu"))
    for layer in caches:
        layer[:] = torch.randn(1, 1, 4, 8).to(torch.bfloat16)
    caches[1][1, 0, 2, 3] *= 1.0078125
    caches[1][2, 0, 2, 3] += 3
    caches[0][3, 0, 0, 0] = float("nan")
    cache = BlockCache(layout, [as_bytes(layer) for layer in caches])
    assert list(compare_blocks(cache, [0, 0, 0, 0, 4], [5, 1, 2, 3, 4])) == [
        EQUAL,
        ROUNDING,
        DIFFERENT,
        DIFFERENT,
        EQUAL,
    ]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_instance_audits_what_its_host_and_store_gave_it(tmp_path: Path, tp_size: int) -> None:
    folder = make(tmp_path / "tiny", "llama", torch.bfloat16)
    (tmp_path / "store").mkdir()
    flags = ["--block_size=16", "--max_cache_size=8MB", "--audit_rate=1", "--check_invariants", f"--tp_size={tp_size}"]
    with running_store(tmp_path / "store") as store, Server(folder, *flags, *store_flags(store)) as server:
        prompt = random_prompt(700)
        expected = server.ask(prompt).bits
        for number, tiers in enumerate((["device"], ["device", "host"]), 1):
            server.wait_quiet()
            server.clear(*tiers)
            assert server.ask(prompt).bits == expected
            wait_for(lambda number=number: server.stats()["audits"]["equal"] == number)
        assert server.health()["cache_alarm"] is False
        assert server.stats()["audits"] == {"equal": 2, "rounding": 0, "different": 0, "given_up": 0}


def test_an_auditor_without_a_rate_costs_nothing() -> None:
    auditor = Auditor(Simulation().manager)
    assert not auditor.has_work and auditor.next_tile() is None and not auditor.give_up()
