"""Laws of a peer engine's books, prefetch, scheduler and store client that no other test here holds.

`docs/laws.md` says for every law which test holds it, or why ours differs; the last tests keep that list honest.
"""

from __future__ import annotations

import ast
import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_workers import Simulation, reference

from xllm_hier.block import BlockLayout, BlockType, CacheLayout, CacheRole, TensorSpec
from xllm_hier.config import EngineConfig
from xllm_hier.engine.blocks.pool import BlockPool
from xllm_hier.engine.blocks.sequence import Sequence as Request
from xllm_hier.engine.blocks.sequence import SequenceState
from xllm_hier.engine.core import EngineCore
from xllm_hier.errors import StoreError
from xllm_hier.figures import TypeSizes, WorkerReady
from xllm_hier.hashing import block_hash, prompt_hashes, root_hash
from xllm_hier.ints import ints
from xllm_hier.plans import (
    HIT,
    MISS,
    UNKNOWN,
    Forward,
    PrefetchAnswer,
    PrefetchFromStorage,
    TransferBlocks,
    TransferKvBlocks,
)
from xllm_hier.request_messages import AddRequest, RequestOutput, SamplingSpec
from xllm_hier.store_key import MAIN, draft_component
from xllm_hier.worker.store.kv_cache_store import KVCacheStore
from xllm_hier.worker.store.mooncake_client import MooncakeClient
from xllm_hier.worker.store.objects import name_blocks
from xllm_hier.worker.tiers.cache_domain import BlockCache, CacheDomain
from xllm_hier.worker.tiers.proof import write_trailer
from xllm_hier.worker.transfer_stats import TransferStats

PROMPT = list(range(1, 18))  # four full blocks of four, and one token


def sent(simulation: Simulation, kind: type) -> list[Any]:
    return [message for message in simulation.workers.sent if isinstance(message, kind)]


def hashes(prompt: Sequence[int], block_size: int = 4) -> list[bytes]:
    return prompt_hashes(prompt, block_size, root_hash())


def request(prompt: Sequence[int], block_size: int = 4, *, tag_decoded: bool = True) -> Request:
    """A sequence that no scheduler knows: the test itself plays the scheduler."""
    return Request(AddRequest("alone", ints(prompt), SamplingSpec(), 1), block_size, tag_decoded)


def warm(simulation: Simulation, *forget: str) -> None:
    """PROMPT computed once, then forgotten by the tiers named; what the workers were sent is forgotten too."""
    assert simulation.ask(PROMPT, 1) == reference(PROMPT, 1)
    for tier in forget:
        simulation.manager.clear(tier)
    simulation.workers.sent.clear()


# ----------------------------------------------------------------------------- B: block pools and lifecycle


def test_a_sequence_holds_just_enough_blocks_and_keeps_those_it_has() -> None:
    """B17, B18. Growth by tokens: ceil(tokens / block size) blocks, old ids stay, the same size again is no change."""
    manager = Simulation(num_device=16).manager
    one, other = request(range(1, 25)), request(range(30, 40))
    held: list[int] = []
    for num_tokens, num_blocks in ((3, 1), (4, 1), (5, 2), (11, 3), (11, 3), (24, 6)):
        assert manager.allocate(one, num_tokens)
        assert len(one.device_blocks) == num_blocks and one.device_blocks[: len(held)] == held
        held = list(one.device_blocks)
    assert manager.allocate(other, 10)
    assert len(other.device_blocks) == 3 and set(held).isdisjoint(other.device_blocks)


def test_a_growth_that_fails_leaves_the_sequence_as_it_was() -> None:
    """B20. Three blocks, two of them held: growing to five fails, and no block, target or count has changed."""
    manager = Simulation(num_device=3).manager
    sequence = request(range(20))
    assert manager.allocate(sequence, 8)
    before = list(sequence.device_blocks), dict(sequence.host_targets), manager.block_counts()
    assert not manager.allocate(sequence, 20)
    assert (sequence.device_blocks, sequence.host_targets, manager.block_counts()) == before


def test_a_request_that_never_got_a_block_can_leave_and_an_unknown_one_is_ignored() -> None:
    """B21. All blocks are taken, the request gives up, nothing is released twice."""
    simulation = Simulation(store=False)
    simulation.manager.pools.first.device.allocate(8)
    request_id = simulation.add(PROMPT)
    simulation.step()
    before = simulation.manager.block_counts()
    simulation.scheduler.abort("nobody")
    simulation.scheduler.abort(request_id)
    simulation.step()
    assert simulation.outputs[request_id][-1].finish_reason == "abort" and not simulation.scheduler.sequences
    assert simulation.manager.block_counts() == before


def test_only_full_blocks_are_cached_and_a_block_without_its_predecessor_is_not_found() -> None:
    """B24, B32. Nine tokens leave two blocks behind, seven leave one; the second block alone matches nothing."""
    simulation = Simulation(store=False, num_host=0, decode_kv_reuse="off")
    simulation.ask(PROMPT[:9], 1)
    assert simulation.manager.pools.first.device.num_evictable == 2
    alone, behind = simulation.add(PROMPT[4:9], 1), simulation.add([*PROMPT[:8], 40], 1)
    simulation.run()
    assert simulation.usage(alone) == (0, 0, 0, 5) and simulation.usage(behind) == (8, 0, 0, 1)
    simulation.manager.clear("device")
    simulation.ask(PROMPT[:7], 1)
    assert simulation.manager.pools.first.device.num_evictable == 1


