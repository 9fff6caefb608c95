"""Pushes behind a forward: what is read when, and what becomes of them when the forward, a call or a peer fails.

A stand-in of the Transfer Engine notes all calls, and lets them return when the test says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import pytest
from pd_sides import LAYERS, LIMIT_S, Side, kv_push, made_sides, seven_layers
from serving import wait_for

from xllm_hier.config import EngineConfig
from xllm_hier.plans import Forward, PullBlocks, PushBlocks, PushFailure, TransferEndpoint
from xllm_hier.worker.compute.plan_digest import PlanDigest
from xllm_hier.worker.peers import pd_transfer
from xllm_hier.worker.peers.push import Pushes


@pytest.fixture
def sides() -> Iterator[Callable[..., Side]]:
    yield from made_sides()


class GatedEngine:
    """In place of the Transfer Engine: notes (session, memory) of all it is to write, to a session that is `shut` once
    that is set; one that is `deaf` does not even answer a greeting until then."""

    made: ClassVar[list[GatedEngine]] = []

    def __init__(self, _config: EngineConfig, rank: int, memory: Sequence[tuple[int, int]]) -> None:
        self.session, self.memory, self.closed = f"gated:{rank}", list(memory), False
        self.written: list[tuple[str, int]] = []
        self.calls = 0
        self.shut: dict[str, threading.Event] = {}
        self.deaf: dict[str, threading.Event] = {}
        self.begun = threading.Event()
        self.made.append(self)

    def greet(self, session: str, _address: int) -> tuple[int, float]:
        if session in self.deaf:
            self.begun.set()
            assert self.deaf[session].wait(LIMIT_S)
        return 0, 0.0

    def write(self, session: str, local: list[int], remote: list[int], sizes: list[int]) -> tuple[int, float]:
        self.begun.set()
        self.calls += 1
        if session in self.shut:
            assert self.shut[session].wait(LIMIT_S)
        for address in local:
            place = next(n for n, (start, size) in enumerate(self.memory) if start <= address < start + size)
            self.written.append((session, place))
        return 0, 0.0

    read = write

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> list[GatedEngine]:
    monkeypatch.setattr(GatedEngine, "made", [])
    monkeypatch.setattr(pd_transfer, "TransferEngine", GatedEngine)
    return GatedEngine.made


def with_draft(push: PushBlocks) -> PushBlocks:
    return PushBlocks(push.push_id, push.peer, push.target_mappings, push.target_mappings)


def named(side: Side, session: str) -> TransferEndpoint:
    """An endpoint with blocks like ours, at some session."""
    return TransferEndpoint(0, session, side.pd.endpoint.regions)


def test_a_layer_is_read_once_its_group_is_computed_and_the_drafts_once_it_has_drafted(
    sides: Callable[..., Side], gated: list[GatedEngine]
) -> None:
    """Seven layers in groups of 2, 2, 2, 1."""
    side = sides(seven_layers())
    side.know(named(side, "peer"))
    begun = side.pd.begin([with_draft(kv_push([1, 2], [3, 4]))])
    waited: list[int] = []
    forward = begun.following(waited.append)

    def written() -> list[int]:
        time.sleep(0.03)
        return [place for _, place in gated[0].written]

    for layer in range(LAYERS):
        forward(layer)
        groups = layer // 2 * 2
        wait_for(lambda: len(gated[0].written) == groups or None)  # noqa: B023
        assert written() == list(range(groups)), f"before layer {layer} is computed"
    begun.target_computed()
    wait_for(lambda: len(gated[0].written) == LAYERS or None)
    assert written() == list(range(LAYERS)) and waited == list(range(LAYERS))
    begun.drafted()
    assert begun.finish(LIMIT_S) == [] and written() == [*range(LAYERS), LAYERS]
    assert gated[0].calls == 5, "one call for each group, and one for the draft"


def test_groups_that_wait_for_a_call_go_together(sides: Callable[..., Side], gated: list[GatedEngine]) -> None:
    """Of seven layers the first group is being written when all others are computed: one more call."""
    side = sides(seven_layers())
    side.know(named(side, "peer"))
    gate = gated[0].shut["peer"] = threading.Event()
    begun = side.pd.begin([kv_push([1, 2], [3, 4])])
    forward = begun.following(lambda layer: None)
    for layer in range(3):
        forward(layer)
    assert gated[0].begun.wait(LIMIT_S)
    begun.target_computed()
    begun.drafted()
    gate.set()
    assert begun.finish(LIMIT_S) == []
    assert [place for _, place in gated[0].written] == list(range(LAYERS)) and gated[0].calls == 2


def test_a_failed_forward_writes_nothing_more_and_waits_for_what_is_under_way(
    sides: Callable[..., Side], gated: list[GatedEngine]
) -> None:
    side = sides(seven_layers())
    side.know(named(side, "peer"))
    gate = gated[0].shut["peer"] = threading.Event()
    begun = side.pd.begin([with_draft(kv_push([1, 2], [3, 4], 8))])
    forward = begun.following(lambda layer: None)
    for layer in range(3):
        forward(layer)
    assert gated[0].begun.wait(LIMIT_S)
    for layer in range(3, 5):
        forward(layer)
    begun.fail()
    threading.Timer(1.0, gate.set).start()
    assert begun.finish(LIMIT_S) == [PushFailure(8, "the forward failed", True)]
    assert begun.waited_s > 0.1 and [place for _, place in gated[0].written] == [0, 1]
    assert side.failures() == {("push", "forward"): 1}


def test_a_call_that_hangs_is_left_behind_and_other_peers_get_their_blocks(
    sides: Callable[..., Side], gated: list[GatedEngine]
) -> None:
    side = sides(seven_layers())
    for name in ("stuck", "well"):
        side.know(named(side, name), name)
    gate = gated[0].shut["stuck"] = threading.Event()
    side.pd._calls.limit_s = 0.1
    begun = side.pd.begin([kv_push([1], [1], 1, "stuck"), kv_push([2], [2], 2, "well")])
    begun.target_computed()
    assert gated[0].begun.wait(LIMIT_S)
    later = side.pd.begin([kv_push([3], [3], 3, "well"), kv_push([3], [3], 4, "stuck")])
    later.target_computed()
    time.sleep(0.15)
    side.pd.watch()
    (failure,) = begun.finish(LIMIT_S)
    assert failure.push_id == 1 and not failure.certain and "stuck" in failure.error and "0.1 s" in failure.error
    (failure,) = later.finish(LIMIT_S)
    assert failure.push_id == 4 and failure.certain, "nothing of it has begun"
    assert {session for session, _ in gated[1].written} == {"well"} and not gated[0].written
    assert not gated[0].closed, "the end of an engine during a call is a segmentation fault"
    gate.set()
    wait_for(lambda: gated[0].closed or None)
    assert side.failures() == {("push", "hangs"): 1, ("push", "peer_failed"): 1}


def test_a_push_that_does_not_end_in_time_fails_and_the_thread_stops_with_its_present_call(
    sides: Callable[..., Side], gated: list[GatedEngine]
) -> None:
    side = sides(seven_layers())
    side.know(named(side, "peer"))
    gate = gated[0].shut["peer"] = threading.Event()
    begun = side.pd.begin([kv_push([1], [1])])
    begun.target_computed()
    (failure,) = begun.finish(0.1)
    assert not failure.certain
    gate.set()
    assert begun._ended.wait(LIMIT_S) and gated[0].calls == 1


@pytest.mark.parametrize("pulled", [False, True], ids=["push", "pull"])
def test_nothing_moves_with_a_peer_that_has_not_answered_before_also_when_it_does_later(
    sides: Callable[..., Side], gated: list[GatedEngine], pulled: bool
) -> None:
    side = sides(seven_layers())
    side.know(named(side, "peer"))
    gate = gated[0].deaf["peer"] = threading.Event()
    side.pd._calls.limit_s = 0.1
    plan = kv_push([1], [1])
    begun = side.pd.begin([] if pulled else [plan])
    begun.target_computed()
    if pulled:
        side.pd.pull(PullBlocks(1, "d", plan.target_mappings))
    assert gated[0].begun.wait(LIMIT_S)
    time.sleep(0.15)
    side.pd.watch()
    (failure,) = side.answers if pulled else begun.finish(LIMIT_S)
    assert failure.certain and "has not returned" in failure.error
    gate.set()
    wait_for(lambda: gated[0].closed or None)
    assert gated[0].calls == 0


def test_a_forward_without_pushes_waits_for_nothing_and_its_layers_are_not_followed(
    sides: Callable[..., Side], gated: list[GatedEngine]
) -> None:
    begun = sides(seven_layers()).pd.begin([])
    wait: Callable[[int], None] = lambda layer: None  # noqa: E731
    assert begun.following(wait) is wait
    begun.target_computed()
    begun.drafted()
    assert begun.finish(0.0) == [] and Pushes.none().finish(0.0) == []


def test_ranks_that_were_told_different_pushes_are_found_out() -> None:
    def digest(*pushes: PushBlocks) -> str:
        plan, told = Forward(3, [], [], [], list(pushes)), PlanDigest()
        told.add(plan)
        return told.view(plan, [], 0)

    pushes = [kv_push([1], [2]), kv_push([1], [3]), kv_push([4], [2]), kv_push([1], [2], 2), kv_push([1], [2], 1, "e")]
    assert len({digest(), digest(*pushes[:2]), *(digest(push) for push in pushes)}) == 7
    assert digest(pushes[0]) == digest(kv_push([1], [2]))


def test_a_peer_that_was_unlinked_gets_nothing_more(sides: Callable[..., Side], gated: list[GatedEngine]) -> None:
    side = sides(seven_layers())
    side.know(named(side, "peer"))
    begun = side.pd.begin([kv_push([1], [1], 1)])
    forward = begun.following(lambda layer: None)
    for layer in range(5):
        forward(layer)
    wait_for(lambda: len(gated[0].written) == 4 or None)
    side.pd.unlink("d")
    begun.target_computed()
    (failure,) = begun.finish(LIMIT_S)
    assert "gone" in failure.error and failure.certain and len(gated[0].written) == 4
    assert [failure.push_id for failure in side.push(kv_push([1], [1], 2))] == [2]
