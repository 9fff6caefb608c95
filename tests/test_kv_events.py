"""Cache events: what pools tell is what is published, in vLLM's form, and nobody who listens misses any of it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq
from simulated_workers import Faults, Simulation

from xllm_hier.block import BlockType
from xllm_hier.config import EngineConfig
from xllm_hier.engine import publisher as kv_publisher
from xllm_hier.engine.blocks.journal import CacheJournal
from xllm_hier.engine.blocks.pool import BlockPool
from xllm_hier.engine.blocks.sequence import Sequence
from xllm_hier.engine.blocks.types import TypePools
from xllm_hier.engine.publisher import KvPublisher
from xllm_hier.errors import ConfigError, StartupError, WireError
from xllm_hier.figures import TypeSizes
from xllm_hier.ints import ints
from xllm_hier.kv_events import (
    END,
    SNAPSHOT,
    Cleared,
    Event,
    EventBatch,
    InstanceLoad,
    Removed,
    Stored,
    pack_batch,
    unpack_batch,
)
from xllm_hier.request_messages import AddRequest, SamplingSpec

KV, SWA = BlockType.KV, BlockType.SWA
BLOCK = 4


def hashed(number: int) -> bytes:
    return number.to_bytes(16, "big")


# ------------------------------------------------------------------------------------------------ the wire


BATCH = EventBatch(
    12.5,
    [
        Stored("device", KV, [hashed(1), hashed(2)], None, [1, 2, 3, 4, 5, 6, 7, 8], BLOCK),
        Stored("host", SWA, [hashed(2)], hashed(1), [5, 6, 7, 8], BLOCK, "ab12"),
        Stored("store", KV, [hashed(2)], hashed(1)),
        Removed("device", KV, [hashed(2), hashed(1)]),
        Cleared(),
    ],
    "incarnation",
    InstanceLoad(num_open=3),
)


def test_a_batch_is_read_back_as_it_was_packed() -> None:
    assert unpack_batch(pack_batch(BATCH, [KV, SWA])) == BATCH


def test_a_batch_has_the_form_that_vllm_publishes() -> None:
    raw = msgpack.unpackb(pack_batch(BATCH, [KV, SWA]))
    ts, events, rank, *ours = raw  # vLLM 0.26: [time, events, data parallel rank], what follows is ignored
    assert (ts, rank, ours) == (12.5, 0, ["incarnation", vars(InstanceLoad(num_open=3))])
    stored, other_type, _, removed, cleared = events
    assert stored == {
        "type": "BlockStored",
        "block_hashes": [hashed(1), hashed(2)],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
        "block_size": BLOCK,
        "lora_id": None,
        "lora_name": None,
        "medium": "GPU",
        "extra_keys": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    assert (other_type["medium"], other_type["group_idx"], other_type["extra_keys"]) == ("CPU", 1, [["ab12"]])
    assert removed["type"] == "BlockRemoved" and removed["block_hashes"] == [hashed(2), hashed(1)]
    assert cleared == {"type": "AllBlocksCleared"}


GOOD = msgpack.unpackb(pack_batch(BATCH, [KV, SWA]))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb([]),
        msgpack.packb([1.0, [], 0]),  # vLLM's own: it does not say whose it is
        msgpack.packb([1.0, [], 0, None, None]),
        msgpack.packb([1.0, [GOOD[1][0] | {"type": "Other"}], 0, "a", None]),
        msgpack.packb([1.0, [GOOD[1][0] | {"medium": "TAPE"}], 0, "a", None]),
        msgpack.packb([1.0, [GOOD[1][0] | {"block_hashes": 7}], 0, "a", None]),
        msgpack.packb([1.0, [["BlockStored"]], 0, "a", None]),
        msgpack.packb([1.0, 5, 0, "a", None]),
    ],
)  # fmt: skip
def test_what_is_no_batch_is_an_error_that_can_be_caught(raw: bytes) -> None:
    with pytest.raises(WireError):
        unpack_batch(raw)


# --------------------------------------------------------------------------------------------- the journal


def sequence_of(tokens: list[int], salt: str = "") -> Sequence:
    request = AddRequest("r", ints(tokens), SamplingSpec(), 1, cache_salt=salt)
    return Sequence(request, BLOCK, False)


class OnePool:
    """A journal over the pools of one type, and a hand that publishes blocks of sequences."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.journal = CacheJournal(BLOCK)
        self.pools = TypePools(TypeSizes("KV", 0, num_blocks, num_blocks, 1), BLOCK)
        self.journal.watch({KV: self.pools})

    def store(self, pool: BlockPool, sequence: Sequence, index: int) -> int:
        (block,) = pool.allocate(1) or [-1]
        self.journal.learn(sequence, index)
        assert pool.publish(block, sequence.hash_of(index), sequence.parent_of(index))
        return block