def test_a_pool_without_cached_blocks_has_nothing_to_evict() -> None:
    """B25. A full pool with an empty index answers None and stays usable."""
    pool = BlockPool(2)
    blocks = pool.allocate(2) or []
    assert pool.allocate(1) is None and (pool.num_free, pool.num_pinned) == (0, 2)
    pool.unpin(blocks)
    assert pool.allocate(2) is not None
    pool.check()


def test_hashes_made_at_once_one_by_one_or_while_tokens_come_are_the_same() -> None:
    """B29. 200 blocks: hashed as a prompt, block by block, and by a sequence whose tokens are appended."""
    tokens = [token * 7 % 50 for token in range(800)]
    at_once = hashes(tokens)
    chain = [root_hash()]
    for start in range(0, 800, 4):
        chain.append(block_hash(chain[-1], tokens[start : start + 4]))
    growing = request(tokens[:6], tag_decoded=False)
    growing.tokens.extend(tokens[6:])
    assert len(at_once) == 200 and at_once == chain[1:] == [growing.hash_of(index) for index in range(200)]


def test_a_changed_token_changes_its_block_and_the_blocks_behind_it_only() -> None:
    """B31. Five blocks; a token of the third is another one; asking for a hash again adds nothing."""
    tokens = list(range(20))
    sequence, other = request(tokens), request([*tokens[:9], 49, *tokens[10:]])
    assert sequence.hash_of(4) == sequence.hash_of(4) and len(sequence.hashes) == 5
    same = [sequence.hash_of(index) == other.hash_of(index) for index in range(5)]
    assert same == [True, True, False, False, False]


def test_cached_blocks_are_shared_with_room_for_the_rest_and_the_account_outlives_them() -> None:
    """B33, A1, A2. Eight of ten tokens are cached: two shared blocks and a new one; after the end still 8 count."""
    simulation = Simulation(store=False)
    simulation.ask(PROMPT[:9], 1)
    cached = [simulation.manager.pools.first.device.find(name) for name in hashes(PROMPT[:8])]
    request_id = simulation.add([*PROMPT[:8], 30, 31], 3)
    simulation.step()
    sequence = simulation.scheduler.sequences[request_id]
    assert sequence.device_blocks[:2] == cached and len(sequence.device_blocks) == 3
    simulation.run()
    assert sequence.device_blocks == [] and sequence.usage is not None and sequence.usage.device == 8
    assert simulation.usage(request_id) == (8, 0, 0, 2)


def test_a_failed_allocation_gives_its_shared_blocks_back_and_they_can_be_evicted() -> None:
    """B34. Three blocks, two cached, one taken: twelve tokens do not fit, four do, over a cached block."""
    simulation = Simulation(num_device=3, store=False, num_host=0)
    simulation.ask(PROMPT[:8], 1)
    (taken,) = simulation.manager.pools.first.device.allocate(1) or []
    before = simulation.manager.block_counts()
    assert before["device"]["KV"] == {"free": 0, "pinned": 1, "evictable": 2}
    long = simulation.add(PROMPT[:12], 1)
    simulation.step()
    sequence = simulation.scheduler.sequences[long]
    assert sequence.device_blocks == [] and sequence.usage is None and simulation.manager.block_counts() == before
    simulation.scheduler.abort(long)
    assert simulation.ask([40, 41, 42, 43], 1) == reference([40, 41, 42, 43], 1)
    simulation.manager.pools.first.device.unpin([taken])


# ----------------------------------------------------------------------------------------- H: the hierarchy


def test_the_host_tier_is_one_pool_of_kv_blocks_and_all_of_them_are_usable() -> None:
    """H1. Five host blocks: five to use, ids 0 to 4, of one type."""
    manager = Simulation(num_host=5).manager
    assert manager.block_counts()["host"] == {"KV": {"free": 5, "pinned": 0, "evictable": 0, "quarantined": 0}}
    assert manager.pools.first.host.allocate(5) == [0, 1, 2, 3, 4]


def test_mounting_pins_host_blocks_and_starts_no_copy() -> None:
    """H6. The host holds the prompt, the device nothing: host blocks are held, no device block, nothing is sent."""
    simulation = Simulation()
    warm(simulation, "device")
    sequence = simulation.scheduler.sequences[simulation.add(PROMPT)]
    found = [simulation.manager.pools.first.host.find(name) for name in hashes(PROMPT)]
    assert list(sequence.mounted.values()) == found and None not in found
    assert sequence.device_blocks == [] and simulation.manager.hit(sequence).tokens == 16
    assert simulation.manager.pools.first.host.num_pinned == 4 and simulation.manager.pools.first.device.num_pinned == 0
    assert simulation.workers.sent == []


def test_device_and_host_complete_each_other_and_only_what_the_device_lacks_is_loaded() -> None:
    """B8, H9, H10, A6. Device: blocks 1 and 3, host: 0 and 2. Alone either serves less than the two together."""
    simulation = Simulation(store=False)
    warm(simulation)
    for index, name in enumerate(hashes(PROMPT)):
        pool = simulation.manager.pools.first.host if index % 2 else simulation.manager.pools.first.device
        pool.withdraw(pool.find(name) or 0)
        assert pool.find(name) is None
    request_id = simulation.add(PROMPT)
    simulation.run()
    assert simulation.usage(request_id) == (8, 8, 0, 1)
    ((mapping,),) = (plan.target_mappings for plan in sent(simulation, TransferBlocks))
    assert mapping.hashes == hashes(PROMPT)[0] + hashes(PROMPT)[2]
    assert simulation.answered[request_id] == reference(PROMPT, 3)


