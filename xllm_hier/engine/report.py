"""The engine's report of itself: facts that stay, figures that grow, and its load for a router."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from dataclasses import dataclass, field

from ..config import EngineConfig
from ..figures import (
    EngineInfo,
    EngineStats,
    PairStats,
    TransferFailures,
    TypeInfo,
    TypeSizes,
    WorkerReady,
    WorkerStats,
)
from ..kv_events import InstanceLoad
from ..plans import ForwardOutput
from ..version import __version__
from .build import EngineParts
from .pair.links import PeerLinks
from .publisher import KvPublisher
from .rank_views import common_sizes, store_keys, worst_state
from .steps.replies import RECENT


@dataclass(eq=False)
class StepTotals:
    """Sums over all steps since the start, in seconds; `recent_decodes` are those of the last steps that decoded."""

    steps: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    draft_s: float = 0.0
    push_wait_s: float = 0.0
    recent_decodes: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, output: ForwardOutput, *, decode: bool) -> None:
        self.steps += 1
        self.compute_s += output.compute_s
        self.wait_s += output.wait_s
        self.draft_s += output.draft_s
        self.push_wait_s += output.push_wait_s
        if decode and output.error is None:
            self.recent_decodes.append(output.compute_s)


class EngineReport:
    """Reads the scheduler and the block books when asked; holds only figures that no other part keeps.

    The engine's loop adds to `totals` and `store_states`, and sets `publisher` once there is one. `worker_stats` are
    the ranks' last figures, merged.
    """

    def __init__(
        self,
        config: EngineConfig,
        ready: list[WorkerReady],
        parts: EngineParts,
        links: PeerLinks | None,
    ) -> None:
        first = ready[0]
        self._config, self._ready, self._links = config, ready, links
        self._scheduler, self._manager, self._policy = parts.scheduler, parts.manager, parts.policy
        self._role, self._limits, self._incarnation = parts.role, parts.limits, parts.incarnation
        self.publisher: KvPublisher | None = None
        self.totals = StepTotals()
        self.store_states: dict[int, str] = {}
        self.worker_stats = WorkerStats(store_state=first.store_state)
        # What all ranks hold alike lies on the host once, and counts once.
        self._tier_bytes = {
            "device": sum(sizes.num_device_blocks * sizes.block_bytes for answer in ready for sizes in answer.types),
            "host": sum(answer.host_bytes for answer in ready),
        }
        self._started = time.monotonic()

    def info(self) -> EngineInfo:
        """The facts of the instance, for its client and its launcher."""
        config, links, publisher = self._config, self._links, self.publisher
        first, sizes = self._ready[0], common_sizes(self._ready)
        return EngineInfo(
            model=config.api_model_name,
            model_id=config.name_space,
            version=__version__,
            max_model_len=self._limits.max_model_len,
            vocab_size=self._limits.vocab_size,
            eos_token_ids=first.eos_token_ids,
            block_size=first.block_size,
            num_device_blocks=sizes[0].num_device_blocks,
            num_host_blocks=sizes[0].num_host_blocks,
            block_types={one.block_type: self._type_info(one) for one in sizes},
            store_state=self.worker_stats.store_state,
            tp_size=len(self._ready),
            tier_bytes=self._tier_bytes,
            details=first.model,
            pd_address=links.address if links is not None else "",
            incarnation=self._incarnation,
            events=publisher.events_address if publisher is not None else "",
            replay=publisher.replay_address if publisher is not None else "",
            store_keys=store_keys(self._ready),
            transfer_endpoints=[answer.endpoint.session for answer in self._ready if answer.endpoint is not None],
        )

    def _type_info(self, sizes: TypeSizes) -> TypeInfo:
        ours = [found for answer in self._ready for found in answer.types if found.block_type == sizes.block_type]
        block_bytes = sum(found.block_bytes for found in ours)
        return TypeInfo(sizes.num_device_blocks, sizes.num_host_blocks, block_bytes, sizes.span)

    def load(self) -> InstanceLoad:
        """The work that waits here now and the rates measured here, for a router; None where nothing was measured
        lately."""
        scheduler, policy, recent = self._scheduler, self._policy, self.totals.recent_decodes
        first_tokens = scheduler.replies.first_token_s
        return InstanceLoad(
            num_open=scheduler.num_open + self._role.num_elsewhere,
            num_waiting=len(scheduler.waiting) + len(scheduler.prefetching),
            num_running=len(scheduler.running),
            backlog_tokens=scheduler.backlog_tokens(),
            compute_s=policy.compute.value,
            load_s=policy.load.value,
            read_s=policy.read.value,
            step_s=statistics.median(recent) if recent else None,
            ttft_s=statistics.median(first_tokens) if first_tokens else None,
            store_state=worst_state(list(self.store_states.values())),
        )

    def stats(self) -> EngineStats:
        """The figures behind /cache/stats and /metrics."""
        scheduler, manager, totals, workers = self._scheduler, self._manager, self.totals, self.worker_stats
        figures = manager.figures()
        late = TransferFailures("g2h", "timeout", figures.read_timeouts)
        return EngineStats(
            workers=dataclasses.replace(workers, transfer_failures=[*workers.transfer_failures, late]),
            blocks=manager.block_counts(),
            tier_bytes=self._tier_bytes,
            prefix_tokens=figures.prefix_tokens,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            prefetching=len(scheduler.prefetching),
            canonical=len(scheduler.canonical),
            preemptions=scheduler.num_preemptions,
            generation_tokens=scheduler.replies.num_generated_tokens,
            steps=totals.steps,
            compute_s=totals.compute_s,
            draft_s=totals.draft_s,
            load_wait_s=totals.wait_s,
            failed_loads=figures.failed_loads,
            restore_decisions=self._policy.decisions,
            audits=scheduler.auditor.results,
            drafted=scheduler.drafts.drafted,
            accepted=scheduler.drafts.accepted,
            draft_steps=scheduler.drafts.steps,
            accept_length=scheduler.drafts.accept_length,
            accept_alarm=manager.settings.drafting.by_model and scheduler.drafts.alarm,
            cache_alarm=scheduler.auditor.alarm,
            failed_offloads=figures.failed_offloads,
            uptime_s=time.monotonic() - self._started,
            pd=self._pair_stats(),
        )

    def _pair_stats(self) -> PairStats | None:
        if self._links is None:
            return None
        return PairStats(
            role=self._config.instance_role,
            address=self._links.address,
            peers=self._links.describe(),
            push_wait_s=self.totals.push_wait_s,
            **self._role.stats(),
        )
