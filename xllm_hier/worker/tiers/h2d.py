"""H2D: layered loads of host blocks, each with a thread that counts its copies and one that proves its blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future

from ...block import CacheRole
from ...config import EngineConfig
from ...errors import TransferError
from ...plans import TransferBlocks
from ..transfer_stats import TransferStats
from .cache_domain import CacheDomain, Part, cache_of, parts_of, payload_bytes
from .layer_copy import Copier, end_of_layers, one_thread
from .layered_wait import HostLoad, LayerSynchronizer, PendingLoads, layer_groups
from .proof import disproofs, misnamed

log = logging.getLogger("xllm.transfer")


class HostLoads:
    """Starts the loads of one worker; a forward attaches them (`pending`) and waits for them layer by layer.

    `verify`: the payload of each host block is proven beside its copy; else its name alone is looked at.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        domains: Mapping[CacheRole, CacheDomain],
        copier: Copier,
        stats: TransferStats,
    ) -> None:
        self._config, self._rank, self._domains = config, rank, domains
        self._copier, self._stats = copier, stats
        self.verify = config.verify_host_blocks
        self.copies, self.proofs = one_thread("h2d"), one_thread("proof")
        self.pending = PendingLoads()

    def load(self, plan: TransferBlocks) -> int:
        """Start a load; returns its number of logical blocks at once.

        Raises:
            InvariantError: the batch id is alive.
        """
        self.pending.check_new(plan.batch_id)
        parts = parts_of(self._domains, plan.target_mappings, plan.draft_mappings)
        groups = layer_groups(self._domains[CacheRole.TARGET].layout.num_layers, self._config.layers_wise_copy_batchs)
        last = groups[-1]  # a draft may be deeper than its target
        groups[-1] = range(last.start, max(last.stop, end_of_layers(parts) if parts else 0))
        start = time.perf_counter()
        problem = misnamed(parts)
        if problem is None:
            copies = self._copier.load(plan.batch_id, parts, groups)
            load = HostLoad(copies, self._start_proof(plan.batch_id, parts))
            self.copies.submit(self._count_copies, copies, payload_bytes(parts), start)
        else:
            log.error("load %d was not begun: %s", plan.batch_id, problem)
            self._stats.fail("h2d", "block_hash")
            copies = LayerSynchronizer(plan.batch_id, groups)
            copies.abort(problem)
            load = HostLoad(copies)
        self.pending.add(load)
        return sum(len(mapping.device) for mapping in plan.target_mappings)

    def _start_proof(self, batch_id: int, parts: list[Part]) -> Future[str | None] | None:
        """Prove the host blocks of a load beside its copies; rank 0 alone proves those that all ranks map."""
        kept = [part for part in parts if cache_of(part).layout.kept_by(self._rank)]
        if not kept or not self.verify:
            return None
        return self.proofs.submit(self._prove, batch_id, kept)

    def _prove(self, batch_id: int, parts: list[Part]) -> str | None:
        """A text on the host blocks without a proof, None when all have one."""
        try:
            problems = disproofs(parts)
        except Exception as error:  # a block that is not proven must not count, and the forward must not wait for ever
            log.exception("load %d could not be verified", batch_id)
            problems = [type(error).__name__]
        if not problems:
            return None
        for problem in problems:
            self._stats.fail("h2d", problem)
        wrong = f"{len(problems)} host blocks are not what was written there ({', '.join(sorted(set(problems)))})"
        log.error("load %d is thrown away: %s", batch_id, wrong)
        return wrong

    def _count_copies(self, copies: LayerSynchronizer, nbytes: int, start: float) -> None:
        try:
            copies.wait_all(self._config.worker_timeout_s)
        except TransferError as error:
            log.error("%s", error)
            self._stats.fail("h2d", "timeout")
            return
        if copies.error is not None:
            log.error("load %d failed: %s", copies.batch_id, copies.error)
            self._stats.fail("h2d", "copy")
        else:
            self._stats.add("h2d", nbytes, time.perf_counter() - start)

    def close(self) -> None:
        """Begin nothing more; copies under way are the copier's."""
        for thread in (self.copies, self.proofs):
            thread.shutdown(wait=False, cancel_futures=True)
