"""What a decode instance asks for and what it is sent, block by block; and the laws of a peer engine on both (group D).

Blocks of four tokens; a prompt of 18 has four full blocks and two tokens in a fifth.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from xllm_hier.block import BlockType
from xllm_hier.config import EngineConfig
from xllm_hier.engine.blocks.books import HierarchyBlockManagerPool
from xllm_hier.engine.blocks.sequence import Sequence
from xllm_hier.engine.blocks.settings import BookSettings, Drafting
from xllm_hier.engine.blocks.types import Places
from xllm_hier.engine.pair.decode import DecodeRole
from xllm_hier.engine.pair.handover import Handover, numbered, places_of
from xllm_hier.engine.pair.links import PeerEvent
from xllm_hier.engine.pair.prefill import PrefillRole
from xllm_hier.engine.steps.limits import RequestLimits
from xllm_hier.engine.steps.scheduler import Scheduler
from xllm_hier.errors import InvariantError
from xllm_hier.figures import TypeSizes
from xllm_hier.ints import ints
from xllm_hier.peer_plans import (
    AddNewRequests,
    Allocated,
    Cancel,
    FirstGeneration,
    FirstGenerationDone,
    Heartbeat,
    NewRequest,
    NumberedBlocks,
    Release,
)
from xllm_hier.plans import Forward, ForwardOutput, PullBlocks, PullDone, PushFailure, TransferBlocks
from xllm_hier.request_messages import AddRequest, SamplingSpec

SIZE = 4
PROMPT = [number % 50 for number in range(1, 19)]
KV, SWA, LINEAR = BlockType
WINDOW = 6
ALL = [TypeSizes("KV", 0, 24, 24, 64), TypeSizes("SWA", WINDOW, 24, 24, 64), TypeSizes("LINEAR", 1, 8, 8, 64)]


class Link:
    """Takes what the books send."""

    num_workers = 1

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def broadcast(self, message: Any) -> None:
        self.sent.append(message)


def books(
    *types: BlockType, head: bool = False, link: Link | None = None, store: bool = False, **changes: Any
) -> HierarchyBlockManagerPool:
    sizes = [one for one in ALL if BlockType(one.block_type) in (types or (KV,))]
    settings = BookSettings(SIZE, drafting=Drafting(3, True, True, ("KV",)) if head else Drafting(), **changes)
    return HierarchyBlockManagerPool(link or Link(), sizes, settings, store_enabled=store)


def arriving(manager: HierarchyBlockManagerPool, tokens: list[int] = PROMPT, name: str = "d") -> Sequence:
    request = AddRequest(name, ints(tokens), SamplingSpec(), 20)
    return manager.new_sequence(request, remote=True)


def leave(manager: HierarchyBlockManagerPool, tokens: list[int]) -> None:
    """A prompt's blocks are in the device prefix from now on, as if it had been taken over and had ended."""
    sequence = arriving(manager, tokens)
    places = manager.allocate_for_peer(sequence)
    assert places is not None
    sequence.tokens.append(7)
    manager.take_over(sequence, places)
    manager.deallocate(sequence)


def numbers(places: Places | None) -> dict[BlockType, list[int]]:
    assert places is not None
    return {kind: sorted(found) for kind, found in places.items()}


# ------------------------------------------------------------------------------- what the decode side asks for


@pytest.mark.parametrize("count", range(5))
def test_whatever_part_of_the_prefix_it_has_is_not_asked_for(count: int) -> None:
    """D2. The first 0 to 4 of 4 full blocks are there; the rest, and the fifth with two tokens, are to be sent."""
    manager = books()
    if count:
        leave(manager, PROMPT[: count * SIZE])
    sequence = arriving(manager)
    places = manager.allocate_for_peer(sequence)
    assert numbers(places) == {KV: list(range(count, 5))}
    assert places is not None and sequence.num_shared(places) == count
    assert len(sequence.device_blocks) == 5 and len(set(sequence.device_blocks)) == 5
    manager.deallocate(sequence)
    manager.check()
    assert manager.pools.first.device.num_pinned == count, "those that are being written back"


