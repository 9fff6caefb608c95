"""Prefill and decode instances on one fake clock, with peers that are killed, stopped and cut off: answers stay right.

The engines, their roles and their links are the real ones; ranks, the lines between instances and the moves of blocks
are simulated (see `simulation`). A schedule that fails is shrunk and printed as a script, to be replayed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from simulation.cluster import Cluster, Pair
from simulation.moving import Mover
from simulation.pd_scripts import MOVES, PD_FAMILIES, PdScript, draw, failure_of, replay, shrink
from simulation.scripts import Event
from simulation.world import Settings

from xllm_hier.engine.blocks.books import HierarchyBlockManagerPool
from xllm_hier.engine.blocks.sequence import Sequence
from xllm_hier.engine.pair.decode import DecodeRole, _Inbound
from xllm_hier.engine.pair.handover import Handover
from xllm_hier.engine.pair.links import PeerEvent, PeerLinks
from xllm_hier.engine.pair.prefill import PrefillRole, _Outbound
from xllm_hier.peer_plans import FirstGeneration, FirstGenerationDone, NewRequest
from xllm_hier.plans import PushBlocks, PushFailure

SEEDS = 8  # of each family; thousands more by `python -m simulation`
PROMPT = list(range(1, 18))


@pytest.mark.parametrize("family", PD_FAMILIES)
def test_random_schedules_answer_as_one_instance_would_and_leave_nothing(family: str) -> None:
    for seed in range(SEEDS):
        script = draw(family, seed)
        problem = failure_of(script)
        if problem is not None:
            small = shrink(script, lambda other: failure_of(other) is not None, most_runs=100)
            pytest.fail(f"{family}, seed {seed}: {problem}\nshrunk: {failure_of(small)}\n{small}")


def test_random_schedules_meet_what_they_are_meant_to_meet() -> None:
    met: Counter[str] = Counter()
    for family, seeds in {"everything": (0, 4, 16, 17), "stopped": (3, 24, 28)}.items():
        for seed in seeds:
            cluster = replay(draw(family, seed))
            met.update(cluster.met)
            for instance in (*cluster.instances.values(), *cluster.past):
                met.update(instance.ranks.done)
                met.update({name: what for name, what in instance.role.stats().items() if isinstance(what, int)})
                met[f"preemptions of {instance.place.name[0]}"] += instance.scheduler.num_preemptions
            met.update(asked.end.finish_reason or "" for _, asked in cluster.asked.values() if asked.end is not None)
    wanted = {kind for kind, _ in MOVES} | {"kill", "stop all", "stop engine", "stop ranks", "break", "break one way"}
    wanted |= {"stall", "handed_over", "taken_over", "moved", "failed_pushes", "failed_pulls", "length", "abort"}
    wanted |= {"preemptions of P", "preemptions of D"}
    assert not [what for what in wanted if not met[what]]


def test_a_schedule_runs_twice_alike() -> None:
    def trace(script: PdScript) -> list[object]:
        cluster = replay(script)
        return [cluster.timeline.now, [(name, asked.tokens, asked.usage) for name, (_, asked) in cluster.asked.items()]]

    for family in ("everything", "types"):
        assert trace(draw(family, 7)) == trace(draw(family, 7))


def test_a_script_is_replayed_as_it_was_printed() -> None:
    script = draw("everything", 3)
    names: dict[str, Any] = {"PdScript": PdScript, "Pair": Pair, "Settings": Settings}
    assert eval(str(script), {"replay": lambda same: same, **names}) == script


# ------------------------------------------------------------------------------------------ planted bugs are found


def blocks_are_free_as_soon_as_their_request_is_over(
    role: DecodeRole, request: _Inbound, *, certain: bool = True
) -> None:
    END(role, request, certain=certain or True)


def a_failed_push_is_as_good_as_another(role: PrefillRole, _: list[PushFailure], *, void: bool) -> None:
    PUSHES_ENDED(role, [], void=void)


def a_step_is_answered_before_its_pushes_have_ended(
    mover: Mover, pushes: list[PushBlocks], then: Callable[[list[PushFailure]], None]
) -> None:
    PUSH(mover, pushes, lambda _: None)
    then([])


def what_was_sent_is_sent_again(handover: Handover) -> None:
    handover.pushing = {}


def a_pull_is_over_when_it_begins(role: DecodeRole, request: _Inbound, first: FirstGeneration) -> None:
    role._links.send(request.peer, FirstGenerationDone(request.request_id))
    PULL(role, request, first)


def others_wait_for_what_is_over(_manager: HierarchyBlockManagerPool, _sequence: Sequence) -> None:
    pass


def a_peer_that_says_hello_writes_no_more(role: DecodeRole, peer: str, _: float) -> None:
    HEAR_OF(role, peer, 0.0)


def nobody_has_to_be_told_that_a_write_is_uncertain(
    links: PeerLinks, incarnation: str, why: str, *, uncertain: bool = False
) -> None:
    LOSE(links, incarnation, why, uncertain=uncertain and False)


def a_decode_instance_goes_on_for_a_peer_that_is_lost(_role: DecodeRole, _event: PeerEvent) -> None:
    pass


def what_is_handed_over_is_free_at_once(role: PrefillRole, request: _Outbound, handover: Handover) -> None:
    HAND_OVER(role, request, handover)
    role._manager.deallocate(request.sequence)


def another_decode_instance_begins_from_the_prompt(
    role: PrefillRole, request: _Outbound, asked: dict[str, list[NewRequest]], burdens: Counter[str]
) -> None:
    SEEK(role, request, asked, burdens)
    for requests in asked.values():
        requests[:] = [replace(new, generated=new.generated[:0]) for new in requests]


END, PULL, HEAR_OF = DecodeRole._end, DecodeRole._pull, DecodeRole._hear_of
PUSHES_ENDED, HAND_OVER, SEEK = PrefillRole.pushes_ended, PrefillRole._hand_over, PrefillRole._seek
PUSH, LOSE = Mover.push, PeerLinks.lose
PLANTED: dict[Callable[..., Any], tuple[str, int, Any, str]] = {  # where to look, and from which seed on
    blocks_are_free_as_soon_as_their_request_is_over: ("moves fail", 0, DecodeRole, "_end"),
    a_failed_push_is_as_good_as_another: ("moves fail", 0, PrefillRole, "pushes_ended"),
    a_step_is_answered_before_its_pushes_have_ended: ("moves fail", 0, Mover, "push"),
    what_was_sent_is_sent_again: ("moves fail", 0, Handover, "push_ended"),
    a_pull_is_over_when_it_begins: ("moves fail", 8, DecodeRole, "_pull"),
    others_wait_for_what_is_over: ("moves fail", 0, HierarchyBlockManagerPool, "disclaim"),
    a_peer_that_says_hello_writes_no_more: ("moves fail", 4, DecodeRole, "_hear_of"),
    nobody_has_to_be_told_that_a_write_is_uncertain: ("everything", 0, PeerLinks, "lose"),
    a_decode_instance_goes_on_for_a_peer_that_is_lost: ("everything", 0, DecodeRole, "_on_lost"),
    what_is_handed_over_is_free_at_once: ("moves fail", 8, PrefillRole, "_hand_over"),
    another_decode_instance_begins_from_the_prompt: ("broken lines", 4, PrefillRole, "_seek"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    family, first, owner, name = PLANTED[bug]
    monkeypatch.setattr(owner, name, bug)
    found = next(script for seed in range(first, 30) if failure_of(script := draw(family, seed)) is not None)
    monkeypatch.undo()
    assert failure_of(found) is None


# --------------------------------------------------------------------------------------------- scripts once found


def run(settings: Settings, events: list[Event], mode: str, **numbers: int) -> Cluster:
    return replay(PdScript(Pair(settings, settings, mode=mode, **numbers), events))


def test_blocks_of_an_uncertain_pull_are_not_held_for_ever() -> None:
    """Found by the simulation: they were held until the prefill instance, which stayed linked, would link again."""
    settings = Settings(num_device=6, block_size=2)
    events: list[Event] = [(0.1, "fault", "D0", "pull limit", (0,), 0.1), (0.3, "add", "P0", "a", PROMPT[:10], 2, {})]
    cluster = run(settings, events, "PULL")
    assert cluster.instances["D0"].role.stats()["failed_pulls"] == 1


def test_blocks_of_an_uncertain_pull_are_not_held_for_ever_when_its_peer_is_killed_meanwhile() -> None:
    """Found by the simulation: the peer's end was heard of before the pull's, and never again."""
    settings = Settings(num_ranks=2, max_tokens=8, chunk_tokens=4, limit_s=16.0)
    events: list[Event] = [
        (0.1, "fault", "D0", "pull limit", (0,), 0.1),
        (0.3, "add", "P0", "a", PROMPT, 5, {}),
        (1.5, "kill", "P0", None),
    ]
    run(settings, events, "PULL")


def test_a_step_that_fails_to_push_to_a_peer_lost_meanwhile_still_warns_it() -> None:
    """Found by the simulation: the line broke and was mended while a push ran past its limit, and the Hello that
    followed said that nothing more would be written."""
    settings = Settings(num_host=6, decode_kv_reuse="off", chunk_tokens=64, pace=0.2)
    events: list[Event] = [
        (0.1, "fault", "P0", "push limit", (0,), 9.0),
        (0.2, "add", "P0", "a", PROMPT, 2, {}),
        (0.6, "cut", "P0", "D0", 0.01, "break one way"),
    ]
    run(settings, events, "PUSH")


def test_blocks_are_held_anew_when_a_peer_that_seemed_to_have_ended_says_that_it_may_still_write() -> None:
    """Found by the simulation: only those were whose peer had not seemed to have ended."""
    settings = Settings(num_device=12, max_tokens=8, chunk_tokens=4)
    events: list[Event] = [
        (0.1, "fault", "P0", "push limit", (0,), 11.0),
        (0.2, "add", "P0", "a", [*PROMPT, *PROMPT], 3, {}),
        (0.6, "cut", "P0", "D0", 0.3, "break"),
    ]
    run(settings, events, "PUSH")


def test_a_sequence_that_moves_in_the_middle_of_its_answer_can_be_preempted_where_it_goes_on() -> None:
    """Found by the simulation: decoded blocks that were found on the device counted as not published."""
    settings = Settings(num_device=6, num_host=6, block_size=2, max_tokens=64, max_seqs=16, batch_size=8, pace=5.0)
    pair = Pair(replace(settings, seed=56), replace(settings, seed=57))
    one, other = [42, 49, 28, 21], [42, 49, 28, 21, 33, 22, 4, 19, 36, 41]
    events: list[Event] = [
        (0.2, "add", "P0", "a", one, 8, {}),
        (0.205, "add", "P0", "h", [*other, 31], 1, {}),
        (0.205, "add", "P0", "b", one, 6, {}),
        (0.205, "add", "P0", "c", one, 3, {}),
        (0.235, "add", "P0", "d", [*other[:7], 33], 4, {}),
        (0.265, "cut", "P0", "D0", 0.3, "break"),
        (1.04, "cut", "P0", "D0", 0.01, "break"),
        (1.235, "clear", "D0", "device", "host", "store"),
        (1.559, "cut", "D0", "P0", 0.01, "break"),
        (1.635, "add", "P0", "e", [*other, 20], 1, {}),
        (1.665, "add", "P0", "i", [*other, 31], 1, {}),
        (1.695, "add", "P0", "f", [42, 19, 10], 6, {}),
        (1.8, "add", "P0", "g", one, 8, {}),
    ]
    replay(PdScript(pair, events))


def test_a_decode_instance_that_still_ends_a_request_is_asked_again_later() -> None:
    """Found by the simulation: it refused the request for good, as one that it knew."""
    settings = Settings(num_device=5, block_size=2, max_seqs=16, pace=20.0)
    events: list[Event] = [
        (0.1, "fault", "D0", "pull limit", (0,), 8.0),
        (0.5, "add", "P0", "a", [23, 46, 31], 7, {}),
        (1.5, "cut", "P0", "D0", 0.3, "break"),
    ]
    cluster = run(settings, events, "PULL")
    assert cluster.asked["a"][1].status == 200


def test_a_request_that_ends_with_its_first_tokens_is_not_moved_afterwards() -> None:
    """Found by the simulation: its decoded blocks were being recomputed when its place was lost, which ended the
    engine."""
    settings = Settings(block_size=2, chunk_tokens=64, batch_size=8, pace=5.0)
    events: list[Event] = [
        (0.1, "fault", "P0", "push limit", (0,), 0.1),
        (0.3, "add", "P0", "a", [35, 20, 3, 0, 2, 1, 26, 16], 2, {}),
        (1.0, "fault", "P0", "push limit", (0,), 5.0),
    ]
    run(settings, events, "PUSH")


def test_a_welcome_counts_only_while_there_is_a_way_to_answer() -> None:
    """Found by the simulation: a prefill instance took itself for linked while its line was broken; what it asked for
    then was lost, and nobody noticed."""
    events: list[Event] = [
        (0.119, "cut", "D0", "P0", 2.0, "break one way"),
        (0.205, "add", "P0", "a", PROMPT, 2, {}),
        (0.482, "cut", "P0", "D0", 2.0, "break one way"),
    ]
    cluster = run(Settings(chunk_tokens=4), events, "PULL")
    assert cluster.asked["a"][1].status == 200


def test_an_aborted_request_that_ends_elsewhere_in_the_same_moment_is_answered() -> None:
    """Found by the simulation: its last tokens came before its abort was dealt with, and its client got no end."""
    for hundredths in range(52, 64):
        events: list[Event] = [
            (0.2, "add", "P0", "a", PROMPT[:6], 3, {}),
            (0.25, "add", "P0", "b", range(50), 2, {}),
            (hundredths / 100, "abort", "a"),
        ]
        cluster = run(Settings(num_device=40, chunk_tokens=4, max_tokens=4), events, "PUSH")
        assert cluster.asked["a"][1].end is not None


def test_prompt_logprobs_of_a_request_that_moves_come_once() -> None:
    """Found by the simulation: those of the first place were kept, and told before the others."""
    events: list[Event] = [
        (0.1, "fault", "P0", "push limit", (0,), 0.1),
        (0.2, "add", "P0", "a", PROMPT, 2, {"prompt_logprobs": 1}),
    ]
    cluster = run(Settings(chunk_tokens=4), events, "PUSH")
    assert cluster.instances["P0"].role.stats()["moved"] == 1


def test_what_a_killed_peer_had_on_the_wire_harms_nobody_though_we_were_stopped_when_it_was_to_come() -> None:
    """Found by the simulation: what was held until a point in time that passed while all processes were stopped was
    given away in the first moment afterwards."""
    for seed in range(4, 8):  # with some of which there is something on the wire
        settings = Settings(num_device=20, chunk_tokens=64, seed=seed)
        events: list[Event] = [
            (0.1, "fault", "P0", "slow push", (0,), 3.0),
            (0.3, "add", "P0", "a", PROMPT, 4, {}),
            (1.0, "kill", "P0", 1.0),
            (1.4, "stop", "D0", 20.0, "all"),
            (3.0, "add", "P0", "b", PROMPT[3:], 4, {}),
        ]
        cluster = run(settings, events, "PUSH")
        assert cluster.asked["b"][1].status == 200


def test_what_was_read_counts_only_if_its_source_was_kept_until_then() -> None:
    """Found by the simulation: a line broke while a pull ran, the prefill instance let go of the source and used it
    anew, and the decode instance, which had not heard of that, published what it had read."""
    prefill = Settings(num_device=6, num_host=6, block_size=2, max_tokens=64, seed=291)
    head = [39, 49, 41]
    events: list[Event] = [
        (0.13, "fault", "D0", "slow pull", (0,), 3.0),
        (0.238, "fault", "D0", "slow pull", (0,), 0.3),
        (0.3, "add", "P0", "r0", [*head, 13, 9, 28], 6, {}),
        (0.378, "cut", "P0", "D1", 0.3, "break"),
        (0.4, "add", "P0", "r1", [*head, 13, 9, 28], 6, {}),
        (0.43, "add", "P0", "r2", [*head, 13, 9, 28, 33, 23, 37, 29, 1], 1, {}),
        (1.43, "add", "P0", "r3", [*head, 33, 12, 45, 18, 6, 3], 3, {}),
        (1.616, "cut", "D1", "P0", 0.01, "break one way"),
        (1.73, "add", "P0", "r4", [*head, 13, 9, 28], 6, {}),
        (2.165, "add", "P0", "r8", [*head, 33, 22, 1], 3, {"priority": 1, "stop": [15, 9, 41, 39, 37]}),
        (2.165, "add", "P0", "r9", [39, 49, 38, 6], 8, {}),
        (2.165, "add", "P0", "r10", [39, 7, 37], 3, {"salt": "a"}),
        (2.165, "add", "P0", "r11", [*head, 13, 9, 28, 33, 23, 37, 29, 1], 1, {}),
        (2.448, "cut", "P0", "D0", 0.3, "break one way"),
    ]
    replay(PdScript(Pair(prefill, replace(prefill, seed=292), num_prefill=1, num_decode=2, mode="PULL"), events))


def test_a_broken_way_to_a_peer_that_stands_still_is_not_taken_for_its_end() -> None:
    """Found by the simulation: fifteen seconds after the line had broken the blocks were given to others, and filled
    by what the peer, which had only been stopped, still sent."""
    settings = Settings(
        num_device=5, block_size=2, decode_kv_reuse="as_is", max_tokens=8, chunk_tokens=64, limit_s=16.0, seed=461
    )
    events: list[Event] = [
        (0.34, "fault", "D1", "slow pull", (0,), 1.0),
        (0.505, "add", "P0", "r1", [7, 4, 37, 27, 28], 3, {}),
        (0.535, "add", "P0", "r2", [1], 6, {"priority": -1}),
        (0.666, "stop", "P0", 20.0, "all"),
        (1.527, "cut", "D1", "P0", 2.0, "break one way"),
    ]
    replay(PdScript(Pair(settings, replace(settings, seed=462), num_prefill=1, num_decode=2, mode="PULL"), events))
