"""Thousands of schedules drawn from seeds, on the real engine and a fake clock: whatever happens, answers stay right.

What is drawn, what is checked after each turn and at the end: see `simulation`. A schedule that fails is shrunk and
printed as a script, to be replayed here as it stands.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import pytest
from simulated_workers import Simulation
from simulation.contents import POISON
from simulation.scripts import DEADLY, FAMILIES, GENTLE, HARSH, PROBING, Script, draw, failure_of, replay, shrink
from simulation.world import Settings, World

from xllm_hier.block import BlockType, RestoreRule, common_boundary
from xllm_hier.calls import ClearCache, Drain, GetStats
from xllm_hier.engine.blocks import prefetch, prefix, write_back
from xllm_hier.engine.blocks.books import HierarchyBlockManagerPool
from xllm_hier.engine.blocks.canonical import CanonicalBlocks
from xllm_hier.engine.blocks.host_loads import Loads
from xllm_hier.engine.blocks.prefetch import PrefetchResult
from xllm_hier.engine.blocks.prefix import Prefix
from xllm_hier.engine.blocks.publishing import Publishing
from xllm_hier.engine.blocks.sequence import Sequence
from xllm_hier.engine.blocks.settings import Drafting
from xllm_hier.engine.blocks.store_reads import _Probe
from xllm_hier.engine.blocks.types import TypePools
from xllm_hier.engine.blocks.write_back import WriteBack
from xllm_hier.engine.steps import step
from xllm_hier.engine.steps.scheduler import Scheduler
from xllm_hier.ints import ints
from xllm_hier.plans import (
    HIT,
    HOLE,
    BlockMapping,
    Forward,
    PrefetchFromStorage,
    ProbeStorage,
    SequenceRows,
    StateMoves,
    TransferBlocks,
    TransferKvBlocks,
)
from xllm_hier.request_messages import AddRequest, RequestOutput, SamplingSpec

SEEDS, TYPED_SEEDS = 400, 160  # of each family with KV blocks alone, and with blocks of other types
PROMPT = list(range(1, 18))


@pytest.mark.parametrize("family", FAMILIES)
def test_random_schedules_answer_as_without_any_cache_and_leave_nothing(family: str) -> None:
    for seed in range(TYPED_SEEDS if "types" in FAMILIES[family] else SEEDS):
        script = draw(family, seed)
        problem = failure_of(script)
        if problem is not None:
            small = shrink(script, lambda other: failure_of(other) is not None, most_runs=300)
            pytest.fail(f"{family}, seed {seed}: {problem}\nshrunk: {failure_of(small)}\n{small}")


def test_random_schedules_meet_what_they_are_meant_to_meet() -> None:
    met: Counter[str] = Counter()
    for family in FAMILIES:
        for seed in range(60 if family == "deadly" else 20):
            world = replay(draw(family, seed))
            manager = world.manager
            met.update(world.ranks.done)
            met.update({f"tokens of {tier}": tokens for tier, tokens in manager.ledger.account.tokens.items()})
            met.update(str(asked.end and (asked.end.finish_reason, asked.status)) for asked in world.asked.values())
            for plan in (PrefetchFromStorage, TransferBlocks, TransferKvBlocks):
                for message in world.sent(plan):
                    kinds = [message] if plan is PrefetchFromStorage else message.target_mappings
                    met.update(f"{plan.__name__} {mapping.block_type}" for mapping in kinds)
            met["preemptions"] += world.scheduler.num_preemptions
            met["failed loads"] += manager.loads.num_failed
            met["failed write-backs"] += manager.write_back.num_failed
            met["ends"] += world.dead is not None
            drafted, accepted = (
                sum(of.values()) for of in (world.scheduler.drafts.drafted, world.scheduler.drafts.accepted)
            )
            if world.settings.draft:
                met["accepted"], met["rejected"] = met["accepted"] + accepted, met["rejected"] + drafted - accepted
    ends = [("length", 200), ("stop", 200), ("abort", 200), ("error", 400), ("error", 500), ("error", 503)]
    faults = {kind for kind, _ in (*GENTLE, *HARSH, *PROBING)} | set(DEADLY) - {"die", "silent"}
    counted = ("tokens of device", "tokens of host", "tokens of store", "preemptions", "failed loads", "ends")
    drafts = ("accepted", "rejected")
    plans = (PrefetchFromStorage, TransferBlocks, TransferKvBlocks)
    moved = [f"{plan.__name__} {kind.value}" for plan in plans for kind in BlockType]
    wanted = (*map(str, ends), *faults, *counted, "failed write-backs", *drafts, *moved)
    assert not [what for what in wanted if not met[what]]


def test_a_schedule_runs_twice_alike() -> None:
    def trace(script: Script) -> list[object]:
        world = replay(script)
        return [world.timeline.now, [(name, one.tokens, one.usage) for name, one in world.asked.items()]]

    for family in FAMILIES:
        assert trace(draw(family, 7)) == trace(draw(family, 7))


def test_a_script_is_replayed_as_it_was_printed() -> None:
    script = draw("faults", 3)
    again = eval(str(script), {"replay": lambda same: same, "Script": Script, "Settings": Settings})
    assert again == script


# ------------------------------------------------------------------------------------------ planted bugs are found


def a_block_needs_the_word_of_one_rank_only(bitmaps: Collection[bytes], num_blocks: int) -> bytes:
    said = zip(*(bitmap for bitmap in bitmaps if len(bitmap) == num_blocks), strict=True)
    return bytes(HIT if HIT in one else max(one) for one in said) or bytes(num_blocks)


def a_read_that_may_still_write_is_over(_result: PrefetchResult, _column: int) -> bool:
    return False


def a_failed_load_is_as_good_as_another(loads: Loads, batch_ids: list[int], _: object) -> set[tuple[BlockType, int]]:
    return FINISH_STEP(loads, batch_ids, [])


def a_copy_is_whole_when_one_rank_says_so(write_back: WriteBack, transfer_id: int, offload: Any) -> None:
    best = max(offload.copied.by_rank.values())
    offload.copied.by_rank.update(dict.fromkeys(offload.copied.by_rank, best))
    COMMIT_COPY(write_back, transfer_id, offload)


def a_head_finds_the_hidden_state_before_a_restored_prefix_somewhere(
    _prefix: Prefix, sequence: Sequence, num_restored: int
) -> int:
    return max(0, min(num_restored * sequence.block_size, sequence.reuse_limit))


def a_draft_model_is_not_told_the_token_behind_a_chunk(
    manager: HierarchyBlockManagerPool,
    sequence: Sequence,
    end: int,
    _next_token: int | None,
    drafts: list[int],
    **more: Any,
) -> SequenceRows:
    return ROW(manager, sequence, end, None, drafts, **more)


def what_a_rejected_draft_left_is_taken_for_computed(
    scheduler: Scheduler, sequence: Sequence, sampled: list[Any], num_drafts: int
) -> None:
    APPEND_ALL(scheduler, sequence, sampled, num_drafts)
    sequence.draft_from += len(sampled) <= num_drafts


def the_newest_token_needs_no_block(_drafting: Drafting) -> int:
    return 0


def a_window_slides_a_block_too_early(manager: HierarchyBlockManagerPool, sequence: Sequence) -> None:
    PUBLISH_COMPUTED(manager, sequence)
    pools = manager.pools[BlockType.SWA]
    boundary = sequence.num_computed - sequence.num_computed % manager.settings.block_size
    pools.release(sequence.held[BlockType.SWA].take_before(pools.rule.needed(boundary).start + 1))


def a_window_is_restored_a_block_short(rule: RestoreRule, boundary: int) -> range:
    needed = NEEDED(rule, boundary)
    return needed[1:] if rule.block_type is BlockType.SWA and len(needed) > 1 else needed


def blocks_that_need_no_others_are_a_tree_too(_pools: TypePools, parent_hash: bytes) -> bytes:
    return parent_hash


def what_one_rank_found_is_there(probe: _Probe) -> set[tuple[BlockType, int]]:
    said = list(probe.answers.by_rank.values())
    return {
        column
        for place, column in enumerate(probe.columns)
        if any(hits[place] == HIT for hits in said if len(hits) == len(probe.columns))
    }


def a_step_leaves_its_state_where_it_found_it(
    manager: HierarchyBlockManagerPool, sequence: Sequence, end: int, num_drafts: int = 0
) -> StateMoves | None:
    moves = MOVE_STATES(manager, sequence, end, num_drafts)
    if moves is not None and moves.source != HOLE and not num_drafts:
        sequence.states[end] = moves.blocks[-1] = moves.source
    return moves


def the_state_behind_all_drafts_is_that_behind_the_right_ones(
    manager: HierarchyBlockManagerPool, sequence: Sequence, end: int, num_drafts: int = 0
) -> StateMoves | None:
    moves = MOVE_STATES(manager, sequence, end, num_drafts)
    for place in range(end, end + num_drafts):
        sequence.states[place] = sequence.states[end + num_drafts]
    return moves


def a_chunk_ends_where_the_budget_does(scheduler: Scheduler, sequence: Sequence, start: int, budget: int) -> int:
    end = sequence.prompt_length if start < sequence.prompt_length else len(sequence.tokens)
    return min(end - start, budget, scheduler.chunk_tokens)


def decoded_blocks_are_recomputed_without_the_window_before_them(*_: object) -> bool:
    return True


def only_a_failed_load_of_the_first_type_counts(sequence: Sequence, blocks: set[tuple[BlockType, int]]) -> bool:
    return any(block in sequence.device_blocks for kind, block in blocks if kind is sequence.types[0])


def a_sequence_holds_all_its_checkpoints(publishing: Publishing, sequence: Sequence) -> None:
    publishing.publish(sequence, publishing.num_publishable(sequence), put=True)


def the_checkpoint_that_a_sequence_goes_on_from_is_let_go_of(
    manager: HierarchyBlockManagerPool, sequence: Sequence
) -> None:
    PUBLISH_COMPUTED(manager, sequence)
    pools, held = manager.pools[BlockType.LINEAR], sequence.held[BlockType.LINEAR]
    for number in held.numbers(sequence.num_published):
        pools.release([held.block(number)])
        held.put(number, HOLE)


def the_last_token_of_a_recurrent_model_is_computed_again(prefix: Prefix, sequence: Sequence) -> int:
    return -(-sequence.reuse_limit // sequence.block_size) if prefix.shares(sequence) else 0


def a_draft_has_blocks_of_all_types(mappings: list[BlockMapping], types: tuple[str, ...]) -> list[BlockMapping]:
    return mappings if types else []


def one_type_decides_the_boundary(rules: list[RestoreRule], has: Callable[[BlockType, int], bool], limit: int) -> int:
    return common_boundary(rules[:1], has, limit)


FINISH_STEP, COMMIT_COPY = Loads.finish, WriteBack._commit_copy
ROW, APPEND_ALL = step._row, Scheduler._append_all
PUBLISH_COMPUTED, NEEDED = HierarchyBlockManagerPool.publish_computed, RestoreRule.needed
MOVE_STATES = HierarchyBlockManagerPool.move_states
PLANTED: dict[Callable[..., Any], tuple[str, Any, str]] = {
    a_block_needs_the_word_of_one_rank_only: ("faults", prefetch, "and_over_ranks"),
    a_read_that_may_still_write_is_over: ("faults", PrefetchResult, "is_unknown"),
    a_failed_load_is_as_good_as_another: ("faults", Loads, "finish"),
    a_copy_is_whole_when_one_rank_says_so: ("faults", WriteBack, "_commit_copy"),
    a_head_finds_the_hidden_state_before_a_restored_prefix_somewhere: (
        "draft head",
        Prefix,
        "num_hit_tokens",
    ),
    a_draft_model_is_not_told_the_token_behind_a_chunk: ("draft model", step, "_row"),
    what_a_rejected_draft_left_is_taken_for_computed: ("draft model", Scheduler, "_append_all"),
    the_newest_token_needs_no_block: ("draft head", Drafting, "ahead"),
    a_window_slides_a_block_too_early: ("windows", HierarchyBlockManagerPool, "publish_computed"),
    a_window_is_restored_a_block_short: ("windows only", RestoreRule, "needed"),
    blocks_that_need_no_others_are_a_tree_too: ("states", TypePools, "parent"),
    what_one_rank_found_is_there: ("typed and restored", _Probe, "found"),
    a_step_leaves_its_state_where_it_found_it: ("states", HierarchyBlockManagerPool, "move_states"),
    the_state_behind_all_drafts_is_that_behind_the_right_ones: ("states", HierarchyBlockManagerPool, "move_states"),
    a_chunk_ends_where_the_budget_does: ("windows and states", Scheduler, "_chunk"),
    decoded_blocks_are_recomputed_without_the_window_before_them: ("windows", CanonicalBlocks, "hold_again"),
    only_a_failed_load_of_the_first_type_counts: ("windows and a draft model", Sequence, "holds_any"),
    a_sequence_holds_all_its_checkpoints: ("states", Publishing, "publish_computed"),
    the_checkpoint_that_a_sequence_goes_on_from_is_let_go_of: (
        "states",
        HierarchyBlockManagerPool,
        "publish_computed",
    ),
    the_last_token_of_a_recurrent_model_is_computed_again: ("states", Prefix, "num_candidates"),
    a_draft_has_blocks_of_all_types: ("windows and a draft model", write_back, "draft_part"),
    one_type_decides_the_boundary: ("windows and states", prefix, "common_boundary"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found_and_its_script_shrunk_to_a_few_events(
    bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, owner, name = PLANTED[bug]
    monkeypatch.setattr(owner, name, property(bug) if isinstance(getattr(owner, name), property) else bug)
    found = next(script for seed in range(400) if failure_of(script := draw(family, seed)) is not None)
    small = shrink(found, lambda other: failure_of(other) is not None)
    assert failure_of(small) is not None and len(small.events) <= 8 < len(found.events), small
    assert all(
        failure_of(Script(small.settings, small.events[:cut] + small.events[cut + 1 :])) is None
        for cut in range(len(small.events))
    ), "every event left is needed"
    monkeypatch.undo()
    assert failure_of(small) is None


# --------------------------------------------------------------------------------------------- scripts once found


def test_a_rate_that_goes_stale_within_a_turn_does_not_split_match_and_allocation() -> None:
    """Found by the simulation: a request was sized by what computing it would take, then given restored blocks."""
    for seed in range(30):
        dice = random.Random(seed)
        world = World(policy="measured", num_device=20)
        world.ask(PROMPT, 1)
        world.forget("device")
        world.manager.policy._pays = lambda *_, dice=dice, **__: dice.random() < 0.5  # type: ignore[method-assign]
        assert world.ask([*PROMPT, 18], 3).status == 200


def test_decoded_blocks_that_are_still_copied_are_recomputed_elsewhere() -> None:
    """Found with a guard removed. Two equal prompts: the one that was preempted ends while the copy of its decoded
    blocks, made when it had to go, is still under way; they are not recomputed in place."""
    settings = Settings(num_device=6, block_size=2, max_tokens=64, max_seqs=16, batch_size=1, pace=5.0, seed=345)
    prompt = [8, 39, 5, 26]
    events = [(0.0, "add", "first", prompt, 6, {}), (0.105, "add", "second", prompt, 6, {})]
    assert replay(Script(settings, events)).scheduler.num_preemptions


def test_an_audit_does_not_take_decoded_blocks_for_those_of_a_prompt() -> None:
    """Found by the simulation: a request that was preempted got its decoded blocks back from the host; computed again
    as a prompt their bits are others, which was an alarm."""
    settings = Settings(block_size=2, decode_kv_reuse="off", max_seqs=16, chunk_tokens=64, audit_rate=1)
    events = [(0.0, "add", "first", [44, 32], 9, {}), (0.005, "add", "second", [5, 40, 15], 12, {"salt": "a"})]
    world = replay(Script(settings, events))
    assert world.scheduler.num_preemptions and world.sent(TransferBlocks)


# ------------------------------------------------------------------------------------------------------ single laws


def test_a_request_alone_that_fits_always_ends_even_when_it_may_reuse_nothing() -> None:
    """One with prompt logprobs used to hold its prefix twice, preempt itself, and start again for ever."""
    for num_device in (3, 8, 20):
        for used in range(1, num_device):
            for chunk_tokens in (2, 8, 64):
                simulation = Simulation(num_device=num_device, num_host=0, store=False, chunk_tokens=chunk_tokens)
                trunk = [number % 50 for number in range(4 * num_device)]
                simulation.ask(trunk[: 4 * used - 1], 1)
                request_id = simulation.add(trunk[: 4 * num_device - 1], 1, prompt_logprobs=0)
                simulation.run(500)
                assert simulation.usage(request_id)[3] == 4 * num_device - 1
                assert simulation.scheduler.num_preemptions <= 1


def test_a_failed_forward_ends_its_requests_only_and_frees_their_blocks() -> None:
    world = World(num_ranks=2, max_seqs=1)
    world.ranks.arm("forward", (0, 1))
    failed, other = world.add("a", [30, 31, 32]), world.add("b", PROMPT)
    world.run()
    assert (failed.status, other.status) == (500, 200) and "simulated" in str(failed.end and failed.end.error)
    assert world.ask(PROMPT).status == 200


def test_a_clear_waits_for_what_is_under_way_so_that_nothing_comes_back_behind_it() -> None:
    world = World(num_device=20)
    world.ranks.arm("slow copy", (0,), 1.0)
    asked = world.add("a", PROMPT, 1)
    world.run(until=lambda: asked.end is not None)
    world.call(ClearCache(["device", "host"]))
    world.run()
    assert world.manager.pools.first.host.num_evictable == world.manager.pools.first.device.num_evictable == 0


def test_a_clear_waits_for_five_seconds_at_most_and_a_question_for_thirty() -> None:
    world = World(num_ranks=2, num_device=20, limit_s=100.0)
    world.ranks.arm("slow put", (0,), 60.0)
    world.ranks.arm("lose stats", (1,))
    asked = world.add("a", PROMPT, 1)
    world.run(until=lambda: asked.end is not None)
    clear, stats = world.call(ClearCache(["device"])), world.call(GetStats())
    for call, seconds in ((clear, 5.0), (stats, 30.0)):
        world.run(until=lambda call=call: call in world.answered_calls)
        assert world.answered_calls[call].error is None
        assert seconds <= world.timeline.now - 1000.0 < seconds + 2.0
    world.run()


def test_a_draining_instance_ends_what_is_open_and_takes_nothing_new() -> None:
    world = World(num_device=20)
    first = world.add("first", PROMPT, 8)
    world.run(until=lambda: bool(first.tokens))
    drained = world.call(Drain())
    late = world.add("late", PROMPT, 1)
    world.run(until=lambda: late.end is not None)
    assert late.status == 503 and first.end is None and drained not in world.answered_calls
    world.run()
    assert first.status == 200 and drained in world.answered_calls


def test_an_id_in_use_one_too_many_and_one_too_long_are_refused_and_harm_nobody() -> None:
    world = World(num_device=20, max_open=2)
    first = world.add("a", PROMPT, 8)
    world.run(until=lambda: bool(first.tokens))
    world.api.inbox.append(AddRequest("a", ints([1]), SamplingSpec(), 1))
    refused: list[RequestOutput] = []
    take = world._take
    world._take = lambda output: refused.append(output) if output.error else take(output)  # type: ignore[method-assign]
    world.run(until=lambda: bool(refused))
    world.add("b", PROMPT, 1)
    world.api.inbox.append(AddRequest("c", ints([1]), SamplingSpec(), 1))
    world.run()
    world.api.inbox.append(AddRequest("d", ints([1] * 80), SamplingSpec(), 1))
    world.run()
    assert [(output.request_id, output.error_status) for output in refused] == [("a", 400), ("c", 429), ("d", 400)]
    assert first.status == world.asked["b"].status == 200


def test_an_answer_of_rank_0_is_the_answer_of_the_step() -> None:
    """Rank 0 alone samples, whatever the order in which the ranks end their step."""
    world = World(num_ranks=4)
    assert world.ask(PROMPT, 5).tokens == world.asked["q0"].answer
    assert world.sent(Forward) and all(rank.device[0][0] != POISON for rank in world.ranks.ranks)


# ------------------------------------------------------------------------------------------- blocks of several types


def test_checkpoints_leave_room_for_the_states_of_all_that_may_run() -> None:
    """Found by the simulation: sequences held the state before their first answered token until their end, and two
    of eight had to wait though each had been given a block for its state."""
    world = World(types="KV LINEAR", num_device=200, num_linear=(10, 0), num_host=0, store=False, max_seqs=8)
    for number in range(8):
        world.add(f"r{number}", [number, *range(1, 20)], 30)
    world.run(until=lambda: all(asked.tokens for asked in world.asked.values()))
    assert len(world.scheduler.running) == 8 and not world.scheduler.num_preemptions
    world.run()


def test_an_answer_longer_than_the_pool_of_windows_can_be_gone_on_from() -> None:
    """Found by the simulation: recomputing decoded blocks as a prompt took all their window blocks at once."""
    world = World(types="SWA", num_device=8, num_host=40, longest=200, window=6, max_tokens=8, tile=4)
    assert world.settings.swa_need() <= 8
    asked = world.ask(range(1, 12), 80)
    usage = world.ask([*asked.prompt, *asked.tokens, 3], 1).usage
    assert usage is not None and usage.device + usage.host == 88


def test_the_time_limit_of_reads_counts_from_the_request_on_behind_a_slow_probe_too() -> None:
    """Found by the simulation: a store that took five seconds to say what it has was then asked for it."""
    world = World(types="KV SWA", num_device=20, num_host=40, num_swa=(20, 40), timeout_ms=20)
    world.ask(PROMPT, 1)
    world.forget("device", "host")
    world.ranks.arm("slow read", (0,), 5.0)
    assert world.ask(PROMPT, 1).status == 200
    assert world.sent(ProbeStorage) and not world.sent(PrefetchFromStorage)