def test_blocks_behind_each_other_are_one_event_with_their_tokens() -> None:
    one, prompt = OnePool(), sequence_of(list(range(10)))
    for index in range(2):
        one.store(one.pools.device, prompt, index)
    first, second = prompt.hash_of(0), prompt.hash_of(1)
    assert one.journal.take() == [Stored("device", KV, [first, second], None, list(range(8)), BLOCK)]
    assert one.journal.take() == []


def test_another_tier_another_prompt_and_a_gap_are_events_of_their_own() -> None:
    one, prompt, other = OnePool(), sequence_of(list(range(12))), sequence_of([9] * 4, "salt")
    for pool, sequence, index in (
        (one.pools.device, prompt, 0),
        (one.pools.host, prompt, 1),
        (one.pools.host, other, 0),
        (one.pools.host, prompt, 2),
    ):
        one.store(pool, sequence, index)
    events = one.journal.take()
    assert [(event.tier, event.hashes, event.parent) for event in events if isinstance(event, Stored)] == [
        ("device", [prompt.hash_of(0)], None),
        ("host", [prompt.hash_of(1)], prompt.hash_of(0)),
        ("host", [other.hash_of(0)], None),
        ("host", [prompt.hash_of(2)], prompt.hash_of(1)),
    ]
    salted = events[2]
    assert isinstance(salted, Stored) and salted.extra and "salt" not in salted.extra


def test_eviction_clearing_and_withdrawing_are_told() -> None:
    one, prompt = OnePool(2), sequence_of(list(range(12)))
    device = one.pools.device
    blocks = [one.store(device, prompt, index) for index in range(2)]
    device.unpin(blocks)
    one.journal.take()
    device.allocate(1)
    assert one.journal.take() == [Removed("device", KV, [prompt.hash_of(1)])]  # leaves before heads
    device.clear()
    assert one.journal.take() == [Removed("device", KV, [prompt.hash_of(0)])]


def test_what_no_tier_has_any_more_is_forgotten() -> None:
    one, prompt = OnePool(), sequence_of(list(range(12)))
    one.store(one.pools.device, prompt, 0)
    one.store(one.pools.host, prompt, 0)
    one.journal.learn(prompt, 1)  # it was to be stored, and was not
    one.journal.take()
    assert list(one.journal._contents) == [prompt.hash_of(0)]
    one.pools.device.clear()
    one.journal.take()
    assert list(one.journal._contents) == [prompt.hash_of(0)]
    one.pools.host.clear()
    one.journal.take()
    assert not one.journal._contents and not one.journal._holders


