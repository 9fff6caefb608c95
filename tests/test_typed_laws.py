"""Laws of a peer engine's books of typed blocks, as they are for ours: KV beside sliding windows or recurrent states.

Theirs have windows beside two kinds of compressed blocks of 512 and 16384 tokens, and slots of states; a hit is a
multiple of the largest block. All of our types number their blocks alike, so a hit is a multiple of the one block size.
A block that has slid out of the window is HOLE in the table, where theirs is id 0 or -1.

What concerns the roles of prefill and decode instances (T7, T31) is in test_handover.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from simulation.contents import DRAFT, TARGET, Part
from simulation.world import World

from xllm_hier.block import BlockType
from xllm_hier.engine.blocks.pool import BlockPool
from xllm_hier.engine.blocks.sequence import Sequence as Request
from xllm_hier.engine.blocks.types import TypePools
from xllm_hier.figures import TypeSizes
from xllm_hier.hashing import prompt_hashes, root_hash
from xllm_hier.ints import ints
from xllm_hier.plans import HOLE, PrefetchFromStorage, TransferBlocks, TransferKvBlocks
from xllm_hier.request_messages import AddRequest, SamplingSpec
from xllm_hier.store_key import MAIN, key_prefix

KV, SWA, LINEAR = BlockType
PROMPT = [number % 50 for number in range(1, 34)]  # eight blocks of four, and one token


def world_of(types: str, **changes: Any) -> World:
    """Blocks of four tokens; a window of six, so two blocks before each boundary; room for everything."""
    sizes: dict[str, Any] = dict(num_device=20, num_host=40, num_swa=(20, 40), num_linear=(20, 40), window=6)
    sizes |= dict(max_tokens=64, chunk_tokens=64, decode_kv_reuse="off")
    return World(types=types, **(sizes | changes))


def request(world: World, prompt: Sequence[int]) -> Request:
    """A sequence that no scheduler knows: the test itself plays the scheduler."""
    return Request(AddRequest("alone", ints(prompt), SamplingSpec(), 1), 4, True, world.manager.pools.types)


def hashes(prompt: Sequence[int] = PROMPT) -> list[bytes]:
    return prompt_hashes(prompt, 4, root_hash())


def keep(pool: BlockPool, *numbers: int) -> None:
    """Of PROMPT's blocks only these can be found from now on; they must have been there."""
    wanted = {hashes()[number] for number in numbers}
    assert wanted <= pool.hashes()
    for name in pool.hashes() - wanted:
        pool.withdraw(pool.find(name))


def numbers_in(pool: BlockPool, prompt: Sequence[int] = PROMPT) -> list[int]:
    """Which blocks of a prompt can be found."""
    return [number for number, name in enumerate(hashes(prompt)) if pool.find(name) is not None]


def moved(world: World, plan: type) -> dict[str, list[int]]:
    """Numbers of PROMPT's blocks in all plans of a kind, by type."""
    found: dict[str, list[int]] = {}
    for message in world.sent(plan):
        for mapping in [message] if plan is PrefetchFromStorage else message.target_mappings:
            names = [mapping.hashes[start : start + 16] for start in range(0, len(mapping.hashes), 16)]
            found.setdefault(mapping.block_type, []).extend(hashes().index(name) for name in names)
    return {kind: sorted(numbers) for kind, numbers in found.items()}


def paid(world: World, prompt: Sequence[int]) -> tuple[int, int, int, int]:
    """A request's prompt tokens by who paid for them: device, host, store, computing."""
    usage = world.ask(prompt, 1).usage
    assert usage is not None
    return usage.device, usage.host, usage.store, usage.computed


# ---------------------------------------------------------------------------- growth, publishing, device hits


