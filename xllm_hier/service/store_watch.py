"""Reads the objects of a Mooncake Store from its master, since no event tells of its evictions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import aiohttp

from ..block import BlockType
from ..registry import InstanceInfo
from .prefix_index import IndexState, PrefixIndex

log = logging.getLogger("xllm.service")

_EVERY_S = 1.0
_LIST_EVERY_S = 10.0  # at most so often all keys are listed
_LIST_LIMIT_S = 60.0
_CALL_S = 2.0
_LOSSES = ("master_evicted_key_count", "master_successful_evictions_total", "master_remove")  # counters of the master
_KEYS = "master_key_count"


def blocks_of(keys: Iterable[str], prefixes: dict[str, list[str]]) -> dict[BlockType, set[bytes]]:
    """The logical blocks of which every object is among `keys`; `prefixes` are those of the keys by block type."""
    of_prefix: dict[str, set[bytes]] = {prefix: set() for ours in prefixes.values() for prefix in ours}
    for key in keys:
        head, _, block_hash = key.strip().rpartition(":")
        found = of_prefix.get(f"{head}:")
        if found is not None:
            try:
                found.add(bytes.fromhex(block_hash))
            except ValueError:
                continue
    return {
        BlockType(name): set.intersection(*(of_prefix[prefix] for prefix in ours))
        for name, ours in prefixes.items()
        if ours
    }


class StoreWatch:
    """Keeps the index of the one store that the instances share in step with its master, of which `addresses` are the
    HTTP endpoints (several for a highly available one); `run` never returns.

    All keys are listed when it begins, and again, not too often, when keys have been evicted or were found missing.
    """

    def __init__(
        self, addresses: Sequence[str], index: PrefixIndex, instances: Callable[[], list[InstanceInfo]]
    ) -> None:
        self._addresses = list(addresses)
        self._index, self._instances = index, instances
        self._losses: dict[str, float] = {}
        self._num_keys = 0.0
        self.num_listings = 0

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Look at the master now and then; while it does not answer the index is stale."""
        listed_at = float("-inf")
        loop = asyncio.get_running_loop()
        while True:
            try:
                if await self._has_lost(session):
                    self._invalidate()
                if self._is_behind() and loop.time() - listed_at >= _LIST_EVERY_S:
                    listed_at = loop.time()
                    await self._list(session)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                log.debug("the store's master does not answer: %s", error)
                self._invalidate()
            await asyncio.sleep(_EVERY_S)

    def _stores(self) -> dict[str, dict[str, list[str]]]:
        """Of each store that an instance uses, what its keys begin with, by block type."""
        return {info.store_blocks: info.store_keys for info in self._instances() if info.store}

    def _invalidate(self) -> None:
        self._index.invalidate_stores()

    def _is_behind(self) -> bool:
        return any(self._index.store(store).state is not IndexState.EXACT for store in self._stores())

    async def _get(self, session: aiohttp.ClientSession, path: str, limit_s: float) -> str:
        """The answer of the master that serves. Raises aiohttp.ClientError or TimeoutError when none does."""
        problem: Exception = aiohttp.ClientConnectionError("no master serves")
        for address in list(self._addresses):
            try:
                limit = aiohttp.ClientTimeout(total=limit_s)
                if len(self._addresses) > 1:
                    async with session.get(f"http://{address}/health", timeout=limit) as answer:
                        told = await answer.json(content_type=None)
                        if not isinstance(told, dict) or not told.get("service_ready"):
                            continue
                async with session.get(f"http://{address}{path}", timeout=limit) as answer:
                    answer.raise_for_status()
                    return await answer.text()
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                problem = error
        raise problem

    async def _has_lost(self, session: aiohttp.ClientSession) -> bool:
        """Keys may have gone since the last look: evicted, removed, with the client that held them, or with a master
        that another one has followed."""
        lines = (await self._get(session, "/metrics", _CALL_S)).splitlines()
        found = {line.split()[0]: float(line.split()[-1]) for line in lines if line.startswith((*_LOSSES, _KEYS))}
        num_keys = found.pop(_KEYS, 0.0)
        lost = num_keys < self._num_keys or found != self._losses
        self._num_keys, self._losses = num_keys, found
        return lost

    async def _list(self, session: aiohttp.ClientSession) -> None:
        stores = self._stores()
        for store in stores:
            self._index.store(store).begin_listing()
        text = await self._get(session, "/get_all_keys", _LIST_LIMIT_S)
        found = await asyncio.to_thread(_all_blocks, text, stores)
        for store, blocks in found.items():
            self._index.store(store).replace(blocks)
        self.num_listings += 1
        log.info("the store holds %s blocks", sum(len(ours) for blocks in found.values() for ours in blocks.values()))


def _all_blocks(text: str, stores: dict[str, dict[str, list[str]]]) -> dict[str, dict[BlockType, Any]]:
    keys = text.splitlines()
    return {store: blocks_of(keys, prefixes) for store, prefixes in stores.items()}
