"""One replica's view of its cluster, kept up to date by tasks: registry, streams of events, probes.

Replicas are equal: each follows all instances by itself and can route every request. One of them is the master, by the
first key in the registry; should it die, the next one that sees the key gone takes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import aiohttp
import zmq.asyncio

from ..clock import now
from ..kv_events import EventBatch, InstanceLoad
from ..registry import MASTER, Etcd, Membership, instances_of, replica_key
from .config import ServiceConfig
from .instances import Instance, Instances
from .kv_event_stream import KvEventStream, rules_of
from .policies import Candidate, Router
from .prefix_index import PrefixIndex
from .store_watch import StoreWatch

log = logging.getLogger("xllm.service")

_TICK_S = 0.1
_PROBES = 2
_FIRST_ROUND_S = 10.0
_Item = TypeVar("_Item")


class Cluster:
    """Instances, index and router of one replica, from `async with` on; `rpc_address` is where it is reached.

    Raises:
        ConfigError: the address of etcd is none.
    """

    def __init__(self, config: ServiceConfig, rpc_address: str) -> None:
        self.config, self.rpc_address = config, rpc_address
        self.index = PrefixIndex()
        self.router = Router(
            config.load_balance_policy,
            self.index,
            target_ttft_s=config.target_ttft / 1000,
            target_tpot_s=config.target_tpot / 1000,
            seed=time.time_ns(),
        )
        self.instances = Instances(config, self._joined, self._left, self._suspected)
        self._answering: dict[str, set[asyncio.Future[None]]] = {}  # by incarnation
        self._streaming: dict[str, set[aiohttp.ClientResponse]] = {}
        self.store_watch = StoreWatch(
            config.store_masters, self.index, lambda: [one.info for one in self.instances.by_name.values()]
        )
        self._contested = {MASTER: rpc_address.encode()}
        self.membership = Membership(
            Etcd(config.etcd_addr, config.etcd_namespace),
            config.etcd_ttl,
            {replica_key(rpc_address): rpc_address.encode()},
            self._contested,
            on_round=self._on_round,
        )
        self._streams: dict[str, tuple[KvEventStream, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Cluster:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._first_round = asyncio.Event()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15)  # less than what servers keep open
        self.session = aiohttp.ClientSession(connector=connector, trust_env=False)
        self.membership.start()
        self._spawn(self._look_after())
        if self.config.store_masters:
            self._spawn(self.store_watch.run(self.session))
        with contextlib.suppress(TimeoutError):  # without a registry it serves, and says that it knows nobody
            await asyncio.wait_for(self._first_round.wait(), _FIRST_ROUND_S)
        return self

    async def leave(self) -> None:
        """Leave the registry; the view stays, and open requests go on."""
        await asyncio.to_thread(self.membership.stop)

    async def __aexit__(self, *_: object) -> None:
        await self.leave()
        tasks = [*self._tasks, *(task for _, task in self._streams.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.session.close()
        self._context.destroy(linger=0)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the service has failed", exc_info=error)

    # ---------------------------------------------------------------------------------------------- the registry

    @property
    def is_master(self) -> bool:
        return self.membership.holds(MASTER)

    def _on_round(self, membership: Membership) -> None:
        """In the registry's thread, after each of its rounds."""
        if not membership.why:
            self._loop.call_soon_threadsafe(self.registered, dict(membership.found or {}))
        else:
            self._loop.call_soon_threadsafe(self._first_round.set)

    def registered(self, found: dict[str, bytes]) -> None:
        size = self.config.block_size
        instances = instances_of(found)
        wanted = {name: info for name, info in instances.items() if not size or info.block_size == size}
        self.instances.registered(wanted, now())
        self._first_round.set()

    # --------------------------------------------------------------------------------------------- the instances

    def _joined(self, instance: Instance) -> None:
        info = instance.info
        try:
            rules = rules_of(info)
        except (ValueError, TypeError) as error:
            log.error("%s has blocks of an unknown type, its caches are not followed: %s", info.name, error)
            return
        self.index.join(info.name, info.incarnation_id, rules, info.store_blocks)
        if info.events and info.replay:
            stream = KvEventStream(
                self._context,
                info,
                self.index,
                lambda batch: self._on_batch(info.name, batch),
                self.config.heart_beat_timeout_s,
            )
            self._streams[info.name] = stream, asyncio.create_task(stream.run())

    def _left(self, instance: Instance) -> None:
        name = instance.info.name
        if self.instances.by_name.get(name) is not instance:  # else it goes on, only with another store
            self._cut_off(instance)
        if name in self._streams:
            _, task = self._streams.pop(name)
            task.cancel()
        self.index.leave(name)
        self.router.leave(name)

    def _cut_off(self, instance: Instance) -> None:
        """End all waits for it."""
        self._suspected(instance)
        for response in self._streaming.pop(instance.info.incarnation_id, ()):
            response.close()

    def _suspected(self, instance: Instance) -> None:
        for lost in self._answering.pop(instance.info.incarnation_id, ()):
            if not lost.done():
                lost.set_result(None)

    @contextlib.contextmanager
    def until_suspected(self, incarnation: str) -> Iterator[asyncio.Future[None]]:
        """A future that is done as soon as this incarnation does not answer any more."""
        lost: asyncio.Future[None] = self._loop.create_future()
        self._answering.setdefault(incarnation, set()).add(lost)
        try:
            yield lost
        finally:
            self._drop(self._answering, incarnation, lost)

    @contextlib.contextmanager
    def while_streaming(self, incarnation: str, response: aiohttp.ClientResponse) -> Iterator[None]:
        """Inside, the response is closed as soon as this incarnation is gone for good."""
        self._streaming.setdefault(incarnation, set()).add(response)
        try:
            yield
        finally:
            self._drop(self._streaming, incarnation, response)

    @staticmethod
    def _drop(books: dict[str, set[_Item]], incarnation: str, item: _Item) -> None:
        items = books.get(incarnation, set())
        items.discard(item)
        if not items:
            books.pop(incarnation, None)

    def _on_batch(self, name: str, batch: EventBatch) -> None:
        instance = self.instances.alive(name, batch.incarnation, now())
        if instance is not None and batch.load is not None:
            instance.load = batch.load
            self.router.heard(name, batch.incarnation, instance.load)

    async def _look_after(self) -> None:
        while True:
            for instance in self.instances.hopeless(now()):
                self._cut_off(instance)
            for instance in self.instances.due(now()):
                self._spawn(self._probe(instance))
            await asyncio.sleep(_TICK_S)

    async def _probe(self, instance: Instance) -> None:
        status = ""
        try:
            for _ in range(_PROBES):
                status = status or await self._answers(instance.info.name)
        finally:
            drains = status == "draining"
            self.instances.probed(instance, bool(status) and not drains, now(), drains=drains)

    async def _answers(self, name: str) -> str:
        """The status that its /health tells when it can be sent requests, or when it drains; else empty."""
        limit = aiohttp.ClientTimeout(total=self.config.probe_timeout_s)
        try:
            async with self.session.get(f"http://{name}/health", timeout=limit) as answer:
                status = str((await answer.json(content_type=None)).get("status"))
                return status if answer.status == 200 or status == "draining" else ""
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, AttributeError):
            return ""

    def candidates(self, model: str) -> list[Candidate]:
        """The instances that can be sent requests for `model` now; of any model when it is empty."""
        return [
            Candidate(
                one.info.name, one.info.role, one.info.incarnation_id, one.info.block_size, one.load or InstanceLoad()
            )
            for one in self.instances.by_name.values()
            if one.schedulable and (not model or one.info.model == model)
        ]

    def models(self) -> dict[str, int]:
        """Names of the models that are served, and the longest request that all their instances take."""
        lengths: dict[str, int] = {}
        for one in self.instances.by_name.values():  # also those that do not answer for a moment
            lengths[one.info.model] = min(lengths.get(one.info.model, 1 << 62), one.info.max_model_len)
        return lengths

    def gaps(self) -> int:
        """Times that batches of events were missed, over all streams of now."""
        return sum(stream.num_gaps for stream, _ in self._streams.values())
