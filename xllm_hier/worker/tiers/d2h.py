"""D2H: the first half of a write-back, which copies device blocks to the host and gives each its trailer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...block import CacheRole
from ...config import EngineConfig
from ...errors import TransferError
from ...hashing import split_hashes
from ...plans import OffloadCopied, OffloadStored, TransferKvBlocks
from ..transfer_stats import TransferStats
from .cache_domain import CacheDomain, Part, cache_of, parts_of, payload_bytes
from .layer_copy import Copier, one_thread
from .proof import write_trailer

log = logging.getLogger("xllm.transfer")


def _nothing_to_wait_for(_timeout_s: float) -> None:
    pass


class Offloads:
    """Copies write-backs of one worker to the host, in order; `copied` gets each plan whose copy has ended well."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        domains: Mapping[CacheRole, CacheDomain],
        copier: Copier,
        stats: TransferStats,
        *,
        answer: Callable[[Any], None],
        copied: Callable[[TransferKvBlocks], None],
    ) -> None:
        self._config, self._rank, self._domains = config, rank, domains
        self._copier, self._stats = copier, stats
        self._answer, self._copied = answer, copied
        self._thread = one_thread("d2h")

    def offload(self, plan: TransferKvBlocks) -> None:
        """Start a write-back of the blocks that the forwards ordered before it have written."""
        try:
            parts = parts_of(self._domains, plan.target_mappings, plan.draft_mappings)
            parts = [part for part in parts if cache_of(part).layout.kept_by(self._rank)]
            wait = self._copier.offload(parts) if parts else _nothing_to_wait_for
        except (TransferError, RuntimeError) as error:  # the engine rolls back on a short count; the worker lives on
            self._failed(plan, error)
            return
        self._thread.submit(self._finish, plan, parts, wait, time.perf_counter())

    def _finish(self, plan: TransferKvBlocks, parts: list[Part], wait: Callable[[float], None], start: float) -> None:
        try:
            wait(self._config.worker_timeout_s)
            for part in parts:
                hashes = split_hashes(part[1].hashes)
                for block, block_hash in zip(part[1].host.tolist(), hashes, strict=True):
                    write_trailer(cache_of(part), block, block_hash)
        except Exception as error:
            self._failed(plan, error)
            return
        if parts:
            self._stats.add("d2h", payload_bytes(parts), time.perf_counter() - start)
        count = sum(len(mapping.device) for mapping in plan.target_mappings)
        self._answer(OffloadCopied(plan.transfer_id, self._rank, count))
        self._copied(plan)

    def _failed(self, plan: TransferKvBlocks, error: object) -> None:
        log.error("write-back %d failed: %s", plan.transfer_id, error)
        self._stats.fail("d2h", "copy")
        self._answer(OffloadCopied(plan.transfer_id, self._rank, 0))
        self._answer(OffloadStored(plan.transfer_id, self._rank, 0))

    def close(self) -> None:
        """Begin nothing more; copies under way are the copier's."""
        self._thread.shutdown(wait=False, cancel_futures=True)
