"""The three phases of the specification, with four-token blocks and no device (groups H, P, C and A of the laws)."""

from __future__ import annotations

import random

import pytest
from simulated_workers import Simulation, reference

from xllm_hier.calls import WorkerCall
from xllm_hier.engine.blocks.prefetch import PrefetchResult
from xllm_hier.engine.blocks.read_targets import QUARANTINE_S
from xllm_hier.engine.blocks.settings import ReadLimits
from xllm_hier.plans import (
    HIT,
    MISS,
    UNKNOWN,
    Forward,
    OffloadCopied,
    OffloadStored,
    PrefetchAnswer,
    PrefetchFromStorage,
    TransferBlocks,
    TransferKvBlocks,
)

PROMPT = list(range(1, 18))  # four full blocks and one token


def sent(simulation: Simulation, kind: type) -> list:
    return [message for message in simulation.workers.sent if isinstance(message, kind)]


def warm(simulation: Simulation, *, clear: tuple[str, ...] = ("device",)) -> None:
    """PROMPT computed once, then forgotten by `clear`; what the workers were sent is forgotten too."""
    assert simulation.ask(PROMPT, 1) == reference(PROMPT, 1)
    for tier in clear:
        simulation.manager.clear(tier)
    simulation.workers.sent.clear()


# ------------------------------------------------------------------------------------- phase 1: prefetch


def test_a_prompt_the_host_holds_makes_no_store_call() -> None:
    simulation = Simulation()
    warm(simulation)
    request_id = simulation.add(PROMPT)
    assert not sent(simulation, PrefetchFromStorage)
    simulation.run()
    assert simulation.usage(request_id) == (0, 16, 0, 1)


def test_a_stored_prompt_is_read_in_batches_and_counted_as_store() -> None:
    simulation = Simulation(prefetch_batch_size=2)
    warm(simulation, clear=("device", "host"))
    request_id = simulation.add(PROMPT)
    simulation.run()
    assert [len(batch.host) for batch in sent(simulation, PrefetchFromStorage)] == [2, 2]
    assert simulation.usage(request_id) == (0, 0, 16, 1)


def test_only_the_holes_are_asked_for() -> None:
    simulation = Simulation()
    warm(simulation, clear=())
    device = simulation.manager.pools.first.device
    last = device.find(simulation_hash(simulation, PROMPT, 3))
    assert last is not None
    device.withdraw(last)
    simulation.manager.clear("host")
    request_id = simulation.add(PROMPT)
    simulation.run()
    (batch,) = sent(simulation, PrefetchFromStorage)
    assert batch.hashes == simulation_hash(simulation, PROMPT, 3)
    assert simulation.usage(request_id) == (12, 0, 4, 1)


def simulation_hash(simulation: Simulation, prompt: list[int], index: int) -> bytes:
    from xllm_hier.hashing import prompt_hashes, root_hash

    return prompt_hashes(prompt, simulation.block_size, root_hash())[index]


def test_after_the_first_miss_no_later_batch_is_issued_and_a_cold_prompt_evicts_little() -> None:
    simulation = Simulation(num_host=8, prefetch_batch_size=1, num_device=20)
    simulation.add(list(range(20, 20 + 29)), 1)
    assert len(sent(simulation, PrefetchFromStorage)) == 2, "two in flight, no more before an answer"
    simulation.run()
    assert len(sent(simulation, PrefetchFromStorage)) == 2


def test_nothing_is_published_before_every_worker_has_answered() -> None:
    simulation = Simulation(num_workers=2)
    warm(simulation, clear=("device", "host"))
    simulation.add(PROMPT)
    answers, simulation.workers.pending = simulation.workers.pending, []
    answers[0](simulation.manager)
    simulation.scheduler.poll_prefetches()
    assert len(simulation.scheduler.prefetching) == 1
    assert simulation.manager.pools.first.host.num_evictable == 0
    simulation.workers.pending = answers[1:]
    simulation.run()
    assert simulation.manager.ledger.account.tokens["store"] == 16


