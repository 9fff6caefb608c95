"""What users of tiered KV caches have reported, row by row, and the tests of ours that hold its kind.

`HELD` has a row for each fault: what was seen elsewhere (its public number), what a test has to do, and the tests that
do it. Those that stand in no other file are here. Not listed: disaggregated prefill and decode, routers, hybrid models
and speculation, which this version does not have.
"""

from __future__ import annotations

import ast
import ctypes
import queue
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulation.world import World
from test_laws import MAIN_DOMAIN, Rank, rank_with  # noqa: F401

from xllm_hier.config import EngineConfig
from xllm_hier.engine.blocks.prefetch import PrefetchResult
from xllm_hier.errors import StoreError
from xllm_hier.ints import ints
from xllm_hier.plans import (
    HIT,
    MISS,
    UNKNOWN,
    BlockMapping,
    Forward,
    OffloadStored,
    PrefetchAnswer,
    PrefetchFromStorage,
    TransferBlocks,
    TransferKvBlocks,
)
from xllm_hier.worker.compute.model_runner import ModelOutput
from xllm_hier.worker.compute.plan_digest import PlanDigest
from xllm_hier.worker.tiers.kv_cache_transfer import HierarchyKVCacheTransfer
from xllm_hier.worker.transfer_stats import TransferStats
from xllm_hier.worker.worker import Worker

PROMPT = list(range(1, 18))  # four full blocks and one token

SIMULATED = "test_engine_simulation.py::test_random_schedules_answer_as_without_any_cache_and_leave_nothing"
TABLE = "test_state_table.py::test_a_request_ends_rightly_and_leaves_nothing"