def test_of_a_window_it_asks_for_its_last_blocks_and_of_states_for_the_last_one() -> None:
    """D18. Six tokens before token 16 lie in blocks 2 and 3; block 4 is begun. Which is meant is said by number, so
    nothing hangs on the order or on placeholders."""
    manager = books(KV, SWA, LINEAR)
    sequence = arriving(manager)
    assert numbers(manager.allocate_for_peer(sequence)) == {KV: [0, 1, 2, 3, 4], SWA: [2, 3, 4], LINEAR: [0]}
    assert sequence.held[SWA].blocks[:2] == [-1, -1] and len(sequence.live_states) == 1


def test_types_are_found_each_by_itself_since_the_peer_has_them_all() -> None:
    """A restore would need all types at one boundary; here keys are found although no state is."""
    manager = books(KV, SWA, LINEAR)
    leave(manager, PROMPT)
    manager.pools[SWA].device.clear()
    assert numbers(manager.allocate_for_peer(arriving(manager))) == {KV: [4], SWA: [2, 3, 4], LINEAR: [0]}


def test_a_draft_models_next_token_has_a_block_too() -> None:
    """With a head the place of the token behind the prompt is written before it comes: 16 tokens take five blocks."""
    assert numbers(books(head=True).allocate_for_peer(arriving(books(head=True), PROMPT[:16]))) == {KV: [0, 1, 2, 3, 4]}
    assert numbers(books().allocate_for_peer(arriving(books(), PROMPT[:16]))) == {KV: [0, 1, 2, 3]}


@pytest.mark.parametrize("lacking", [KV, SWA, LINEAR])
def test_without_room_for_one_type_nothing_of_any_is_taken(lacking: BlockType) -> None:
    manager = books(KV, SWA, LINEAR)
    leave(manager, PROMPT[:8])
    device = manager.pools[lacking].device
    hogged = device.allocate(device.num_available) or []
    before = manager.block_counts()
    sequence = arriving(manager)
    assert manager.allocate_for_peer(sequence) is None
    assert manager.block_counts() == before and not sequence.device_blocks and not sequence.probed
    device.unpin(hogged)
    assert manager.allocate_for_peer(sequence) is not None
    manager.check()


def test_neither_host_nor_store_is_looked_at() -> None:
    link = Link()
    manager = books(link=link, store=True)
    leave(manager, PROMPT)
    for sequence in (arriving(manager),):
        for number in range(4):
            (host,) = manager.pools.first.host.allocate(1) or []
            manager.pools.first.host.publish(host, sequence.hash_of(number), sequence.parent_of(number))
        manager.clear("device")
        assert numbers(manager.allocate_for_peer(sequence)) == {KV: [0, 1, 2, 3, 4]}
    assert manager.transfer_blocks() == [] and not any(isinstance(sent, TransferBlocks) for sent in link.sent)


def test_who_shares_nothing_is_sent_everything() -> None:
    manager = books(prefix_cache=False)
    leave(manager, PROMPT)
    assert numbers(manager.allocate_for_peer(arriving(manager))) == {KV: [0, 1, 2, 3, 4]}


def test_what_was_taken_over_is_found_by_others_and_goes_to_the_host() -> None:
    """C13. A prompt that extends it shares its four full blocks; the fifth holds what the sequence alone goes on in."""
    link = Link()
    manager = books(link=link)
    sequence = arriving(manager)
    places = manager.allocate_for_peer(sequence)
    assert places is not None
    assert manager.pools.first.device.find(sequence.hash_of(0)) is None, "not before it is filled"
    other = arriving(manager, PROMPT + PROMPT, "other")
    assert manager.is_being_computed(other), "it waits for what is on its way"
    sequence.tokens.append(7)
    manager.take_over(sequence, places)
    assert not manager.is_being_computed(other)
    assert numbers(manager.allocate_for_peer(other))[KV][0] == 4
    assert sequence.num_computed == len(PROMPT) == sequence.write_from and sequence.num_published == 4
    manager.transfer_offload_blocks()
    (plan,) = link.sent
    assert len(plan.target_mappings[0].device) == 4


# ---------------------------------------------------------------------------------- what the prefill side sends