def test_a_block_that_one_rank_lacks_is_a_miss_for_all() -> None:
    simulation = Simulation(num_workers=2, prefetch_batch_size=4)
    warm(simulation, clear=("device", "host"))
    request_id = simulation.add(PROMPT)
    (batch,) = sent(simulation, PrefetchFromStorage)
    simulation.workers.pending.clear()
    simulation.workers.host[batch.host[0]] = list(simulation.workers.store[batch.hashes[:16]])
    manager = simulation.manager
    manager.reads.on_answer(PrefetchAnswer(batch.prefetch_id, 0, 0, b"\1\1\1\1"))
    manager.reads.on_answer(PrefetchAnswer(batch.prefetch_id, 0, 1, b"\1\0\1\1"))
    simulation.run()
    assert simulation.usage(request_id) == (0, 0, 4, 13)


def test_requests_for_the_same_stored_prefix_read_it_once() -> None:
    simulation = Simulation(prefetch_batch_size=4)
    warm(simulation, clear=("device", "host"))
    first, second = simulation.add(PROMPT), simulation.add(PROMPT)
    simulation.run()
    assert len(sent(simulation, PrefetchFromStorage)) == 1
    assert simulation.usage(first) == (0, 0, 16, 1)
    assert sum(simulation.usage(second)[:3]) == 16


def test_a_request_that_needs_no_prefetch_never_waits_for_one_that_does() -> None:
    simulation = Simulation()
    warm(simulation, clear=("device", "host"))
    slow = simulation.add(PROMPT)
    simulation.share = 0.0  # the store does not answer
    quick = simulation.add([40, 41], 2)
    for _ in range(4):
        simulation.step()
    assert simulation.answered[quick] == reference([40, 41], 2) and slow not in simulation.answered


def test_a_host_pool_full_of_reads_leaves_room_for_others_and_device_requests_progress() -> None:
    simulation = Simulation(num_host=2, prefetch_batch_size=8)
    warm(simulation, clear=("device", "host"))
    simulation.share = 0.0
    simulation.add(PROMPT)
    assert sum(len(batch.host) for batch in sent(simulation, PrefetchFromStorage)) <= 1, "half of the pool at most"
    quick = simulation.add([40, 41, 42, 43, 44], 2)
    simulation.share = 1.0
    simulation.run()
    assert simulation.answered[quick] == reference([40, 41, 42, 43, 44], 2)


def test_an_aborted_prefetch_keeps_its_targets_until_every_answer_is_in() -> None:
    simulation = Simulation(num_workers=2)
    warm(simulation, clear=("device", "host"))
    request_id = simulation.add(PROMPT)
    simulation.share = 0.0
    simulation.scheduler.abort(request_id)
    for _ in range(3):
        simulation.step()
    assert simulation.manager.pools.first.host.num_pinned == 4 and request_id in simulation.scheduler.sequences
    simulation.share = 1.0
    simulation.run()
    assert simulation.manager.pools.first.host.num_pinned == 0
    assert simulation.outputs[request_id][-1].finish_reason == "abort"


def test_late_double_and_unknown_answers_are_ignored() -> None:
    simulation = Simulation()
    warm(simulation, clear=("device", "host"))
    request_id = simulation.add(PROMPT)
    batch = sent(simulation, PrefetchFromStorage)[0]
    answers, simulation.workers.pending = simulation.workers.pending, []
    for answer in (*answers, *answers):
        answer(simulation.manager)
    simulation.manager.reads.on_answer(PrefetchAnswer(10**6, 0, 0, b"\1"))
    simulation.run()
    simulation.manager.reads.on_answer(PrefetchAnswer(batch.prefetch_id, 0, 0, b"\0\0"))
    simulation.manager.check()
    assert simulation.answered[request_id] == reference(PROMPT, 3)


def test_a_request_whose_blocks_are_all_here_does_not_wait_for_anothers_read() -> None:
    simulation = Simulation(num_device=20)
    warm(simulation, clear=("device", "host"))
    simulation.share = 0.0
    simulation.add(PROMPT)  # its read of four blocks never ends
    simulation.manager.use_store(False)
    computed = simulation.add([*PROMPT[:12], 40], 1)
    for _ in range(4):
        simulation.step()
    assert computed in simulation.answered
    simulation.manager.use_store(True)
    quick = simulation.add([*PROMPT[:12], 41], 2)
    for _ in range(4):
        simulation.step()
    assert simulation.answered[quick] == reference([*PROMPT[:12], 41], 2)