HELD: dict[str, tuple[str, ...]] = {
    "garbled text on later hits from the host (vllm 45704): slow the compute, the copy sees the bytes after it": (
        "test_fault_rows.py::test_a_write_back_begins_when_the_forwards_before_it_have_ended",
        "test_native_devices.py::test_an_offload_waits_for_the_stream_that_writes_its_blocks",
    ),
    "a load corrupts pages that an earlier forward still writes (sglang 36738): reallocate with a forward in flight": (
        "test_fault_rows.py::test_blocks_freed_while_a_forward_writes_them_are_loaded_into_only_afterwards",
        SIMULATED,
    ),
    "a full hit reads KV that is not loaded (vllm 29608): stall the copy, the forward blocks at its first layer": (
        "test_fault_rows.py::test_a_forward_waits_for_loads_that_it_does_not_name",
        "test_transfer.py::test_a_stalled_load_blocks_the_forward_exactly_at_the_first_layer_that_needs_it",
        "test_native_devices.py::test_the_forward_waits_on_the_device_while_the_host_goes_on",
    ),
    "one tensor role is never stored (sglang 27504, 32176): fill all, evict, restore, compare all": (
        "test_transfer.py::test_a_block_written_back_and_restored_elsewhere_has_its_bytes_in_every_layer",
        "test_native.py::test_target_and_draft_advance_the_same_groups",
    ),
    "an unwritten block is published (vllm 53084): fresh host blocks are NaN in tests": (
        "test_transfer.py::test_a_host_block_that_holds_something_else_is_not_loaded",
        "test_block_manager.py::test_nothing_is_published_before_every_worker_has_answered",
        SIMULATED,
    ),
    "the state of one rank is served to all (vllm 49499): payloads that differ come back to the right rank": (
        "test_ranks_and_tiers.py::test_payloads_that_differ_by_rank_come_back_to_the_right_rank_from_host_and_store",
        SIMULATED,
    ),
    "a failed read is reported as success (LMCache 3388, vllm 49556, dynamo 15079): raise, read short, one rank only": (
        "test_fault_rows.py::test_a_store_that_raises_is_a_miss_for_reads_and_nothing_for_writes",
        "test_fault_rows.py::test_what_a_rank_says_first_counts_and_only_if_there_is_such_a_rank",
        "test_laws.py::test_a_read_counts_only_with_exactly_the_bytes_of_the_object",
        "test_block_manager.py::test_a_block_that_one_rank_lacks_is_a_miss_for_all",
        TABLE,
    ),
    "KV of another model, dtype or tenant is used (sglang 24758, 33268, 38577; vllm 44250): any field, another key": (
        "test_contracts.py::test_any_field_that_changes_the_kv_changes_the_key",
        "test_contracts.py::test_the_schema_hash_changes_with_shape_dtype_role_and_layers_only",
        "test_laws.py::test_the_main_key_depends_neither_on_a_draft_beside_it_nor_on_the_number_of_host_blocks",
        "test_three_tiers.py::test_salts_keep_tenants_apart_in_every_tier",
    ),
    "hits of another tenant by made collisions (vllm GHSA-rm76-4mrf-v9r8): a cryptographic hash of 128 bits": (
        "test_contracts.py::test_golden_hashes",
        "test_contracts.py::test_parts_of_the_root_cannot_run_into_each_other",
    ),
    "data changes under a slow read (Mooncake 850): overwrite the buffer after the lease, the checksum says miss": (
        "test_fault_rows.py::test_bytes_that_change_under_a_read_are_a_miss",
        "test_store_faults.py::test_objects_that_are_not_what_their_key_says_are_misses_and_counted",
    ),
    "exists is true, then get fails (Mooncake 1374): a clean miss, the target is free": (
        "test_laws.py::test_a_read_counts_only_with_exactly_the_bytes_of_the_object",
        "test_fault_rows.py::test_an_object_that_exists_and_cannot_be_read_is_a_miss_and_frees_its_target",
    ),
    "one duplicate key fails the batch (Mooncake 2827): once per key, there already is success": (
        "test_laws.py::test_a_block_named_twice_in_one_write_is_written_once",
        "test_laws.py::test_an_object_that_is_there_already_counts_as_stored_and_any_error_does_not",
    ),
    "ranks go apart and hang with four of them (sglang 30760): uneven stops, ranks end in any order": (
        "test_fault_rows.py::test_four_ranks_that_end_in_any_order_stay_together_whatever_stops_when",
        "test_engine_and_ranks.py::test_ranks_that_computed_from_different_plans_end_the_instance_with_both_views",
    ),
    "a host pool smaller than needed deadlocks (sglang 33862, 31402): one free block and a slow store": (
        "test_block_manager.py::test_a_host_pool_full_of_reads_leaves_room_for_others_and_device_requests_progress",
        "test_fault_rows.py::test_with_one_host_block_and_a_store_that_does_not_answer_others_are_served",
        SIMULATED,
    ),
    "the id of a batch is reused while it lives (xLLM): ids only grow, reuse is an error": (
        "test_fault_rows.py::test_ids_of_plans_only_grow",
        "test_transfer.py::test_registration_does_not_wait_and_a_live_batch_id_is_refused",
    ),
    "assertions and reuse on abort or preemption in mid-transfer (vllm 43226, 46014; vllm-ascend 16662): the table": (
        "test_state_table.py::test_the_table_has_every_cell",
        TABLE,
    ),
    "pins leak or go negative on error paths (LMCache 987, 3884): check after every step, never clamp": (
        "test_block_pool.py::test_a_block_released_more_often_than_pinned_is_an_error_not_a_clamp",
        "test_engine_simulation.py::test_a_planted_bug_is_found_and_its_script_shrunk_to_a_few_events",
        SIMULATED,
    ),
    "/dev/shm is full after SIGKILL (vllm 51579): kill a worker, nothing is left, the next start works": (
        "test_host_memory.py::test_nothing_survives_sigkill_of_the_holder",
        "test_processes.py::test_sigkill_of_any_process_under_load_leaves_nothing_behind",
    ),
    "a failure of the cache ends the engine (xLLM LOG(FATAL); vllm 50388): store down at start, copy errors": (
        "test_store_faults.py::test_a_store_that_is_absent_at_start_is_degraded_and_attached_when_it_comes",
        "test_transfer.py::test_a_failed_group_fails_its_batch_and_lets_the_forward_go_on",
        "test_transfer.py::test_a_failed_write_back_answers_with_a_short_count",
        TABLE,
    ),
    "cache on, nothing stored (sglang 33714, 39444; vllm 53498): a cold chunked run, then all blocks from the store": (
        "test_three_tiers.py::test_after_one_cold_chunked_run_of_2000_tokens_every_full_block_is_in_the_store",
        "test_block_manager.py::test_after_one_cold_chunked_run_all_full_blocks_come_from_the_store",
    ),
    "garbled text after failover (Mooncake 3740, 1871): the leader changes during reads and writes": (
        "test_store_faults.py::test_a_store_process_killed_under_load_costs_no_request_and_no_token",
        "test_fault_rows.py::test_a_leader_lost_at_any_moment_of_reads_and_writes_never_changes_an_answer",
    ),
    "cached tokens 0, counters negative (xllm 2011; vllm 28585): the tiers sum to the prompt, for every request": (
        "test_three_tiers.py::test_the_tier_counters_sum_to_all_prompt_tokens",
        "test_block_manager.py::test_usage_says_computed_when_the_load_of_a_hit_failed",
        SIMULATED,
    ),
    "a hit is slower than computing (sglang 31600): throttle the link, the engine computes": (
        "test_restore_policy.py::test_a_host_slower_than_computing_is_left_alone_and_the_decision_is_counted",
        "test_restore_policy.py::test_a_store_slower_than_computing_is_not_asked_and_the_decision_is_counted",
    ),
}