def test_a_running_sequence_is_not_matched_again_and_nothing_it_computed_is_restored() -> None:
    """H13, H23. Two blocks are computed when the host gets the next two: the sequence goes on computing."""
    simulation = Simulation(store=False, max_tokens=8)
    request_id = simulation.add(PROMPT)
    simulation.step()
    sequence, host = simulation.scheduler.sequences[request_id], simulation.manager.pools.first.host
    assert sequence.num_computed == 8
    blocks = host.allocate(2) or []
    for index, block in enumerate(blocks, 2):
        assert host.publish(block, sequence.hash_of(index), sequence.parent_of(index))
    host.unpin(blocks)
    simulation.step()
    assert sent(simulation, Forward)[-1].prefill[0].start == 8
    simulation.run()
    assert not sent(simulation, TransferBlocks) and simulation.usage(request_id) == (0, 0, 0, 17)


def test_a_waiting_request_takes_what_the_host_got_in_the_meantime() -> None:
    """H14. One host block was mounted on arrival; when there is room to run, the host has all four: all are used."""
    simulation = Simulation()
    warm(simulation, "device")
    simulation.workers.store.clear()
    host, names = simulation.manager.pools.first.host, hashes(PROMPT)
    blocks = [host.find(name) or 0 for name in names]
    contents = [list(simulation.workers.host[block]) for block in blocks]
    for block in blocks[1:]:
        host.withdraw(block)
    others = simulation.manager.pools.first.device.allocate(8) or []
    request_id = simulation.add(PROMPT)
    simulation.step()
    sequence = simulation.scheduler.sequences[request_id]
    assert list(sequence.mounted) == [0] and sequence.state is SequenceState.WAITING
    new = host.allocate(3) or []
    for index, block in enumerate(new, 1):
        simulation.workers.host[block] = contents[index]
        host.publish(block, names[index], names[index - 1])
    host.unpin(new)
    simulation.manager.pools.first.device.unpin(others)
    simulation.run()
    assert simulation.usage(request_id) == (0, 16, 0, 1) and simulation.answered[request_id] == reference(PROMPT, 3)


def test_a_load_names_for_each_block_its_host_source_its_device_target_and_the_content_of_both() -> None:
    """H15, H24, H25. Four host blocks are four copies; source and target are what both prefixes know by that hash."""
    simulation = Simulation()
    warm(simulation, "device")
    request_id = simulation.add(PROMPT)
    simulation.step()
    ((mapping,),) = (plan.target_mappings for plan in sent(simulation, TransferBlocks))
    manager, names = simulation.manager, hashes(PROMPT)
    assert mapping.block_type == "KV" and mapping.hashes == b"".join(names)
    assert mapping.host.tolist() == [manager.pools.first.host.find(name) for name in names]
    assert mapping.device.tolist() == [manager.pools.first.device.find(name) for name in names]
    assert mapping.device.tolist() == simulation.scheduler.sequences[request_id].device_blocks[:4]


def test_a_planned_load_is_sent_once_and_sending_it_publishes_nothing_more() -> None:
    """H27. The plan stays with the pool until it is sent; the second call has nothing to send."""
    simulation = Simulation()
    warm(simulation, "device")
    manager, sequence = simulation.manager, request(PROMPT)
    assert manager.allocate(sequence, 17)
    assert not simulation.workers.sent and sequence.num_published == 4
    before = manager.block_counts()
    (batch_id,) = manager.transfer_blocks()
    assert manager.transfer_blocks() == [] and len(sent(simulation, TransferBlocks)) == 1
    assert sequence.num_published == 4 and manager.block_counts() == before
    assert manager.loads.finish([batch_id], []) == set()


def test_a_device_too_small_plans_no_load_and_the_host_match_waits_for_the_next_try() -> None:
    """H29, H31. Five blocks are needed, four are there: no block, no plan; the mount stays until the request leaves."""
    simulation = Simulation()
    warm(simulation, "device")
    manager, sequence = simulation.manager, request(PROMPT)
    assert not manager.prefetch_from_storage(sequence)
    manager.pools.first.device.allocate(4)
    before = manager.block_counts()
    assert not manager.allocate(sequence, 17)
    assert sequence.device_blocks == [] and sequence.num_computed == sequence.num_published == 0
    assert manager.transfer_blocks() == [] and manager.block_counts() == before
    assert list(sequence.mounted) == [0, 1, 2, 3] and manager.pools.first.host.num_pinned == 4
    manager.deallocate(sequence)
    assert manager.pools.first.host.num_pinned == 0


def test_host_room_is_reserved_whole_or_not_at_all_and_tried_again_when_a_block_is_complete() -> None:
    """H32. One host block, two wanted: none is reserved, the allocation stands; once complete, the first one goes."""
    simulation = Simulation(num_host=1)
    manager, sequence = simulation.manager, request(PROMPT[:9])
    assert manager.allocate(sequence, 9)
    assert sequence.host_targets == {} and manager.pools.first.host.num_free == 1
    sequence.num_computed = 8
    manager.publish_computed(sequence)
    manager.write_back.send()
    (plan,) = sent(simulation, TransferKvBlocks)
    assert plan.target_mappings[0].hashes == hashes(PROMPT)[0]