def test_the_target_of_a_read_that_may_still_write_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    simulation = Simulation(prefetch_batch_size=4)
    warm(simulation, clear=("device", "host"))
    simulation.add(PROMPT)
    (batch,) = sent(simulation, PrefetchFromStorage)
    simulation.workers.pending.clear()
    simulation.workers.host[batch.host[0]] = list(simulation.workers.store[batch.hashes[:16]])
    answer = bytes([HIT, UNKNOWN, HIT, MISS])
    simulation.manager.reads.on_answer(PrefetchAnswer(batch.prefetch_id, 0, 0, answer))
    simulation.run()
    manager = simulation.manager
    assert [block for _, _, block in manager.reads.targets.quarantine] == [batch.host[1]]
    assert manager.block_counts()["host"]["KV"]["quarantined"] == 1
    assert manager.block_counts()["host"]["KV"]["pinned"] == 0
    taken = manager.pools.first.host.allocate(manager.pools.first.host.num_available)
    assert taken is not None and batch.host[1] not in taken
    now[0] += QUARANTINE_S - 1
    manager.reads.targets.release_quarantine()
    assert manager.pools.first.host.num_available == 0
    now[0] += 2
    manager.reads.targets.release_quarantine()
    assert manager.pools.first.host.allocate(1) == [batch.host[1]]