@cache
def names_of(file: str) -> set[str]:
    tree = ast.parse((Path(__file__).parent / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"}


def test_every_row_names_tests_that_exist_and_every_test_here_stands_in_a_row() -> None:
    named = {test for tests in HELD.values() for test in tests}
    for test in named:
        file, _, name = test.partition("::")
        assert name in names_of(file), test
    here = Path(__file__).name
    assert names_of(here) - {name.partition("::")[2] for name in named} == {
        "test_every_row_names_tests_that_exist_and_every_test_here_stands_in_a_row"
    }


# ---------------------------------------------------------------------------------------------- in the engine


def test_blocks_freed_while_a_forward_writes_them_are_loaded_into_only_afterwards() -> None:
    """The device has room for one of the two: what is restored takes the blocks of the request that was aborted."""
    world = World(num_device=5, max_tokens=32, chunk_tokens=32)
    world.ask(PROMPT, 1)
    world.forget("device")
    world.ranks.arm("slow forward", (0,), 0.5)
    world.add("gone", list(range(20, 37)), 3)
    ended: list[bool] = []

    def replace() -> None:
        world.abort("gone")
        world.add("restored", PROMPT, 2)

    (rank,) = world.ranks.ranks
    world.timeline.when(lambda: rank.computing, replace)
    world.timeline.when(lambda: rank.loading, lambda: ended.append(not rank.computing))
    world.run()
    usage = world.asked["restored"].usage
    assert ended == [True] and usage is not None and usage.host == 16
    (load,) = world.sent(TransferBlocks)
    written = world.sent(Forward)[1].prefill[0].block_table
    assert set(load.target_mappings[0].device.tolist()) <= set(written.tolist()), "they are the same blocks"


def test_an_object_that_exists_and_cannot_be_read_is_a_miss_and_frees_its_target() -> None:
    for ranks in ((0,), (1,), (0, 1)):
        world = World(num_ranks=2, batch_size=4)
        world.ask(PROMPT, 1)
        world.forget("device", "host")
        world.ranks.arm("read", ranks)
        usage = world.ask(PROMPT, 2).usage
        assert usage is not None and (usage.store, usage.computed) == (0, 17)
        assert not world.manager.reads.targets.quarantine and world.manager.pools.first.host.num_pinned == 0


def test_what_a_rank_says_first_counts_and_only_if_there_is_such_a_rank() -> None:
    result = PrefetchResult(2, 2, 2, 0)
    result.next_batch(9)
    assert result.record(0, 0, [MISS, HIT])
    assert not result.record(0, 0, [HIT, HIT]) and not result.record(2, 0, [HIT, HIT])
    assert not result.completed()
    assert result.record(1, 0, [HIT, HIT])
    assert result.merged_hits() == [False, True] and result.completed()


def test_four_ranks_that_end_in_any_order_stay_together_whatever_stops_when() -> None:
    world = World(num_ranks=4, num_device=40, max_seqs=8)
    for number in range(8):
        world.ranks.arm("slow forward", (number % 4,), 0.05)
        world.add(f"r{number}", [number, *PROMPT[:number]], 8, stop=range(5 * number))
    world.run()
    assert len({len(asked.tokens) for asked in world.asked.values()}) > 2, "they stop at different steps"


def test_with_one_host_block_and_a_store_that_does_not_answer_others_are_served() -> None:
    world = World(num_host=2, limit_s=30.0)  # half of it may be read into
    world.ask(PROMPT, 1)
    world.forget("device", "host")
    world.ranks.arm("slow read", (0,), 20.0)
    slow = world.add("slow", PROMPT, 1)
    quick = world.add("quick", [40, 41, 42, 43, 44], 3)
    world.run(until=lambda: quick.end is not None)
    assert slow.end is None and world.timeline.now < 1005.0
    world.run()


def test_ids_of_plans_only_grow() -> None:
    world = World(num_device=6, num_host=8)
    for start in (1, 20, 1, 20, 1):
        world.ask(range(start, start + 17), 4)
        world.forget("device", "host" if start == 20 else "device")
    plans = world.sent(PrefetchFromStorage), world.sent(TransferBlocks), world.sent(TransferKvBlocks)
    assert all(plans)
    ids = [getattr(plan, name) for kind, name in zip(plans, ("prefetch_id", "batch_id", "transfer_id"), strict=True)
           for plan in kind]  # fmt: skip
    own = {plan.prefetch_id for plan in plans[0]}  # batches of one read carry its id
    assert len(ids) - len(plans[0]) + len(own) == len(set(ids))
    for kind, name in zip(plans, ("prefetch_id", "batch_id", "transfer_id"), strict=True):
        numbers = [getattr(plan, name) for plan in kind]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("keep", [True, False], ids=["objects kept", "objects gone"])
def test_a_leader_lost_at_any_moment_of_reads_and_writes_never_changes_an_answer(keep: bool) -> None:
    """Every 2 ms of a run that writes to the store and reads from it, the store is lost for 20 ms; all answers stay
    right (`World` compares them), and afterwards the store is used again."""
    for moment in range(0, 120, 2):
        world = World(num_ranks=2, num_device=6, seed=moment)
        at = world.timeline.now + moment / 1000
        world.timeline.at(at, lambda world=world: world.ranks.store_fails(0.02, keep=keep))
        for _ in range(3):
            world.ask(PROMPT, 3)
            world.forget("device", "host")
        world.run(until=lambda world=world: world.ranks.store_up)
        world.ask(PROMPT, 3)
        world.forget("device", "host")
        usage = world.ask(PROMPT, 3).usage
        assert usage is not None and usage.store == 16


# ---------------------------------------------------------------------------------------------- in the worker


def test_a_write_back_begins_when_the_forwards_before_it_have_ended() -> None:
    """The plans come in one go, the forward is slow. A store read that stands behind it does not wait for it."""
    happened: list[str] = []
    reading = threading.Event()

    def read(_plan: PrefetchFromStorage) -> None:
        happened.append("read begun")
        reading.set()

    def forward(_plan: Forward, _waiter: object) -> ModelOutput:
        reading.wait(20)
        happened.append("written")
        return ModelOutput([], [], [])

    plans = [
        Forward(1, [], [], []),
        TransferKvBlocks(2, [BlockMapping("KV", ints([0]), ints([0]), bytes(16))]),
        PrefetchFromStorage(3, 0, "KV", ints([1]), bytes(16)),
    ]
    worker = worker_without_a_model(
        plans,
        forward=forward,
        offload=lambda plan: happened.append("copied"),
        prefetch=read,
    )
    receiver = threading.Thread(target=worker._receive)
    receiver.start()
    try:
        for _ in range(2):
            worker._execute(worker._queue.get(timeout=30))
    finally:
        worker.stop()
        receiver.join(10)
    assert happened == ["read begun", "written", "copied"]


def test_a_forward_waits_for_loads_that_it_does_not_name() -> None:
    """Device blocks are found before their bytes are there: whoever uses them comes behind the load, and waits."""
    waited: list[object] = []
    load = SimpleNamespace(
        batch_id=7,
        error=None,
        wait=lambda layer, _limit: waited.append(layer),
        wait_all=lambda _limit: waited.append("the end"),
    )

    def forward(_plan: Forward, waiter: Callable[[int], None]) -> ModelOutput:
        waiter(3)
        return ModelOutput([], [], [])

    worker = worker_without_a_model([], forward=forward, attach_loads=lambda: [load])
    worker._execute(Forward(1, [], [], []))
    assert waited == [3, "the end"]


def worker_without_a_model(plans: list[Any], *, forward: Callable[..., ModelOutput], **transfer: Any) -> Worker:
    """A worker's loops over `plans`, with a forward and transfers of the test's."""
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for plan in plans:
        waiting.put(plan)

    def receive(_timeout_s: float) -> Any | None:
        return None if waiting.empty() else waiting.get()

    worker = Worker.__new__(Worker)
    worker.pd = None
    worker.config, worker.rank, worker.draft = EngineConfig(model="tiny"), 0, None
    worker.parallel = SimpleNamespace(calls=0)  # type: ignore[assignment]
    worker.transfer = SimpleNamespace(  # type: ignore[assignment]
        **{"attach_loads": list, "watch_store": lambda: None} | transfer
    )
    worker.runner = SimpleNamespace(forward=forward)  # type: ignore[assignment]
    worker._plans = SimpleNamespace(receive=receive, peer_gone=lambda: False)  # type: ignore[assignment]
    worker._answers = SimpleNamespace(send=lambda message: None)  # type: ignore[assignment]
    worker._answer_lock, worker._stop = threading.Lock(), threading.Event()
    worker._queue, worker._digest, worker._doing = queue.SimpleQueue(), PlanDigest(), "nothing"
    return worker


def test_a_store_that_raises_is_a_miss_for_reads_and_nothing_for_writes() -> None:
    def fail(*_: object) -> None:
        raise OSError("the library gave up")

    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    config = EngineConfig(model="tiny", enable_kvcache_store=True, host_blocks_factor=2.0)
    transfer = HierarchyKVCacheTransfer(config, 0, TransferStats(), answers.put)
    transfer.store_tier.store = SimpleNamespace(  # type: ignore[assignment]
        state="attached", prefetch=fail, put=fail, close=lambda: True
    )
    transfer.host.keeps = lambda block_type: True  # type: ignore[method-assign]
    transfer.prefetch(PrefetchFromStorage(1, 0, "KV", ints([0, 1]), bytes(32)))
    assert answers.get(timeout=10) == PrefetchAnswer(1, 0, 0, bytes([UNKNOWN, UNKNOWN]))
    transfer.store_tier.put_behind(TransferKvBlocks(2, [BlockMapping("KV", ints([0]), ints([0]), bytes(16))]))
    assert answers.get(timeout=10) == OffloadStored(2, 0, 0)
    assert transfer.close()


@pytest.mark.parametrize("moment", ["while it is read", "between exist and get"])
def test_bytes_that_change_under_a_read_are_a_miss(
    rank_with: Callable[..., Rank],  # noqa: F811
    moment: str,
) -> None:
    """Its lease ended and the space went to somebody else: some of the bytes that arrive are not the object's."""
    rank = rank_with(MAIN_DOMAIN)
    assert rank.put((0, 0), (1, 1)) == 2
    honest = rank.client.get

    def get(keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        if moment == "between exist and get":
            raise StoreError("the object is gone")
        codes = honest(keys, addresses, sizes)
        ctypes.memset(addresses[0] + 8, 0xAA, 16)
        return codes

    rank.client.get = get  # type: ignore[method-assign]
    hits = rank.get((2, 0), (3, 1))
    assert hits[0] != HIT
    if moment == "while it is read":
        assert hits == [MISS, HIT] and rank.client.keys("remove") == rank.client.keys("put")[:1]