def test_a_growth_that_fails_for_want_of_one_type_changes_nothing_of_any() -> None:
    """B20. Four window blocks, two of them held and slid on: growing by five fails, though KV has room enough, and no
    block of any type has been taken, let go of, or moved."""
    world = world_of("KV SWA", num_swa=(4, 0), num_host=0, store=False)
    manager, sequence = world.manager, request(world, PROMPT)
    assert manager.allocate(sequence, 12)
    sequence.num_computed = 12
    manager.publish_computed(sequence)
    before = {kind: list(held.blocks) for kind, held in sequence.held.items()}, manager.block_counts()
    assert before[0][SWA][0] == HOLE != before[0][SWA][1]
    assert not manager.allocate(sequence, 33)
    assert ({kind: list(held.blocks) for kind, held in sequence.held.items()}, manager.block_counts()) == before


@pytest.mark.parametrize(("length", "hit"), [(33, 32), (32, 31)])
def test_a_repeated_prompt_shares_all_before_its_last_token_of_every_type(length: int, hit: int) -> None:
    """T1, T2. Of eight blocks all KV and the last two of the window are the very blocks of the first request. Theirs
    cuts a full hit back by the largest block; ours computes the last token again, whose window the tail covers too."""
    world, prompt = world_of("KV SWA"), PROMPT[:length]
    world.ask(prompt, 1)
    sequence = request(world, prompt)
    assert world.manager.allocate(sequence, length) and sequence.num_computed == hit
    shared = {kind: [pools.device.find(name) for name in hashes()] for kind, pools in world.manager.pools.items()}
    assert sequence.held[KV].blocks[:8] == shared[KV]
    assert sequence.held[SWA].blocks[:8] == [HOLE] * 6 + shared[SWA][6:]


def test_another_prompt_shares_nothing_of_any_type() -> None:
    """T3. The first token differs: no block is shared, the cursor stands at the beginning, no state is taken over."""
    world = world_of("KV SWA LINEAR")
    world.ask(PROMPT, 1)
    sequence = request(world, [40, *PROMPT[1:]])
    assert world.manager.allocate(sequence, 33) and sequence.num_computed == 0 and sequence.states == {0: HOLE}
    for kind, held in sequence.held.items():
        found = {world.manager.pools[kind].device.find(name) for name in hashes()}
        assert found.isdisjoint(held.blocks), kind


def test_what_one_type_has_lost_no_other_can_make_up_for() -> None:
    """T4. Room for five KV blocks and three prompts of two: the first one's KV is gone, its window and its state are
    still there, and its hit is 0."""
    world = world_of("KV SWA LINEAR", num_device=5, num_host=0, store=False)
    prompts = [[first, *range(1, 9)] for first in (20, 30, 40)]
    for prompt in prompts:
        world.ask(prompt, 1)
    found = {kind: numbers_in(pools.device, prompts[0]) for kind, pools in world.manager.pools.items()}
    assert len(found[KV]) < 2 and found[SWA] == [0, 1] and found[LINEAR] == [1]
    assert paid(world, prompts[0])[0] == 0


def test_a_block_that_slid_out_of_the_window_can_still_be_found() -> None:
    """T5. A prompt goes on to be computed in chunks of eight; what its window has left serves one that ends earlier."""
    world = world_of("KV SWA", chunk_tokens=8)
    first = world.add("first", PROMPT, 12)
    world.run(until=lambda: bool(first.tokens))
    assert world.sequence("first").held[SWA].blocks[:6] == [HOLE] * 6
    second = world.add("second", PROMPT[:17], 1)
    world.run()
    assert second.usage is not None and second.usage.device == 16