def computing(manager: HierarchyBlockManagerPool, num_tokens: int) -> Sequence:
    """A sequence whose first tokens are computed by the next step."""
    sequence = Sequence(AddRequest("p", ints(PROMPT), SamplingSpec(), 20), SIZE, True, manager.pools.types)
    assert manager.allocate(sequence, num_tokens)
    return sequence


def step(manager: HierarchyBlockManagerPool, sequence: Sequence, handover: Handover, end: int) -> dict[str, list[int]]:
    """The numbers of the blocks that a step over the tokens up to `end` sends."""
    assert manager.allocate(sequence, end)
    manager.move_states(sequence, end)
    due = handover.due(sequence, end)
    by_remote = {block: number for places in handover.lacking.values() for number, block in places.items()}
    sent = {one.block_type: [by_remote[block] for block in one.remote.tolist()] for one in due}
    for one in due:
        if one.block_type != "LINEAR":
            held = sequence.held[BlockType(one.block_type)]
            assert one.local.tolist() == [held.block(number) for number in sent[one.block_type]]
    return sent


def finish(manager: HierarchyBlockManagerPool, sequence: Sequence, end: int) -> None:
    sequence.num_computed = end
    manager.publish_computed(sequence)


def test_each_block_is_sent_once_with_the_chunk_that_completes_it_and_the_rest_with_the_last() -> None:
    """D1. A cursor that only goes forward, kept as what is still lacking."""
    manager = books(KV, SWA, LINEAR)
    sequence = computing(manager, 9)
    handover = Handover({KV: {n: 100 + n for n in range(5)}, SWA: {n: 200 + n for n in (2, 3, 4)}, LINEAR: {0: 300}})
    seen = []
    for end in (9, 16, 18):
        seen.append(step(manager, sequence, handover, end))
        handover.push_ended()
        finish(manager, sequence, end)
    assert seen == [{"KV": [0, 1]}, {"KV": [2, 3], "SWA": [2, 3]}, {"KV": [4], "SWA": [4], "LINEAR": [0]}]
    assert not any(handover.lacking.values())


def test_what_the_decode_side_has_is_never_sent() -> None:
    manager = books()
    sequence = computing(manager, 16)
    handover = Handover({KV: {3: 7, 4: 5}})
    assert step(manager, sequence, handover, 16) == {"KV": [3]}
    handover.push_ended()
    finish(manager, sequence, 16)
    assert step(manager, sequence, handover, 18) == {"KV": [4]}


def test_a_step_that_was_void_sends_again() -> None:
    manager = books()
    sequence = computing(manager, 16)
    handover = Handover({KV: {n: n for n in range(5)}})
    assert step(manager, sequence, handover, 16) == step(manager, sequence, handover, 16) == {"KV": [0, 1, 2, 3]}


def test_what_is_to_be_read_is_named_by_the_same_numbers_once_all_is_computed() -> None:
    """D11, D12. Each type by its own mapping; the draft model's blocks have the target's numbers."""
    manager = books(KV, SWA, LINEAR)
    sequence = computing(manager, 18)
    manager.move_states(sequence, 18)
    finish(manager, sequence, 18)
    handover = Handover({KV: {1: 9, 4: 8}, SWA: {3: 7}, LINEAR: {0: 6}})
    source = places_of(handover.source(sequence))
    held = sequence.held
    assert source == {
        KV: {1: held[KV].block(1), 4: held[KV].block(4)},
        SWA: {3: held[SWA].block(3)},
        LINEAR: {0: sequence.states[18]},
    }


def test_a_block_that_is_not_held_is_never_sent() -> None:
    manager = books(KV, SWA)
    sequence = computing(manager, 18)
    finish(manager, sequence, 18)
    with pytest.raises(InvariantError, match="block 0 of type SWA"):
        Handover({SWA: {0: 3}}).source(sequence)