def test_write_back_targets_are_reserved_early_handed_to_the_pairs_and_outlive_the_sequence() -> None:
    """H33, H35, H39. Reserved before anything is computed; then the pair holds both blocks; release adds no pair."""
    simulation = Simulation()
    manager, sequence = simulation.manager, request(PROMPT[:11])
    assert manager.allocate(sequence, 11)
    targets = list(sequence.host_targets.values())
    assert list(sequence.host_targets) == [0, 1] and sequence.num_computed == 0
    sequence.num_computed = 8
    manager.publish_computed(sequence)
    first = sequence.device_blocks[0]
    assert sequence.host_targets == {} and manager.pools.first.device.references(first) == 2
    manager.deallocate(sequence)
    assert (manager.pools.first.device.num_pinned, manager.pools.first.host.num_pinned) == (2, 2), "the pairs hold them"
    manager.write_back.send()
    (plan,) = sent(simulation, TransferKvBlocks)
    assert plan.target_mappings[0].host.tolist() == targets
    for _ in range(2):  # copied, then stored
        simulation.workers.deliver(manager)
    assert (manager.pools.first.device.num_pinned, manager.pools.first.host.num_pinned) == (0, 0)
    assert (manager.pools.first.device.num_evictable, manager.pools.first.host.num_evictable) == (2, 2)


def test_a_request_is_in_no_queue_while_it_is_read_and_in_the_batch_of_the_round_that_finds_it_ready() -> None:
    """C1, C2, H40, H42. One prefetch, no blocks meanwhile; then the host part is mounted; only the step loads it."""
    simulation = Simulation(num_workers=2, prefetch_batch_size=4)
    warm(simulation, "device", "host")
    scheduler, manager = simulation.scheduler, simulation.manager
    sequence = scheduler.sequences[simulation.add(PROMPT)]
    (plan,) = sent(simulation, PrefetchFromStorage)
    scheduler.poll_prefetches()
    assert scheduler.schedule() is None and len(sent(simulation, PrefetchFromStorage)) == 1
    assert scheduler.prefetching == [sequence] and scheduler.waiting == scheduler.running == []
    assert scheduler.num_open == 1 and sequence.device_blocks == [] and sequence.mounted == {}
    simulation.workers.deliver(manager)
    scheduler.poll_prefetches()
    assert scheduler.prefetching == [] and list(sequence.mounted.values()) == plan.host.tolist()
    assert (
        sequence.device_blocks == []
        and manager.pools.first.device.num_evictable == 0
        and not sent(simulation, TransferBlocks)
    )
    step = scheduler.schedule()
    assert step is not None and step.prefill == [(sequence, 1)]
    assert len(sequence.device_blocks) == 5 and len(sent(simulation, TransferBlocks)) == 1


def test_what_an_aborted_prefetch_has_read_serves_the_next_request() -> None:
    """C3, H45. The aborted request is never computed; what was read whole is in the host prefix, held by nobody."""
    simulation = Simulation()
    warm(simulation, "device", "host")
    gone = simulation.add(PROMPT)
    simulation.scheduler.abort(gone)
    simulation.run()
    assert simulation.outputs[gone][-1].finish_reason == "abort" and not sent(simulation, Forward)
    assert simulation.manager.block_counts()["host"]["KV"] == {
        "free": 12,
        "pinned": 0,
        "evictable": 4,
        "quarantined": 0,
    }
    simulation.workers.sent.clear()
    request_id = simulation.add(PROMPT)
    simulation.run()
    assert simulation.usage(request_id) == (0, 16, 0, 1) and not sent(simulation, PrefetchFromStorage)


def test_a_prompt_larger_than_the_host_is_read_as_far_as_half_of_the_host_goes() -> None:
    """H46. Four host blocks, four stored ones: the first two are read, the rest is computed."""
    simulation = Simulation(num_host=4)
    warm(simulation, "device", "host")
    request_id = simulation.add(PROMPT)
    simulation.run()
    assert [len(plan.host) for plan in sent(simulation, PrefetchFromStorage)] == [2]
    assert simulation.usage(request_id) == (0, 0, 8, 9) and simulation.answered[request_id] == reference(PROMPT, 3)


def test_targets_of_missed_blocks_return_and_hit_ones_are_cached_even_behind_the_miss() -> None:
    """H48. Hits 1 0 1 1: one block is mounted, two are cached for others, one is free again."""
    simulation = Simulation(num_workers=2, prefetch_batch_size=4)
    warm(simulation, "device", "host")
    sequence = simulation.scheduler.sequences[simulation.add(PROMPT)]
    (plan,) = sent(simulation, PrefetchFromStorage)
    manager = simulation.manager
    assert manager.pools.first.host.num_pinned == 4
    manager.reads.on_answer(PrefetchAnswer(plan.prefetch_id, 0, 0, b"\1\1\1\1"))
    manager.reads.on_answer(PrefetchAnswer(plan.prefetch_id, 0, 1, b"\1\0\1\1"))
    assert manager.update_prefetch_result(sequence)
    assert manager.block_counts()["host"]["KV"] == {"free": 13, "pinned": 1, "evictable": 2, "quarantined": 0}
    assert list(sequence.mounted) == [0]
    assert [manager.pools.first.host.find(name) is not None for name in hashes(PROMPT)] == [True, False, True, True]


# ------------------------------------------------------------------------------------------ C: the scheduler


class ScriptedChannel:
    """The api's side of the engine: hands over its messages, keeps the answers, and is gone when all are read."""

    def __init__(self, messages: list[Any]) -> None:
        self.messages = messages
        self.sent: list[Any] = []

    def receive(self, timeout_s: float) -> Any:
        return self.messages.pop(0) if self.messages else None

    def send(self, message: Any) -> bool:
        self.sent.append(message)
        return True

    def peer_gone(self) -> bool:
        return not self.messages


