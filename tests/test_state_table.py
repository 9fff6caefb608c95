"""Every state of a request x everything that can happen to it: the answer is right, or the error is, and all returns.

Each cell of the table drives a world (see `simulation`) until its request stands in the state, lets the event happen in
that very moment, mid-step where that is where the state lives, and runs until everything is at rest: the invariants are
checked after each turn, and at the end no block is held. Cells that cannot occur say why, and show that they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from simulation.world import World

from xllm_hier.engine.blocks.sequence import Sequence, SequenceState
from xllm_hier.plans import PrefetchFromStorage

PROMPT = list(range(1, 18))  # four full blocks and one token
SHORT = [1, 2, 3]  # no full block: there is nothing to look for in any tier
FOR_EVER = 1e6
BOTH = (0, 1)

EVENTS = ("abort", "preempt", "finish", "rank error", "store error", "timeout")


def nothing(_: World) -> None:
    pass


# ------------------------------------------------------------------------------------------------- the states


@dataclass(frozen=True)
class State:
    """How to bring request `s` there, and how to see that it is. The prompt was computed before; `forget` empties
    tiers, so that it has to come from where the state wants it."""

    holds: Callable[[World], bool]
    prompt: list[int]
    forget: tuple[str, ...]
    slow: str = ""  # what takes long enough for the state to last
    behind: bool = False  # another request runs, and only one may


def request(world: World) -> Sequence | None:
    return world.scheduler.sequences.get("s")


def waits(world: World, *, mounted: bool) -> bool:
    one = request(world)
    return one is not None and one in world.scheduler.waiting and bool(one.mounted) is mounted


def runs(world: World) -> bool:
    return (one := request(world)) is not None and one.state is SequenceState.RUNNING


def is_read(world: World) -> bool:
    return request(world) in world.scheduler.prefetching and any(r.host_claims.writers for r in world.ranks.ranks)


def is_copied(world: World) -> bool:
    return "s" in world.asked and any(rank.device_claims.readers.total() for rank in world.ranks.ranks)


STATES = {
    "queued": State(lambda world: waits(world, mounted=False), SHORT, (), behind=True),
    "prefetching": State(is_read, PROMPT, ("device", "host"), "slow read"),
    "ready": State(lambda world: waits(world, mounted=True), PROMPT, ("device", "host"), behind=True),
    "H2D registered": State(
        lambda world: runs(world) and all(rank.loading for rank in world.ranks.ranks), PROMPT, ("device",), "slow load"
    ),
    "forward running": State(
        lambda world: runs(world) and all(rank.computing for rank in world.ranks.ranks),
        PROMPT,
        ("device", "host", "store"),
        "slow forward",
    ),
    "D2H2G running": State(is_copied, PROMPT, ("device", "host", "store"), "slow copy"),
}


def world_in(state: State, *, length: int = 8, slow_s: float = 0.3, before: Callable[[World], None] = nothing,
             **settings: Any) -> World:  # fmt: skip
    """A world whose request `s` is about to come into the state."""
    world = World(**{"num_ranks": 2, "num_device": 20, "max_seqs": 1 if state.behind else 4} | settings)
    world.ask(PROMPT, 1)
    world.forget(*state.forget)
    if state.behind:
        world.add("busy", [40, 41, 42], 20)
        world.run(until=lambda: bool(world.scheduler.running))
    if state.slow and slow_s:
        world.ranks.arm(state.slow, BOTH, slow_s)
    before(world)
    world.add("s", state.prompt, length)
    return world


# ------------------------------------------------------------------------------------------------- the cells

Cell = Callable[[State], None]


def cell(
    event: Callable[[World], None],
    end: str | int = "length",
    *,
    after: Callable[[World], None] = nothing,
    holds: Callable[[World], bool] | None = None,
    **given: Any,
) -> Cell:
    """`event` happens in the state; the request ends with `end`, a reason or a status; `after` looks at the rest."""

    def drive(state: State) -> None:
        world = world_in(state, **given)
        world.timeline.when(lambda: (holds or state.holds)(world), lambda: event(world))
        world.run()
        assert world.timeline.num_watchers == 0, "the request never came into the state"
        asked = world.asked["s"]
        assert asked.end is not None and end in (asked.end.finish_reason, asked.status), asked.end
        after(world)
        if world.dead is None:
            world.add("again", state.prompt, 3)
            world.run()
            assert world.asked["again"].status == 200

    return drive


def abort(world: World) -> None:
    world.abort("s")


def die(world: World) -> None:
    world.ranks.ranks[1].die()
    world.timeline.latest = world.timeline.now + 1.0  # it is seen at once, not when somebody loses patience


def fall_silent(world: World) -> None:
    world.ranks.ranks[1].fall_silent()


def lose_store(world: World) -> None:
    world.ranks.store_fails(3.0, keep=False)


def arm(kind: str, ranks: tuple[int, ...], amount: float = 0.0) -> Callable[[World], None]:
    return lambda world: world.ranks.arm(kind, ranks, amount)


def both(*steps: Callable[[World], None]) -> Callable[[World], None]:
    def work(world: World) -> None:
        for step in steps:
            step(world)

    return work


def paid_by(**tiers: int) -> Callable[[World], None]:
    def look(world: World) -> None:
        usage = world.asked["s"].usage
        assert usage is not None and {tier: getattr(usage, tier) for tier in tiers} == tiers, usage

    return look


def ended_after(low: float, high: float) -> Callable[[World], None]:
    """The instance ended within so many seconds of its start."""

    def look(world: World) -> None:
        assert world.dead is not None and low <= world.timeline.now - 1000.0 <= high, world.timeline.now

    return look


def victims_of(world: World) -> list[tuple[str, bool, bool, bool]]:
    """Fills with (request, some rank loads, some rank computes, a copy reads the device) for each preemption."""
    seen: list[tuple[str, bool, bool, bool]] = []
    preempt = world.scheduler.preempt

    def watched(sequence: Sequence) -> None:
        ranks = world.ranks.ranks
        seen.append(
            (
                sequence.request.request_id,
                any(rank.loading for rank in ranks),
                any(rank.computing for rank in ranks),
                world.manager.write_back.pins_device,
            )
        )
        preempt(sequence)

    world.scheduler.preempt = watched  # type: ignore[method-assign]
    return seen


def another_is_preempted(state: State) -> None:
    """Cannot occur: only who holds device blocks is preempted. While `s` waits, another one is."""
    world = World(num_ranks=2, num_device=9, max_seqs=2)
    world.ask(PROMPT, 1)
    world.forget(*state.forget)
    world.add("old", [30, 31, 32, 33, 34, 35, 36], 17)
    world.add("young", [20, 21, 22, 23, 24, 25, 26], 17)
    world.run(until=lambda: len(world.scheduler.running) == 2)
    if state.slow:
        world.ranks.arm(state.slow, BOTH, 2.0)
    seen = victims_of(world)
    there: list[bool] = []
    preempt = world.scheduler.preempt
    world.scheduler.preempt = lambda one: (there.append(state.holds(world)), preempt(one))[1]  # type: ignore
    world.add("s", state.prompt, 3)
    world.run()
    assert there[0] and seen[0][0] == "young"
    assert world.asked["s"].status == 200


def preempted_later(state: State) -> None:
    """Cannot occur: a step is planned, sent and awaited in one turn, and preemption is part of planning. The request is
    preempted in a later turn, when its load or forward has ended."""
    world = tight_world(state)
    seen = victims_of(world)
    world.timeline.when(lambda: state.holds(world), lambda: None)
    world.run()
    assert world.timeline.num_watchers == 0
    assert ("s", False, False, False) in seen and not any(loads or runs for _, loads, runs, _ in seen)
    assert world.asked["s"].status == world.asked["old"].status == 200


def tight_world(state: State, **settings: Any) -> World:
    """`old` grows until the device is too small for `s` beside it."""
    world = World(num_ranks=2, num_device=8, max_tokens=64, chunk_tokens=64, **settings)
    world.ask(PROMPT, 1)
    world.forget(*state.forget)
    world.add("old", [30, 31, 32], 28)
    world.run(until=lambda: bool(world.scheduler.running))
    world.ranks.arm(state.slow, BOTH, 0.1)
    world.add("s", state.prompt, 12)
    return world


def not_while_copied(state: State) -> None:
    """While a copy reads device blocks nobody is preempted, since those blocks come back; while the store is written
    to, `s` may be, and its blocks on the way to the store stay what they are."""
    world = tight_world(state)
    world.ranks.arm("slow put", BOTH, 2.0)
    seen = victims_of(world)
    world.run()
    assert seen[0][0] == "s" and not any(copied for *_, copied in seen)
    assert world.asked["s"].status == world.asked["old"].status == 200


def ends_only_when_running(state: State) -> None:
    """Cannot occur: tokens come from forwards only, so that a request ends out of a running state."""
    world = world_in(state, length=1)
    states: list[SequenceState] = []
    finish = world.scheduler._finish
    world.scheduler._finish = lambda one: (states.append(one.state), finish(one))[1]  # type: ignore
    world.run()
    assert states and set(states) == {SequenceState.RUNNING}


def one_in_flight_at_the_end(world: World) -> None:
    assert len(world.sent(PrefetchFromStorage)) == 2 * 2, "once cold, once again; none behind the first answer"


def leaves_a_read_it_only_waits_for(state: State) -> None:
    """Another request reads what `s` needs, and takes a second: `s` does not have to stay for its end."""
    world = world_in(state, slow_s=1.0, before=lambda w: w.add("reader", PROMPT, 1) and None)
    world.run(until=lambda: (one := request(world)) is not None and world.manager.reads.concerns(one))
    start = world.timeline.now
    world.abort("s")
    world.run(until=lambda: world.asked["s"].end is not None)
    assert world.timeline.now - start < 0.5 and world.asked["reader"].end is None
    world.run()
    usage = world.asked["reader"].usage
    assert usage is not None and usage.store == 16


TABLE: dict[tuple[str, str], dict[str, Cell]] = {
    ("queued", "abort"): {"": cell(abort, "abort")},
    ("queued", "preempt"): {"cannot": another_is_preempted},
    ("queued", "finish"): {"cannot": ends_only_when_running},
    ("queued", "rank error"): {
        "a rank dies": cell(die, 503),
        "a rank falls silent": cell(fall_silent, 503, after=ended_after(8.0, 12.0)),
        "the forward of another fails": cell(arm("forward", BOTH), after=lambda w: has_status(w, "busy", 500)),
    },
    ("queued", "store error"): {"": cell(lose_store)},
    ("queued", "timeout"): {"no clock runs": cell(arm("slow forward", BOTH, 5.0), length=2)},
    ("prefetching", "abort"): {"": cell(abort, "abort"), "another's read": leaves_a_read_it_only_waits_for},
    ("prefetching", "preempt"): {"cannot": another_is_preempted},
    ("prefetching", "finish"): {"cannot": ends_only_when_running},
    ("prefetching", "rank error"): {
        "a rank dies": cell(die, 503),
        "a rank falls silent": cell(fall_silent, 503, after=ended_after(8.0, 12.0)),
        "one rank cannot read": cell(arm("read", (1,)), after=paid_by(store=0, computed=17)),
        "all ranks cannot read": cell(arm("read", BOTH), after=paid_by(store=0, computed=17)),
        "one rank's read may still write": cell(arm("late", (1,), 9.0), after=paid_by(store=0)),
        "one rank's answer is cut": cell(arm("length", (1,)), after=paid_by(store=0)),
    },
    ("prefetching", "store error"): {
        "": cell(lose_store, after=paid_by(store=0, computed=17)),
        "one rank lost an object": cell(lambda w: w.spoil_store(6, "lost"), batch_size=1),
        "one rank's object changed": cell(lambda w: w.spoil_store(6, "bytes"), batch_size=1),
        "one rank's object is another one": cell(lambda w: w.spoil_store(6, "other"), batch_size=1),
    },
    ("prefetching", "timeout"): {
        "prefetch_timeout": cell(nothing, batch_size=1, timeout_ms=100, after=paid_by(store=8, computed=9)),
        "prefetch_deadline": cell(nothing, deadline_ms=100, after=paid_by(store=0, computed=17)),
        "prefetch_deadline, while one rank's read that failed may still write": cell(
            nothing,
            before=both(arm("late", (0,), 9.0), arm("slow read", (1,), 0.5)),
            slow_s=0.0,
            batch_size=4,
            deadline_ms=100,
            after=paid_by(store=0),
        ),
        "no answer of one rank": cell(nothing, before=arm("lose read", (1,)), after=paid_by(store=0, computed=17)),
        "a read that takes for ever": cell(nothing, slow_s=15.0, after=paid_by(store=0, computed=17)),
    },
    ("ready", "abort"): {"": cell(abort, "abort")},
    ("ready", "preempt"): {"cannot": another_is_preempted},
    ("ready", "finish"): {"cannot": ends_only_when_running},
    ("ready", "rank error"): {
        "a rank dies": cell(die, 503),
        "a rank falls silent": cell(fall_silent, 503, after=ended_after(8.0, 12.0)),
        "the forward of another fails": cell(arm("forward", BOTH), after=paid_by(store=16)),
    },
    ("ready", "store error"): {"": cell(lose_store, after=paid_by(store=16))},
    ("ready", "timeout"): {"no clock runs": cell(arm("slow forward", BOTH, 5.0), after=paid_by(store=16))},
    ("H2D registered", "abort"): {"": cell(abort, "abort")},
    ("H2D registered", "preempt"): {"cannot": preempted_later},
    ("H2D registered", "finish"): {"": cell(nothing, length=1, after=paid_by(host=16, computed=1))},
    ("H2D registered", "rank error"): {
        "a rank dies": cell(die, 503),
        "a rank falls silent": cell(fall_silent, 503),
        "one rank's copy fails": cell(nothing, before=arm("load", (1,)), after=paid_by(host=0)),
        "all ranks' copies fail": cell(nothing, before=arm("load", BOTH), after=paid_by(host=0)),
        "one rank registers too few": cell(nothing, before=arm("ack", (1,)), after=paid_by(host=0)),
        "one rank's source is another block": cell(nothing, before=lambda w: w.spoil_host(1, 0), after=paid_by(host=0)),
    },
    ("H2D registered", "store error"): {"": cell(lose_store, after=paid_by(host=16))},
    ("H2D registered", "timeout"): {"a load never ends": cell(lambda w: doom(w), 503, slow_s=FOR_EVER)},
    ("forward running", "abort"): {
        "": cell(abort, "abort", after=lambda w: says_nothing(w), max_tokens=64, chunk_tokens=64)
    },
    ("forward running", "preempt"): {"cannot": preempted_later},
    ("forward running", "finish"): {"": cell(nothing, length=1)},
    ("forward running", "rank error"): {
        "a rank dies": cell(die, 503),
        "a rank falls silent": cell(fall_silent, 503),
        "all fail alike": cell(nothing, 500, before=arm("forward", BOTH)),
        "one fails alone": cell(nothing, 503, before=arm("forward", (1,)), after=ended_after(0.0, 7.0)),
        "one was told something else": cell(nothing, 503, before=arm("view", (1,))),
    },
    ("forward running", "store error"): {"": cell(lose_store, after=paid_by(computed=17))},
    ("forward running", "timeout"): {"no answer": cell(lambda w: doom(w), 503, slow_s=FOR_EVER)},
    ("D2H2G running", "abort"): {"": cell(abort, "abort")},
    ("D2H2G running", "preempt"): {"": not_while_copied},
    ("D2H2G running", "finish"): {"": cell(nothing, length=1)},
    ("D2H2G running", "rank error"): {
        "a rank dies": cell(die, 503),
        "a rank falls silent": cell(fall_silent, 503),
        "one rank's copy fails": cell(arm("offload", (1,)), after=lambda w: offloads_failed(w)),
        "all ranks' copies fail": cell(arm("offload", BOTH), after=lambda w: offloads_failed(w)),
        "one rank cannot write to the store": cell(arm("put", (1,))),
    },
    ("D2H2G running", "store error"): {"": cell(lose_store)},
    ("D2H2G running", "timeout"): {
        "a copy never ends": cell(lambda w: doom(w), 503, slow_s=FOR_EVER, length=200, num_device=60, limit_s=1.0),
        "a store write takes long": cell(arm("slow put", BOTH, 60.0)),
    },
}


def says_nothing(world: World) -> None:
    assert world.asked["s"].tokens == []


def has_status(world: World, name: str, status: int) -> None:
    assert world.asked[name].status == status


def doom(world: World) -> None:
    world.ranks.doom = "something never ends"


def offloads_failed(world: World) -> None:
    assert world.manager.write_back.num_failed == 1


def test_the_table_has_every_cell() -> None:
    assert set(TABLE) == {(state, event) for state in STATES for event in EVENTS}


@pytest.mark.parametrize(
    ("state", "drive"),
    [
        pytest.param(state, drive, id=" - ".join(filter(None, (state, event, case))))
        for (state, event), cases in TABLE.items()
        for case, drive in cases.items()
    ],
)
def test_a_request_ends_rightly_and_leaves_nothing(state: str, drive: Cell) -> None:
    drive(STATES[state])