def test_a_mapping_that_names_a_type_or_a_number_twice_is_refused() -> None:
    """D13. Nothing of it is used."""
    good = numbered({KV: {0: 5, 1: 6}, SWA: {1: 2}})
    assert places_of(good) == {KV: {0: 5, 1: 6}, SWA: {1: 2}}
    for bad in (
        [*good, *numbered({KV: {2: 7}})],
        [NumberedBlocks("KV", ints([1, 1]), ints([5, 6]))],
        [NumberedBlocks("KV", ints([1, 2]), ints([5]))],
        [NumberedBlocks("C4", ints([1]), ints([5]))],
    ):
        with pytest.raises(ValueError, match=r"twice|not a valid BlockType"):
            places_of(bad)


# ------------------------------------------------------------------------------------------- the decode role


class Links:
    """Takes what is said to peers."""

    def named(self, name: str) -> str:
        return name

    def __init__(self, *incarnations: str) -> None:
        self.said: list[Any] = []
        self.lost: list[str] = []
        self.refusals: list[str] = []
        self.linked = [
            SimpleNamespace(incarnation=name, address=name, load=Heartbeat(0, 0, 0)) for name in incarnations
        ]

    def say_hello(self) -> None:
        pass

    def send(self, _peer: str, message: Any) -> None:
        self.said.append(message)

    def lose(self, peer: str, _why: str, *, uncertain: bool = False) -> None:
        self.lost.append(peer)


class Decode:
    """A decode role with its books and its scheduler, to which `p` speaks."""

    def __init__(self, mode: str, *types: BlockType, num_workers: int = 1) -> None:
        config = EngineConfig(model="x", enable_disagg_pd=True, instance_role="DECODE", kv_cache_transfer_mode=mode)
        self.link = Link()
        self.link.num_workers = num_workers
        self.manager = books(*types, link=self.link)
        self.scheduler = Scheduler(self.manager, max_tokens=64, max_seqs=8, chunk_tokens=64)
        self.links = Links()
        self.role = DecodeRole(config, self.scheduler, self.links, RequestLimits(self.scheduler, 1000, 1000, 100))  # type: ignore[arg-type]

    def hear(self, *messages: Any) -> list[Any]:
        """What is said in return."""
        self.links.said.clear()
        for message in messages:
            self.role.on_pull_done(message) if isinstance(message, PullDone) else self.role.on_event(
                message if isinstance(message, PeerEvent) else PeerEvent("p", message)
            )
        self.role.poll(settled=True)
        return list(self.links.said)

    def place(self) -> Places:
        new = NewRequest(AddRequest("r", ints(PROMPT), SamplingSpec(), 5), ints([]))
        (answer,) = self.hear(AddNewRequests([new]))
        assert isinstance(answer, Allocated) and answer.error is None
        return places_of(answer.blocks)

    def first(self, source: Places | None = None, mode: str = "") -> list[Any]:
        mode = mode or ("PULL" if source is not None else "PUSH")
        return self.hear(FirstGeneration("r", 7, mode, None, ints([]), numbered(source or {})))

    @property
    def pulls(self) -> list[PullBlocks]:
        return [message for message in self.link.sent if isinstance(message, PullBlocks)]


def test_pushed_blocks_are_taken_as_they_are_and_the_request_generates_behind_its_first_token() -> None:
    """D17. Nothing is read, and nothing waits."""
    decode = Decode("PUSH")
    decode.place()
    assert decode.first() == [FirstGenerationDone("r")]
    assert not decode.pulls
    plan = decode.scheduler.schedule()
    assert plan is not None and isinstance(plan.plan, Forward) and not plan.plan.prefill
    (row,) = plan.plan.decode
    assert row.start == len(PROMPT) and row.token_ids.tolist() == [7] and row.draw == 1


def test_a_pull_reads_all_that_is_lacking_in_one_plan_and_the_request_waits_for_every_rank() -> None:
    """D11, D17. Each type by its own mapping."""
    decode = Decode("PULL", KV, SWA, LINEAR, num_workers=2)
    places = decode.place()
    source = {kind: {number: 40 + number for number in found} for kind, found in places.items()}
    assert decode.first(source) == []
    (pull,) = decode.pulls
    assert {one.block_type: (one.local.tolist(), one.remote.tolist()) for one in pull.target_mappings} == {
        kind.value: (list(places[kind].values()), list(source[kind].values())) for kind in places
    }
    assert decode.hear(PullDone(pull.pull_id, 0)) == [] and not decode.scheduler.arriving
    assert decode.hear(PullDone(pull.pull_id, 1)) == [FirstGenerationDone("r")]
    assert not decode.scheduler.arriving, "the source may have been let go of while it was read"
    assert decode.hear(Release("r")) == []
    assert len(decode.scheduler.arriving) == 1


