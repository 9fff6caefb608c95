"""The service follows an engine's events: what it knows is what is there, or it says that it may not be."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from xllm_hier.block import BlockType
from xllm_hier.config import EngineConfig
from xllm_hier.embedded_store import free_ports
from xllm_hier.engine import publisher as kv_publisher
from xllm_hier.engine.blocks.journal import CacheJournal
from xllm_hier.engine.blocks.types import TypePools
from xllm_hier.engine.publisher import KvPublisher
from xllm_hier.figures import TypeSizes
from xllm_hier.kv_events import Cleared, EventBatch, InstanceLoad
from xllm_hier.registry import InstanceInfo
from xllm_hier.service.kv_event_stream import KvEventStream
from xllm_hier.service.prefix_index import IndexState, PrefixIndex

KV = BlockType.KV
NAME = "10.0.0.1:8010"


class Engine:
    """Pools whose journal is published by a thread, as an engine's loop would; `change` works between two ticks."""

    def __init__(self, incarnation: str = "a", events: int = 0, replay: int = 0) -> None:
        self.pools = TypePools(TypeSizes("KV", 0, 64, 64, 1), 4)
        journal = CacheJournal(4)
        journal.watch({KV: self.pools})
        self._context = zmq.Context()
        config = EngineConfig(
            enable_kv_events=True, heart_beat_interval=0.05, kv_events_port=events, kv_events_replay_port=replay
        )
        self.publisher = KvPublisher(self._context, config, journal, [KV], incarnation, load=InstanceLoad(num_open=1))
        self.incarnation = incarnation
        self._lock = threading.Lock()
        self.silent = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            if not self.silent.is_set():
                with self._lock:
                    self.publisher.tick(InstanceLoad(num_open=1) if self.publisher.heartbeat_due else None)

    def change(self, what: Callable[[], Any]) -> None:
        with self._lock:
            what()

    def store(self, *numbers: int, tier: str = "device") -> None:
        def publish() -> None:
            pool = self.pools.tiers[tier]
            for number in numbers:
                (block,) = pool.allocate(1) or [-1]
                assert pool.publish(block, hashed(number), hashed(number - 1))
                pool.unpin([block])

        self.change(publish)

    @property
    def info(self) -> InstanceInfo:
        return InstanceInfo(
            name=NAME,
            rpc_address=NAME,
            incarnation_id=self.incarnation,
            register_ts_ms=1,
            type=0,
            block_size=4,
            types=[["KV", 0]],
            events=self.publisher.events_address,
            replay=self.publisher.replay_address,
        )

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.publisher.close()
        self._context.destroy(linger=0)