@pytest.mark.parametrize("deadline_ms", [0, 250])
def test_a_read_given_up_leaves_its_targets_alone_until_every_rank_has_ended_it(
    monkeypatch: pytest.MonkeyPatch, deadline_ms: int
) -> None:
    """By the deadline where there is one, else by the limit of silence. Two ranks read; one may write even later."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    simulation = Simulation(num_workers=2, prefetch_batch_size=4, prefetch_deadline_ms=deadline_ms)
    warm(simulation, clear=("device", "host"))
    request_id = simulation.add(PROMPT)
    (batch,) = sent(simulation, PrefetchFromStorage)
    simulation.workers.pending.clear()
    reads = simulation.manager.reads
    now[0] += deadline_ms / 1000 if deadline_ms else ReadLimits().silence_s
    simulation.step()
    assert request_id not in simulation.answered, "not before the limit"
    now[0] += 0.01
    for _ in range(12):
        simulation.step()
    assert simulation.answered[request_id] == reference(PROMPT, 3) and reads.num_timeouts == 1
    assert simulation.usage(request_id) == (0, 0, 0, 17)
    simulation.run()
    assert reads.targets.num_left_alone == 4 == simulation.manager.pools.first.host.num_pinned
    now[0] += 10 * QUARANTINE_S
    reads.targets.release_quarantine()
    assert reads.targets.num_left_alone == 4, "however long it takes"
    reads.on_answer(PrefetchAnswer(batch.prefetch_id, 0, 1, bytes([HIT, UNKNOWN, MISS, HIT])))
    reads.on_answer(PrefetchAnswer(batch.prefetch_id, 0, 1, bytes(4)))  # once more: nothing to it
    assert reads.targets.num_left_alone == 4, "the other rank still reads"
    reads.on_answer(PrefetchAnswer(batch.prefetch_id, 0, 0, bytes([HIT] * 4)))
    assert [block for _, _, block in reads.targets.quarantine] == [batch.host[1]] and reads.targets.num_left_alone == 1
    now[0] += QUARANTINE_S
    reads.targets.release_quarantine()
    assert reads.targets.num_left_alone == 0 == simulation.manager.pools.first.host.num_pinned


def test_a_deadline_counts_from_the_arrival_also_for_who_waits_for_the_reads_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    simulation = Simulation(prefetch_batch_size=4, prefetch_deadline_ms=1000, num_device=32, num_host=64)
    prompts = [[*PROMPT, *range(20 + n, 20 + n + 4 * n)] for n in range(3)]
    for prompt in prompts:
        simulation.ask(prompt)
    for tier in ("device", "host"):
        simulation.manager.clear(tier)
    simulation.share = 0.0
    ids = [simulation.add(prompt, 1) for prompt in prompts]
    now[0] += 1.01
    for _ in range(20):
        simulation.step()
    assert all(name in simulation.answered for name in ids), "one deadline, not one after the other"
    simulation.share = 1.0
    simulation.run()


def test_a_store_that_is_attached_gets_what_the_host_has_when_it_is_used_again() -> None:
    simulation = Simulation(store=False)
    simulation.ask(PROMPT)
    simulation.workers.store.clear()
    simulation.manager.use_store(True)
    simulation.ask(PROMPT)
    assert len(simulation.workers.store) == 4
    copies = len(sent(simulation, TransferKvBlocks))
    simulation.ask(PROMPT)
    assert len(sent(simulation, TransferKvBlocks)) == copies, "once is enough"


# ----------------------------------------------------------------------------------- the result matrix


def test_hits_are_the_and_of_all_workers_in_any_order_of_answers() -> None:
    result = PrefetchResult(2, 5, 3, 0)
    assert [result.next_batch(9), result.next_batch(9), result.next_batch(9)] == [(0, 3), (3, 2), None]
    assert result.record(1, 3, [1, 1]) and result.record(0, 0, [1, 0, 1])
    assert not result.completed()
    assert result.record(0, 3, [0, 1]) and result.record(1, 0, [1, 1, 1])
    assert result.merged_hits() == [True, False, True, False, True] and result.completed()


def test_an_answer_of_the_wrong_length_counts_as_missed() -> None:
    result = PrefetchResult(1, 2, 2, 0)
    result.next_batch(9)
    assert result.record(0, 0, [1])
    assert result.merged_hits() == [False, False] and result.completed()


def test_the_first_stop_request_takes_effect_and_what_is_in_flight_is_awaited() -> None:
    result = PrefetchResult(1, 4, 2, 0)
    result.next_batch(9)
    assert result.request_stop() and not result.request_stop()
    assert result.next_batch(9) is None and not result.completed()
    result.record(0, 0, [1, 1])
    assert result.completed() and result.merged_hits() == [True, True, False, False]


def test_after_the_timeout_no_batch_is_issued_and_hits_so_far_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("xllm_hier.engine.blocks.prefetch.time.monotonic", lambda: now[0])
    result = PrefetchResult(1, 4, 2, 30)
    result.next_batch(9)
    now[0] += 0.031
    assert result.next_batch(9) is None and result.timed_out and not result.completed()
    result.record(0, 0, [1, 1])
    assert result.completed() and result.merged_hits() == [True, True, False, False]
    forever = PrefetchResult(1, 4, 2, 0)
    now[0] += 10**6
    assert forever.next_batch(9) == (0, 2)


# ----------------------------------------------------------------------------- phase 2: restore and share


def test_a_full_hit_computes_the_last_token_only_and_does_not_write_it() -> None:
    simulation = Simulation()
    prompt = PROMPT[:16]
    simulation.ask(prompt, 1)
    simulation.manager.clear("device")
    simulation.workers.sent.clear()
    request_id = simulation.add(prompt)
    simulation.run()
    assert simulation.usage(request_id) == (0, 15, 0, 1)
    row = sent(simulation, Forward)[0].prefill[0]
    assert (row.start, len(row.token_ids), row.write_from) == (15, 1, 16)


@pytest.mark.parametrize("length", range(1, 18))
def test_hits_equal_a_brute_force_search_whatever_each_tier_holds(length: int) -> None:
    dice = random.Random(length)
    for _ in range(20):
        simulation = Simulation(store=False)
        warm(simulation, clear=())
        present = []
        for index in range(4):
            block_hash = simulation_hash(simulation, PROMPT, index)
            tiers = [tier for tier in ("device", "host") if dice.random() < 0.6]
            first = simulation.manager.pools.first
            for tier, pool in (("device", first.device), ("host", first.host)):
                block = pool.find(block_hash)
                if tier not in tiers and block is not None:
                    pool.withdraw(block)
            present.append(bool(tiers))
        prompt = PROMPT[:length]
        full = [present[index] for index in range(length // 4)]
        brute = max(b for b in range(len(full) + 1) if all(full[:b])) * 4
        request_id = simulation.add(prompt)
        simulation.run()
        assert sum(simulation.usage(request_id)[:3]) == min(brute, length - 1)
        assert simulation.answered[request_id] == reference(prompt, 3)


def test_device_metadata_of_restored_blocks_is_shared_before_the_copy_ran() -> None:
    simulation = Simulation(chunk_tokens=16)
    warm(simulation)
    first, second = simulation.add(PROMPT), simulation.add([*PROMPT, 18])
    simulation.run()
    assert len(sent(simulation, TransferBlocks)) == 1
    assert simulation.usage(first) == (0, 16, 0, 1) and simulation.usage(second) == (16, 0, 0, 2)


def test_two_equal_prompts_at_once_are_computed_once() -> None:
    simulation = Simulation(store=False)
    first, second = simulation.add(PROMPT), simulation.add(PROMPT)
    simulation.run()
    assert simulation.usage(first) == (0, 0, 0, 17) and simulation.usage(second) == (16, 0, 0, 1)
    assert simulation.answered[first] == simulation.answered[second] == reference(PROMPT, 3)


def test_a_salt_separates_prefixes_in_every_tier() -> None:
    simulation = Simulation()
    simulation.ask(PROMPT, 1, cache_salt="a")
    other = simulation.add(PROMPT, cache_salt="b")
    same = simulation.add(PROMPT, cache_salt="a")
    simulation.run()
    assert simulation.usage(other)[3] == 17 and simulation.usage(same)[3] == 1


def test_without_prefix_cache_everything_is_computed() -> None:
    simulation = Simulation(enable_prefix_cache=False, store=False, num_host=0)
    simulation.ask(PROMPT)
    request_id = simulation.add(PROMPT)
    simulation.run()
    assert simulation.usage(request_id) == (0, 0, 0, 17)


def test_an_allocation_that_fails_takes_nothing() -> None:
    simulation = Simulation(num_device=6)
    warm(simulation)
    holder = simulation.manager.pools.first.device.allocate(3)
    assert holder is not None
    simulation.add(PROMPT)
    before = simulation.manager.block_counts()
    for _ in range(3):
        simulation.step()
    assert simulation.manager.block_counts()["device"] == before["device"]
    simulation.manager.pools.first.device.unpin(holder)
    simulation.run()
    assert simulation.answered["r1"] == reference(PROMPT, 3)


# ---------------------------------------------------------------------------------- phase 3: write-back


def test_blocks_are_written_back_while_the_prompt_is_still_being_computed() -> None:
    simulation = Simulation(chunk_tokens=4)
    simulation.add(PROMPT, 1)
    written = []
    for _ in range(4):
        simulation.step()
        written.append(sum(len(plan.target_mappings[0].host) for plan in sent(simulation, TransferKvBlocks)))
    assert written == [0, 1, 2, 3] or written == [1, 2, 3, 4]


def test_after_one_cold_chunked_run_all_full_blocks_come_from_the_store() -> None:
    simulation = Simulation(num_device=128, num_host=128, chunk_tokens=7)
    prompt = [n % 50 for n in range(2000 // 8)]
    simulation.ask(prompt, 1)
    simulation.manager.clear("device")
    simulation.manager.clear("host")
    request_id = simulation.add(prompt)
    simulation.run()
    device, host, store, computed = simulation.usage(request_id)
    assert (device, host) == (0, 0) and store == len(prompt) // 4 * 4 and computed == len(prompt) % 4


def test_content_the_host_holds_is_not_written_back_again() -> None:
    simulation = Simulation()
    warm(simulation, clear=("device",))
    simulation.ask(PROMPT, 1)
    assert not sent(simulation, TransferKvBlocks)


def test_without_room_on_the_host_nothing_is_reserved_and_the_answer_is_the_same() -> None:
    simulation = Simulation(num_host=1, chunk_tokens=16, max_tokens=32)
    holder = simulation.manager.pools.first.host.allocate(1)
    assert simulation.ask(PROMPT) == reference(PROMPT, 3)
    assert not sent(simulation, TransferKvBlocks)
    simulation.manager.pools.first.host.unpin(holder or [])


def test_the_host_prefix_is_published_only_if_every_rank_copied_every_block() -> None:
    simulation = Simulation(num_workers=2)
    simulation.workers.faults.offload = 1.0
    simulation.ask(PROMPT, 1)
    assert simulation.manager.write_back.num_failed > 0
    counts = simulation.manager.block_counts()
    assert counts["host"]["KV"] == {"free": 16, "pinned": 0, "evictable": 0, "quarantined": 0}
    assert counts["device"]["KV"]["pinned"] == 0 and counts["device"]["KV"]["evictable"] >= 4


def test_host_blocks_stay_pinned_until_the_store_has_them() -> None:
    simulation = Simulation(chunk_tokens=16, max_tokens=32)
    simulation.add(PROMPT, 1)
    simulation.step()
    (plan,) = sent(simulation, TransferKvBlocks)
    pool = simulation.manager.pools.first.host
    copied, simulation.workers.pending = simulation.workers.pending, []
    for answer in copied:
        answer(simulation.manager)
    assert pool.num_evictable == 0 and pool.num_pinned == len(plan.target_mappings[0].host)
    simulation.run()
    assert pool.num_pinned == 0


def test_a_block_whose_write_back_was_skipped_is_written_when_it_is_used_again() -> None:
    simulation = Simulation()
    holder = simulation.manager.pools.first.host.allocate(16)
    simulation.ask(PROMPT, 1)
    assert not sent(simulation, TransferKvBlocks) and not simulation.workers.store
    simulation.manager.pools.first.host.unpin(holder or [])
    simulation.ask(PROMPT, 1)
    assert len(simulation.workers.store) == 4 and simulation.manager.pools.first.host.num_evictable == 4


def test_blocks_that_did_not_reach_the_store_are_put_again_once_it_works() -> None:
    simulation = Simulation(num_device=20)
    simulation.workers.faults.put = 1.0
    simulation.ask(PROMPT, 1)
    simulation.workers.sent.clear()
    simulation.ask(PROMPT, 1)
    assert not sent(simulation, TransferKvBlocks), "a store that does not work is not tried again and again"
    simulation.workers.faults.put = 0.0
    simulation.ask(list(range(30, 39)), 1)  # new blocks are written anyway, and show that it works
    assert len(simulation.workers.store) == 2
    simulation.ask(PROMPT, 1)
    assert len(simulation.workers.store) == 6 and simulation.manager.pools.first.host.num_pinned == 0


def test_a_block_that_one_rank_could_not_store_is_put_again_whichever_rank_answers_last() -> None:
    for counts in ((0, 4), (4, 0)):
        simulation = Simulation(num_workers=2, chunk_tokens=17, max_tokens=17)
        simulation.add(PROMPT, 1)
        simulation.step()
        (plan,) = sent(simulation, TransferKvBlocks)
        write_back = simulation.manager.write_back
        simulation.workers.pending.clear()
        for rank, count in enumerate(counts):
            write_back.on_copied(OffloadCopied(plan.transfer_id, rank, 4))
            write_back.on_stored(OffloadStored(plan.transfer_id, rank, count))
        assert len(write_back._unstored) == 4 and not write_back.store_works and not write_back.busy


# --------------------------------------------------------------------------------- decoded blocks, turns


def test_canonical_blocks_of_an_answer_serve_the_next_turn_with_the_bits_of_a_prompt() -> None:
    simulation = Simulation(num_device=16)
    answer = simulation.ask(PROMPT, 6)
    turn = [*PROMPT, *answer, 7, 8]
    request_id = simulation.add(turn)
    simulation.run()
    assert simulation.usage(request_id) == (20, 0, 0, len(turn) - 20)
    assert simulation.answered[request_id] == reference(turn, 3)


def test_decoded_blocks_are_not_reused_when_that_is_off() -> None:
    simulation = Simulation(num_device=16, decode_kv_reuse="off")
    answer = simulation.ask(PROMPT, 6)
    request_id = simulation.add([*PROMPT, *answer, 7, 8])
    simulation.run()
    assert simulation.usage(request_id)[0] == 16


def test_decoded_blocks_are_published_as_they_are_when_asked() -> None:
    simulation = Simulation(num_device=16, decode_kv_reuse="as_is")
    answer = simulation.ask(PROMPT, 8)
    simulation.workers.sent.clear()
    request_id = simulation.add([*PROMPT, *answer, 7, 8])
    simulation.run()
    assert simulation.usage(request_id)[0] == 24


def test_a_preempted_sequence_goes_on_with_the_bits_it_would_have_had() -> None:
    simulation = Simulation(num_device=8, num_host=32, max_tokens=32, chunk_tokens=32)
    prompts = [[n, n + 1, n + 2, n + 3, n + 4] for n in (1, 11, 21)]
    ids = [simulation.add(prompt, 12) for prompt in prompts]
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert simulation.answered[request_id] == reference(prompt, 12)
    assert not [plan for plan in sent(simulation, TransferKvBlocks) if not plan.put and plan.draft_mappings]
    decoded = [plan for plan in sent(simulation, TransferKvBlocks) if not plan.put]
    assert decoded, "decoded blocks of a preempted sequence go to the host, not to the store"


# ----------------------------------------------------------------------------------------- scheduling


def test_running_sequences_decode_while_a_long_prompt_is_computed_in_chunks() -> None:
    simulation = Simulation(num_device=16, max_tokens=8, chunk_tokens=8, store=False)
    first = simulation.add([1, 2, 3], 8)
    simulation.step()
    simulation.add(list(range(20, 44)), 1)
    for _ in range(3):
        simulation.step()
    forwards = sent(simulation, Forward)[1:4]
    assert len(forwards) == 3
    assert all(len(plan.decode) == 1 and len(plan.prefill) == 1 for plan in forwards)
    assert all(sum(len(row.token_ids) for row in (*plan.prefill, *plan.decode)) <= 8 for plan in forwards)
    simulation.run()
    assert simulation.answered[first] == reference([1, 2, 3], 8)


def test_first_come_first_served_within_a_priority() -> None:
    simulation = Simulation(max_seqs=1, store=False)
    late, early = simulation.add([1], 1, priority=1), simulation.add([2], 1, priority=0)
    also = simulation.add([3], 1, priority=0)
    order: list[str] = []
    for _ in range(8):
        simulation.step()
        order += [name for name in simulation.outputs if name not in order]
    assert order == [early, also, late]


def test_usage_counts_every_prompt_token_once_and_keeps_the_first_account_over_preemption() -> None:
    simulation = Simulation(num_device=8, num_host=32, max_tokens=32, chunk_tokens=32)
    ids = [simulation.add([n, n + 1, n + 2, n + 3, n + 4], 12) for n in (1, 11, 21)]
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    assert all(sum(simulation.usage(request_id)) == 5 for request_id in ids)
    assert sum(simulation.manager.ledger.account.tokens.values()) == 15


def test_usage_says_computed_when_the_load_of_a_hit_failed() -> None:
    simulation = Simulation()
    warm(simulation)
    simulation.workers.faults.load = 1.0
    before = dict(simulation.manager.ledger.account.tokens)
    request_id = simulation.add(PROMPT)
    for _ in range(8):
        simulation.step()
    assert simulation.answered[request_id] == reference(PROMPT, 3)
    assert simulation.usage(request_id) == (0, 0, 0, 17)
    after = simulation.manager.ledger.account.tokens
    assert {tier: after[tier] - before[tier] for tier in after} == {"device": 0, "host": 0, "store": 0, "computed": 17}


def test_a_crowd_behind_one_prompt_is_not_looked_through_at_every_step() -> None:
    simulation = Simulation(num_device=40, store=False, chunk_tokens=4, max_tokens=8)
    prompt = list(range(1, 42))
    simulation.add(prompt, 1)
    simulation.step()
    crowd = [simulation.add(prompt, 1) for _ in range(20)]
    simulation.step()
    looked = simulation.manager.ledger.prefix.num_lookups
    for _ in range(5):
        simulation.step()
    assert simulation.manager.ledger.prefix.num_lookups == looked
    simulation.run()
    assert all(simulation.usage(request_id) == (40, 0, 0, 1) for request_id in crowd)


def test_a_waiting_requests_hit_is_worked_out_once_until_the_caches_or_the_request_change() -> None:
    """One request decodes in all but three blocks of the device; the next one, with a hit of two, has no room."""
    simulation = Simulation(num_device=7, store=False, decode_kv_reuse="off", num_host=0)
    prefix = simulation.manager.ledger.prefix
    simulation.ask(PROMPT[:9], 1)
    simulation.add(list(range(20, 32)), 8)
    simulation.step()
    simulation.step()
    waiting = simulation.add([*PROMPT[:8], *range(40, 52)], 1)
    simulation.step()
    (sequence,) = simulation.scheduler.waiting
    assert simulation.manager.hit(sequence).tokens == 8
    before = prefix.num_lookups
    for _ in range(3):
        simulation.step()  # it asks whether somebody computes its blocks, how long its chunk is, and for the blocks
    assert simulation.scheduler.waiting == [sequence] and prefix.num_lookups == before
    simulation.manager.pools.first.device.clear()
    simulation.step()
    assert prefix.num_lookups == before + 1
    simulation.run()
    assert simulation.usage(waiting) == (0, 0, 0, 20), "a hit that is gone is not relied on"


def test_no_message_of_the_engine_is_anything_but_a_plan() -> None:
    simulation = Simulation()
    simulation.ask(PROMPT)
    kinds = {type(message) for message in simulation.workers.sent}
    assert kinds <= {Forward, TransferBlocks, TransferKvBlocks, PrefetchFromStorage, WorkerCall}