def test_a_pull_that_failed_on_one_rank_is_answered_with_why_and_its_blocks_are_free() -> None:
    """D17, the half of it that is not about success."""
    decode = Decode("PULL", num_workers=2)
    places = decode.place()
    decode.first({KV: {number: 40 + number for number in places[KV]}})
    (pull,) = decode.pulls
    assert decode.hear(PullDone(pull.pull_id, 0)) == []
    (done,) = decode.hear(PullDone(pull.pull_id, 1, "the peer is gone"))
    assert done.request_id == "r" and "the peer is gone" in done.error
    assert not decode.scheduler.arriving and decode.manager.pools.first.device.num_pinned == 0
    decode.manager.check()


def wrong_sources(places: Places) -> Iterator[Places]:
    right = {number: 40 + number for number in places[KV]}
    yield {}
    yield {KV: {number: block for number, block in right.items() if number != 2}}
    yield {KV: right | {9: 49}}
    yield {KV: right, SWA: {1: 4}}


@pytest.mark.parametrize("which", range(4))
def test_blocks_to_read_that_are_not_those_that_are_lacking_are_refused_before_any_byte_moves(which: int) -> None:
    """D13, D16. Too few, too many, other types."""
    decode = Decode("PULL")
    (done,) = decode.first(list(wrong_sources(decode.place()))[which], "PULL")
    assert "not those that are lacking" in done.error
    assert not decode.pulls and decode.manager.pools.first.device.num_pinned == 0


def test_a_first_token_nobody_waits_for_and_another_mode_are_refused() -> None:
    decode = Decode("PUSH")
    (done,) = decode.first()
    assert done.error == "the request is not known here"
    decode.place()
    (done,) = decode.first(mode="PULL")
    assert "PULL at prefill and PUSH at decode" in done.error
    assert decode.manager.pools.first.device.num_pinned == 0


def test_requests_that_share_a_prefix_are_placed_one_after_the_other_and_others_pass_them() -> None:
    decode = Decode("PUSH")
    news = [
        NewRequest(AddRequest(name, ints(tokens), SamplingSpec(), 5), ints([]))
        for name, tokens in (("r", PROMPT), ("same", PROMPT), ("other", PROMPT[::-1]))
    ]
    assert [answer.request_id for answer in decode.hear(AddNewRequests(news))] == ["r", "other"]
    done, allocated = decode.first()
    assert done == FirstGenerationDone("r")
    assert allocated.request_id == "same" and allocated.remote_shared_num == 4
    assert numbers(places_of(allocated.blocks)) == {KV: [4]}


def test_a_lost_prefill_instance_leaves_its_blocks_with_nobody_until_its_writes_must_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("xllm_hier.engine.pair.decode.time.monotonic", lambda: now[0])
    decode = Decode("PUSH")
    decode.place()
    decode.hear(PeerEvent("p", why="no sign of life"))
    now[0] += 1000
    decode.hear()
    assert decode.manager.pools.first.device.num_pinned == 5, "it may still go on where it stopped"
    decode.hear(PeerEvent("p", why="its process has ended", gone=True))
    assert decode.manager.pools.first.device.num_pinned == 5
    now[0] += 21
    decode.role.poll(settled=False)
    assert decode.manager.pools.first.device.num_pinned == 5, "this process was away: what came meanwhile comes now"
    now[0] += 21
    decode.hear()
    assert decode.manager.pools.first.device.num_pinned == 0
    decode.manager.check()


def test_what_is_read_is_nobody_elses_business_when_its_source_is_lost() -> None:
    decode = Decode("PULL")
    decode.place()
    decode.hear(PeerEvent("p", why="no sign of life"))
    assert decode.manager.pools.first.device.num_pinned == 0