def test_publishing_follows_the_cursor_in_every_type() -> None:
    """T6. With room allocated for all of it nothing can be found; after a chunk of eight tokens its two blocks can, and
    the state behind it only where one is worth keeping."""
    world = world_of("KV SWA LINEAR", linear_stride=4)
    manager, sequence = world.manager, request(world, PROMPT)
    assert manager.allocate(sequence, 33)
    assert all(not pools.device.hashes() for pools in manager.pools.values())
    for end in (8, 12):
        manager.move_states(sequence, end)
        sequence.num_computed = end
        manager.publish_computed(sequence)
        found = {kind: numbers_in(pools.device) for kind, pools in manager.pools.items()}
        assert found == {kind: list(range(end // 4)) for kind in (KV, SWA, LINEAR)}


# -------------------------------------------------------------------------------------- device, host and store


def test_tiers_complete_each_other_type_by_type() -> None:
    """H9, H10. The device has KV alone, the host windows alone: together they give all, and what is loaded is what the
    window needs. Ours keeps one cursor per sequence, not one per tier."""
    world = world_of("KV SWA", store=False)
    world.ask(PROMPT, 1)
    world.manager.pools[SWA].device.clear()
    world.manager.pools[KV].host.clear()
    assert paid(world, PROMPT) == (24, 8, 0, 1)
    assert moved(world, TransferBlocks) == {"SWA": [6, 7]}


@pytest.mark.parametrize(
    ("windows", "hit", "loads"), [((2, 3), 16, {}), ((2, 3, 6, 7), 32, {"KV": [4, 5, 6, 7], "SWA": [6, 7]})]
)
def test_more_of_one_type_on_the_host_helps_only_with_a_window_behind_it(
    windows: tuple[int, ...], hit: int, loads: dict[str, list[int]]
) -> None:
    """H11, H12, H22. The device ends at 16 tokens, the host has KV up to 32: nothing is loaded, unless the host has the
    window before 32 too. Ours has no budget that could end a load at a boundary without its window."""
    world = world_of("KV SWA", store=False, swa_stride=16)
    world.ask(PROMPT, 1)
    device, host = (
        {kind: pools.tiers[tier] for kind, pools in world.manager.pools.items()} for tier in ("device", "host")
    )
    keep(device[KV], 0, 1, 2, 3)
    keep(device[SWA], 2, 3)
    keep(host[SWA], *windows)
    assert numbers_in(host[KV]) == list(range(8))
    assert sum(paid(world, PROMPT)[:2]) == hit
    assert moved(world, TransferBlocks) == loads


def test_a_restore_loads_what_its_boundary_needs_and_no_more() -> None:
    """H24. All KV blocks, the two of the window, the one state behind the last: though the host has more of them."""
    world = world_of("KV SWA LINEAR", store=False, swa_stride=8, linear_stride=8)
    world.ask(PROMPT, 1)
    assert numbers_in(world.manager.pools[SWA].host) == list(range(8))
    assert numbers_in(world.manager.pools[LINEAR].host) == [1, 3, 5, 7]
    world.forget("device")
    assert paid(world, PROMPT) == (0, 32, 0, 1)
    assert moved(world, TransferBlocks) == {"KV": list(range(8)), "SWA": [6, 7], "LINEAR": [7]}


def test_only_what_lies_before_a_boundary_worth_keeping_is_written_back() -> None:
    """H36. Chunks of 16 tokens, strides of 16: of KV all goes, of windows the two blocks before 16 and those before the
    prompt's end, of states those behind 16 and 32. A block in which two types have content goes in both."""
    world = world_of("KV SWA LINEAR", chunk_tokens=16, swa_stride=16, linear_stride=16)
    world.ask(PROMPT, 1)
    assert moved(world, TransferKvBlocks) == {"KV": list(range(8)), "SWA": [2, 3, 6, 7], "LINEAR": [3, 7]}


def test_the_window_before_an_answers_end_is_written_back_for_the_next_turn() -> None:
    """H37. Theirs writes every complete window block of a decode instance; ours has no roles, computes the decoded
    blocks again as a prompt, and writes what a prompt that goes on from the answer will need."""
    world = world_of("KV SWA LINEAR", decode_kv_reuse="canonical")
    asked = world.ask(PROMPT[:9], 16)
    whole = [*asked.prompt, *asked.tokens]
    assert len(whole) == 25
    host = {kind: numbers_in(pools.host, whole) for kind, pools in world.manager.pools.items()}
    assert host == {KV: [0, 1, 2, 3, 4, 5], SWA: [0, 1, 4, 5], LINEAR: [1, 5]}
    world.forget("device")
    assert paid(world, [*whole, 3]) == (0, 24, 0, 2)


@pytest.mark.parametrize(("hole", "hit"), [(2, 32), (7, 16), (6, 16)])
def test_a_hole_in_the_windows_counts_only_where_the_boundary_needs_it(hole: int, hit: int) -> None:
    """H47. The store lacks one rank's object of one window block: away from the boundary that is no loss, at the
    boundary the one before it is taken."""
    world = world_of("KV SWA", num_ranks=2, swa_stride=16)
    world.ask(PROMPT, 1)
    world.forget("device", "host")
    del world.ranks.ranks[1].domains[Part(TARGET, SWA)].store[hashes()[hole]]
    assert paid(world, PROMPT) == (0, 0, hit, 33 - hit)
    assert moved(world, PrefetchFromStorage)["SWA"] == [hit // 4 - 2, hit // 4 - 1]


def test_a_type_that_only_the_main_model_has_is_one_object_per_block() -> None:
    """K10. A draft model's blocks follow KV: two objects for each, one for each window block."""
    world = world_of("KV SWA", draft="model", num_drafts=1)
    world.ask(PROMPT, 1)
    (rank,) = world.ranks.ranks
    stored = {part: len(domain.store) for part, domain in rank.domains.items()}
    assert stored == {Part(TARGET, KV): 8, Part(DRAFT, KV): 8, Part(TARGET, SWA): 2}


def test_one_name_under_two_types_is_two_keys() -> None:
    """K7. The type is part of the key, so the main model's blocks of every type have names of their own."""
    keys = {key_prefix("m", MAIN, kind, "0" * 32, tp_size=1, tp_rank=0) for kind in BlockType}
    assert len(keys) == len(BlockType)


# ------------------------------------------------------------------------------------------- recurrent states


def test_a_state_that_cannot_be_had_makes_a_sequence_wait() -> None:
    """T17. Three blocks of states, three sequences; a fourth gets nothing, of KV neither, until one lets go of its own.
    Ours has no slot 0 that is never handed out."""
    world = world_of("KV LINEAR", num_linear=(3, 0), num_host=0, store=False)
    manager = world.manager
    others = [request(world, [first, 1, 2]) for first in (10, 20, 30)]
    assert all(manager.allocate(sequence, 3) for sequence in others)
    assert sorted(block for sequence in others for block in sequence.live_states) == [0, 1, 2]
    late, before = request(world, [40, 1, 2]), manager.block_counts()
    assert not manager.allocate(late, 3) and manager.block_counts() == before
    (freed,) = others[1].live_states
    manager.deallocate(others[1])
    assert manager.allocate(late, 3) and late.live_states == [freed]


def test_a_checkpoint_can_be_found_only_once_a_step_has_written_it() -> None:
    """T18, T30. Reserved it is nobody's to find, and free again when its sequence leaves before the step has ended."""
    world = world_of("KV LINEAR")
    manager, pool = world.manager, world.manager.pools[LINEAR].device
    dropped, kept = request(world, PROMPT[:9]), request(world, PROMPT[:9])
    for sequence in (dropped, kept):
        assert manager.allocate(sequence, 9) and sequence.held[LINEAR].block(1) != HOLE
        manager.move_states(sequence, 9)
        assert not pool.hashes()
        if sequence is dropped:
            manager.deallocate(sequence)
            assert pool.num_free == pool.num_blocks
    kept.num_computed = 9
    manager.publish_computed(kept)
    assert numbers_in(pool) == [1] and pool.find(hashes()[1]) == kept.held[LINEAR].block(1)


def checkpoints(count: int, num_blocks: int) -> BlockPool:
    """A pool of states with `count` checkpoints named 0, 1 ..., used in this order."""
    pools = TypePools(TypeSizes("LINEAR", 1, num_blocks, 0, 0), 4)
    for number in range(count):
        (block,) = pools.device.allocate(1) or []
        assert pools.device.publish(block, b"%d" % number, pools.parent(b"%d" % (number - 1)))
        pools.release([block])
    return pools.device


def test_the_checkpoint_unused_for_longest_is_evicted_and_a_match_is_a_use() -> None:
    """T19. Of one conversation's three states the oldest is of least use, unless somebody has just begun from it: they
    are no chain, of which only the last could go."""
    untouched, matched = checkpoints(3, 3), checkpoints(3, 3)
    matched.pin(matched.find(b"0"))
    matched.unpin([matched.find(b"0")])
    for pool, gone in ((untouched, b"0"), (matched, b"1")):
        pool.allocate(1)
        assert pool.hashes() == {b"0", b"1", b"2"} - {gone}


def test_a_checkpoint_that_is_held_is_neither_evicted_nor_made_twice() -> None:
    """T21, T22, T29. Eviction takes the other one; with both held nothing is to be had, and both stay; the same content
    once more stays private. When a hold ends, that one can be reclaimed."""
    pool = checkpoints(2, 3)
    first, second = pool.find(b"0"), pool.find(b"1")
    pool.pin(first)
    (spare,) = pool.allocate(1) or []
    assert not pool.publish(spare, b"0", b"none") and pool.find(b"0") == first
    assert pool.allocate(1) == [second]
    assert pool.allocate(1) is None and pool.find(b"0") == first
    pool.unpin([first])
    assert pool.allocate(1) == [first] and not pool.hashes()


def test_a_sequence_takes_a_checkpoints_room_and_a_checkpoint_no_sequences() -> None:
    """T20. Two blocks of states: the checkpoint of an ended request goes for the state of a new one; while two run none
    is left for a checkpoint, which makes a later restore longer and nothing else."""
    world = world_of("KV LINEAR", num_linear=(2, 0), num_host=0, store=False)
    world.ask(PROMPT[:9], 1)
    pool = world.manager.pools[LINEAR].device
    assert numbers_in(pool) == [1]
    short, long = request(world, [30, 1, 2]), request(world, [31, *PROMPT[:8]])
    assert world.manager.allocate(short, 3) and world.manager.allocate(long, 9)
    assert not pool.hashes() and {*short.live_states, *long.live_states} == {0, 1}
    assert set(long.held[LINEAR].blocks) <= {HOLE}


@pytest.mark.parametrize(
    ("length", "cached", "states", "blocks"),
    [
        (12, 12, (), 0),
        (12, 12, (8,), 2),
        (8, 8, (8,), 0),
        (9, 8, (8,), 2),
        (16, 16, (8, 16), 2),
        (17, 16, (16,), 4),
        (17, 16, (12,), 3),
        (17, 16, (), 0),
        (17, 8, (8, 16), 2),
        (17, 8, (16,), 0),
    ],
)
def test_a_hit_ends_where_a_state_is(length: int, cached: int, states: tuple[int, ...], blocks: int) -> None:
    """T23, T24, T25, T26. KV up to `cached` tokens and states behind some: the hit is the largest boundary that has
    both and leaves a token to compute. A state has none before its last token, so that a full hit is none."""
    world = world_of("KV LINEAR", num_host=0, num_linear=(20, 0), store=False)
    manager, prompt = world.manager, PROMPT[:length]
    wanted = {KV: range(cached // 4), LINEAR: [tokens // 4 - 1 for tokens in states]}
    for kind, numbers in wanted.items():
        pools = manager.pools[kind]
        for number in numbers:
            (block,) = pools.device.allocate(1) or []
            pools.device.publish(block, hashes()[number], pools.parent(hashes()[number - 1] if number else root_hash()))
            pools.release([block])
    before, sequence = manager.block_counts()["device"], request(world, prompt)
    assert manager.allocate(sequence, length) and sequence.num_computed == 4 * blocks
    manager.deallocate(sequence)
    after = manager.block_counts()["device"]
    assert {kind: counts["pinned"] for kind, counts in after.items()} == {"KV": 0, "LINEAR": 0}
    assert before["KV"]["evictable"] == after["KV"]["evictable"]


def test_a_step_that_ends_at_a_checkpoint_leaves_its_state_there_and_the_next_one_only_reads_it() -> None:
    """T27. Theirs turns the live slot into the checkpoint and restores into a fresh one; ours lets the step write the
    checkpoint, and the next step read it and go on in the sequence's own block: nothing is copied."""
    world = world_of("KV LINEAR", chunk_tokens=8, linear_stride=8)
    manager, sequence = world.manager, request(world, PROMPT[:17])
    assert manager.allocate(sequence, 17)
    own, saved, later = sequence.live_states[0], *(sequence.held[LINEAR].block(number) for number in (1, 3))
    moves = []
    for end in (8, 16, 17):
        moves.append(manager.move_states(sequence, end))
        sequence.num_computed = end
        manager.publish_computed(sequence)
    sources = [one.source for one in moves if one is not None]
    targets = [dict(zip(one.positions.tolist(), one.blocks.tolist(), strict=True)) for one in moves if one is not None]
    assert sources == [HOLE, saved, later] and targets == [{8: saved}, {16: later}, {17: own}]


def test_two_sequences_that_save_one_state_go_on_from_the_first_ones() -> None:
    """T28. The second one's block is given back at once, and its next step reads the block that others find."""
    world = world_of("KV LINEAR")
    manager, pool = world.manager, world.manager.pools[LINEAR].device
    one, other = request(world, PROMPT[:9]), request(world, PROMPT[:9])
    assert manager.allocate(one, 9) and manager.allocate(other, 9)
    used = pool.num_pinned
    for sequence in (one, other):
        manager.move_states(sequence, 8)
        sequence.num_computed = 8
        manager.publish_computed(sequence)
    saved = one.held[LINEAR].block(1)
    assert other.held[LINEAR].block(1) == saved == pool.find(hashes()[1]) and pool.num_pinned == used - 1
    moves = manager.move_states(other, 9)
    assert moves is not None and moves.source == saved and moves.blocks.tolist() == other.live_states


# ------------------------------------------------------------------------------------- interrupted and resumed


def interrupted(world: World, prompt: Sequence[int], tokens: int, generated: int = 0) -> Request:
    """A sequence that was preempted after so many tokens, of which the last few were generated; played by hand."""
    manager, sequence = world.manager, request(world, prompt)
    sequence.tokens += [100 + number for number in range(generated)]
    for end in [*range(8, len(prompt), 8), *range(len(prompt), tokens + 1)]:
        if end <= tokens:
            assert manager.allocate(sequence, end)
            manager.move_states(sequence, end)
            sequence.num_computed = end
            manager.publish_computed(sequence)
    manager.deallocate(sequence, resume=True)
    return sequence


@pytest.mark.parametrize("types", ["KV SWA", "KV LINEAR", "KV SWA LINEAR"])
def test_an_interrupted_prompt_goes_on_where_it_was(types: str) -> None:
    """Its window lies before a boundary that was not worth keeping until then; its state is the sequence's own."""
    world = world_of(types, swa_stride=400, linear_stride=400)
    sequence = interrupted(world, PROMPT, 16)
    manager = world.manager
    assert manager.hit(sequence).tokens == 16
    for kind, pools in manager.pools.items():
        needed = [hashes()[number] for number in pools.rule.needed(16)]
        assert not any(manager.write_back.is_missing(kind, name) for name in needed), "on its way to the host"


def test_a_long_answer_goes_on_from_its_last_state_and_only_the_sequence_itself_finds_that() -> None:
    """A checkpoint each eight tokens, also of generated ones; of those a sequence holds the last one alone."""
    world = world_of("KV LINEAR", linear_stride=8)
    sequence = interrupted(world, PROMPT[:9], 30, generated=22)
    assert world.manager.hit(sequence).tokens == 24
    assert world.manager.hit(request(world, sequence.tokens)).tokens == 8, "as a prompt the same tokens have other bits"


def test_states_behind_generated_tokens_leave_half_of_the_pool_to_others() -> None:
    world = world_of("KV LINEAR", linear_stride=4, num_linear=(5, 0), num_host=0, store=False)
    manager, held = world.manager, [request(world, [first, 2, 3]) for first in (50, 60)]
    for sequence in held:
        sequence.tokens += list(range(9))
        assert manager.allocate(sequence, 3)
        manager.move_states(sequence, 3)
        sequence.num_computed = 3
        manager.publish_computed(sequence)
    assert manager.allocate(held[0], 8) and held[0].held[LINEAR].blocks
    assert manager.allocate(held[1], 8) and not held[1].held[LINEAR].blocks
    assert manager.allocate(request(world, [70, 2]), 2)


def test_what_a_step_reserves_behind_generated_tokens_is_dropped_before_they_are_computed_as_a_prompt() -> None:
    world = world_of("KV LINEAR", linear_stride=4, decode_kv_reuse="canonical")
    manager, sequence = world.manager, request(world, PROMPT[:9])
    sequence.tokens += list(range(100, 112))
    for end in range(9, 21):
        assert manager.allocate(sequence, end)
        manager.move_states(sequence, end)
        sequence.num_computed = end
        manager.publish_computed(sequence)
    decoded = set(sequence.held[LINEAR].blocks)
    assert decoded and manager.begin_canonical(sequence)
    assert sequence.num_computed == 8 and decoded.isdisjoint(sequence.held[LINEAR].blocks)
    assert sequence.states == {8: manager.pools[LINEAR].device.find(hashes()[1])}


def test_a_prompt_that_floods_the_windows_takes_what_is_useless_first() -> None:
    """Twelve window blocks, four of which lie before a boundary worth keeping; then a prompt of thirty blocks."""
    world = world_of("KV SWA", num_device=60, num_swa=(12, 0), num_host=0, store=False, chunk_tokens=8, swa_stride=400)
    kept = PROMPT[:17]
    world.ask(kept, 1)
    world.ask([40 + number % 9 for number in range(121)], 1)
    assert world.manager.hit(request(world, kept)).tokens == 16


def test_a_boundary_that_was_of_use_is_kept() -> None:
    """Every other prompt begins with the same sixteen tokens; those between them use up the few states there are."""
    world = world_of("KV LINEAR", num_linear=(5, 0), num_host=0, store=False, linear_stride=400, num_device=60)
    trunk = PROMPT[:16]
    hits = []
    for number in range(6):
        hits.append(paid(world, [*trunk, 40 + number, *range(9)])[0])
        world.ask([30 + number, *range(20)], 1)
    assert hits[2:] == [16] * 4


def test_a_step_over_a_prompt_ends_behind_a_block_where_it_can() -> None:
    """Only there a state is worth keeping. A step too short for that ends with a cell of the scan, here of two."""
    manager = world_of("KV LINEAR", scan=2).manager
    ends = {
        (start, end): end - manager.settings.beyond_grid(start, end) for start, end in [(0, 6), (0, 3), (4, 7), (4, 5)]
    }
    assert ends == {(0, 6): 4, (0, 3): 2, (4, 7): 6, (4, 5): 4}


def test_a_state_is_read_only_if_it_spares_more_than_it_weighs() -> None:
    """A stranger's store has four blocks of the prompt and the state behind them. Reading a block takes half as long as
    computing one: with states as light as KV blocks they are read, with states ten times as heavy they are not."""
    for weight, hit in ((1.0, 16), (10.0, 0)):
        world = world_of("KV LINEAR", linear_stride=16, policy="measured")
        assert paid(world, PROMPT[:17]) == (0, 0, 0, 17)
        world.run()
        for tier in ("device", "host"):
            world.manager.clear(tier)
        world.manager.pools[LINEAR].weight = weight
        policy = world.manager.policy
        policy.compute.add(4000, 4000.0)  # a second a token: four a block
        policy.read.add(1000, 2000.0)  # two a block
        assert paid(world, PROMPT[:17])[2] == hit