class SilentWorkers:
    """One worker that takes plans and answers none."""

    num_workers = 1

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def broadcast(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self, timeout_s: float, also: Any = None) -> list[Any]:
        return []

    def take_states(self) -> list[tuple[int, dict[str, Any]]]:
        return []

    def check_alive(self) -> None:
        pass


def engine_answers(*requests: AddRequest, max_waiting: int) -> tuple[list[RequestOutput], list[PrefetchFromStorage]]:
    """One turn of an engine with a store and four device blocks of two tokens: its outputs, and the reads it began."""
    config = EngineConfig(
        max_waiting_requests=max_waiting, enable_kvcache_store=True, host_blocks_factor=2.0, worker_timeout_s=1.0
    )
    api, workers = ScriptedChannel(list(requests)), SilentWorkers()
    ready = WorkerReady(0, [TypeSizes("KV", 0, 4, 8, 1)], 2, 100, 50)
    EngineCore(config, api, workers, [ready]).run()  # type: ignore[arg-type]
    reads = [message for message in workers.sent if isinstance(message, PrefetchFromStorage)]
    return [output for message in api.sent for output in message.outputs], reads


def test_a_full_queue_refuses_a_request_before_any_prefetch_is_started() -> None:
    """C4. Room for one open request: the second is told so, and the store is asked for the first one only."""
    first = AddRequest("first", ints([1, 2, 3, 4]), SamplingSpec(), 1)
    second = AddRequest("second", ints([5, 6, 7, 8]), SamplingSpec(), 1)
    (output,), (read,) = engine_answers(first, second, max_waiting=1)
    assert (output.request_id, output.error_status) == ("second", 429)
    assert read.hashes == b"".join(hashes([1, 2, 3, 4], 2))


def test_a_request_that_can_never_fit_is_refused_on_arrival_and_one_that_just_fits_is_not() -> None:
    """C17. Four blocks of two: six tokens and two new ones fit, six and three never will."""
    fits = AddRequest("fits", ints([1, 2, 3, 4, 5, 6]), SamplingSpec(), 2)
    never = AddRequest("never", ints([1, 2, 3, 4, 5, 7]), SamplingSpec(), 3)
    (output,), reads = engine_answers(fits, never, max_waiting=10)
    assert (output.request_id, output.error_status) == ("never", 400) and "limit of 8" in (output.error or "")
    assert reads


def test_a_request_that_found_no_room_is_sized_anew_and_takes_nothing_from_a_running_one() -> None:
    """C5. It waits while another runs; the host loses a block meanwhile; the first chunk begins where the hit ends."""
    simulation = Simulation(store=False)
    warm(simulation, "device")
    runner = simulation.add([40], 2)
    others = simulation.manager.pools.first.device.allocate(7) or []
    simulation.step()
    request_id = simulation.add(PROMPT)
    simulation.step()
    assert simulation.scheduler.waiting[0].request.request_id == request_id
    assert simulation.scheduler.num_preemptions == 0 and simulation.answered[runner] == reference([40], 2)
    host = simulation.manager.pools.first.host
    host.withdraw(host.find(hashes(PROMPT)[3]) or 0)
    simulation.manager.pools.first.device.unpin(others)
    simulation.step()
    (row,) = sent(simulation, Forward)[-1].prefill
    assert (row.start, len(row.token_ids)) == (12, 5)
    simulation.run()
    assert simulation.usage(request_id) == (0, 12, 0, 5) and simulation.answered[request_id] == reference(PROMPT, 3)


def test_a_running_sequence_waits_for_blocks_that_a_write_back_will_return() -> None:
    """C6. No block is free, a write-back still reads two: nobody is preempted or failed, the step is left out."""
    simulation = Simulation(num_device=4, store=False)
    done = simulation.add(PROMPT[:8], 1)
    request_id = simulation.add(list(range(20, 27)), 5)
    simulation.step()
    simulation.share = 0.0  # the copies take their time
    for _ in range(6):
        simulation.step()
    assert simulation.answered[done] and len(simulation.answered[request_id]) == 2
    (sequence,) = simulation.scheduler.running
    assert len(sequence.device_blocks) == 2 and simulation.scheduler.num_preemptions == 0
    assert simulation.manager.pools.first.device.num_available == 0
    simulation.share = 1.0
    simulation.run()
    assert simulation.scheduler.num_preemptions == 0
    assert simulation.answered[request_id] == reference(list(range(20, 27)), 5)