class Mirror:
    """What a listener knows: blocks by tier and type."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, BlockType], set[bytes]] = {}

    def apply(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self.blocks.clear()
            elif isinstance(event, Stored):
                known = self.blocks.setdefault((event.tier, event.block_type), set())
                assert not known & set(event.hashes) or event.tier == "store", "stored twice"
                known |= set(event.hashes)
            else:
                known = self.blocks.setdefault((event.tier, event.block_type), set())
                assert known >= set(event.hashes) or event.tier == "store", "removed what was not there"
                known -= set(event.hashes)


def test_what_was_written_to_the_store_is_told_once_every_rank_has_written_it() -> None:
    journal = CacheJournal(BLOCK)
    simulation = Simulation(num_workers=2, journal=journal)
    simulation.ask(list(range(8)), 1)
    stored = [event.hashes for event in journal.take() if isinstance(event, Stored) and event.tier == "store"]
    assert sum(map(len, stored)) == 2
    simulation = Simulation(num_workers=2, journal=journal, faults=Faults(put=1.0))
    simulation.ask(list(range(8)), 1)
    assert not [event for event in journal.take() if isinstance(event, Stored) and event.tier == "store"]


@pytest.mark.parametrize("seed", range(6))
def test_a_listener_knows_at_every_step_what_the_pools_have(seed: int) -> None:
    """A whole engine with failing loads, offloads, puts and reads; the snapshot says the same as all events."""
    dice, journal, mirror = random.Random(seed), CacheJournal(BLOCK), Mirror()
    faults = Faults(load=0.05, offload=0.05, put=0.2, unreadable=0.1)
    simulation = Simulation(seed=seed, faults=faults, journal=journal, share=0.6)
    pools = simulation.manager.pools[KV]
    prompts = [[dice.randrange(50) for _ in range(dice.randrange(4, 20))] for _ in range(6)]
    for _ in range(150):
        if dice.random() < 0.3:
            simulation.add(dice.choice(prompts) + [dice.randrange(50)] * dice.randrange(4), dice.randrange(1, 6))
        if dice.random() < 0.02:
            simulation.manager.clear(dice.choice(["device", "host"]))
        simulation.step()
        mirror.apply(journal.take())
        for tier in ("device", "host"):
            assert mirror.blocks.get((tier, KV), set()) == pools.tiers[tier].hashes()
        assert mirror.blocks.get(("store", KV), set()) <= set(simulation.workers.store), "told of what is not there"
    assert all(mirror.blocks[tier, KV] for tier in ("device", "host", "store")), "nothing was seen of a tier"
    anew = Mirror()
    for part in journal.snapshot(3):
        assert sum(len(event.hashes) for event in part if isinstance(event, Stored)) <= 3
        anew.apply(part)
    for tier in ("device", "host"):
        assert anew.blocks.get((tier, KV), set()) == mirror.blocks[tier, KV]


# ------------------------------------------------------------------------------------------- the publisher


class Talk:
    """A publisher and somebody who listens and asks, both in this thread."""

    def __init__(self, publisher: KvPublisher, one: OnePool) -> None:
        self.publisher, self.one = publisher, one
        self.context = zmq.Context()
        self.subscriber = self.context.socket(zmq.SUB)
        self.subscriber.subscribe(b"")
        self.subscriber.connect(f"tcp://{publisher.events_address}")
        self.questions = self.context.socket(zmq.DEALER)
        self.questions.connect(f"tcp://{publisher.replay_address}")

    def ask(self, question: bytes) -> list[tuple[int, EventBatch]]:
        self.questions.send_multipart([b"", question])
        answer: list[tuple[int, EventBatch]] = []
        end = time.monotonic() + 30
        while time.monotonic() < end:
            self.publisher.tick()
            if self.questions.poll(5):
                _, number, payload = self.questions.recv_multipart()
                if number == END:
                    return answer
                answer.append((int.from_bytes(number, "big"), unpack_batch(payload)))
        raise AssertionError("no answer")


@pytest.fixture
def talk() -> Iterator[Talk]:
    one, context = OnePool(), zmq.Context()
    config = EngineConfig(enable_kv_events=True, heart_beat_interval=60.0, peer_timeout_s=120.0)
    publisher = KvPublisher(context, config, one.journal, [KV], "me", load=InstanceLoad(num_open=7))
    both = Talk(publisher, one)
    yield both
    both.context.destroy(linger=0)
    publisher.close()
    context.destroy(linger=0)


def test_the_first_batch_says_that_nothing_is_left_of_an_earlier_process(talk: Talk) -> None:
    ((number, batch),) = talk.ask((0).to_bytes(8, "big"))
    assert (number, batch.events, batch.incarnation, batch.load) == (0, [Cleared()], "me", InstanceLoad(num_open=7))


def test_whoever_missed_batches_gets_them_once_more_and_who_missed_none_gets_none(talk: Talk) -> None:
    prompt = sequence_of(list(range(12)))
    for index in range(3):
        talk.one.store(talk.one.pools.device, prompt, index)
        talk.publisher.tick()
    assert [number for number, _ in talk.ask((2).to_bytes(8, "big"))] == [2, 3]
    assert talk.ask((4).to_bytes(8, "big")) == []
    hashes = [event.hashes for _, batch in talk.ask((1).to_bytes(8, "big")) for event in batch.events]  # type: ignore[union-attr]
    assert hashes == [[prompt.hash_of(0)], [prompt.hash_of(1)], [prompt.hash_of(2)]]


def test_a_snapshot_has_all_that_is_there_and_the_number_that_comes_next(talk: Talk) -> None:
    prompt, other = sequence_of(list(range(12))), sequence_of([1] * 4)
    for index in range(3):
        talk.one.store(talk.one.pools.device, prompt, index)
    talk.one.store(talk.one.pools.host, other, 0)
    (number, batch), (last, empty) = talk.ask(SNAPSHOT)
    assert number == last == 2 and not empty.events  # what was not sent yet is number 1
    assert batch.events == [
        Stored("device", KV, [prompt.hash_of(n) for n in range(3)], None, list(range(12)), BLOCK),
        Stored("host", KV, [other.hash_of(0)], None, [1] * 4, BLOCK),
    ]


def test_what_comes_and_goes_between_two_parts_of_a_snapshot_is_in_it_or_in_later_batches(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xllm_hier.engine.publisher._PART_BLOCKS", 1)
    prompt, late, device = sequence_of(list(range(20))), sequence_of([7] * 4), talk.one.pools.device
    blocks = [talk.one.store(device, prompt, index) for index in range(5)]
    talk.publisher.tick()
    talk.questions.send_multipart([b"", SNAPSHOT])
    end = time.monotonic() + 30
    while not talk.publisher.busy and time.monotonic() < end:
        talk.publisher.tick()
    device.withdraw(blocks[4])  # not sent yet
    device.withdraw(blocks[0])  # sent
    talk.one.store(device, late, 0)
    parts, mirror = [], Mirror()
    while not parts or parts[-1].events:
        talk.publisher.tick()
        while talk.questions.poll(5):
            _, number, payload = talk.questions.recv_multipart()
            if number != END:
                parts.append(unpack_batch(payload))
                first = int.from_bytes(number, "big")
    for part in parts:
        mirror.apply(part.events)
    assert prompt.hash_of(0) in mirror.blocks["device", KV] and prompt.hash_of(4) not in mirror.blocks["device", KV]
    removed: list[bytes] = []
    for number, payload in talk.publisher.kept:
        if number >= first:
            for event in unpack_batch(payload).events:
                removed += event.hashes if isinstance(event, Removed) else []
                known = mirror.blocks["device", KV]
                known |= set(event.hashes) if isinstance(event, Stored) else set()
                known -= set(event.hashes) if isinstance(event, Removed) else set()
    assert mirror.blocks["device", KV] == device.hashes() and len(removed) == 2


def test_an_empty_cache_has_a_snapshot_too(talk: Talk) -> None:
    ((number, batch),) = talk.ask(SNAPSHOT)
    assert (number, batch.events, batch.incarnation) == (1, [], "me")


@pytest.mark.parametrize("frames", [[b"x"], [b"", b"seven", b"more"], [b"", b"short"], [b""]])
def test_what_is_no_question_is_not_answered_and_harms_nobody(talk: Talk, frames: list[bytes]) -> None:
    talk.questions.send_multipart(frames)
    assert talk.ask((9).to_bytes(8, "big")) == []
    talk.publisher.tick()
    assert not talk.questions.poll(50)


def test_a_load_is_told_at_every_interval_also_when_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    one, context, now = OnePool(), zmq.Context(), 0.0
    monkeypatch.setattr(kv_publisher, "now", lambda: now)
    config = EngineConfig(enable_kv_events=True, heart_beat_interval=1.0)
    publisher = KvPublisher(context, config, one.journal, [KV], "me", load=InstanceLoad(num_open=7))
    try:
        for step in range(49):
            now = step / 8
            publisher.tick(InstanceLoad(num_open=7) if publisher.heartbeat_due else None)
        assert [unpack_batch(payload).load for _, payload in publisher.kept] == [InstanceLoad(num_open=7)] * 7
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_a_taken_port_is_an_error_that_names_it() -> None:
    context = zmq.Context()
    try:
        with context.socket(zmq.PUB) as taken:
            port = taken.bind_to_random_port("tcp://127.0.0.1")
            config = EngineConfig(enable_kv_events=True, kv_events_port=port)
            with pytest.raises(StartupError, match=f"kv_events_port {port}"):
                KvPublisher(context, config, CacheJournal(BLOCK), [KV], "me", load=InstanceLoad())
    finally:
        context.destroy(linger=0)


def test_settings_that_contradict_each_other_are_refused_by_name() -> None:
    for settings, name in (
        ({"kv_events_port": 5557, "kv_events_replay_port": 5557}, "kv_events_replay_port"),
        ({"etcd_addr": "127.0.0.1:1", "host": "0.0.0.0"}, "advertise_host"),
        ({"etcd_addr": "http://127.0.0.1:1"}, "etcd_addr"),
        ({"etcd_addr": "127.0.0.1:1", "etcd_ttl": 0}, "etcd_ttl"),
    ):
        with pytest.raises(ConfigError) as caught:
            EngineConfig(**settings)  # type: ignore[arg-type]
        assert caught.value.name == name


def test_random_events_survive_the_wire() -> None:
    dice = random.Random(1)
    for _ in range(50):
        events: list[Event] = []
        for _ in range(dice.randrange(4)):
            tier, kind = dice.choice(["device", "host", "store"]), dice.choice(list(BlockType))
            hashes = [dice.randbytes(16) for _ in range(dice.randrange(1, 4))]
            stored = Stored(tier, kind, hashes, dice.choice([None, dice.randbytes(16)]), [7] * dice.randrange(5), 4)
            events.append(dice.choice([stored, Removed(tier, kind, hashes), Cleared()]))
        more: dict[str, Any] = {"load": dice.choice([None, InstanceLoad(compute_s=0.5)])}
        batch = EventBatch(dice.random(), events, "x" * dice.randrange(3), **more)
        assert unpack_batch(pack_batch(batch, list(BlockType))) == batch