def test_an_alarm_of_the_audit_leaves_nobody_with_blocks_found_before_it() -> None:
    """What is placed is asked back, once for each alarm; what has arrived begins anew, from nothing that was cached."""
    decode = Decode("PUSH")
    leave(decode.manager, PROMPT[:8])
    decode.place()
    decode.scheduler.auditor.alarm = True
    (cancel,) = decode.hear()
    assert isinstance(cancel, Cancel) and cancel.request_id == "r" and decode.hear() == []
    decode = Decode("PUSH")
    leave(decode.manager, PROMPT[:8])
    decode.place()
    decode.first()
    (arrived,) = decode.scheduler.arriving
    decode.scheduler.auditor.alarm = True
    decode.scheduler._drop_restored()
    assert not decode.scheduler.arriving and not decode.scheduler.running and arrived not in decode.scheduler.waiting
    (output,) = decode.scheduler.take_outputs()
    assert output.finish_reason == "error" and "audit" in (output.error or "")


# ------------------------------------------------------------------------------------------ the prefill role


class Prefill:
    """A prefill role whose one request is placed at `d`, and the step that computes and sends it."""

    def __init__(self) -> None:
        config = EngineConfig(model="x", enable_disagg_pd=True, instance_role="PREFILL", decode_instances="127.0.0.1:1")
        self.scheduler = Scheduler(books(), max_tokens=64, max_seqs=8, chunk_tokens=64, hands_over=True)
        self.links = Links("d")
        self.role = PrefillRole(config, self.scheduler, self.links)  # type: ignore[arg-type]
        self.scheduler.add_request(AddRequest("r", ints(PROMPT), SamplingSpec(), 5))
        self.role.poll(settled=True)
        (asked,) = self.links.said
        assert isinstance(asked, AddNewRequests) and not self.scheduler.waiting, "not before it has a place"
        places = numbered({KV: {number: 40 + number for number in range(5)}})
        self.role.on_event(PeerEvent("d", Allocated("r", places)))
        step = self.scheduler.schedule()
        assert step is not None
        self.role.begin_step(step)
        (self.push,) = step.plan.pushes
        self.step = step
        self.links.said.clear()


@pytest.mark.parametrize(("certain", "lost"), [(True, []), (False, ["d"])])
def test_a_forward_that_failed_is_no_fault_of_the_peers_unless_something_may_still_be_written(
    certain: bool, lost: list[str]
) -> None:
    prefill = Prefill()
    assert prefill.push.peer == "d" and prefill.push.target_mappings[0].remote.tolist() == [40, 41, 42, 43, 44]
    prefill.role.pushes_ended([PushFailure(prefill.push.push_id, "the forward failed", certain)], void=True)
    prefill.scheduler.fail_step(prefill.step, "boom")
    prefill.role.poll(settled=True)
    assert prefill.links.lost == lost
    assert prefill.links.said == [Cancel("r", "it is over")]
    (output,) = prefill.scheduler.take_outputs()
    assert (output.finish_reason, output.error) == ("error", "boom")


def test_a_push_that_failed_gives_the_peer_up_and_its_requests_seek_another_place() -> None:
    prefill = Prefill()
    prefill.role.pushes_ended([PushFailure(prefill.push.push_id, "refused", True)], void=False)
    assert prefill.links.lost == ["d"]
    prefill.links.linked.clear()
    output = ForwardOutput(prefill.step.plan.step_id, 0, ints([7]), [None], [], [], 0.1, 0.0)
    prefill.role.step_ended(prefill.scheduler.finish(prefill.step, output))
    prefill.role.poll(settled=True)
    assert not prefill.scheduler.running and not prefill.scheduler.waiting
    prefill.links.linked.append(SimpleNamespace(incarnation="e", address="e", load=Heartbeat(0, 0, 0)))
    prefill.links.said.clear()
    time.sleep(0.11)  # a pause between two looks around
    prefill.role.poll(settled=True)
    (asked,) = prefill.links.said
    assert asked.requests[0].generated.tolist() == [7], "what was generated is not asked for again"