@pytest.mark.parametrize(("prefix", "budget"), [(4, 4), (16, 3)])
def test_a_cached_prefix_costs_no_budget_and_the_blocks_cover_it_and_the_chunk(prefix: int, budget: int) -> None:
    """C8, C9. A chunk as long as the prefix, and a prefix five times the budget of a step."""
    simulation = Simulation(store=False, num_host=0, max_tokens=budget, chunk_tokens=budget)
    prompt = list(range(1, 21))
    simulation.ask([*prompt[:prefix], 40], 1)
    request_id = simulation.add(prompt)
    simulation.step()
    (row,) = sent(simulation, Forward)[-1].prefill
    assert (row.start, len(row.token_ids)) == (prefix, budget)
    assert len(simulation.scheduler.sequences[request_id].device_blocks) == -(-(prefix + budget) // 4)
    simulation.run()
    assert simulation.answered[request_id] == reference(prompt, 3)


def test_two_prompts_at_once_share_the_blocks_they_have_in_common() -> None:
    """C10. Two of three blocks are equal: the second request shares two, four different ones are cached."""
    simulation = Simulation(num_device=16, store=False, num_host=0, max_tokens=32, chunk_tokens=32)
    first = simulation.add([*PROMPT[:12], 40], 1)
    second = simulation.add([*PROMPT[:8], 30, 31, 32, 33, 40], 1)
    simulation.run()
    assert simulation.usage(first) == (0, 0, 0, 13) and simulation.usage(second) == (8, 0, 0, 5)
    assert simulation.manager.pools.first.device.num_evictable == 4


def test_a_prompt_is_shared_from_the_end_of_its_prefill_and_a_longer_one_adds_only_the_new_block() -> None:
    """C13, C14. Blocks of two: two are findable while the request still decodes and after it; six tokens make three."""
    simulation = Simulation(block_size=2, num_device=16, store=False, num_host=0, decode_kv_reuse="off")
    device, names = simulation.manager.pools.first.device, hashes(PROMPT[:4], 2)
    first = simulation.add(PROMPT[:4], 4)
    simulation.step()
    assert simulation.scheduler.sequences[first].state is SequenceState.RUNNING
    found = [device.find(name) for name in names]
    assert None not in found and device.num_evictable == 0
    simulation.run()
    assert [device.find(name) for name in names] == found and device.num_evictable == 2
    second = simulation.add(PROMPT[:6], 1)
    simulation.run()
    assert simulation.usage(second) == (4, 0, 0, 2) and device.num_evictable == 3


# ------------------------------------------------------------------------------------- K: keys and the store


def name_of(number: int) -> bytes:
    return bytes([number]) * 16


LAYOUT = BlockLayout(
    BlockType.KV, 2, (0,), (TensorSpec("key", "float32", (2, 3)), TensorSpec("value", "float32", (2, 3)))
)
DRAFT_LAYOUT = BlockLayout(BlockType.KV, 2, (0,), (TensorSpec("key", "float32", (2, 1)),))
OBJECT = LAYOUT.object_bytes  # 48 bytes of payload, filled up to 64, and the trailer
MAIN_DOMAIN = (CacheRole.TARGET, MAIN, LAYOUT)
DRAFT_DOMAIN = (CacheRole.DRAFT, draft_component("mtp"), DRAFT_LAYOUT)


class ScriptedClient:
    """In place of the store's client: keeps real bytes, notes every call, and fails as it is told to."""

    through_node = False
    connected = True

    def __init__(self, *_: Any) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: list[tuple[str, list[str]]] = []
        self.buffers: list[tuple[int, int]] = []
        self.registered: list[tuple[int, int]] = []
        self.get_codes: list[int] = []
        self.put_codes: dict[str, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        self.registered.append((address, nbytes))

    def exist(self, keys: Sequence[str]) -> list[bool]:
        self.calls.append(("exist", list(keys)))
        return [key in self.objects for key in keys]

    def get(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        self.calls.append(("get", list(keys)))
        self.buffers.extend(zip(addresses, sizes, strict=True))
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            ctypes.memmove(address, self.objects[key], size)
        return self.get_codes or list(sizes)

    def put(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], groups: Sequence[str]
    ) -> list[int]:
        self.calls.append(("put", list(keys)))
        self.buffers.extend(zip(addresses, sizes, strict=True))
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            if not self.put_codes.get(key):
                self.objects[key] = ctypes.string_at(address, size)
        return [self.put_codes.get(key, 0) for key in keys]

    def remove(self, key: str) -> None:
        self.calls.append(("remove", [key]))
        self.objects.pop(key, None)

    def close(self) -> bool:
        return True

    def keys(self, method: str) -> list[str]:
        return [key for name, keys in self.calls if name == method for key in keys]


@dataclass
class Rank:
    """One worker's store over real host blocks, each of which holds its own number and a trailer that proves it."""

    store: KVCacheStore
    client: ScriptedClient
    caches: list[BlockCache]
    memory: torch.Tensor

    def fill(self, block: int, name: bytes) -> None:
        for cache_ in self.caches:
            cache_.payload(block)[:] = name[0]
            write_trailer(cache_, block, name)

    def put(self, *pairs: tuple[int, int]) -> int:
        return self.store.put(BlockType.KV, [block for block, _ in pairs], [name_of(name) for _, name in pairs])

    def get(self, *pairs: tuple[int, int]) -> list[int]:
        return list(self.store.prefetch(BlockType.KV, [b for b, _ in pairs], [name_of(n) for _, n in pairs]))


@pytest.fixture
def rank_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rank]]:
    """Makes a Rank; block b of its `num_blocks` host blocks holds content b."""
    monkeypatch.setattr("xllm_hier.worker.store.kv_cache_store.MooncakeClient", ScriptedClient)
    stores: list[KVCacheStore] = []

    def make(*domains: tuple[CacheRole, str, BlockLayout], num_blocks: int = 4, number: int = 0):
        config = EngineConfig(model_id="m", enable_kvcache_store=True, host_blocks_factor=2.0)
        store = KVCacheStore(config, number, TransferStats())
        made, caches = [], []
        memory = torch.zeros(num_blocks * sum(layout.object_bytes for *_, layout in domains), dtype=torch.uint8)
        rest = memory
        for role, component, layout in domains:
            part, rest = rest.split([num_blocks * layout.object_bytes, len(rest) - num_blocks * layout.object_bytes])
            caches.append(BlockCache(layout, [], part.view(num_blocks, layout.object_bytes)))
            made.append(CacheDomain(role, component, CacheLayout(role, (layout,)), {BlockType.KV: caches[-1]}))
        for domain in made:
            name_blocks(domain, config, number)
        store.start(made, memory.data_ptr(), len(memory))
        stores.append(store)
        client = store.client
        assert isinstance(client, ScriptedClient)
        client.calls.clear()
        rank = Rank(store, client, caches, memory)
        for block in range(num_blocks):
            rank.fill(block, name_of(block))
        return rank

    yield make
    for store in stores:
        assert store.close()