def hashed(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Listener:
    """An index that follows one engine."""

    def __init__(self, index: PrefixIndex, stream: KvEventStream, batches: list[EventBatch]) -> None:
        self.index, self.stream, self.batches = index, stream, batches

    def known(self, tier: str = "device") -> int:
        return int(self.index.describe()["instances"].get(NAME, {}).get(tier, {}).get("KV", 0))

    @property
    def state(self) -> IndexState:
        return self.index.state(NAME)

    async def until(self, what: Callable[[], Any], limit_s: float = 30.0) -> None:
        end = asyncio.get_running_loop().time() + limit_s
        while not what():
            assert asyncio.get_running_loop().time() < end, f"{self.state}, {self.known()} blocks"
            await asyncio.sleep(0.005)


class HearsFirst(KvEventStream):
    """Asks for its snapshot once batches come in: there is no gap before its subscription has reached the engine."""

    def _open(self, kind: int, address: str) -> Any:
        socket = super()._open(kind, address)
        if kind == zmq.SUB:
            self._events = socket
        return socket

    async def _snapshot(self) -> None:
        await self._events.poll()
        await super()._snapshot()


@asynccontextmanager
async def following(info: InstanceInfo, kind: type[KvEventStream] = KvEventStream) -> AsyncIterator[Listener]:
    context, index, batches = zmq.asyncio.Context(), PrefixIndex(), list[EventBatch]()
    stream = kind(context, info, index, batches.append, silence_s=0.3)
    task = asyncio.create_task(stream.run())
    try:
        yield Listener(index, stream, batches)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine()
    yield found
    found.close()


def test_what_was_there_before_is_known_after_the_join(engine: Engine) -> None:
    engine.store(1, 2, 3)
    engine.store(9, tier="host")

    async def story() -> None:
        async with following(engine.info) as listener:
            await listener.until(lambda: listener.state is IndexState.EXACT)
            assert (listener.known(), listener.known("host")) == (3, 1)

    asyncio.run(story())


def test_what_comes_and_goes_is_followed(engine: Engine) -> None:
    async def story() -> None:
        async with following(engine.info, HearsFirst) as listener:
            await listener.until(lambda: listener.state is IndexState.EXACT)
            engine.store(*range(1, 11))
            await listener.until(lambda: listener.known() == 10)
            engine.change(engine.pools.device.clear)
            await listener.until(lambda: listener.known() == 0)
            assert listener.stream.num_gaps == 0 and listener.batches[-1].load in (None, InstanceLoad(num_open=1))

    asyncio.run(story())


def test_a_gap_is_noticed_and_filled_from_what_the_engine_keeps(engine: Engine) -> None:
    async def story() -> None:
        async with following(engine.info, HearsFirst) as listener:
            await listener.until(lambda: listener.state is IndexState.EXACT)
            engine.store(1)
            await listener.until(lambda: listener.known() == 1)
            engine.change(lambda: setattr(engine.publisher, "_publish", Losing(engine.publisher._publish, 3)))
            for number in (2, 3, 4, 5):
                engine.store(number)
                await asyncio.sleep(0.02)
            await listener.until(lambda: listener.known() == 5 and listener.state is IndexState.EXACT)
            assert listener.stream.num_gaps == 1

    asyncio.run(story())


class Losing:
    """A socket whose next `count` messages reach nobody."""

    def __init__(self, socket: Any, count: int) -> None:
        self._socket, self._left = socket, count

    def send_multipart(self, frames: list[bytes]) -> None:
        self._left -= 1
        if self._left < 0:
            self._socket.send_multipart(frames)

    def close(self) -> None:
        self._socket.close()


def test_a_batch_that_the_snapshot_has_already_is_not_taken_once_more(engine: Engine) -> None:
    """Else what was removed and stored again since would be removed again."""

    async def story() -> None:
        async with following(engine.info) as listener:
            engine.store(1)
            await listener.until(lambda: listener.known() == 1)
            await listener.stream._take(0, EventBatch(0.0, [Cleared()], "a"))
            assert listener.known() == 1

    asyncio.run(story())


def test_a_gap_longer_than_what_is_kept_costs_a_snapshot(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with following(engine.info) as listener:
            await listener.until(lambda: listener.state is IndexState.EXACT)

            def lose_and_forget() -> None:
                engine.publisher._publish = Losing(engine.publisher._publish, 4)  # type: ignore[assignment]
                engine.publisher.kept = kv_publisher.deque(maxlen=2)

            engine.change(lose_and_forget)
            for number in range(1, 7):
                engine.store(number)
                await asyncio.sleep(0.02)
            await listener.until(lambda: listener.known() == 6 and listener.state is IndexState.EXACT)

    asyncio.run(story())


def test_an_engine_that_falls_silent_makes_the_index_stale_and_exact_again(engine: Engine) -> None:
    async def story() -> None:
        async with following(engine.info) as listener:
            engine.store(1)
            await listener.until(lambda: listener.state is IndexState.EXACT and listener.known() == 1)
            engine.silent.set()
            await listener.until(lambda: listener.state is IndexState.STALE)
            assert listener.known() == 1  # what is known is used on
            engine.silent.clear()
            await listener.until(lambda: listener.state is IndexState.EXACT)

    asyncio.run(story())


def test_an_engine_that_was_never_heard_of_is_unknown() -> None:
    gone = Engine()
    info = gone.info
    gone.close()

    async def story() -> None:
        async with following(info) as listener:
            await asyncio.sleep(0.5)
            assert listener.state is IndexState.UNKNOWN

    asyncio.run(story())


def test_nothing_of_another_process_on_the_same_address_is_taken() -> None:
    events, replay = free_ports(2)
    first = Engine("a", events, replay)
    info = first.info
    first.store(1, 2)

    async def story() -> None:
        async with following(info) as listener:
            await listener.until(lambda: listener.known() == 2)
            first.close()
            second = Engine("b", events, replay)
            try:
                second.store(*range(20, 30))
                await listener.until(lambda: listener.known() == 0)
                await asyncio.sleep(0.5)
                assert listener.state is IndexState.UNKNOWN and listener.known() == 0
                assert all(batch.incarnation == "a" for batch in listener.batches)
            finally:
                second.close()

    asyncio.run(story())


def test_a_snapshot_of_many_parts_is_taken_while_blocks_come_and_go(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_publisher, "_PART_BLOCKS", 2)
    engine.store(*range(1, 61))

    async def story() -> None:
        async with following(engine.info, HearsFirst) as listener:
            for number in range(100, 140):
                engine.store(number)  # evicts an older one, once all 64 are taken
                await asyncio.sleep(0.002)
            await listener.until(lambda: listener.state is IndexState.EXACT)
            known = listener.index._instances[NAME].blocks["device"]
            await listener.until(lambda: known[KV] == engine.pools.device.hashes())
            assert listener.stream.num_gaps == 0

    asyncio.run(story())


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_lost_on_the_way_the_index_is_exact_in_the_end(engine: Engine, seed: int) -> None:
    dice = random.Random(seed)

    async def story() -> None:
        async with following(engine.info) as listener:
            number = 0
            for _ in range(40):
                act = dice.random()
                if act < 0.7:
                    engine.store(*range(number + 1, number + 1 + (count := dice.randrange(1, 9))))
                    number += count
                elif act < 0.85:
                    count = dice.randrange(1, 4)
                    engine.change(
                        lambda count=count: setattr(
                            engine.publisher, "_publish", Losing(engine.publisher._publish, count)
                        )
                    )
                else:
                    engine.change(lambda: engine.publisher.kept.clear())
                await asyncio.sleep(dice.random() * 0.01)
            there = engine.pools.device.hashes()
            known = listener.index._instances
            await listener.until(lambda: known[NAME].blocks["device"].get(KV) == there)
            await listener.until(lambda: listener.state is IndexState.EXACT)
            assert known[NAME].blocks["device"].get(KV) == there

    asyncio.run(story())
