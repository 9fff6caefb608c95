"""What holds after every turn of the engine, whatever happens: the invariants of the block books and of the bytes.

I1 blocks are conserved, and each is held exactly as often as somebody holds it. I2 what can be found is whole, on
every rank. I3 eviction leaves prefixes. I5 no block in the middle of I/O is free; that it is used for nothing else the
ranks see themselves (`ranks.Claims`). I6 answers equal those of a run without any cache, I7 each prompt token is paid
for once (both in `World`, as outputs come). I9 nothing waits for ever, I10 no cache error ends the instance (both in
`World.run`). I4 needs no look: there is one decision, and all ranks get it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from xllm_hier.block import BlockType
from xllm_hier.engine.blocks.pool import BlockPool, BlockState
from xllm_hier.engine.blocks.sequence import Sequence
from xllm_hier.plans import HOLE

from .contents import is_right

if TYPE_CHECKING:
    from .domains import Domain
    from .world import World


def check_after_turn(world: World) -> None:
    world.manager.check()
    check_holders(world)
    check_contents(world)
    check_io(world)
    check_sequences(world)
    check_prefixes(world)


def sequences_of(world: World) -> list[Sequence]:
    """All that hold, or may hold, blocks."""
    scheduler = world.scheduler
    queues = scheduler.prefetching, scheduler.waiting, scheduler.running, scheduler.arriving, scheduler.canonical
    return [*(sequence for queue in queues for sequence in queue), *world.elsewhere()]


# ------------------------------------------------------------------------------------------------------- I1


def device_holders(world: World, kind: BlockType) -> Iterator[int]:
    write_back, audit = world.manager.write_back, world.scheduler.auditor.audit
    audited = [audit.again] if audit is not None else []
    for sequence in (*sequences_of(world), *audited):
        yield from (block for block in sequence.held[kind].blocks if block != HOLE)
        yield from sequence.live_states if kind is BlockType.LINEAR else ()
    yield from audit.restored if audit is not None and kind is BlockType.KV else ()
    pairs = list(write_back._pairs)
    for offload in write_back._offloads.values():
        pairs += offload.pairs if len(offload.copied.by_rank) < world.settings.num_ranks else []
    yield from (pair.device for pair in pairs if pair.type is kind)


def host_holders(world: World, kind: BlockType) -> Iterator[int]:
    manager = world.manager
    reads, write_back = manager.reads, manager.write_back
    for sequence in sequences_of(world):
        yield from sequence.held[kind].mounted.values()
        yield from sequence.held[kind].targets.values()
    for operation in reads._prefetches.values():
        abandoned = operation.result.is_abandoned
        for column, target in enumerate(operation.targets):
            if operation.columns[column][0] is kind and not abandoned(column):
                yield target
    for orphan in reads.targets._orphans.values():
        yield from orphan.targets if orphan.type is kind else ()
    yield from (target for _, of, target in reads.targets.quarantine if of is kind)
    for loads in (manager.loads.planned, *manager.loads.batches.values()):
        yield from (load.host for load in loads if load.type is kind)
    pairs = [*write_back._pairs, *(pair for offload in write_back._offloads.values() for pair in offload.pairs)]
    yield from (pair.host for pair in pairs if pair.type is kind)


def pools_of(world: World) -> Iterator[tuple[str, BlockType, BlockPool]]:
    for kind, pools in world.manager.pools.items():
        for tier, pool in pools.tiers.items():
            yield tier, kind, pool


def check_holders(world: World) -> None:
    """Neither a leak nor a hold too few: the references of each block are those of who holds it."""
    for tier, kind, pool in pools_of(world):
        holders = device_holders(world, kind) if tier == "device" else host_holders(world, kind)
        counted = Counter(holders)
        if any(count != counted[block] for block, count in enumerate(map(pool.references, range(pool.num_blocks)))):
            wrong = {
                block: f"{count} references, {counted[block]} holders"
                for block, count in enumerate(map(pool.references, range(pool.num_blocks)))
                if count != counted[block]
            }
            raise AssertionError(f"{tier} {kind.value}: {wrong}")
        if kind is not BlockType.KV:
            held = sum(count > 0 for count in map(pool.references, range(pool.num_blocks)))
            assert pool.num_pinned == held, f"{tier} {kind.value}: a block is pinned that nobody holds"


# ------------------------------------------------------------------------------------------------------- I2


def check_contents(world: World) -> None:
    """Every block that can be found holds, on every rank, what its hash says, but for loads not waited for."""
    manager = world.manager
    batches = (manager.loads.planned, *manager.loads.batches.values())
    loading = {(load.type, load.device) for loads in batches for load in loads}
    for rank in world.ranks.ranks:
        for domain in rank.domains.values():
            check_device(world, rank.number, domain, loading)
        for domain in rank.kept:
            check_host(world, rank.number, domain)


def check_device(world: World, rank: int, domain: Domain, loading: set[tuple[BlockType, int]]) -> None:
    kind = domain.part.type
    for name, block in world.manager.pools[kind].device.contents().items():
        expected = world.contents.of(name, rank, domain.part)
        if (kind, block) not in loading and not is_right(domain.device[block], expected):
            raise AssertionError(f"rank {rank} has something else in {domain.part} device block {block}")


def check_host(world: World, rank: int, domain: Domain) -> None:
    for name, block in world.manager.pools[domain.part.type].host.contents().items():
        held = domain.host[block]
        expected = world.contents.of(name, rank, domain.part)
        good = held is not None and held.name == name and is_right(held.values, expected)
        if not good and block not in domain.spoilt:
            raise AssertionError(f"rank {rank} has something else in {domain.part} host block {block}: {held}")


# ------------------------------------------------------------------------------------------------------- I5


def check_io(world: World) -> None:
    """What is being read or written belongs to somebody, so that nobody else can get it."""
    for rank in world.ranks.ranks:
        if rank.deaf:
            continue
        for domain in rank.domains.values():
            pools = world.manager.pools[domain.part.type]
            for pool, claims in ((pools.device, domain.device_claims), (pools.host, domain.host_claims)):
                for block in claims.busy():
                    assert pool.references(block) > 0, f"something is at {claims.tier} {block}, which nobody holds"


# ------------------------------------------------------------------------------------------- sequences: I3, I7


def check_sequences(world: World) -> None:
    """Each open request stands in one queue, and holds what its place allows."""
    scheduler, manager = world.scheduler, world.manager
    everybody = sequences_of(world)
    assert len({id(sequence) for sequence in everybody}) == len(everybody), "a request stands in two queues"
    open_ones = {id(sequence) for sequence in scheduler.sequences.values()}
    assert open_ones == {id(s) for s in everybody} - {id(s) for s in (*scheduler.canonical, *world.not_begun())}
    for sequence in (*scheduler.prefetching, *scheduler.waiting):
        kept = [*sequence.live_states, *(x for held in sequence.held.values() for x in (*held.blocks, *held.targets))]
        assert not kept, "a request that waits holds device blocks"
    size = world.settings.block_size
    for sequence in scheduler.running:
        covered = len(sequence.device_blocks) * size
        assert sequence.num_computed <= min(covered, len(sequence.tokens)), "computed is more than there is"
        for kind, held in sequence.held.items():
            blocks = [block for block in held.blocks if block != HOLE]
            blocks += sequence.live_states if kind is BlockType.LINEAR else []
            assert len(set(blocks)) == len(blocks), f"one {kind.value} block is held twice by one sequence"
        check_window(world, sequence, world.settings.swa_need())
        if BlockType.LINEAR in sequence.held:
            states = sequence.held[BlockType.LINEAR]
            done = {states.block(number) for number in states.numbers(sequence.num_published)}
            left = done - {HOLE} - set(sequence.states.values())
            assert not left, f"checkpoints {left} are held, and the last step wrote others"
    audit = scheduler.auditor.audit
    for sequence in (*scheduler.canonical, *([audit.again] if audit is not None else ())):
        check_window(world, sequence, world.settings.swa_need(world.settings.tile))
    for sequence in world.preempted:
        assert sequence in scheduler.waiting, "what was preempted comes back in the same step"
    world.preempted.clear()
    assert min(manager.ledger.account.tokens.values()) >= 0


def check_window(world: World, sequence: Sequence, most: int) -> None:
    """Of its sliding window a sequence holds no more than a step needs, however long it is."""
    if BlockType.SWA in sequence.held:
        count = sum(block != HOLE for block in sequence.held[BlockType.SWA].blocks)
        assert count <= most, f"{count} blocks are held for a window of {world.settings.window} tokens"


def check_prefixes(world: World) -> None:
    """Eviction leaves prefixes of KV blocks: one is not evicted while one behind it stays."""
    pools = world.manager.pools.get(BlockType.KV)
    for tier, pool in pools.tiers.items() if pools is not None else ():
        before, now = world.found[tier], pool.hashes()
        evicted = before - now - world.withdrawn
        for name in (before & now) - world.published if evicted else ():
            parent = pool._parent[pool.contents()[name]]
            assert parent not in evicted, f"{tier}: a block was evicted before one that stands behind it"
        world.found[tier] = now
    world.withdrawn.clear()
    world.published.clear()


# ------------------------------------------------------------------------------------------------- the end


def what_is_left(world: World) -> dict[str, Any]:
    """What is not at rest, by name."""
    scheduler, manager = world.scheduler, world.manager
    lost = world.ranks.num_lost_reads
    left = {
        "script": world.num_events_left,
        "messages": len(world.api.inbox),
        "requests": list(scheduler.sequences),
        "canonical": len(scheduler.canonical),
        "audit": scheduler.auditor.audit is not None,
        "transfers": manager.busy,
        "left alone": bool(manager.reads.targets.quarantine or (manager.reads.targets.num_left_alone and not lost)),
        "ranks": world.ranks.busy,
        "calls": world.num_calls - len(world.answered_calls),
        "answers": sum(asked.end is None for asked in world.asked.values()),
    }
    return {name: what for name, what in left.items() if what}


def check_at_the_end(world: World) -> None:
    """Everybody was answered; if the instance lives, no block is held and no table of the books has an entry left."""
    assert all(asked.end is not None for asked in world.asked.values()), "somebody was never answered"
    if world.dead is not None:
        return
    manager = world.manager
    reads, write_back = manager.reads, manager.write_back
    orphans = Counter(dict.fromkeys(manager.pools, 0))
    for orphan in reads.targets._orphans.values():
        orphans[orphan.type] += len(orphan.targets)
    for tier, kind, pool in pools_of(world):
        assert pool.num_pinned == (orphans[kind] if tier == "host" else 0), f"{tier} {kind.value} blocks stay pinned"
    tables: dict[str, Any] = {
        "reads": reads._prefetches,
        "reads by request": reads._prefetch_of,
        "being read": reads._fetching,
        "awaited": reads._awaited,
        "being computed": manager.ledger.prefix.claims,
        "planned loads": manager.loads.planned,
        "loads": manager.loads.batches,
        "pairs": write_back._pairs,
        "write-backs": write_back._offloads,
        "being written back": write_back._offloading,
        "questions": world.core.calls.questions,
        "clears": world.core.calls.clears,
        "prompt logprobs": world.scheduler.replies.prompt_logprobs,
    }
    left = {name: table for name, table in tables.items() if table}
    assert not left, left
    assert not any((*reads.targets.held.values(),)), "counts of targets and mounts do not return to 0"
    paid = sum(len(asked.prompt) for asked in world.asked.values() if asked.usage is not None)
    assert sum(manager.ledger.account.tokens.values()) == paid, "the tiers' counters are not the sum of all prompts"
    for tier, kind, pool in pools_of(world):
        _check_all_can_be_had(pool, orphans[kind] if tier == "host" else 0)


def _check_all_can_be_had(pool: BlockPool, pinned: int) -> None:
    pool = copy.deepcopy(pool)
    pool.on_stored = pool.on_removed = None  # what becomes of a copy is no event
    blocks = pool.allocate(pool.num_blocks - pinned)
    assert blocks is not None and len(set(blocks)) == len(blocks), "a block is lost"
    pool.unpin(blocks)
    assert not pool._num_children and not pool._num_pinned_children
    assert sum(state is BlockState.FREE for state in pool._state) == pool.num_blocks - pinned