def test_the_main_key_depends_neither_on_a_draft_beside_it_nor_on_the_number_of_host_blocks(
    rank_with: Callable[..., Rank],
) -> None:
    """K2, K4, K10. One object alone, two with a draft; the main model's key is the same every time."""
    asked = []
    for domains, num_blocks in (((MAIN_DOMAIN,), 2), ((MAIN_DOMAIN,), 5), ((MAIN_DOMAIN, DRAFT_DOMAIN), 2)):
        rank = rank_with(*domains, num_blocks=num_blocks)
        rank.get((1, 1))
        asked.append(rank.client.keys("exist"))
    assert [len(keys) for keys in asked] == [1, 1, 2]
    assert asked[0] == asked[1] == asked[2][:1] and asked[2][1] != asked[2][0]


def test_a_logical_block_is_a_hit_only_if_every_domain_has_its_object(rank_with: Callable[..., Rank]) -> None:
    """K9. Two blocks in two domains are four objects; one is missing: the first block is read, the second is not."""
    rank = rank_with(MAIN_DOMAIN, DRAFT_DOMAIN)
    assert rank.put((0, 0), (1, 1)) == 2
    stored = rank.client.keys("put")
    assert len(set(stored)) == 4
    del rank.client.objects[stored[3]]
    assert rank.get((2, 0), (3, 1)) == [1, 0]
    assert rank.client.keys("get") == stored[:2]
    assert [int(cache_.payload(2)[0]) for cache_ in rank.caches] == [0, 0]
    assert [int(cache_.payload(3)[0]) for cache_ in rank.caches] == [3, 3], "a block that is missed is left alone"


def test_a_block_named_twice_in_one_write_is_written_once(rank_with: Callable[..., Rank]) -> None:
    """K11. Four requests, two keys: each is asked for and written once, and both logical blocks count."""
    rank = rank_with(MAIN_DOMAIN, DRAFT_DOMAIN)
    assert rank.put((0, 7), (0, 7)) == 2
    assert len(rank.client.keys("exist")) == len(rank.client.keys("put")) == len(rank.client.objects) == 2


def test_a_block_named_twice_in_one_read_is_a_miss_without_asking_the_store(rank_with: Callable[..., Rank]) -> None:
    """K12. One key for two targets would be two writes from one read: nobody gets it."""
    rank = rank_with(MAIN_DOMAIN)
    rank.put((0, 0))
    rank.client.calls.clear()
    assert rank.get((1, 0), (2, 0)) == [0, 0]
    assert rank.client.calls == []


def test_an_object_that_is_there_already_counts_as_stored_and_any_error_does_not(
    rank_with: Callable[..., Rank],
) -> None:
    """K14. One there, one refused, one without space, one written: two count, and the first is not written again."""
    rank = rank_with(MAIN_DOMAIN)
    assert rank.put((0, 0)) == 1
    (there,) = rank.client.keys("put")
    others = [there.replace(name_of(0).hex(), name_of(number).hex()) for number in (1, 2, 3)]
    rank.client.put_codes = {others[0]: -1, others[1]: -200}
    rank.client.calls.clear()
    assert rank.put((0, 0), (1, 1), (2, 2), (3, 3)) == 2
    assert rank.client.keys("put") == others and set(rank.client.objects) == {there, others[2]}


@pytest.mark.parametrize(
    ("code", "hit"), [(OBJECT, HIT), (0, MISS), (-704, MISS), (-800, UNKNOWN), (OBJECT - 1, MISS), (OBJECT + 1, MISS)]
)
def test_a_read_counts_only_with_exactly_the_bytes_of_the_object(
    rank_with: Callable[..., Rank], code: int, hit: int
) -> None:
    """K15. Short, long, empty and failed reads are misses, even when the bytes happen to be there; after a failed one
    the target may still be written to."""
    rank = rank_with(MAIN_DOMAIN)
    rank.put((0, 0))
    rank.client.get_codes = [code]
    assert rank.get((1, 0)) == [hit]


def test_a_read_of_another_blocks_bytes_is_a_miss(rank_with: Callable[..., Rank]) -> None:
    """K15. The right number of bytes under the right key is not enough: the block must prove itself."""
    rank = rank_with(MAIN_DOMAIN)
    rank.put((0, 0), (1, 1))
    first, second = rank.client.keys("put")
    rank.client.objects[second] = rank.client.objects[first]
    assert rank.get((2, 0), (3, 1)) == [1, 0]
    assert rank.client.keys("remove") == [second], "it would be found bad, and never be replaced, for ever"


def test_a_read_is_one_buffer_at_the_host_block_and_the_host_is_registered_as_one_range(
    rank_with: Callable[..., Rank],
) -> None:
    """K16, K19. Key and value of a block lie together: its place in the pool, all its bytes, one registered range."""
    rank = rank_with(MAIN_DOMAIN)
    rank.put((0, 0))
    rank.client.buffers.clear()
    rank.get((1, 0))
    assert OBJECT == 128 and rank.client.buffers == [(rank.memory.data_ptr() + OBJECT, OBJECT)]
    assert rank.client.registered == [(rank.memory.data_ptr(), 4 * OBJECT)]


def test_two_domains_of_one_name_and_shape_are_refused(rank_with: Callable[..., Rank]) -> None:
    """K7. Their keys would be the same; with another shape they are not, so that is fine."""
    with pytest.raises(StoreError, match="two cache domains are both main for KV"):
        rank_with(MAIN_DOMAIN, (CacheRole.DRAFT, MAIN, LAYOUT))
    rank = rank_with(MAIN_DOMAIN, (CacheRole.DRAFT, MAIN, DRAFT_LAYOUT))
    rank.get((0, 0))
    assert len(set(rank.client.keys("exist"))) == 2


def connected_client(monkeypatch: pytest.MonkeyPatch, config: EngineConfig, get_answer: list[int]) -> tuple[Any, Any]:
    """A MooncakeClient over a scripted library, and what the library's set-up was called with."""
    given: list[tuple[Any, ...]] = []
    library = SimpleNamespace(
        setup=lambda *arguments: given.append(arguments) or 0,
        batch_get_into=lambda keys, addresses, sizes: get_answer,
    )
    module = SimpleNamespace(MooncakeDistributedStore=lambda: library)
    monkeypatch.setattr("xllm_hier.worker.store.mooncake_client.library", lambda name: module)
    monkeypatch.setattr(MooncakeClient, "reachable", lambda self: True)
    monkeypatch.setattr(MooncakeClient, "_check_rdma", lambda self: None)
    client = MooncakeClient(config, 0)
    client.connect(0)
    return client, given[0]


@pytest.mark.parametrize("answer", [[], [32, 32], [32, 32, 32]])
def test_an_answer_with_another_number_of_codes_than_keys_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, answer: list[int]
) -> None:
    """K15. One key was asked for: no code, or more than one, says nothing that could be relied on."""
    client, _ = connected_client(monkeypatch, EngineConfig(store_master_server_address="127.0.0.1:1"), answer)
    (code,) = client.get(["key"], [0], [32])
    assert code < 0


@pytest.mark.parametrize(
    ("protocol", "devices", "used"),
    [("rdma", "mlx5_0,mlx5_1", "mlx5_0,mlx5_1"), ("rdma", "", ""), ("tcp", "mlx5_0", "")],
)
def test_only_the_named_rdma_devices_are_used_and_only_with_rdma(
    monkeypatch: pytest.MonkeyPatch, protocol: str, devices: str, used: str
) -> None:
    """K17, K18. The list is passed on as it is, empty means automatic, and the environment has no say."""
    monkeypatch.setenv("DEVICE_NAMES", "mlx5_9")
    config = EngineConfig(
        store_protocol=protocol, store_rdma_devices=devices, store_master_server_address="127.0.0.1:1"
    )
    _, given = connected_client(monkeypatch, config, [])
    assert given[4:6] == (protocol, used)


# ------------------------------------------------------------------------------------------ the list of laws

LAWS = {"B": 35, "H": 48, "P": 6, "T": 35, "K": 19, "C": 19, "A": 7, "X": 14, "D": 40}
TESTS = Path(__file__).parent
REASONS = ("Differs:", "Concerns ")


def spelled_out(ids: str) -> list[str]:
    """`B1, B3-B5` as B1, B3, B4, B5."""
    laws = []
    for part in ids.split(","):
        first, _, last = part.strip().partition("-")
        group, start, end = first[0], int(first[1:]), int((last or first)[1:])
        assert last[:1] in ("", group) and start <= end, part
        laws += [f"{group}{number}" for number in range(start, end + 1)]
    return laws


@cache
def listed_laws() -> list[tuple[list[str], str]]:
    """(laws, what holds them) for each row of the tables."""
    text = (TESTS.parent / "docs" / "laws.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [(spelled_out(row[0]), row[2]) for row in rows if re.fullmatch(r"[A-Z]\d.*", row[0])]


@cache
def functions_of(file: str) -> dict[str, str]:
    """Name and docstring of every test of a file."""
    functions = ast.walk(ast.parse((TESTS / file).read_text(encoding="utf-8")))
    return {node.name: ast.get_docstring(node) or "" for node in functions if isinstance(node, ast.FunctionDef)}


def named_in(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)


def test_the_list_has_every_law_once() -> None:
    laws = [law for row, _ in listed_laws() for law in row]
    assert sorted(laws) == sorted(f"{group}{number}" for group, last in LAWS.items() for number in range(1, last + 1))


def test_every_row_of_the_list_names_tests_that_exist_or_says_why_there_is_none() -> None:
    for laws, held in listed_laws():
        assert named_in(held) or held.startswith(REASONS), laws
        assert held.count(".py") == len(named_in(held)), f"{laws}: a test is not written as `file::name`"
        for file, name in named_in(held):
            assert name in functions_of(file), f"{laws}: {file} has no {name}"


@pytest.mark.parametrize(
    ("file", "at_least", "may_be_our_own"),
    [("test_laws.py", 30, False), ("test_typed_laws.py", 20, True), ("test_handover.py", 7, True)],
)
def test_every_test_stands_in_the_rows_of_the_laws_it_claims(file: str, at_least: int, may_be_our_own: bool) -> None:
    held = {law: text for laws, text in listed_laws() for law in laws}
    claims = {
        name: re.match(r"((?:[A-Z]\d+, )*[A-Z]\d+)\. ", docstring)
        for name, docstring in functions_of(file).items()
        if name.startswith("test_") and docstring
    }
    claiming = {name: spelled_out(ids[1]) for name, ids in claims.items() if ids is not None}
    assert len(claiming) > at_least
    assert may_be_our_own or claiming.keys() == claims.keys(), f"{claims.keys() - claiming.keys()}: no laws"
    for name, laws in claiming.items():
        for law in laws:
            assert (file, name) in named_in(held[law]), f"{law} does not name {name}"
